"""In-memory datasets: arrays, torch datasets and data frames, used instead of a dataset's name."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpmac_cli.data.schema import InMemoryData
from dpmac_cli.data.table_schema import TableSchema, read_schema, schema_of
from dpmac_cli.errors import InputError


class ArrayFacts(TypedDict, total=False):
    """Keywords of :class:`ArrayData` besides its records and their units."""

    classes: Sequence[str] | None
    low: ArrayLike | None
    high: ArrayLike | None
    target_low: ArrayLike | None
    target_high: ArrayLike | None
    target_transform: str | Sequence[str] | None
    target_names: Sequence[str] | None
    name: str


class ArrayData(InMemoryData):
    """Arrays of records and labels, accepted wherever the name of a dataset is.

    The rules for their contents, and for what is public, are those of an .npz. ``x`` is not copied:
    do not modify it while a model is trained on it.

    Args:
        x: images, uint8, shape (records, height, width) with 1 or 3 channels first or last; or
            numbers, shape (records, columns) or that of images, which need ``low`` and ``high``; or
            a list of texts. Anything that numpy can convert to an array, such as a tensor.
        y: labels, integers from 0, or names in ``classes``, shape (records,). Numbers to predict,
            shape (records,) or (records, targets), need ``target_low`` and ``target_high``. A
            language model has none.
        x_test, y_test: records to test on, which epsilon does not cover. By default some are held
            out, as set by ``test_fraction``.
        classes: class names in label order, declared as public; by default those found in ``y``.
        low, high: public range to clip numbers to, for all of them or per column or channel.
        unit, unit_test: number or name of the unit of privacy that each record belongs to, such as
            a person, shape (records,); by default each record is one.
        target_low, target_high: public range of numbers to predict, which ``y`` then has instead of
            classes; other numbers are clipped to it. For several targets, one range for each.
        target_transform: "log1p" to predict log(1 + y), for numbers of very different sizes; for
            several targets, one for all of them or one for each.
        target_names: names of several targets in reports; by default y1, y2 and so on.
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
        **facts: Unpack[ArrayFacts],
    ) -> None:
        place = _place(facts.pop("name", "arrays"))
        records = {"x": x, "y": y, "x_test": x_test, "y_test": y_test}
        given = {**records, "unit": unit, "unit_test": unit_test, **facts}
        given["target_name"] = given.pop("target_names", None)
        given["classes"] = None if (named := facts.get("classes")) is None else list(named)
        arrays = {name: as_array(of, name) for name, of in given.items() if of is not None}
        arrays |= {name: arrays[name].copy() for name in ("y", "y_test") if name in arrays}
        super().__init__(place, arrays)


def as_array(values: Any, name: str) -> NDArray[Any]:
    """Return an array; a list with texts becomes one of objects, so that no item changes another.

    Raises InputError.
    """
    texts = isinstance(values, list | tuple) and any(isinstance(item, str) for item in values)
    try:
        return np.array(values, object) if texts else np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as failure:
        raise InputError(
            f"numpy cannot convert {name} to an array ({type(failure).__name__}). All records need "
            "one shape and type."
        ) from failure


def from_dataframe(
    frame: Any, schema: TableSchema | Mapping[str, Any] | Path | str, *, name: str = "table"
) -> InMemoryData:
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
    return InMemoryData(_place(name), frame=frame, schema=schema_of(schema, "schema"))


def from_torch(
    train: Any,
    test: Any = None,
    *,
    unit: ArrayLike | None = None,
    unit_test: ArrayLike | None = None,
    **facts: Unpack[ArrayFacts],
) -> ArrayData:
    """Return the records of map-style torch datasets, each read once.

    Transforms run once per record, so a random transform is frozen; use the setting
    ``augmentations`` instead. Its draws are secret and others in each call, so that no record
    changes those of another; a run is resumed with the same :class:`ArrayData`. Values in [0, 1],
    as from ``ToTensor()``, need ``low=0, high=1``. With ``low`` and ``high``, records are stored as
    float32, and otherwise images as uint8.

    Args:
        train: a dataset with a length that returns (image or tensor, label) pairs by index.
        test: the same for records to test on; see :class:`ArrayData`.
        unit: unit of each record, as in :class:`ArrayData`. With ``unit="record"`` each record is a
            unit with its copies, which are found in a ``Subset`` whose indices repeat, and in a
            ``ConcatDataset`` of datasets or of their subsets. The records of other datasets count
            as different ones, also if they read another dataset.
        unit_test: the same for records to test on.
        facts: ``classes``, ``low``, ``high`` and others, as in :class:`ArrayData`.

    Raises:
        InputError: a record cannot be read, or has another shape or type than others; one record is
            there several times in different units, or is both in ``train`` and in ``test``, by what
            is said of ``unit``.
    """
    origins = [list(_origins(dataset)) for dataset in (train, test) if dataset is not None]
    if isinstance(unit, str) and unit == RECORD:
        unit, unit_test, *_ = (*_records_as_units(origins), None)
    check_copies(train, unit)
    _check_held_out(*origins)
    numbers = {"low", "high"} <= facts.keys()
    x, y = _read(train, numbers)
    x_test, y_test = (None, None) if test is None else _read(test, numbers)
    return ArrayData(x, y, x_test, y_test, unit=unit, unit_test=unit_test, **facts)


#: Dataset by identity, and index of a record in it.
Origin: TypeAlias = tuple[int, int]
#: Value of ``unit`` of :func:`from_torch`: each record is a unit with its copies.
RECORD = "record"


def _read(dataset: Any, numbers: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return records and labels. Raises InputError.

    ``numbers``: whether records are declared as numbers.
    """
    from dpmac_cli.randomness.layers import forked, seed_all  # noqa: PLC0415  (torch takes a second)
    from dpmac_cli.torch_errors import type_and_place  # noqa: PLC0415  (loads torch)

    kind, x, labels = type(dataset).__name__, np.empty(0), list[NDArray[Any]]()
    remedy = "leave it out with torch.utils.data.Subset, or correct the dataset"
    if not hasattr(dataset, "__len__"):
        raise InputError(
            f"{kind} has no length, so records cannot be read by index. Pass a map-style "
            "torch.utils.data.Dataset that does."
        )
    with forked():
        for row in range(len(dataset)):
            # The draws of one record must not shift those of others, nor may anyone know them.
            seed_all(secrets.randbits(63))
            try:
                record, label = dataset[row]
                values = _record(record, numbers)
                labels.append(np.asarray(label).copy())  # a dataset may reuse the memory
            except MemoryError:
                raise
            except Exception as raised:  # noqa: BLE001  (a dataset raises whatever a file leads to)
                why = type_and_place(raised)  # its message may quote the record
                raise InputError(
                    f"Record {row} of {kind} is no (record, label) pair of numbers ({why}): "
                    f"{remedy}."
                ) from None
            x = np.zeros((len(dataset), *values.shape), values.dtype) if row == 0 else x
            found = [values.shape, values.dtype, labels[row].shape]
            if found != [x.shape[1:], x.dtype, labels[0].shape]:
                raise InputError(
                    f"Record {row} of {kind} has shape {values.shape} ({values.dtype}) and a label "
                    f"of shape {labels[row].shape}, but others have {x.shape[1:]} ({x.dtype}) and "
                    f"{labels[0].shape}: {remedy}."
                )
            x[row] = values
    return x, np.stack(labels) if labels else x


def _record(record: Any, numbers: bool) -> NDArray[Any]:
    """Return an image as uint8, or numbers as float32: the declared range is inside of it."""
    values = np.asarray(record)
    if values.ndim > 1 and values.dtype == np.uint8 and not numbers:
        return values
    most, converted = np.finfo(np.float32).max, values.astype(np.float64)
    clipped = np.where(np.isinf(converted), converted, converted.clip(-most, most))
    return clipped.astype(np.float32)


def _records_as_units(origins: Sequence[Sequence[Origin]]) -> list[NDArray[np.str_]]:
    """Return the unit of each record of some datasets: one per record that they have come from."""
    places: dict[int, int] = {}
    return [
        np.array([f"{places.setdefault(of, len(places))}-{row}" for of, row in side] or [""])
        for side in origins
    ]


def check_copies(dataset: Any, units: Any = None) -> None:
    """Reject a training set that has a record several times in different units."""
    origins = list(_origins(dataset))
    names = range(len(origins)) if units is None else np.asarray(units, object).ravel().tolist()
    if len(names) != len(origins):
        return  # its length is refused elsewhere
    owners: dict[Origin, set[Any]] = {}
    for origin, name in zip(origins, names, strict=True):
        owners.setdefault(origin, set()).add(name)
    if copies := sum(len(owner) - 1 for owner in owners.values()):
        raise InputError(
            f"The training set has {len(owners)} different records, and {copies} copies of them "
            "in other units: its parts or indices repeat. Epsilon would protect each copy, but not "
            "a record with all of its copies. Leave out the copies (class weights can replace "
            "oversampling), or protect each record with its copies: make_private(network, "
            'from_torch(..., unit="record")).'
        )


def _check_held_out(train: Sequence[Origin], test: Sequence[Origin] = ()) -> None:
    """Reject a test set with training records."""
    if both := len(set(train) & set(test)):
        raise InputError(
            f"{both} records are both in the training set and in the test set. Epsilon does not "
            "cover what scores reveal of training records, and they would be too high. Use each "
            "record in one of them."
        )


def _origins(dataset: Any) -> Iterator[Origin]:
    """Yield which record of which dataset each record is, by identity and index.

    One ``ConcatDataset`` is looked into, and one ``Subset`` in each of its parts. Every other
    dataset has records of its own, whatever it reads them from.
    """
    from torch.utils.data import ConcatDataset, Subset  # noqa: PLC0415  (torch takes a second)

    parts = dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset]
    for part in parts:
        if isinstance(part, Subset):
            whole: Any = part.dataset
            yield from ((id(whole), int(index) % len(whole)) for index in part.indices)
        elif hasattr(part, "__len__"):
            yield from ((id(part), row) for row in range(len(part)))


def _place(name: str) -> Path:
    """Return a placeholder path, which names no file."""
    if not name.isidentifier():
        raise InputError(f"The dataset name '{name}' must consist of letters and digits.")
    return Path(f"<{name}>")
