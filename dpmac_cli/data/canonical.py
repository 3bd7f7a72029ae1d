"""Canonical text of single values, such as names of units.

A type that is chosen for all records together, such as the dtype of a list or the width of a
column, lets one record change how every other one is read. Here the text of a value depends on that
value alone.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Stands for bytes that are not UTF-8 in decoded text.
NOT_TEXT = "\ufffd"
#: Text that stands for a missing value in every table, unless it is a declared category.
MISSING = ("", "NA", "N/A", "#N/A", "NaN", "nan", "null", "NULL", "None")
#: Names of units that stand for nobody in particular. Records of unknown persons must not become
#: those of one person, so these are missing in all data.
_NOBODY = re.compile(r"[\W_]+|n/a|k\. ?a\.|unknown|unbekannt|missing|keine angabe", re.IGNORECASE)
#: A whole number as a column of floats is printed, such as 17.0.
_PRINTED = re.compile(r"([-+]?\d+)\.0*")
#: Said of units that are no exact whole number or text.
UNUSABLE = "has a unit that is no whole number that its type stores exactly (write units as text)"
NO_NAME = "has no unit"
FLOATS = Decimal | float | np.floating
#: Types of values that have a text.
KNOWN = FLOATS | int | np.integer | bool | np.bool_ | str | date
#: Why records cannot be used, by their number.
Faults = dict[int, str]


def units_in(
    values: Iterable[Any], missing_words: Sequence[str] = ()
) -> tuple[NDArray[np.str_], Faults]:
    """Return the names of units, and faults; the name is empty where a unit cannot be used.

    Args:
        values: a value for each record.
        missing_words: declared words for a missing value, which records must not share as a unit.
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
    """
    if isinstance(value, FLOATS) and not _is_exact(value):
        return "" if value != value else NOT_TEXT  # noqa: PLR0124  (NaN)
    name = (text_of(value) or "").strip()
    if printed := _PRINTED.fullmatch(name):
        return str(int(printed[1])) if _is_exact(float(printed[1])) else NOT_TEXT
    return "" if name in MISSING or _NOBODY.fullmatch(name) else name


def _is_exact(value: Any) -> bool:
    most = 2.0 ** (np.finfo(float if isinstance(value, Decimal) else type(value)).nmant + 1)
    return bool(abs(value) < most and value == int(value))


def text_of(value: Any) -> str | None:
    """Return a value as text; None if it is missing, and :data:`NOT_TEXT` if it has no text."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if not isinstance(value, KNOWN):
        return None if value is None else NOT_TEXT
    if value != value:  # noqa: PLR0124  (NaN)
        return None
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, FLOATS) and _is_exact(value):
        return str(int(value))
    return str(value).encode(errors="replace").decode()
