"""In-memory datasets: arrays and data frames, used instead of a dataset's name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from numpy.typing import ArrayLike

from dpmac_cli.config.facts import InMemoryData, in_memory
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.kinds import schema_of_kinds
from dpmac_cli.data.reader import Reading, as_array, register_reader
from dpmac_cli.data.table_file import table_of
from dpmac_cli.data.table_schema import TableSchema, read_schema, schema_of
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.tasks.task import is_labelled


class ArrayData(InMemoryData):
    """Arrays of records and labels, accepted wherever the name of a dataset is.

    The rules for their contents, and for what is public, are those of an .npz. ``x`` is not copied:
    do not modify it while a model is trained on it.

    Args:
        x: images, uint8, shape (records, height, width) with 1 or 3 channels first or last; or
            numbers, shape (records, columns) or that of images, which need ``low`` and ``high``; or
            a list of texts. Anything that numpy can convert to an array, such as a tensor.
        y: labels, integers from 0, or names in ``classes``, shape (records,). Numbers to predict,
            shape (records,), need ``target_low`` and ``target_high``. A language model has none.
        x_test, y_test: records to test on, which epsilon does not cover. By default some are held
            out, as set by ``test_fraction``; with 0 there are none.
        classes: class names in label order, declared as public; by default those found in ``y``.
        low, high: public range to clip numbers to, for all of them or per column or channel.
        unit, unit_test: number or name of the unit of privacy that each record belongs to, such as
            a person, shape (records,); by default each record is one.
        target_low, target_high: public range of numbers to predict, which ``y`` then has instead of
            classes; other numbers are clipped to it.
        target_transform: "log1p" to predict log(1 + y), for numbers of very different sizes.
        target_name: the name of these numbers in reports; by default y.
        name: the dataset's name in reports.

    A record that cannot be used is an error: no other one is changed or left out because of it.

    Raises:
        InputError: the name is that of a registered dataset or of a file, or numpy cannot convert
            something to an array.
    """

    def __init__(
        self,
        x: ArrayLike,
        y: ArrayLike | None = None,
        x_test: ArrayLike | None = None,
        y_test: ArrayLike | None = None,
        *,
        unit: ArrayLike | None = None,
        unit_test: ArrayLike | None = None,
        classes: Sequence[str] | None = None,
        low: ArrayLike | None = None,
        high: ArrayLike | None = None,
        target_low: float | None = None,
        target_high: float | None = None,
        target_transform: str | None = None,
        target_name: str | None = None,
        name: str = "arrays",
    ) -> None:
        values = {
            "x": x,
            "y": y,
            "x_test": x_test,
            "y_test": y_test,
            "unit": unit,
            "unit_test": unit_test,
            "classes": None if classes is None else list(classes),
            "low": low,
            "high": high,
            "target_low": target_low,
            "target_high": target_high,
            "target_transform": target_transform,
            "target_name": target_name,
        }
        arrays = {}
        for array_name, value in values.items():
            if value is not None:
                arrays[array_name] = as_array(value, array_name)
        for array_name in ("y", "y_test"):
            if array_name in arrays:
                arrays[array_name] = arrays[array_name].copy()
        super().__init__(_place(name), arrays)


def _is_arrays(declared: Declaration) -> bool:
    """Return whether a dataset is arrays in memory."""
    return declared.in_memory is not None and declared.in_memory.arrays is not None


@register_reader("arrays", _is_arrays)
def read_in_memory(declared: Declaration) -> Reading:
    """Return arrays in memory.

    Args:
        declared: the dataset. New records, and those of a language model, need no ``y``.

    Raises:
        InputError: there are no labels.
    """
    assert declared.in_memory is not None  # noqa: S101  (the reader fits only such data)
    arrays = dict(declared.in_memory.arrays or {})
    if "y" not in arrays and declared.labels and is_labelled(declared.settings.task):
        raise InputError(
            f"{declared.path} has no y, the labels or numbers to predict. Without them, train a "
            "language model on texts: task='language-model'."
        )
    return Reading(arrays)


def as_new(values: Any) -> InMemoryData:
    """Return records without labels, to predict.

    Args:
        values: an array or a list of texts, or a data frame.

    Raises:
        InputError: numpy cannot convert them to an array.
    """
    frame = in_memory(values)
    return frame or InMemoryData(Path("the array"), {"x": as_array(values, "x")})


def from_dataframe(
    frame: Any,
    schema: TableSchema | Mapping[str, Any] | Path | str | None = None,
    *,
    label: str | None = None,
    kinds: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    name: str = "table",
) -> InMemoryData:
    """Return the records of a data frame.

    Either a schema declares the columns, or each is of a kind, and what else is needed is found
    within epsilon::

        from_dataframe(frame, label="y", kinds={"age": "number", "job": "category"})

    Args:
        frame: a data frame of pandas, polars or pyarrow.
        schema: a public schema (see docs/own-tables.md): a file, or the parsed contents of one.
        label: without a schema, the column to predict.
        kinds: without a schema, the kind of each column: number, category, boolean or date, and
            number for a label that is a number to predict. Those of other columns follow from their
            dtypes, and those of a column of objects from its cells: these are facts of the records,
            which epsilon does not cover, but for the dtypes category and boolean.
        classes: without a schema, the classes of the label. They are read from the records if they
            are not declared.
        name: the dataset's name in reports.

    Raises:
        InputError: the schema is invalid, or there are ``label``, ``kinds`` or ``classes``, too.
            Records are checked when the dataset is used.
    """
    if isinstance(schema, str | Path):
        schema = read_schema(Path(schema))
    if schema is not None:
        faults = []
        without_schema = {"label": label, "kinds": kinds, "classes": classes}
        for keyword, value in without_schema.items():
            if value is not None:
                faults.append(
                    f"{keyword} is for a data frame without a schema: leave one of them out."
                )
        raise_errors(faults)
        return InMemoryData(_place(name), frame=frame, schema=schema_of(schema, "schema"))
    table = table_of(frame)
    declared = {**_declared_kinds(table), **(kinds or {})}
    contents = schema_of_kinds(table, label, declared, classes)
    numbers = [] if label is None or "classes" in contents["label"] else [label]
    used = (*contents["columns"], *numbers)
    inferred = list[str]()
    if not declared.keys() >= set(used):
        inferred.append("kinds of columns")
    if label is not None and classes is None and not numbers:
        inferred.append("classes")
    return InMemoryData(
        _place(name),
        frame=frame,
        schema=schema_of(contents, "schema"),
        inferred=tuple(inferred),
    )


def _declared_kinds(table: pa.Table) -> dict[str, str]:
    """Return the kinds of columns whose dtype whoever made a frame has chosen, by their names."""
    kinds = dict[str, str]()
    for field in table.schema:
        if pa.types.is_dictionary(field.type):
            kinds[field.name] = "category"
        elif pa.types.is_boolean(field.type):
            kinds[field.name] = "boolean"
    return kinds


def _place(name: str) -> Path:
    """Return a placeholder path, which names no file.

    Args:
        name: name of the dataset.

    Raises:
        InputError: it is no identifier, such as the name of a file.
    """
    if not name.isidentifier():
        raise InputError(f"The dataset name '{name}' must consist of letters and digits.")
    return Path(f"<{name}>")
