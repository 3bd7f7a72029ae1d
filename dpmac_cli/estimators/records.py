"""Records and targets of a fit as a dataset, by what they are: images, numbers, texts or a frame.

Out of scope: sparse matrices, and numbers of more than two dimensions.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpmac_cli.config.facts import InMemoryData, first_of
from dpmac_cli.data.column_schema import Label
from dpmac_cli.data.in_memory import ArrayData, from_dataframe
from dpmac_cli.data.reader import as_array
from dpmac_cli.data.table_file import table_of
from dpmac_cli.data.table_schema import TableSchema, read_schema, schema_of
from dpmac_cli.data.units import unit_name
from dpmac_cli.errors import InputError

#: Column of the unit of privacy that is added to a frame, and of the target.
UNIT, TARGET = "unit of privacy", "y"
NO_BOUNDS = (
    "bounds=(low, high) is missing: the public range that numbers are clipped to, one for all "
    "columns or a list with one for each. Base it on what the columns mean, not on X, which is "
    "private."
)
#: ValueError, as scikit-learn expects it.
NOT_FINITE = (
    "X contains NaN or infinity. In rows of numbers, fill missing values with a public constant: "
    "private_pipeline(SimpleImputer(strategy='constant', fill_value=0, keep_empty_features=True), "
    "estimator). Other imputers learn from the records. In a data frame with kinds= or schema=, "
    "missing values may stay."
)
TESTED = (
    "schema: test: says which records are to test on, and a fit trains on all of its records. "
    "Leave test: out, list its column under drop:, and pass the records to train on alone."
)


def is_frame(records: Any) -> bool:
    """Return whether records are a data frame of pandas, polars or pyarrow, or one like it.

    Frames are told by ``columns`` of their type, so neither pandas nor polars is imported to look.

    Args:
        records: ``X`` of a fit, of any type.
    """
    return hasattr(type(records), "columns") or isinstance(records, pa.Table)


def words_in(records: Any) -> list[str]:
    """Return the names of a data frame's columns that hold words or other objects.

    Arrays have none: the result is empty.
    """
    if not is_frame(records):
        return []
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    words = list[str]()
    for field in table_of(records).schema:
        if not any(is_kind(field.type) for is_kind in numbers):
            words.append(field.name)
    return words


def are_texts(records: Any) -> bool:
    """Return whether records are texts: a list of str, or an array of one dimension of them.

    >>> are_texts(["a text", "another"]), are_texts([[1.0], [2.0]])
    (True, False)
    """
    in_a_row = isinstance(records, list | tuple) or getattr(records, "ndim", 0) == 1
    return in_a_row and len(records) > 0 and isinstance(next(iter(records)), str)


def are_images(records: Any) -> bool:
    """Return whether records are images: an array of uint8 of three or four dimensions.

    >>> are_images(np.zeros((5, 8, 8), np.uint8)), are_images(np.zeros((5, 64)))
    (True, False)
    """
    return getattr(records, "dtype", None) == np.uint8 and records.ndim in (3, 4)


def arrays_of(
    records: Any, targets: NDArray[Any], bounds: Sequence[Any] | None, **declared: Any
) -> InMemoryData:
    """Return images, numbers or texts as a dataset.

    Args:
        records: see :func:`are_images` and :func:`are_texts`; numbers, shape (records, columns).
        targets: numbers of classes, or numbers to predict, shape (records,).
        bounds: public range of numbers: low and high, one each or one per column.
        declared: other arguments of :class:`~dpmac_cli.data.in_memory.ArrayData`.

    Raises:
        InputError: numbers have no bounds, or bounds do not fit their columns.
    """
    if are_texts(records):
        return ArrayData([*map(str, records)], targets, **declared)
    if are_images(records):
        return ArrayData(records, targets, **declared)
    if bounds is None:
        raise InputError(NO_BOUNDS)
    low, high = _ends_of(bounds, records.shape[1])
    return ArrayData(records, targets, low=low, high=high, **declared)


def _ends_of(bounds: Any, columns: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the low and the high ends of columns, shape () or (columns,) each."""
    wanted = f"Each is one number, or a list with one for each of the {columns} columns of X."
    if not isinstance(bounds, Sequence | np.ndarray) or isinstance(bounds, str) or len(bounds) != 2:
        raise InputError(f"bounds must be two, (low, high), not {bounds!r}. {wanted}")
    low, high = map(np.asarray, bounds)
    for name, end in (("low", low), ("high", high)):
        if end.shape not in ((), (columns,)):
            numbers = "x".join(map(str, end.shape))
            raise InputError(
                f"bounds=(low, high): {name} has {numbers} numbers for {columns} columns. {wanted}"
            )
    _check_order("bounds", bounds, np.broadcast_to(low < high, columns))
    return low, high


def target_range(bounds: Any) -> tuple[float, float]:
    """Return the public range of the numbers to predict, (low, high).

    Args:
        bounds: ``target_bounds`` of :class:`~dpmac_cli.PrivateRegressor`.

    Raises:
        InputError: it is not two numbers of which the first is smaller.
    """
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError):
        raise InputError(
            f"target_bounds must be two numbers, (low, high), not {bounds!r}."
        ) from None
    _check_order("target_bounds", bounds, np.array([low < high]))
    return low, high


def _check_order(name: str, bounds: Any, in_order: NDArray[np.bool_]) -> None:
    """Raise InputError unless the low end of every range is below its high end.

    Args:
        name: name of the argument.
        bounds: the argument, for the message.
        in_order: whether low is below high, shape (columns,).
    """
    wrong = np.flatnonzero(~in_order).tolist()
    if not wrong:
        return
    where = ""
    if len(wrong) < len(in_order):
        where = f" in {first_of(f'X[:, {place}]' for place in wrong)}"
    raise InputError(
        f"{name}={bounds!r}: low is not below high{where}. Write the lower end of the public range "
        f"first: {name}=(low, high)."
    )


def table_with(
    frame: Any,
    targets: NDArray[Any],
    label: Mapping[str, Any],
    schema: TableSchema,
    unit: Any = None,
) -> InMemoryData:
    """Return a data frame with its targets as a dataset.

    Args:
        frame: the records, without their targets.
        targets: names of classes, or numbers to predict, shape (records,).
        label: what a schema declares of the targets, without their column.
        schema: declares the columns of the frame.
        unit: unit of privacy of each record; None if each is one.

    Raises:
        InputError: there is not one unit for each record.
    """
    table = table_of(frame)
    column = TARGET if schema.label is None else schema.label.column
    if column in table.column_names:
        table = table.drop_columns([column])
    table = table.append_column(column, pa.array(targets))
    if unit is not None:
        table = table.append_column(UNIT, _names_of(unit, len(table)))
    declared = Label.model_validate({"column": column, **label})
    return from_dataframe(table, schema.model_copy(update={"label": declared}))


def _names_of(unit: Any, records: int) -> pa.Array:
    """Return the names of units as a column, in which the reader of tables finds those missing.

    Args:
        unit: unit of privacy of each record, shape (records,).
        records: number of records.

    Raises:
        InputError: there is not one for each record.
    """
    units = as_array(unit, "unit")
    if units.shape != (records,):
        raise InputError(
            f"unit must give the unit of each of the {records} records, as integers or text, not "
            f"{units.dtype} of shape {units.shape}."
        )
    return pa.array(map(unit_name, units), pa.string())


def schema_from(
    schema: Mapping[str, Any] | Path | str | None, kinds: Mapping[str, str] | None
) -> TableSchema:
    """Return the schema of a frame: as given, or from the kinds of all columns by their names.

    Raises InputError if neither or both are given, or one is invalid or declares test records.
    """
    if (schema is None) == (kinds is None):
        raise InputError(
            "A data frame needs its columns declared: schema= with a file or the contents of one, "
            'or kinds={"age": "number", "job": "category"} with the kind of each column.'
        )
    if kinds is not None:
        schema = {"columns": {name: {"type": kind} for name, kind in kinds.items()}}
    if isinstance(schema, str | Path):
        declared = read_schema(Path(schema))
    else:
        declared = schema_of(schema, "schema")
    if declared.test is not None:
        raise InputError(TESTED)
    return declared
