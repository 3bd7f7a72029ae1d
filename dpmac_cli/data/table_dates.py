"""Dates and times of tables as inputs: read as declared, and clipped to a public range."""

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.data.column_schema import EPOCH, ISO_DATE, Column

DAYS_PER_YEAR = 365.25
ISO = re.compile(rf"{ISO_DATE.pattern}(?:[T ]\d\d:\d\d\S*)?")
#: Forms of dates to suggest for cells that cannot be read.
SUGGESTED = (
    *("%d.%m.%Y", "%d.%m.%Y %H:%M", "%d.%m.%y", "%Y%m%d", "%d-%m-%Y", "%Y/%m/%d"),
    *("%d/%m/%Y", "%m/%d/%Y", "%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M", "%d/%m/%y", "%m/%d/%y"),
)
#: Values of inputs and their lowest and highest, each (records,) or one number for all.
Part = tuple[NDArray[np.float64], float, float]


def read_dates(text: Iterable[str | None], column: Column, typed: bool) -> NDArray[np.float64]:
    """Return days since 1970-01-01 with the time of day as a fraction; NaN where a cell is no date.

    The time is as written: a time zone is not converted.

    Args:
        text: trimmed cells.
        column: how dates are written, and their range.
        typed: the table stores dates as such, so they are not written in the column's format.
    """
    low, _ = column.ends
    written = None if typed else column.format
    return np.array([_days(cell, written, low) for cell in text], np.float64)


def _days(cell: str | None, written: str | None, low: float) -> float:
    if cell is None:
        return np.nan
    try:
        if written is not None:
            found = datetime.strptime(cell, written)
            found = _in_century(found, low) if "%y" in written else found
        elif ISO.fullmatch(cell):
            found = datetime.fromisoformat(cell)
        else:
            return np.nan
    except ValueError:
        return np.nan
    seconds = (found.hour * 60 + found.minute) * 60 + found.second + found.microsecond / 1e6
    return found.toordinal() - EPOCH + seconds / 86_400


def _in_century(found: datetime, low: float) -> datetime:
    """Return a date with a year of two digits in the hundred years that begin with the range.

    Raises ValueError for a 29 February that does not exist.
    """
    first = datetime.fromordinal(int(low) + EPOCH)
    year = first.year + (found.year - first.year) % 100
    early = (found.month, found.day) < (first.month, first.day) and year == first.year
    return found.replace(year=year + 100 * early)


def formats_of(cell: str) -> list[str]:
    """Return formats that a cell may be written in, without claiming that one is meant."""
    return [written for written in SUGGESTED if _fits(cell, written)]


def _fits(cell: str, written: str) -> bool:
    try:
        datetime.strptime(cell, written)
    except ValueError:
        return False
    return True


def outside_of(days: NDArray[np.float64], column: Column) -> NDArray[np.bool_]:
    """Return which dates are before the first or after the last day of the range."""
    low, high = column.ends
    return (days < low) | (days >= high + 1)


def age_of(
    days: NDArray[np.float64], column: Column, reference: tuple[NDArray[np.float64], Column] | None
) -> Part:
    """Return years from a date to the reference, by default the last day of the range.

    Args:
        days: dates, shape (records,); NaN where they are missing.
        column: their column.
        reference: dates of another column, and that column.

    Returns:
        Years, NaN where a date is missing, and the fewest and most that the ranges allow.
    """
    low, high = column.ends
    then, first, last = (
        (np.array(high), high, high) if reference is None else (reference[0], *reference[1].ends)
    )
    years: NDArray[np.float64] = (then - days) / DAYS_PER_YEAR
    return years, (first - high) / DAYS_PER_YEAR, (last - low) / DAYS_PER_YEAR


def _weekday(days: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    number = (np.floor(days) + 3) % 7  # 1970-01-01 was a Thursday, and 0 is Monday
    return [np.equal(number, day).astype(np.float64) for day in range(7)]


def _month(days: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    months = np.floor(days).astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12
    return [np.equal(months, month).astype(np.float64) for month in range(12)]


def _day_of_year(days: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    day = np.floor(days).astype("datetime64[D]")
    passed = (day - day.astype("datetime64[Y]")).astype(np.float64)
    return _circle(passed / 366)


def _time_of_day(days: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    return _circle(days % 1)


def _circle(share: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Return a place on a circle, so that the end of a year is close to its beginning."""
    return [np.sin(2 * np.pi * share), np.cos(2 * np.pi * share)]


#: Parts of a date that do not depend on its range, each in [-1, 1].
CALENDAR: Mapping[str, Callable[[NDArray[np.float64]], list[NDArray[np.float64]]]] = {
    "weekday": _weekday,
    "month": _month,
    "day_of_year": _day_of_year,
    "time_of_day": _time_of_day,
}
