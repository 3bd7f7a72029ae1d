"""Convert records, labels and keys one by one, so that none decides how another one is stored.

The form of a record depends on that record, and on what was declared.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpmac_cli.data.canonical import Faults
from dpmac_cli.errors import InputError

#: Failures to convert a value, of any library.
FAILURES = (TypeError, ValueError, RuntimeError, OverflowError)
#: Said of labels with fractions.
NO_CLASS = (
    "has a label that is not a whole number (numbers to predict need a range: target_low and "
    "target_high)"
)
NO_LABEL = -1


class UnfitError(ValueError):
    """Reason why a value cannot be used, as a message says it."""


class Stack:
    """Values of records that are stored in one array, each converted by itself.

    Args:
        count: number of records.
        read: converts a value to an array. Raises UnfitError with the reason why it cannot.
        shape: shape of each, if it is declared.
        what: said before the shape of a value that is not the record itself, such as "a label of ".

    Attributes:
        faults: why records cannot be used, by their number. Their rows are zeros.
    """

    def __init__(
        self,
        count: int,
        read: Callable[[Any], NDArray[Any]],
        shape: tuple[int, ...] | None = None,
        what: str = "",
    ) -> None:
        self._count, self._read, self._shape, self._what = count, read, shape, what
        self._rows: NDArray[Any] | None = None
        self._first = 0
        self.faults: Faults = {}

    def add(self, row: int, value: Any) -> None:
        """Store a value. Raises InputError if it differs from another in what is undeclared."""
        try:
            values = self._read(value)
        except UnfitError as fault:
            self.faults[row] = str(fault)
            return
        if self._rows is None:
            shape = values.shape if self._shape is None else self._shape
            self._first, self._rows = row, np.zeros((self._count, *shape), values.dtype)
        known = self._rows.shape[1:]
        if (values.shape, values.dtype) == (known, self._rows.dtype):
            self._rows[row] = values
        elif self._shape is not None:
            self.faults[row] = f"has {self._what}shape {values.shape}, not {known}"
        else:
            raise InputError(
                f"Record {row} has {self._what}shape {values.shape} ({values.dtype}), but record "
                f"{self._first} has {self._what}shape {known} ({self._rows.dtype}). Give all of "
                "them one shape and type, or declare them: pass an array, or shape=, label_shape=, "
                "low= and high= to from_torch."
            )

    def array(self) -> NDArray[Any]:
        """Return all values, shape (records, ...)."""
        empty = np.zeros((self._count, *(self._shape or ())))
        return empty if self._rows is None else self._rows


def read_record(
    record: Any, numbers: bool | None = None, dtype: type[np.floating[Any]] = np.float64
) -> NDArray[Any]:
    """Return a record as numbers, or as an image of uint8. Raises UnfitError.

    Args:
        record: anything that numpy converts to an array.
        numbers: whether it is declared as numbers; None if that is not declared.
        dtype: type of numbers. Those beyond its range are clipped, because the declared range is
            inside.
    """
    try:
        values = np.asarray(record)
        if values.ndim > 1 and values.dtype == np.uint8 and not numbers:
            return values
        if numbers is not False and values.dtype.kind in "biufOUS":
            most, converted = np.finfo(dtype).max, values.astype(np.float64)
            clipped = np.where(np.isinf(converted), converted, converted.clip(-most, most))
            return clipped.astype(dtype)
    except FAILURES as failure:
        raise UnfitError(f"cannot be converted to numbers ({type(failure).__name__})") from failure
    raise UnfitError(f"contains {values.dtype}, not {'uint8' if numbers is False else 'numbers'}")


def one_by_one(values: Any) -> NDArray[Any]:
    """Return an array; a list becomes an array of objects, so no item changes another one."""
    if not isinstance(values, list | tuple):
        return np.asarray(values)
    items = np.empty(len(values), object)
    for place, value in enumerate(values):
        items[place] = value
    return items


def stacked(
    x: NDArray[Any], numbers: bool | None, unusable: Mapping[int, str] | None = None
) -> tuple[NDArray[Any], Faults]:
    """Return records that numpy stores as objects or text as numbers or images, and faults.

    ``numbers`` and errors are those of :func:`read_record` and :class:`Stack`. Rows of numbers
    whose values are objects or text have the shape that their array declares.
    """
    read = partial(read_record, numbers=True if x.ndim == 2 else numbers)
    return _each(x, Stack(len(x), read, x.shape[1:] if x.ndim > 1 else None), unusable or {})


def _each(
    values: Iterable[Any], stack: Stack, known: Mapping[int, str]
) -> tuple[NDArray[Any], Faults]:
    """Return values as an array, and faults; those of records with a known one are not read."""
    for row, value in enumerate(values):
        if row not in known:
            stack.add(row, value)
    return stack.array(), stack.faults


def labels_in(
    y: NDArray[Any],
    classes: Sequence[str] | None,
    shape: tuple[int, ...] | None = None,
    known: Mapping[int, str] | None = None,
) -> tuple[NDArray[Any], Faults]:
    """Return labels as integers, and faults; as names if these are not declared.

    Args:
        y: shape (records,), or (records, labels).
        classes: declared names, which may be used instead of numbers.
        shape: shape of the label of each record, if it is declared.
        known: faults of records that cannot be used anyway, whose labels are not looked at.

    Raises:
        InputError: some records have several labels and others one, and none is declared.
    """
    if y.dtype.kind == "f":
        whole = np.isfinite(y) & (y == np.floor(y)) & (abs(y) < 2.0**63)
        bad = ~whole.all(tuple(range(1, y.ndim)))
        faults: Faults = dict.fromkeys(np.flatnonzero(bad).tolist(), NO_CLASS)
        return np.where(whole, y, 0).astype(np.int64), faults
    if y.ndim != 1 or y.dtype.kind not in "OU":
        return y, {}
    if classes is None and any(isinstance(label, str) for label in y):
        return y.astype(str), {}
    places = {name: place for place, name in reversed([*enumerate(map(str, classes or ()))])}

    def read(label: Any) -> NDArray[np.int64]:
        return _whole(places.get(label, NO_LABEL) if isinstance(label, str) else label)

    return _each(y, Stack(len(y), read, shape, "a label of "), known or {})


def _whole(label: Any) -> NDArray[np.int64]:
    """Return a label as integers. Raises UnfitError."""
    try:
        values = np.asarray(label)
        with np.errstate(invalid="ignore"):
            whole = values.astype(np.int64)
        if values.dtype.kind in "biuf" and (whole == values).all():
            return whole
    except FAILURES:
        pass
    raise UnfitError("has no label that is a whole number")


def numbers_in(y: NDArray[Any], targets: int | None = None) -> tuple[NDArray[Any], Faults]:
    """Return numbers to predict as float64, each record's converted by themselves, and faults.

    Args:
        y: shape (records,), or (records, targets); objects are rows.
        targets: number of targets; None for one number per record, not in a row.
    """
    form = () if targets is None else (targets,)
    if targets is None and y.ndim == 2 and y.shape[1] == 1:  # a column
        y = y[:, 0]
    rows = y.dtype.kind == "O" and y.ndim == 1
    if not y.ndim or not (rows or y.shape[1:] == form) or y.dtype.kind not in "biufOUS":
        return y, {}

    def read(value: Any) -> NDArray[np.float64]:
        try:
            number = np.asarray(value, np.float64)
            number = number.reshape(form) if targets is None else number
        except FAILURES as failure:
            raise UnfitError("has a target that is not a number") from failure
        if not np.isfinite(number).all():
            raise UnfitError("has a target that is NaN or infinite")
        return number

    return _each(y.tolist(), Stack(len(y), read, form, "targets of "), {})


def masks(faults: Mapping[int, str], count: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield each reason and a mask of the records that it holds for, shape (records,)."""
    found: dict[str, NDArray[np.bool_]] = {}
    for row, reason in faults.items() if count else ():
        found.setdefault(reason, np.zeros(count, bool))[row] = True
    yield from found.items()


def key_of(record: NDArray[Any], label: ArrayLike, numbers: bool) -> bytes:
    """Return bytes that depend on the values of a record, and not on the types they have."""
    with np.errstate(over="ignore"):  # of wider floats
        # Adding 0 turns -0 into 0.
        values = record.astype("<f8") + 0.0 if numbers else np.asarray(record, np.uint8)
    target = np.asarray(label)
    exact = target.astype("<f8") + 0.0 if target.dtype.kind == "f" else target.astype("<i8")
    return values.tobytes() + exact.tobytes()
