"""Records of torch datasets, in memory, and copies of a record by its identity."""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import ConcatDataset, Subset

from dpmac_cli.data.in_memory import ArrayData
from dpmac_cli.data.reader import as_array
from dpmac_cli.dp.torch_errors import type_and_place
from dpmac_cli.errors import InputError
from dpmac_cli.randomness.layers import forked, seed_all


def from_torch(
    train: Any,
    test: Any = None,
    *,
    unit: ArrayLike | None = None,
    unit_test: ArrayLike | None = None,
    **facts: Any,
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
            unit with its copies, which are found in any nesting of ``Subset`` and
            ``ConcatDataset``. The records of other datasets count as different ones, also if they
            read another dataset.
        unit_test: the same for records to test on.
        facts: ``classes``, ``low``, ``high`` and others, as in :class:`ArrayData`.

    Raises:
        InputError: a record cannot be read, or has another shape or type than others; one record is
            there several times in different units, or is both in ``train`` and in ``test``, by what
            is said of ``unit``.
    """
    origins = [list(_origins(train))]
    if test is not None:
        origins.append(list(_origins(test)))
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
            if row == 0:
                x = np.zeros((len(dataset), *values.shape), values.dtype)
            form = [values.shape, values.dtype, labels[row].shape]
            if form != [x.shape[1:], x.dtype, labels[0].shape]:
                raise InputError(
                    f"Record {row} of {kind} has shape {values.shape} ({values.dtype}) and a label "
                    f"of shape {labels[row].shape}, but others have {x.shape[1:]} ({x.dtype}) and "
                    f"{labels[0].shape}: {remedy}."
                )
            x[row] = values
    return x, as_array([label.tolist() for label in labels], "y") if labels else x


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
    places: dict[int, int] = {}  # of each dataset, in the order of their first records
    units = []
    for records in origins:
        names = []
        for dataset, row in records:
            place = places.setdefault(dataset, len(places))
            names.append(f"{place}-{row}")
        units.append(np.array(names or [""]))
    return units


def check_copies(dataset: Any, units: Any = None) -> None:
    """Reject a training set that has a record several times in different units.

    Copies are found by the index of a record in a dataset, in any nesting of ``Subset`` and
    ``ConcatDataset``; no record is read.

    Args:
        dataset: map-style dataset.
        units: unit of each record, shape (records,); by default each is one.

    Raises:
        InputError: there are copies, with their number.
    """
    origins = list(_origins(dataset))
    names = range(len(origins)) if units is None else np.asarray(units, object).ravel().tolist()
    if len(names) != len(origins):
        return  # its length is refused elsewhere
    owners: dict[Origin, set[Any]] = {}
    for origin, name in zip(origins, names, strict=True):
        owners.setdefault(origin, set()).add(name)
    copies = sum(len(units_of_record) - 1 for units_of_record in owners.values())
    if copies:
        raise InputError(
            f"The training set has {len(owners)} different records, and {copies} copies of them "
            "in other units: its parts or indices repeat. Epsilon would protect each copy, but not "
            "a record with all of its copies. Leave out the copies (class weights can replace "
            "oversampling), or protect each record with its copies: make_private(network, "
            'from_torch(..., unit="record")).'
        )


def _check_held_out(train: Sequence[Origin], test: Sequence[Origin] = ()) -> None:
    """Reject a test set with training records."""
    both = len(set(train) & set(test))
    if both:
        raise InputError(
            f"{both} records are both in the training set and in the test set. Epsilon does not "
            "cover what scores reveal of training records, and they would be too high. Use each "
            "record in one of them."
        )


def _origins(dataset: Any) -> Iterator[Origin]:
    """Yield which record of which dataset each record is, by identity and index.

    Any nesting of ``ConcatDataset`` and ``Subset`` is followed, as ``data + data + data`` makes it.
    Every other dataset has records of its own, whatever it reads them from.
    """
    if isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _origins(part)
    elif isinstance(dataset, Subset):
        known = list(_origins(dataset.dataset))
        yield from (known[int(index)] for index in dataset.indices)
    elif hasattr(dataset, "__len__"):
        yield from ((id(dataset), row) for row in range(len(dataset)))
