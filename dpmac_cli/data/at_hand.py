"""Records at hand in a program: arrays, torch datasets and data frames, in place of a name."""

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

    What may be in them, and what is public, is as for an .npz. ``x`` is kept and not copied: leave
    it as it is while anything is trained on it.

    Args:
        x: images, uint8, shape (records, height, width) with 1 or 3 channels first or last; or
            numbers, shape (records, columns) or that of images, which need ``low`` and ``high``.
            Anything that numpy makes an array of, such as a tensor.
        y: labels, integers from 0, or names of ``classes``, shape (records,); or, where a record
            has several labels, 0 and 1 for each of them, shape (records, labels).
        x_test, y_test: records to test on, which epsilon does not cover. By default some are held
            out, as the setting ``test_fraction`` says.
        classes: names in order of label, declared as public; by default those found in ``y``.
        low, high: public range of all numbers, or of each column or channel, to clip to.
        unit, unit_test: number or name of the unit of privacy that each record belongs to, such as
            a person, shape (records,); by default each record is one.
        name: what reports call the dataset.

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
        frame: of pandas, polars or pyarrow.
        schema: public, as docs/own-data.md describes: a file, or what such a file holds.
        name: what reports call the dataset.

    Raises:
        InputError: the schema has faults; those of records come when the dataset is used.
    """
    if isinstance(schema, str | Path):
        schema = read_schema(Path(schema))
    return AtHand(_place(name), frame=frame, schema=schema_of(schema, "schema"))


def from_torch(train: Any, test: Any = None, **facts: Any) -> ArrayData:
    """Return the records of map-style torch datasets, each read once.

    A transform is run once per record, so one that draws at random is frozen: augmentation is the
    setting ``augmentations``. Fractions as of ``ToTensor()`` need ``low=0, high=1``.

    Args:
        train: gives pairs of an image or tensor and a label by index, and has a length.
        test: the same for records to test on; see :class:`ArrayData`.
        facts: ``classes``, ``low``, ``high`` and ``name``, as of :class:`ArrayData`.

    Raises:
        InputError: a dataset gives something else.
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
            f"{type(dataset).__name__} does not give pairs of a record and a label, all of one "
            f"shape, by index ({failure}). Give a map-style torch.utils.data.Dataset that does."
        ) from failure
    return np.empty((0, 1)) if x is None else x, np.array(y)


def _place(name: str) -> Path:
    """Return what stands for a path. No file is of that name."""
    if not name.isidentifier():
        raise InputError(f"The name '{name}' of a dataset at hand must be letters and digits.")
    return Path(f"<{name}>")
