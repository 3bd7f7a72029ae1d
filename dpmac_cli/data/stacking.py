"""Convert records, labels and keys one by one, so that none decides how another one is stored.

The form of a record depends on that record, and on what was declared.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
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


class Stack:
    """Records of one shape that are converted to one array, each by itself.

    Args:
        count: number of records.
        shape: shape of each, if it is declared.
        numbers: whether they are numbers, which are stored as ``dtype``, or uint8 images; None if
            that is not declared.
        dtype: type of numbers.

    Attributes:
        faults: why records cannot be used, by their number. Their rows are zeros.
    """

    def __init__(
        self,
        count: int,
        shape: tuple[int, ...] | None = None,
        numbers: bool | None = None,
        dtype: type[Any] = np.float64,
    ) -> None:
        self._count, self._shape, self._numbers, self._dtype = count, shape, numbers, dtype
        self._rows: NDArray[Any] | None = None
        self._undeclared = tuple(
            what for what, given in (("shape", shape), ("kind", numbers)) if given is None
        )
        self._first = 0
        self.faults: Faults = {}

    def add(self, row: int, record: Any) -> None:
        """Store a record. Raises InputError if it differs from another in what is undeclared."""
        try:
            values = np.asarray(record)
        except FAILURES as failure:
            self.faults[row] = f"cannot be converted to an array ({type(failure).__name__})"
            return
        if self._rows is None and (self._undeclared == () or values.dtype.kind in "biuf"):
            self._begin(row, values)
        if self._rows is None:
            self.faults[row] = f"contains {values.dtype}, not numbers"
            return
        self._check_alike(row, values)
        if values.shape != self._rows.shape[1:]:
            self.faults[row] = f"has the shape {values.shape}, not {self._rows.shape[1:]}"
        elif self._rows.dtype == np.uint8 and values.dtype != np.uint8:
            self.faults[row] = f"is an image of {values.dtype}, not uint8"
        elif values.dtype.kind not in "biufOUS":
            self.faults[row] = f"contains {values.dtype}, not numbers"
        else:
            try:
                self._rows[row] = self._converted(values)
            except FAILURES:
                self.faults[row] = "contains values that are not numbers"

    def _begin(self, row: int, values: NDArray[Any]) -> None:
        shape = values.shape if self._shape is None else self._shape
        numbers = self._numbers
        if numbers is None:
            numbers = len(shape) < 2 or values.dtype != np.uint8
        self._first = row
        self._rows = np.zeros((self._count, *shape), self._dtype if numbers else np.uint8)

    def _check_alike(self, row: int, values: NDArray[Any]) -> None:
        rows = self._rows
        assert rows is not None  # noqa: S101
        if "shape" in self._undeclared and values.shape != rows.shape[1:]:
            raise InputError(
                f"Record {row} has the shape {values.shape}, but record {self._first} has "
                f"{rows.shape[1:]}. Give all records one shape, or declare it: pass an array, or "
                "shape= to from_torch."
            )
        pixels = values.ndim > 1 and values.dtype == np.uint8
        if "kind" in self._undeclared and values.ndim > 1 and pixels != (rows.dtype == np.uint8):
            kinds = ("numbers", "a uint8 image") if pixels else ("a uint8 image", "numbers")
            raise InputError(
                f"Record {row} is {kinds[1]}, but record {self._first} is {kinds[0]}. Convert all "
                "of them to uint8 images, or declare the range of numbers: low= and high=."
            )

    def _converted(self, values: NDArray[Any]) -> NDArray[Any]:
        if self._rows is None or self._rows.dtype == np.uint8:
            return values
        numbers = values.astype(np.float64)
        if self._dtype == np.float64:
            return numbers
        # Numbers beyond the range of the type are clipped, because the declared range is inside.
        most = np.finfo(self._dtype).max
        return np.where(np.isfinite(numbers), numbers.clip(-most, most), numbers)

    def array(self) -> NDArray[Any]:
        """Return all records, shape (records, ...)."""
        return np.empty((self._count, 1)) if self._rows is None else self._rows


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

    ``numbers`` and errors are those of :class:`Stack`. Rows of numbers whose values are objects or
    text have the shape that their array declares.
    """
    whole = x.ndim > 1
    stack = Stack(len(x), x.shape[1:] if whole else None, True if x.ndim == 2 else numbers)
    stack.faults |= unusable or {}
    for row, record in enumerate(x):
        if row not in stack.faults:
            stack.add(row, record)
    return stack.array(), stack.faults


def labels_in(
    y: NDArray[Any],
    classes: Sequence[str] | None,
    shape: tuple[int, ...] | None = None,
    known: Container[int] = (),
) -> tuple[NDArray[Any], Faults]:
    """Return labels as integers, and faults; as names if these are not declared.

    Args:
        y: shape (records,), or (records, labels).
        classes: declared names, which may be used instead of numbers.
        shape: shape of the label of each record, if it is declared.
        known: records that cannot be used anyway, whose labels are not looked at.

    Raises:
        InputError: some records have several labels and others one, and none is declared.
    """
    kind, faults = y.dtype.kind, Faults()
    if kind == "f":
        whole = np.isfinite(y) & (y == np.floor(y)) & (abs(y) < 2.0**63)
        bad = ~whole if y.ndim == 1 else ~whole.all(tuple(range(1, y.ndim)))
        rows: Iterable[int] = np.flatnonzero(bad).tolist()
        faults = dict.fromkeys(rows, NO_CLASS)
        return np.where(whole, y, 0).astype(np.int64), faults
    if kind == "U" and classes is not None:
        same = y[..., None] == np.array(classes).astype(str).ravel()
        return np.where(same.any(-1), same.argmax(-1), NO_LABEL), faults
    if kind != "O" or y.ndim != 1:
        return y, faults
    return _labels_of_objects(y, classes, shape, known)


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
        return y, Faults()
    values, faults = np.zeros((len(y), *form)), Faults()
    for row, value in enumerate(y.tolist()):
        try:
            number = np.asarray(value, np.float64)
            number = number.reshape(form) if targets is None else number
        except FAILURES:
            faults[row] = "has a target that is not a number"
            continue
        if number.shape != form:
            faults[row] = f"has targets of shape {number.shape}, not {form}"
        elif np.isfinite(number).all():
            values[row] = number
        else:
            faults[row] = "has a target that is NaN or infinite"
    return values, faults


def _labels_of_objects(
    y: NDArray[Any],
    classes: Sequence[str] | None,
    shape: tuple[int, ...] | None,
    known: Container[int],
) -> tuple[NDArray[Any], Faults]:
    places = {name: place for place, name in reversed([*enumerate(map(str, classes or ()))])}
    found, faults, declared, first = dict[int, NDArray[np.int64]](), Faults(), shape, 0
    names = [row for row, label in enumerate(y) if isinstance(label, str)]
    if names and classes is None:
        return np.array([str(label) for label in y]), faults
    for row, label in enumerate(y):
        if row in known:
            continue
        value = _label(places.get(label, NO_LABEL) if isinstance(label, str) else label)
        if value is None:
            faults[row] = "has no label that is a whole number"
            continue
        if shape is None:
            shape, first = value.shape, row
        if value.shape == shape:
            found[row] = value
        elif declared is None:
            raise InputError(
                f"The label of record {row} has the shape {value.shape}, but that of record "
                f"{first} has {shape}. Give all records one label each, or all of them one row "
                "of 0 and 1, or declare which: pass an array, or label_shape= to from_torch."
            )
        else:
            faults[row] = f"has a label of shape {value.shape}, not {shape}"
    labels = np.zeros((len(y), *(shape or ())), np.int64)
    for row, value in found.items():
        labels[row] = value
    return labels, faults


def _label(label: Any) -> NDArray[np.int64] | None:
    try:
        values = np.asarray(label)
        if values.dtype.kind not in "biuf" or not (abs(values * 1.0) < 2.0**63).all():
            return None
        whole = values.astype(np.int64)
        return whole if (values == whole).all() else None
    except FAILURES:
        return None


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
