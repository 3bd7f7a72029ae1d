"""CellNumbers of a table's cells, read as their column declares: text to a number, each by itself.

What a cell means depends on that cell and on the schema, never on other cells.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from dpmac_cli.config.records import PLACES
from dpmac_cli.data.column_schema import EPOCH, FALSE, ISO_DATE, TRUE, Column, Label, Written
from dpmac_cli.data.values import MISSING

CellNumbers = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
#: Zeros at the end of the digits behind a point, which the type of a column adds.
TRAILING = r"(?:(\.\d*[1-9])0+|\.0+)(Z?)$"
#: Characters that each sign between groups of three digits stands for.
GROUPING = {" ": r"[ \x{00a0}\x{2009}\x{202f}]", "'": r"['\x{2019}]", ".": r"\.", ",": ","}
ISO = re.compile(rf"{ISO_DATE.pattern}(?:[T ]\d\d:\d\d\S*)?")
DAY = 86_400
#: Between the name of a column and a value, of which the hash is taken.
BETWEEN = "\x1f"


def values_in(cells: pa.Array, of: Column | Label) -> tuple[CellNumbers, BoolArray]:
    """Return a number per cell, NaN where it is none as declared, and where there is no value.

    Numbers are themselves, dates are days since 1970-01-01, booleans are 0 and 1, and categories
    are places among the declared ones.

    Args:
        cells: text, or a column of any type of numbers or dates; shape (records,).
        of: how the column is declared.
    """
    read = READERS[of.type]
    values, text = read(cells, of), text_cells(cells)
    usual = [word for word in MISSING if word not in of.values]
    missing = np.asarray(cells.is_null()) | is_one_of(text, [*usual, *of.missing_words])
    if of.missing_words and of.type in ("number", "date"):  # 999 stands for 999.0, too
        words = pa.array(of.missing_words, pa.string())
        missing |= np.isin(values, read(words, of)) & ~np.isnan(values)
    return np.where(missing | np.isinf(values), np.nan, values), missing


def hashed_in(cells: pa.Array, column: Column) -> CellNumbers:
    """Return the place of each value of a column by a public hash of its name and the value.

    All words for a missing value have the place of an empty one.

    Args:
        cells: text, or a column of any type; shape (records,).
        column: the column.
    """
    text = text_cells(cells)
    missing = is_one_of(text, [*MISSING, *column.missing_words])
    known = compute.if_else(pa.array(missing), "", text.fill_null(""))
    different = known.dictionary_encode()
    places = [
        _hashed(f"{column.name}{BETWEEN}{value}") for value in decoded_cells(different.dictionary)
    ]
    return _floats(pa.array(places, pa.float64()).take(different.indices))


def _hashed(value: str) -> int:
    digest = hashlib.sha256(value.encode()).digest()
    return int.from_bytes(digest, "big") % PLACES


def is_one_of(text: pa.Array, words: Iterable[str]) -> BoolArray:
    """Return where trimmed text is one of some words."""
    trimmed = pa.array([word.strip() for word in words], pa.string())
    return np.asarray(compute.is_in(text, trimmed))


def _numbers_in(cells: pa.Array, of: Column | Label) -> CellNumbers:
    if is_number(cells.type):
        return _floats(cells.cast(pa.float64(), safe=False))
    text = text_cells(cells)
    plain = compute.if_else(compute.match_substring_regex(text, _pattern(of)), text, None)
    if of.thousands is not None:
        plain = compute.replace_substring_regex(plain, GROUPING[of.thousands], "")
    if of.point != ".":
        plain = compute.replace_substring(plain, of.point, ".")
    return _floats(plain.cast(pa.float64()))


def _floats(cells: pa.Array) -> CellNumbers:
    values: CellNumbers = np.asarray(cells.fill_null(np.nan), np.float64)
    return values


def _pattern(form: Written) -> str:
    """Return a regular expression, of RE2, that matches a number as it is written."""
    point = re.escape(form.point)
    group = "" if form.thousands is None else rf"\d{{1,3}}(?:{GROUPING[form.thousands]}\d{{3}})+|"
    return rf"^[-+]?(?:(?:{group}\d+)(?:{point}\d*)?|{point}\d+)(?:[eE][-+]?\d+)?$"


def _dates_in(cells: pa.Array, of: Column | Label) -> CellNumbers:
    """Return days since 1970-01-01; the time is as written, so a time zone is not converted."""
    assert isinstance(of, Column)  # noqa: S101
    written = None if pa.types.is_temporal(cells.type) else of.format
    different = compute.dictionary_encode(text_cells(cells))
    days = [_days(cell, written) for cell in decoded_cells(different.dictionary)]
    return _floats(pa.array(days, pa.float64()).take(different.indices))


def _days(cell: str | None, written: str | None) -> float:
    """Return days since 1970-01-01; NaN for a cell that is no date as written."""
    try:
        if written is not None:
            found = datetime.strptime(cell or "", written)
        elif ISO.fullmatch(cell or ""):
            found = datetime.fromisoformat(cell or "")
        else:
            return np.nan
    except ValueError:
        return np.nan
    seconds = (found.hour * 60 + found.minute) * 60 + found.second + found.microsecond / 1e6
    return found.toordinal() - EPOCH + seconds / DAY


def _places_in(cells: pa.Array, of: Column | Label) -> CellNumbers:
    text, words = text_cells(cells), pa.array(of.values)
    if of.type == "boolean" and not of.values:
        return _truths(text)
    if of.type == "boolean":
        text, words = compute.utf8_lower(text), compute.utf8_lower(words)
    found = compute.index_in(text, words)
    return _floats(found.cast(pa.float64()))


def _truths(text: pa.Array) -> CellNumbers:
    """Return 0 and 1 for words of false and true; NaN for others."""
    places = compute.index_in(compute.utf8_lower(text), pa.array([*FALSE, *TRUE]))
    numbers = _floats(places.cast(pa.float64()))
    return np.where(np.isnan(numbers), np.nan, numbers >= len(FALSE))


#: Functions that read each type of column but texts.
READERS: Mapping[str, Callable[[pa.Array, Column | Label], CellNumbers]] = {
    "number": _numbers_in,
    "date": _dates_in,
    "category": _places_in,
    "boolean": _places_in,
}


def is_number(kind: pa.DataType) -> bool:
    """Return whether a type is one of numbers."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return any(test(kind) for test in kinds)


def has_text(cells: pa.Array) -> bool:
    """Return whether a column has a type of text."""
    return bool(pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type))


def kind_of(kind: pa.DataType) -> str:
    """Return the type of column in a schema that fits a type of arrow."""
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "date"
    return "number" if is_number(kind) else "category"


def decoded_cells(text: pa.Array) -> Iterator[str | None]:
    """Yield text cells; bytes that are not UTF-8 are replaced."""
    raw = text.cast(pa.binary()).to_pylist()
    yield from (None if cell is None else cell.decode(errors="replace") for cell in raw)


def text_cells(cells: pa.Array) -> pa.Array:
    """Return cells as text that does not depend on the type that the column needs for others."""
    text = cells.cast(pa.string())
    if pa.types.is_floating(cells.type):  # integers where a value is missing
        whole = compute.equal(compute.floor(cells), cells)
        exact = compute.and_(whole, compute.less(compute.abs(cells), 2.0**53))
        numbers = compute.if_else(exact, cells, None).cast(pa.int64())
        text = compute.if_else(exact.fill_null(False), numbers.cast(pa.string()), text)
    elif pa.types.is_decimal(cells.type) or pa.types.is_temporal(cells.type):
        text = compute.replace_substring_regex(text, TRAILING, r"\1\2")
    return compute.ascii_trim_whitespace(text)
