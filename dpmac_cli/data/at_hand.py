"""In-memory datasets: arrays, torch datasets and data frames, used instead of a dataset's name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpmac_cli.data.schema import AtHand
from dpmac_cli.data.table_schema import TableSchema, read_schema, schema_of
from dpmac_cli.errors import InputError


class ArrayData(AtHand):
    """Arrays of records and labels, accepted wherever the name of a dataset is.

    The rules for their contents, and for what is public, are those of an .npz. ``x`` is not copied:
    do not modify it while a model is trained on it.

    Args:
        x: images, uint8, shape (records, height, width) with 1 or 3 channels first or last; or
            numbers, shape (records, columns) or that of images, which need ``low`` and ``high``.
            Anything that numpy can convert to an array, such as a tensor.
        y: labels, integers from 0, or names in ``classes``, shape (records,). For several labels
            per record, 0 or 1 for each label, shape (records, labels).
        x_test, y_test: records to test on, which epsilon does not cover. By default some are held
            out, as set by ``test_fraction``.
        classes: class names in label order, declared as public; by default those found in ``y``.
        low, high: public range to clip numbers to, for all of them or per column or channel.
        unit, unit_test: number or name of the unit of privacy that each record belongs to, such as
            a person, shape (records,); by default each record is one.
        name: the dataset's name in reports.

    Raises:
        InputError: the name is that of a registered dataset or of a file.
    """

    def __init__(
        self,
        x: ArrayLike,
        y: ArrayLike,
        x_test: ArrayLike | None = None,
        y_test: ArrayLike | None = None,
        *,
        classes: Sequence[str] | None = None,
        low: ArrayLike | None = None,
        high: ArrayLike | None = None,
        unit: ArrayLike | None = None,
        unit_test: ArrayLike | None = None,
        name: str = "arrays",
    ) -> None:
        names = None if classes is None else list(classes)
        given = {"x": x, "y": y, "x_test": x_test, "y_test": y_test, "low": low, "high": high}
        given |= {"unit": unit, "unit_test": unit_test, "classes": names}
        arrays = {name: np.asarray(array) for name, array in given.items() if array is not None}
        arrays |= {name: arrays[name].copy() for name in ("y", "y_test") if name in arrays}
        super().__init__(_place(name), arrays)


def from_dataframe(
    frame: Any, schema: TableSchema | Mapping[str, Any] | Path | str, *, name: str = "table"
) -> AtHand:
    """Return the records of a data frame.

    Args:
        frame: a data frame of pandas, polars or pyarrow.
        schema: a public schema (see docs/own-data.md): a file, or the parsed contents of one.
        name: the dataset's name in reports.

    Raises:
        InputError: the schema is invalid. Records are checked when the dataset is used.
    """
    if isinstance(schema, str | Path):
        schema = read_schema(Path(schema))
    return AtHand(_place(name), frame=frame, schema=schema_of(schema, "schema"))


def from_torch(train: Any, test: Any = None, **facts: Any) -> ArrayData:
    """Return the records of map-style torch datasets, each read once.

    Transforms run once per record, so a random transform is frozen; use the setting
    ``augmentations`` instead. Values in [0, 1], as from ``ToTensor()``, need ``low=0, high=1``.

    Args:
        train: a dataset with a length that returns (image or tensor, label) pairs by index.
        test: the same for records to test on; see :class:`ArrayData`.
        facts: ``classes``, ``low``, ``high`` and ``name``, as in :class:`ArrayData`.

    Raises:
        InputError: a dataset returns something else.
    """
    tested = (None, None) if test is None else _stacked(test)
    return ArrayData(*_stacked(train), *tested, **facts)


def _stacked(dataset: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    x, y = None, []
    try:
        for row in range(len(dataset)):
            record, label = dataset[row]
            values = np.asarray(record)
            x = np.empty((len(dataset), *values.shape), values.dtype) if x is None else x
            x[row] = values
            y.append(np.asarray(label))
    except (TypeError, ValueError, KeyError) as failure:
        raise InputError(
            f"{type(dataset).__name__} does not return (record, label) pairs of equal shapes by "
            f"index ({failure}). Pass a map-style torch.utils.data.Dataset that does."
        ) from failure
    return np.empty((0, 1)) if x is None else x, np.array(y)


def _place(name: str) -> Path:
    """Return a placeholder path, which names no file."""
    if not name.isidentifier():
        raise InputError(f"The dataset name '{name}' must consist of letters and digits.")
    return Path(f"<{name}>")
