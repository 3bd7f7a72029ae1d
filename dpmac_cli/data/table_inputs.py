"""Columns of a table as inputs of a network and as targets, and which records cannot be used."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpmac_cli.config.facts import NAMED, LeftOut, refuse, some_of
from dpmac_cli.config.records import PLACES, Numbers, Table
from dpmac_cli.config.tokens import TextReader
from dpmac_cli.data.column_schema import YEAR, Column, Label
from dpmac_cli.data.memory import check_memory
from dpmac_cli.data.table_cells import (
    BoolArray,
    CellNumbers,
    decoded_cells,
    has_text,
    hashed_in,
    is_one_of,
    text_cells,
    values_in,
)
from dpmac_cli.data.targets import NO_LABEL
from dpmac_cli.data.texts import NEEDS_ENCODER, as_inputs, is_blank, texts_at
from dpmac_cli.errors import InputError, counted
from dpmac_cli.tasks.task import FARTHEST

#: Most characters of a cell to show in a message.
SHOWN = 40


HIDDEN = " (not shown, because it may be part of a text)"


#: Advice on cells that are not written as declared, by the type of their column.
ADVICE = {
    "number": "declare decimal, thousands, missing_words or categories in the schema",
    "date": 'declare a format, such as "%d.%m.%Y", or missing_words in the schema',
    "boolean": "declare other categories or missing_words in the schema",
    "category": "declare it, or a range of numbers, or missing_words in the schema",
}


Cells = dict[str, pa.Array]


#: Range of inputs that are 0 or 1, which standardisation does not change.
FLAG = (-1.0, 1.0)


class TableRows:
    """Cells of a table, and which records cannot be used.

    Attributes:
        cells: columns, shape (records,) each.
        broken: why records cannot be read, by their number; their cells are null.
        bad: masks of other records that cannot be used, by the reason as a message says it.
        remarks: private notes on cells that count as missing.
    """

    def __init__(self, cells: Cells, broken: dict[int, str], texts: bool) -> None:
        self.cells, self.broken, self._texts = cells, broken, texts
        self.bad: dict[str, BoolArray] = {}
        self.remarks = list[str]()
        self._lost = np.isin(range(len(self)), [*broken])

    def __len__(self) -> int:
        return max(map(len, self.cells.values()), default=0)

    def add(self, what: str, records: BoolArray, of: Column | Label | None = None) -> None:
        """Add a reason why records cannot be used, with their first cell and some other words."""
        if of is not None and records.any():
            bad = text_cells(self.cells[of.name].filter(pa.array(records)))
            some = [*dict.fromkeys(cell or "" for cell in decoded_cells(bad))][:NAMED]
            short = (f"{cell[:SHOWN]}..." if len(cell) > SHOWN else cell for cell in some)
            shown = ", ".join(f"'{cell}'" for cell in short)
            what += HIDDEN if self._texts else f": {shown} ({ADVICE[of.type]})"
        self.bad[what] = records | self.bad.get(what, False)

    def faults(self) -> list[str]:
        """Return why records cannot be used, with the first of them and how many others."""
        found = some_of([*self.broken.values()])
        for what, records in self.bad.items():
            if count := int((records & ~self._lost).sum()):
                others = f" and {count - 1} more have" if count > 1 else " has"
                found.append(f"Record {int((records & ~self._lost).argmax()) + 1}{others} {what}")
        return found

    def used(self, skip_bad: bool, remedy: str) -> tuple[BoolArray, LeftOut]:
        """Return which records can be used, and a description of the others.

        Raises InputError if there are others, and ``skip_bad`` does not leave them out.
        """
        if not skip_bad:
            refuse(self.faults(), remedy)
        good = ~np.logical_or.reduce([self._lost, *self.bad.values()])
        named = (self.broken.get(r, f"record {r + 1}") for r in np.flatnonzero(~good).tolist())
        return good, LeftOut(tuple(named), tuple(self.faults()))


def records_in(columns: Sequence[Column], texts: TextReader | None) -> Callable[..., Numbers]:
    """Return what records of some columns are, given their shape and their ends."""
    places = _places_of_texts(columns)
    if texts is not None and places:
        refuse(
            [
                f"The column {column.name} is declared by its type alone"
                for column in columns
                if column.open
            ],
            " Beside texts, declare its range, such as {range: [0, 100]}, or its categories, such "
            "as {categories: [A, B]}, or list it under drop in the schema.",
        )
        return texts_at(texts, places)
    parts = chain.from_iterable(column.parts for column in columns)
    return partial(Table, columns=tuple(parts))


def _places_of_texts(columns: Sequence[Column]) -> list[tuple[int, int]]:
    """Return the first input and the number of tokens of each column of texts."""
    places, first = list[tuple[int, int]](), 0
    for column in columns:
        if column.text is not None:
            places.append((first, column.text))
        first += column.inputs
    return places


def inputs_in(
    columns: Sequence[Column], rows: TableRows, reader: TextReader | None
) -> tuple[CellNumbers, CellNumbers, CellNumbers]:
    """Return columns as inputs, shape (records, inputs), and the ends of each.

    Reasons why records cannot be used are added to ``rows``.
    """
    texts = [column.name for column in columns if column.type == "text"]
    if texts and reader is None:
        refuse([f"The column {name} is declared as text" for name in texts], f" {NEEDS_ENCODER}.")
    refuse(
        [f"The column {name} contains numbers" for name in texts if not has_text(rows.cells[name])],
        " Declare their range in the schema instead of text: {range: [LOW, HIGH]}.",
    )
    inputs = sum(column.inputs for column in columns)
    try:
        check_memory(len(rows) * inputs * np.dtype(np.float64).itemsize, f"{inputs:,} inputs each")
    except ValueError as failure:
        raise InputError(
            f"The table has {len(rows):,} records: {failure}. Declare fewer columns or categories."
        ) from failure
    x, low, high = list[NDArray[Any]](), list[float](), list[float]()
    for column in columns:
        block, (lows, highs), missing = _block(column, rows, reader)
        x.append(block)
        low += lows
        high += highs
        if column.flagged:
            x.append(missing[:, None])
            low.append(FLAG[0])
            high.append(FLAG[1])
        else:
            rows.add(f"no {'text' if column.type == 'text' else 'value'} in {column.name}", missing)
    joined = np.column_stack(x).astype(np.float64, copy=False)
    return joined, np.array(low, np.float64), np.array(high, np.float64)


#: Lowest and highest values of inputs.
Ranges = tuple[list[float], list[float]]


def _block(
    column: Column, rows: TableRows, reader: TextReader | None
) -> tuple[NDArray[Any], Ranges, BoolArray]:
    """Return a column as inputs, shape (records, inputs), their ranges, and where it is missing."""
    cells = rows.cells[column.name]
    if column.type == "text" and reader is not None:
        texts = [text or "" for text in decoded_cells(cells)]
        missing = np.array([is_blank(text) for text in texts], np.bool_)
        missing |= is_one_of(text_cells(cells), column.missing_words)
        kept = ("" if m else text for m, text in zip(missing, texts, strict=True))
        return as_inputs(kept, reader, column.text), reader.ranges(column.text or 0), missing
    if column.hashed:
        return (
            hashed_in(cells, column)[:, None],
            ([0.0], [PLACES - 1.0]),
            np.zeros(len(cells), bool),
        )
    if column.type == "category":
        values, missing = values_in(cells, column)
        known = values[:, None] == np.arange(len(column.categories))
        block = np.column_stack([known, np.isnan(values) & ~missing])
        return block, ([FLAG[0]] * block.shape[1], [FLAG[1]] * block.shape[1]), missing
    if column.open:
        return _open_block(column, rows)
    values, missing = _values(column, rows)
    ends = (0.0, 1.0) if column.type == "boolean" else column.ends
    if column.type == "date":  # years until the last day
        values, ends = (ends[1] - values) / YEAR, (0, (ends[1] - ends[0]) / YEAR)
    block = np.where(np.isnan(values), sum(ends) / 2, values)[:, None]
    return block, ([ends[0]], [ends[1]]), missing


def _open_block(column: Column, rows: TableRows) -> tuple[NDArray[Any], Ranges, BoolArray]:
    """Return :func:`_block` of a number, date or truth value of which nothing else is declared.

    A cell that cannot be read is missing, and counts in a remark.
    """
    values, missing = values_in(rows.cells[column.name], column)
    unknown = np.isnan(values)
    if strange := int((unknown & ~missing).sum()):
        of_type = {"number": "number", "date": "date", "boolean": "truth value"}[column.type]
        rows.remarks.append(
            f"{counted(strange, 'cell')} of {column.name} {'is' if strange == 1 else 'are'} no "
            f"{of_type}, and count{'s' * (strange == 1)} as missing"
        )
    between, ends = (0.5, (0.0, 1.0)) if column.type == "boolean" else (0.0, (-FARTHEST, FARTHEST))
    block = np.where(unknown, between, values)[:, None]
    return block, ([ends[0]], [ends[1]]), unknown


def _values(of: Column | Label, rows: TableRows) -> tuple[CellNumbers, BoolArray]:
    """Return :func:`values_in`, and add where they cannot be read to ``rows``."""
    values, missing = values_in(rows.cells[of.name], of)
    expected = {"number": "no number", "category": "no class of the schema"}
    if of.type == "boolean":
        expected["boolean"] = f"neither {' nor '.join(of.values)}"
    if isinstance(of, Column):
        written = "as in 2024-12-31" if of.format is None else f"in the format {of.format}"
        expected["date"] = f"no date {written}"
    rows.add(f"{expected[of.type]} in {of.name}", np.isnan(values) & ~missing, of)
    return values, missing


def targets_of(label: Label, rows: TableRows) -> NDArray[Any]:
    """Return classes, int64, or numbers, float64; shape (records,)."""
    values, missing = _values(label, rows)
    rows.add(f"no value in {label.name}", missing)
    unknown = NO_LABEL if label.type == "category" else sum(label.ends) / 2
    y = np.where(np.isnan(values), unknown, values)
    return y.astype(np.int64) if label.type == "category" else y
