"""Cells of a table as text and numbers, and which of them have no value."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from dpmac_cli.data.canonical import MISSING
from dpmac_cli.data.column_schema import Column, Label, Written
from dpmac_cli.data.table_dates import read_dates
from dpmac_cli.data.table_numbers import read_numbers

#: Zeros at the end of the digits behind a point, which the type of a column adds.
TRAILING = r"(?:(\.\d*[1-9])0+|\.0+)(Z?)$"
BoolArray = NDArray[np.bool_]


class BadRecords(dict[str, BoolArray]):
    """Masks of records that cannot be used, by the reason as a message says it.

    ``beside_texts``: whether the table has columns of texts, which no message shows.
    """

    def __init__(self, *, beside_texts: bool = False) -> None:
        super().__init__()
        self.beside_texts = beside_texts


def is_number(kind: pa.DataType) -> bool:
    """Return whether a type is one of numbers."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def kind_of(kind: pa.DataType) -> str:
    """Return the type of column in a schema that fits a type of arrow."""
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "date"
    return "number" if is_number(kind) or pa.types.is_decimal(kind) else "category"


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


def places_of(cells: pa.Array, values: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the index of each cell's text in ``values``; -1 if it is not there."""
    found = compute.index_in(text_cells(cells), pa.array(values))
    return np.asarray(found.fill_null(-1), np.int64)


def has_text(cells: pa.Array) -> bool:
    """Return whether a column has a type of text."""
    return bool(pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type))


def numbers_of(cells: pa.Array, form: Written) -> tuple[pa.Array, BoolArray]:
    """Return cells as float64, null where they are no numbers, and which of them are numbers."""
    if is_number(cells.type):
        return cells.cast(pa.float64(), safe=False), np.ones(len(cells), bool)
    form = form if has_text(cells) else Written()  # a type is written with a point
    return read_numbers(text_cells(cells), form)


def missing_in(cells: pa.Array, of: Column | Label) -> BoolArray:
    """Return a mask of cells without a value: empty cells, and words that stand for one."""
    words = [word for word in MISSING if word not in of.values]
    missing = compute.or_(
        cells.is_null(), compute.is_in(text_cells(cells), pa.array(words, pa.string()))
    )
    return np.asarray(missing) | stands_for_none(cells, of)


def stands_for_none(cells: pa.Array, of: Column | Label) -> BoolArray:
    """Return a mask of cells that are one of the declared words for a missing value.

    In a column of numbers, or one with a type of dates, a word stands for its number or date,
    however a cell has it: 999 for 999.0, too.
    """
    words = pa.array([word.strip() for word in of.missing_words], pa.string())
    if not len(words):
        return np.zeros(len(cells), bool)
    found = np.asarray(compute.is_in(text_cells(cells), words))
    if isinstance(of, Column) and of.type == "date":
        if pa.types.is_temporal(cells.type):  # text is as the schema has it
            days = [read_dates(words.to_pylist(), of, typed) for typed in (True, False)]
            own = read_dates(decoded_cells(text_cells(cells)), of, True)
            found = found | np.isin(own, np.concatenate(days))
    elif of.range is not None:
        numbers, fits = read_numbers(words, of)
        if fits.any():
            own = numbers_of(cells, of)[0].fill_null(np.nan)
            found = found | np.isin(np.asarray(own), np.asarray(numbers.drop_null()))
    return found


def without_missing(cells: pa.Array, of: Column | Label) -> pa.Array:
    """Return the text of the cells that have a value."""
    return text_cells(cells).filter(pa.array(~missing_in(cells, of)))
