"""Units of privacy that hold several records each, such as persons, and their names."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpmac_cli.data.values import FLOATS, MISSING, NOT_TEXT, Faults, is_exact, text_of

Indices = NDArray[np.int64]
#: Names of units that stand for nobody in particular, also as pandas prints them. Records of
#: unknown persons must not become those of one person, so these are missing in all data.
_NOBODY = re.compile(
    r"[\W_]+|<na>|(?-i:NaT)|n/a|k\. ?a\.|unknown|unbekannt|missing|keine angabe", re.IGNORECASE
)
#: A whole number as a column of floats is printed, such as 17.0.
_PRINTED = re.compile(r"([-+]?\d+)\.0*")
#: A number as a spreadsheet or a float rounds it, such as 1.23457E+15.
_ROUNDED = re.compile(r"[-+]?\d+([.,]\d*)?e\+\d+", re.IGNORECASE)
#: Arrays of text drop it at the end, so that "p1" and "p1\0" would be one unit.
_NUL = "\0"
#: Said of units that are no exact whole number or text.
UNUSABLE = "has a unit that is no whole number that its type stores exactly (write units as text)"
NO_NAME = "has no unit"


@dataclass(frozen=True)
class Units:
    """Assignment of records to units of privacy, of :func:`units_of`.

    Attributes:
        order: records grouped by unit, each group in its original order; shape (records,).
        starts: index in ``order`` where each unit begins, and the end; shape (units + 1,).
    """

    order: Indices
    starts: Indices

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def owners(self) -> Indices:
        """Index of each record's unit, shape (records,)."""
        sizes = np.diff(self.starts)
        owners = np.empty(len(self.order), np.int64)
        owners[self.order] = np.repeat(np.arange(len(self)), sizes)
        return owners

    def sha256(self) -> str:
        """Return a checksum of the assignment of records to units, in hexadecimal."""
        contents = self.order.tobytes() + self.starts.tobytes()
        return hashlib.sha256(contents).hexdigest()

    def records(
        self,
        units: Indices,
        words: NDArray[np.uint64],
        count: int,
    ) -> Indices:
        """Return K = ``count`` records of each unit, shape (units, K).

        They are consecutive in the unit's order, cyclically, from a random start. Every record of
        the unit is equally likely, and none is repeated before all have been used.

        Args:
            units: indices of units.
            words: one uniform 64-bit word per unit, shape (units,).
            count: K.
        """
        sizes = self.starts[units + 1] - self.starts[units]
        first = (words % sizes.astype(np.uint64)).astype(np.int64)
        ring = (first[:, None] + np.arange(count)) % sizes[:, None]
        chosen: Indices = self.order[self.starts[units][:, None] + ring]
        return chosen


def units_of(numbers: ArrayLike) -> Units:
    """Return units, given the number or name of each record's unit.

    Units are in the order of their numbers or names.

    Args:
        numbers: a number or name for each record, shape (records,).

    Example:
        >>> units = units_of([7, 3, 7])
        >>> units.order.tolist(), units.starts.tolist()
        ([1, 0, 2], [0, 1, 3])
    """
    _, which = np.unique(np.asarray(numbers), return_inverse=True)
    # Keep the original order within a unit. An order that depended on other units would let one
    # of them change which records are drawn from this one.
    order = np.argsort(which, kind="stable")
    sizes = np.bincount(which)
    return Units(order, np.append(0, np.cumsum(sizes)))


def units_in(
    values: Iterable[Any], missing_words: Sequence[str] = ()
) -> tuple[NDArray[np.str_], Faults]:
    """Return the names of units, and faults by the numbers of records.

    A name is empty where a unit cannot be used.

    Args:
        values: a value for each record.
        missing_words: declared words for a missing value, which records must not share as a unit.

    Returns:
        Names, shape (records,), and why units cannot be used by the number of the record, from 0;
        {} if
        all can.
    """
    names, faults = list[str](), Faults()
    no_units = set(map(unit_name, missing_words))
    for row, value in enumerate(values):
        name = unit_name(value)
        name = "" if name in no_units else name
        if not name or NOT_TEXT in name:
            faults[row] = UNUSABLE if name else NO_NAME
            name = ""
        names.append(name)
    return np.array(names, np.str_), faults


def unit_name(value: Any) -> str:
    """Return the name of a unit; "" if it is missing, and :data:`NOT_TEXT` if it is not exact.

    Floats are accepted if they are whole numbers that the type stores exactly, because a column of
    integers becomes one of floats where a value is missing.

    Args:
        value: a value of any type that says which unit a record belongs to.

    Example:
        >>> unit_name(17.0), unit_name(" 17.0 "), unit_name("unknown")
        ('17', '17', '')
    """
    if isinstance(value, FLOATS) and not is_exact(value):
        return "" if value != value else NOT_TEXT  # noqa: PLR0124  (NaN)
    name = (text_of(value) or "").strip()
    if NOT_TEXT in name or _NUL in name or _ROUNDED.fullmatch(name):
        return NOT_TEXT
    printed = _PRINTED.fullmatch(name)
    if printed:
        digits = printed[1]
        return str(int(digits)) if is_exact(float(digits)) else NOT_TEXT
    return "" if name in MISSING or _NOBODY.fullmatch(name) else name
