"""Numbers as people write them in tables: read as declared, never guessed.

What a cell means depends on that cell and on the schema. Other cells of its column are only looked
at to explain a refusal, or to refuse a whole table.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute
from pydantic import ValidationError

from dpmac_cli.data.column_schema import Written

#: Characters that each sign between groups of three digits stands for.
GROUPING = {" ": r"[ \x{00a0}\x{2009}\x{202f}]", "'": r"['\x{2019}]", ".": r"\.", ",": ","}
#: Numbers with three digits behind a point, which may separate thousands.
GROUPED = r"^[-+]?[1-9]\d{0,2}\.\d{3}$"
#: The same without groups as well.
PLAIN_OR_GROUPED = r"^[-+]?(0|[1-9]\d{0,2}(\.\d{3})?)$"
#: Most characters of a cell to show in a message.
SHOWN = 40
_CODE = r"-?9+(?:[.,]0*)?|-1"
#: Cells that may stand for a missing value: codes such as 999, among numbers and dates short words,
#: and everywhere usual ones.
_AMONG_NUMBERS = re.compile(rf"[^\d\s]{{1,12}}|{_CODE}")
_AMONG_NAMES = re.compile(
    rf"(?i:[\W_]+|n[./]? ?[adv]\.?|k\.? ?a\.?|unknown|unbekannt|missing|fehlt|keine angabe)|{_CODE}"
)
#: Numbers and dates.
_NO_TEXT = re.compile(r"[-+\d.,'/:]{1,10}")
_SYMBOL = re.compile(r"^(?P<before>[^\s\d.,+-]*)\s*[-+]?\d[\d.,' ]*(?P<after>\D*)$")


def number_pattern(form: Written) -> str:
    """Return a regular expression, of RE2, that matches a number as it is written."""
    point = re.escape(form.point)
    group = "" if form.thousands is None else rf"\d{{1,3}}(?:{GROUPING[form.thousands]}\d{{3}})+|"
    return rf"^[-+]?(?:(?:{group}\d+)(?:{point}\d*)?|{point}\d+)(?:[eE][-+]?\d+)?$"


def without_symbol(text: pa.Array, symbol: str | None) -> pa.Array:
    """Return cells without the symbol before or after the number."""
    if symbol is None:
        return text
    space, escaped = r"[\s\x{00a0}\x{202f}]*", re.escape(symbol)
    bare = compute.replace_substring_regex(text, rf"{space}{escaped}$", "")
    return compute.if_else(
        compute.equal(bare, text),
        compute.replace_substring_regex(text, rf"^{escaped}{space}", ""),
        bare,
    )


def read_numbers(text: pa.Array, form: Written) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Return numbers as float64, null where a cell is none, and which cells are numbers.

    Args:
        text: trimmed cells, shape (records,).
        form: how numbers are written.
    """
    text = without_symbol(text, form.symbol)
    fits = compute.match_substring_regex(text, number_pattern(form)).fill_null(False)
    plain = compute.if_else(fits, text, None)
    if form.thousands is not None:
        plain = compute.replace_substring_regex(plain, GROUPING[form.thousands], "")
    if form.point != ".":
        plain = compute.replace_substring(plain, form.point, ".")
    return plain.cast(pa.float64()), np.asarray(fits)


def shown(cell: str | None) -> str:
    """Return a cell for a message, in quotation marks and shortened."""
    text = cell or ""
    return f"'{text[:SHOWN]}...'" if len(text) > SHOWN else f"'{text}'"


def tells_no_text(cell: str) -> bool:
    """Return whether a cell is a short number or date, or a usual word for a missing value."""
    return bool(_NO_TEXT.fullmatch(cell) or _AMONG_NAMES.fullmatch(cell))


def what_it_may_mean(cell: str, form: Written, others: pa.Array) -> str:
    """Return what to declare so that a cell is read as a number; "" if that is not known.

    Args:
        cell: a trimmed cell that is no number as declared.
        form: how numbers are declared to be written.
        others: cells of the same column that are numbers as declared.
    """
    readings = list(_readings(cell, form))
    meant = [f"{value:.15g} with {_declaration(new)}" for value, new in readings]
    text = f" ({'; '.join(meant)} in the schema)" if meant else if_no_value(cell)
    if form.point == "." and any(new.point == "," for _, new in readings):
        odd = compute.filter(others, compute.match_substring_regex(others, GROUPED))
        if len(odd):
            text += f", while {shown(odd[0].as_py())} is read as {float(odd[0].as_py()):.15g}"
    return text


def if_no_value(cell: str, names: bool = False) -> str:
    """Return how to say that there is no value, for a cell that may mean it; "" for others.

    Args:
        cell: a trimmed cell that is not a value of its column.
        names: whether the values of the column are names, such as categories.
    """
    known = _AMONG_NAMES.fullmatch(cell) or (not names and _AMONG_NUMBERS.fullmatch(cell))
    if not known or len(cell) > SHOWN:
        return ""
    line = f"missing_words: [{json.dumps(cell, ensure_ascii=False)}]"
    return f" (leave the cell empty, or declare {line} in the schema, where there is no value)"


def _readings(cell: str, form: Written) -> Iterator[tuple[float, Written]]:
    """Yield numbers that a cell may mean, and how they would be declared, the simplest first."""
    cells, found = pa.array([cell], pa.string()), set[float]()
    for new in sorted(_forms(cell, form), key=lambda new: len(new.model_dump(exclude_none=True))):
        numbers, fits = read_numbers(cells, new)
        if fits[0] and (value := numbers[0].as_py()) not in found:
            found.add(value)
            yield value, new


def _forms(cell: str, form: Written) -> Iterator[Written]:
    """Yield declarations that add to what is declared."""
    symbols, match = [form.symbol], _SYMBOL.match(cell)
    if form.symbol is None and match is not None:
        symbols.append((match["before"] + match["after"]).strip() or None)
    signs = [None, *GROUPING] if form.thousands is None else [form.thousands]
    points = [None, ","] if form.decimal is None else [form.decimal]
    for symbol, thousands, decimal in product(symbols, signs, points):
        with suppress(ValidationError):
            yield Written.model_validate(
                {"decimal": decimal, "thousands": thousands, "symbol": symbol}
            )


def _declaration(form: Written) -> str:
    """Return what a schema would declare, such as ``decimal: ","``."""
    named = [("decimal", form.decimal), ("thousands", form.thousands), ("symbol", form.symbol)]
    return ", ".join(f'{key}: "{value}"' for key, value in named if value is not None)


def points_may_group(text: pa.Array, semicolons: bool) -> str | None:
    """Return a cell such as 28.570 if points may separate thousands in a whole column.

    That is so if all numbers look like it, and either some have no point, which a program that
    writes decimals would not leave out, or the columns are separated by semicolons, as where commas
    are decimal.
    """
    text = compute.drop_null(text)
    grouped = compute.match_substring_regex(text, GROUPED)
    if not compute.any(grouped).as_py():
        return None
    if not compute.all(compute.match_substring_regex(text, PLAIN_OR_GROUPED)).as_py():
        return None
    if not semicolons and compute.all(grouped).as_py():
        return None
    first: str = compute.filter(text, grouped)[0].as_py()
    return first
