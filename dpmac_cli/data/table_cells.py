"""Numbers of a table's cells, read as their column declares: text to a number, each by itself.

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


def values_in(
    cells: pa.Array,
    column: Column | Label,
) -> tuple[CellNumbers, BoolArray]:
    """Return a number per cell, NaN where it is none as declared, and where there is no value.

    Numbers are themselves, dates are days since 1970-01-01, booleans are 0 and 1, and categories
    are places among the declared ones.

    Args:
        cells: text, or a column of any type of numbers or dates; shape (records,).
        column: how the column is declared.

    Returns:
        numbers, float64, and where cells are empty or have a word for a missing value, bool; both
        of shape (records,).

    Example:
        >>> column = Column.model_validate({"name": "age", "range": [0, 120]})
        >>> values_in(pa.array(["41", "", "old"]), column)
        (array([41., nan, nan]), array([False,  True, False]))
    """
    read = CELL_READERS[column.type]
    values = read(cells, column)
    usual_words = [word for word in MISSING if word not in column.values]
    words = [*usual_words, *column.missing_words]
    is_empty = np.asarray(cells.is_null())
    missing = is_empty | is_one_of(text_cells(cells), words)
    if column.missing_words and column.type in ("number", "date"):  # 999 stands for 999.0, too
        missing_values = read(pa.array(column.missing_words, pa.string()), column)
        missing |= np.isin(values, missing_values) & ~np.isnan(values)
    return np.where(missing | np.isinf(values), np.nan, values), missing


def hashed_in(cells: pa.Array, column: Column) -> CellNumbers:
    """Return the place of each value of a column by a public hash of its name and the value.

    All words for a missing value have the place of an empty one.

    Args:
        cells: text, or a column of any type; shape (records,).
        column: the column.

    Returns:
        numbers from 0 to :data:`~dpmac_cli.config.records.PLACES` - 1, float64, shape (records,).
    """
    text = text_cells(cells)
    missing = is_one_of(text, [*MISSING, *column.missing_words])
    known = compute.if_else(pa.array(missing), "", text.fill_null(""))
    return _each_once(known, lambda value: _hashed(f"{column.name}{BETWEEN}{value}"))


def _each_once(text: pa.Array, number: Callable[[str], float]) -> CellNumbers:
    """Return a number per cell, which is computed once for all equal cells.

    Args:
        text: cells as text, shape (records,).
        number: returns the number of a cell.
    """
    different = text.dictionary_encode()
    numbers = map(number, decoded_cells(different.dictionary))
    of_cells = pa.array(numbers, pa.float64()).take(different.indices)
    return _floats(of_cells)


def _hashed(value: str) -> int:
    """Return the place of a value, by the remainder of its SHA-256."""
    digest = hashlib.sha256(value.encode()).digest()
    return int.from_bytes(digest, "big") % PLACES


def is_one_of(text: pa.Array, words: Iterable[str]) -> BoolArray:
    """Return where trimmed text is one of some words, shape (records,).

    Args:
        text: cells as text without blanks around them.
        words: words that are compared without the blanks around them.
    """
    trimmed = pa.array(map(str.strip, words), pa.string())
    return np.asarray(compute.is_in(text, trimmed))


def _numbers_in(cells: pa.Array, column: Column | Label) -> CellNumbers:
    """Return the numbers of cells, NaN where a text is none as the column writes them."""
    if is_number(cells.type):
        return _floats(cells.cast(pa.float64(), safe=False))
    text = text_cells(cells)
    is_written = compute.match_substring_regex(text, _pattern(column))
    plain = compute.if_else(is_written, text, None)
    if column.thousands is not None:
        plain = compute.replace_substring_regex(plain, GROUPING[column.thousands], "")
    if column.point != ".":
        plain = compute.replace_substring(plain, column.point, ".")
    return _floats(plain.cast(pa.float64()))


def _floats(cells: pa.Array) -> CellNumbers:
    """Return a column of numbers as an array, NaN where it is null."""
    values: CellNumbers = np.asarray(cells.fill_null(np.nan), np.float64)
    return values


def _pattern(form: Written) -> str:
    """Return a regular expression, of RE2, that matches a number as it is written."""
    point = re.escape(form.point)
    group = ""
    if form.thousands is not None:
        group = rf"\d{{1,3}}(?:{GROUPING[form.thousands]}\d{{3}})+|"
    return rf"^[-+]?(?:(?:{group}\d+)(?:{point}\d*)?|{point}\d+)(?:[eE][-+]?\d+)?$"


def _dates_in(cells: pa.Array, column: Column | Label) -> CellNumbers:
    """Return days since 1970-01-01; the time is as written, so a time zone is not converted."""
    assert isinstance(column, Column)  # noqa: S101
    written = None if pa.types.is_temporal(cells.type) else column.format
    return _each_once(text_cells(cells), lambda cell: _days(cell, written))


def _days(cell: str, written: str | None) -> float:
    """Return days since 1970-01-01; NaN for a cell that is no date as written.

    Args:
        cell: text of a cell.
        written: format of ``strptime``; None for ISO 8601.
    """
    try:
        if written is not None:
            moment = datetime.strptime(cell, written)
        elif ISO.fullmatch(cell):
            moment = datetime.fromisoformat(cell)
        else:
            return np.nan
    except ValueError:
        return np.nan
    minutes = moment.hour * 60 + moment.minute
    seconds = minutes * 60 + moment.second + moment.microsecond / 1e6
    return moment.toordinal() - EPOCH + seconds / DAY


def _places_in(cells: pa.Array, column: Column | Label) -> CellNumbers:
    """Return the place of each cell among the declared values, NaN for other cells."""
    text = text_cells(cells)
    if column.type == "boolean" and not column.values:
        return _truths(text)
    words = pa.array(column.values)
    if column.type == "boolean":
        text, words = compute.utf8_lower(text), compute.utf8_lower(words)
    places = compute.index_in(text, words)
    return _floats(places.cast(pa.float64()))


def _truths(text: pa.Array) -> CellNumbers:
    """Return 0 and 1 for words of false and true; NaN for others."""
    words = pa.array([*FALSE, *TRUE])
    indices = compute.index_in(compute.utf8_lower(text), words)
    places = _floats(indices.cast(pa.float64()))
    return np.where(np.isnan(places), np.nan, places >= len(FALSE))


#: Functions that read each type of column but texts.
CELL_READERS: Mapping[str, Callable[[pa.Array, Column | Label], CellNumbers]] = {
    "number": _numbers_in,
    "date": _dates_in,
    "category": _places_in,
    "boolean": _places_in,
}


def is_number(kind: pa.DataType) -> bool:
    """Return whether a type of arrow is one of numbers: integers, floats or decimals."""
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return True
    return bool(pa.types.is_decimal(kind))


def has_text(cells: pa.Array) -> bool:
    """Return whether a column of arrow has a type of text."""
    return bool(pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type))


def schema_type(kind: pa.DataType) -> str:
    """Return the type of column in a schema that fits a type of arrow.

    Example:
        >>> schema_type(pa.int8()), schema_type(pa.date32()), schema_type(pa.string())
        ('number', 'date', 'category')
    """
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "date"
    return "number" if is_number(kind) else "category"


def plain_cells(cells: pa.Array) -> pa.Array:
    """Return a column without a dictionary of its values.

    Args:
        cells: a column of any type, such as a category of pandas.
    """
    return cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells


def decoded_cells(text: pa.Array) -> Iterator[str]:
    """Yield text cells in order, "" for null; bytes that are not UTF-8 are replaced."""
    for cell in text.cast(pa.binary()).to_pylist():
        yield "" if cell is None else cell.decode(errors="replace")


def text_cells(cells: pa.Array) -> pa.Array:
    """Return cells as text that does not depend on the type that the column needs for others.

    Whole floats are written as integers, because a column of integers becomes one of floats where
    a value is missing. Zeros at the end of decimals and times, which the type adds, are dropped.

    Args:
        cells: a column of any type that has a text, shape (records,).

    Returns:
        text without blanks around it, null where a cell is.
    """
    if pa.types.is_float16(cells.type):
        cells = cells.cast(pa.float32())  # in which pyarrow computes
    text = cells.cast(pa.string())
    if pa.types.is_floating(cells.type):
        is_whole = compute.equal(compute.floor(cells), cells)
        is_small = compute.less(compute.abs(cells), 2.0**53)
        is_exact = compute.and_(is_whole, is_small)
        integers = compute.if_else(is_exact, cells, None).cast(pa.int64())
        is_integer = is_exact.fill_null(False)
        text = compute.if_else(is_integer, integers.cast(pa.string()), text)
    elif pa.types.is_decimal(cells.type) or pa.types.is_temporal(cells.type):
        text = compute.replace_substring_regex(text, TRAILING, r"\1\2")
    return compute.ascii_trim_whitespace(text)
