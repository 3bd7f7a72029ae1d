"""Text of a value of a record, which depends on that value alone.

A type that is chosen for all records together, such as the dtype of a list or the width of a
column, lets one record change how every other one is read.
"""

from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np

#: Stands for bytes that are not UTF-8 in decoded text.
NOT_TEXT = "\ufffd"
#: Text that stands for a missing value in every table, unless it is a declared category.
MISSING = ("", "NA", "N/A", "#N/A", "NaN", "nan", "null", "NULL", "None")
FLOATS = Decimal | float | np.floating
#: Types of values that have a text.
KNOWN = FLOATS | int | np.integer | bool | np.bool_ | str | date
#: Why records cannot be used, by their number.
Faults = dict[int, str]


def is_exact(value: Any) -> bool:
    """Return whether a number is a whole one that its type stores exactly.

    Args:
        value: one of :data:`FLOATS`. A Decimal has the limit of a float.

    Example:
        >>> is_exact(3.0), is_exact(0.5), is_exact(2.0**53)
        (True, False, False)
    """
    kind = float if isinstance(value, Decimal) else type(value)
    limit = 2.0 ** (np.finfo(kind).nmant + 1)
    return bool(abs(value) < limit and value == int(value))


def text_of(value: Any) -> str | None:
    """Return a value as text; None if it is missing, and :data:`NOT_TEXT` if it has no text.

    Whole floats have the text of integers, because a column of integers becomes one of floats
    where a value is missing.

    Args:
        value: a value of a record, of any type.

    Example:
        >>> text_of(17.0), text_of(True), text_of(float("nan"))
        ('17', 'true', None)
    """
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if not isinstance(value, KNOWN):
        is_missing = value is None or type(value).__name__ == "NAType"  # of pandas
        return None if is_missing else NOT_TEXT
    if value != value:  # noqa: PLR0124  (NaN)
        return None
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, FLOATS) and is_exact(value):
        return str(int(value))
    return str(value).encode(errors="replace").decode()
