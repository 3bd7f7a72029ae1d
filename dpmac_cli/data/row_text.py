"""One text for each row of a table, in every kind of file, whatever a schema says of its columns.

A hash of that text decides on which side of a split a record is. Another range of a column, another
delimiter, or the same table as Parquet or as a data frame must not change the side: what a record
is tested on in one run would be trained on in the next.
"""

from collections.abc import Sequence
from datetime import datetime

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from dpmac_cli.data.held_out import copy_keys, hash_of
from dpmac_cli.data.table_cells import ISO, decoded_cells, is_one_of, text_cells
from dpmac_cli.data.values import MISSING

#: Regular expressions, of RE2, of a whole number and of any number with a decimal point. Numbers of
#: more digits are names.
WHOLE = r"^(?:\+|(-))?0*([0-9]{1,300})(?:\.0*)?$"
NUMBER = r"^[-+]?(?:[0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})(?:[eE][-+]?[0-9]{1,9})?$"
#: Separates cells in the text of a row, and stands for a cell without a value.
BETWEEN, NOTHING = "\x1f", "\x00"


def keys_of(columns: Sequence[pa.Array]) -> NDArray[np.object_]:
    """Return the key of each row that decides its side of a split, of type bytes, shape (rows,).

    Args:
        columns: all columns of the table, in its order, shape (rows,) each.
    """
    plain = _hashes(list(map(plain_texts, columns)))
    forms = _hashes([_texts(column).fill_null(NOTHING) for column in columns])
    keys = list(copy_keys(plain, forms))
    # With None behind them, numpy makes objects of keys, which it would otherwise pad.
    return np.array([*keys, None], np.object_)[:-1]


def _hashes(texts: Sequence[pa.Array]) -> list[bytes]:
    """Return a hash of each row.

    Args:
        texts: columns of texts, shape (rows,) each.
    """
    rows = compute.binary_join_element_wise(*texts, BETWEEN).cast(pa.binary())
    return list(map(hash_of, rows.to_pylist()))


def plain_texts(cells: pa.Array) -> pa.Array:
    """Return a column as text, in which all forms of an equal cell are one.

    - Numbers are equal with and without a sign +, zeros at their ends, and an exponent: 1, +1.0 and
      1e0. Whole ones are compared by their digits, others as float64.
    - Words for a missing value are equal to no value, and so to each other.
    - True and TRUE are true. A date is equal to its midnight, with a blank or a T before the time.
    - Blanks around a cell do not count.

    Args:
        cells: a column of any type, shape (rows,).

    Example:
        >>> plain_texts(pa.array(["+1.0", "1e0", "TRUE", "NA"])).to_pylist()
        ['1', '1', 'true', '']
    """
    text = _texts(cells).fill_null("")
    is_missing = pa.array(is_one_of(text, MISSING))
    text = compute.if_else(is_missing, "", text)
    whole = compute.match_substring_regex(text, WHOLE)
    digits = compute.replace_substring_regex(text, WHOLE, r"\1\2")
    digits = compute.if_else(compute.equal(digits, "-0"), "0", digits)
    number = compute.and_not(compute.match_substring_regex(text, NUMBER), whole)
    floats = compute.if_else(number, text, None).cast(pa.float64())
    numeric = compute.or_(whole, number)
    others = _other_texts(compute.if_else(numeric, "", text))
    texts = compute.if_else(number, text_cells(floats), others)
    return compute.if_else(whole, digits, texts)


def _texts(cells: pa.Array) -> pa.Array:
    """Return a column of any type as text, each cell by itself."""
    try:
        return text_cells(cells)
    except pa.ArrowException:  # lists and the like
        texts = []
        for cell in cells.to_pylist():
            texts.append(None if cell is None else repr(cell))
        return pa.array(texts)


def _other_texts(text: pa.Array) -> pa.Array:
    """Return cells that are no numbers, in which all forms of a truth value or a date are one.

    Args:
        text: a column of texts, shape (rows,). Each different one is converted once.
    """
    different = text.dictionary_encode()
    plain = map(_plain, decoded_cells(different.dictionary))
    return pa.array(plain, pa.string()).take(different.indices)


def _plain(cell: str) -> str:
    """Return a text, a truth value in lower case, or a date in one form."""
    if cell.lower() in ("true", "false"):
        return cell.lower()
    if not ISO.fullmatch(cell):
        return cell
    try:
        moment = datetime.fromisoformat(cell)
    except ValueError:
        return cell
    day, _, time = moment.isoformat().partition("T")
    return day if time == "00:00:00" else f"{day}T{time}"
