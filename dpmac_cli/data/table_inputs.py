"""Columns of a table as inputs of a network and as targets.

A column becomes one or several inputs, each with a public range:

- number: itself, in its declared range; without one, in the largest range, until the run has found
  a range within epsilon.
- date: years until the last day of its range; without one, days since 1970-01-01.
- category: one input per declared value, 0 or 1, and one for all other values; without declared
  values, one input, the place of a public hash.
- boolean: one input, 0 or 1.
- text: numbers of its tokens, and how it is written.

``missing: input`` adds an input that is 1 where there is no value. The value itself is then the
middle of the range, which says nothing about the other records.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpmac_cli.config.facts import refuse
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
from dpmac_cli.data.table_rows import TableRows, names_of_texts
from dpmac_cli.data.targets import CLASSES, NO_LABEL
from dpmac_cli.data.texts import NEEDS_ENCODER, as_inputs, is_blank, texts_at
from dpmac_cli.data.units import units_in
from dpmac_cli.errors import InputError
from dpmac_cli.tasks.task import FARTHEST

#: A value of each type of column of which nothing else is declared, in words.
ONE_OF_TYPE = {"number": "number", "date": "date", "boolean": "truth value"}
#: Lowest and highest values of inputs.
Ranges = tuple[list[float], list[float]]
#: Range of inputs that are 0 or 1, which standardisation does not change.
FLAG = (-1.0, 1.0)


def records_in(
    columns: Sequence[Column],
    texts: TextReader | None,
) -> Callable[..., Numbers]:
    """Return what records of some columns are, given their shape and their ends.

    Args:
        columns: columns of the schema that are inputs.
        texts: how texts are read; None without texts.

    Raises:
        InputError: beside texts, a column is declared by its type alone.
    """
    places = _places_of_texts(columns)
    if texts is not None and places:
        faults = []
        for column in columns:
            if column.open:
                faults.append(f"The column {column.name} is declared by its type alone")
        refuse(
            faults,
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
    """Return columns as inputs, and the ends of each.

    Args:
        columns: columns of the schema that are inputs.
        rows: their cells. Reasons why records cannot be used are added.
        reader: how texts are read; None without texts.

    Returns:
        inputs, float64, shape (records, inputs), and their lowest and highest values, shape
        (inputs,).

    Raises:
        InputError: a column is no text as declared, or the inputs do not fit into memory.
    """
    _check_texts(columns, rows, reader)
    _check_size(columns, rows)
    blocks = list[NDArray[Any]]()
    low = list[float]()
    high = list[float]()
    for column in columns:
        block, (lows, highs), missing = _block(column, rows, reader)
        blocks.append(block)
        low += lows
        high += highs
        if column.flagged:
            blocks.append(missing[:, None])
            low.append(FLAG[0])
            high.append(FLAG[1])
        else:
            value = "text" if column.type == "text" else "value"
            rows.add(f"no {value} in {column.name}", missing)
    inputs = np.column_stack(blocks).astype(np.float64, copy=False)
    ends = np.array([low, high], np.float64)
    return inputs, ends[0], ends[1]


def _check_texts(
    columns: Sequence[Column],
    rows: TableRows,
    reader: TextReader | None,
) -> None:
    """Raise InputError for texts without a reader, and for numbers that are declared as text."""
    texts = names_of_texts(columns)
    if reader is None:
        refuse([f"The column {name} is declared as text" for name in texts], f" {NEEDS_ENCODER}.")
    remedy = ", not texts"
    if rows.drafted:
        remedy = ". Declare their range in the schema instead of text: {range: [LOW, HIGH]}"
    faults = []
    for name in texts:
        if not has_text(rows.cells[name]):
            faults.append(f"The column {name} contains numbers{remedy}")
    refuse(faults)


def _check_size(columns: Sequence[Column], rows: TableRows) -> None:
    """Raise InputError for inputs that do not fit into memory."""
    inputs = sum(column.inputs for column in columns)
    size = len(rows) * inputs * np.dtype(np.float64).itemsize
    try:
        check_memory(size, f"{inputs:,} inputs each")
    except ValueError as failure:
        raise InputError(
            f"The table has {len(rows):,} records: {failure}. Declare fewer columns or categories."
        ) from failure


def _block(
    column: Column, rows: TableRows, reader: TextReader | None
) -> tuple[NDArray[Any], Ranges, BoolArray]:
    """Return a column as inputs, their ranges, and where it is missing.

    Ranges are declared or of the type of the column, and a missing value is in the middle of its
    range, so no record decides what another one becomes.

    Args:
        column: a column of the schema.
        rows: its cells. Reasons why records cannot be used are added.
        reader: how texts are read; None without texts.

    Returns:
        inputs, shape (records, inputs), the ends of each, and a mask, shape (records,).
    """
    if column.type == "text" and reader is not None:
        return _block_of_texts(column, rows.cells[column.name], reader)
    if column.hashed:
        places = hashed_in(rows.cells[column.name], column)
        ends = [0.0], [PLACES - 1.0]
        return places[:, None], ends, np.zeros(len(places), bool)
    if column.type == "category":
        values, missing = values_in(rows.cells[column.name], column)
        is_category = values[:, None] == np.arange(len(column.categories))
        is_other = np.isnan(values) & ~missing
        rows.remark(column, "no declared category", is_other, "another value")
        block = np.column_stack([is_category, is_other])
        low, high = FLAG
        width = block.shape[1]
        return block, ([low] * width, [high] * width), missing
    if column.open:
        return _block_without_range(column, rows)
    values, missing = _values(column, rows)
    low, high = (0.0, 1.0) if column.type == "boolean" else column.ends
    if column.type == "date":  # years until the last day
        values = (high - values) / YEAR
        low, high = 0, (high - low) / YEAR
    middle = (low + high) / 2
    block = np.where(np.isnan(values), middle, values)[:, None]
    return block, ([low], [high]), missing


def _block_of_texts(
    column: Column, cells: pa.Array, reader: TextReader
) -> tuple[NDArray[Any], Ranges, BoolArray]:
    """Return :func:`_block` of a column of texts.

    Args:
        column: the column, with the largest number of tokens.
        cells: its texts, shape (records,).
        reader: a public tokenizer.
    """
    limit = column.text or 0
    texts = list(decoded_cells(cells))
    missing = np.fromiter(map(is_blank, texts), np.bool_, len(texts))
    missing |= is_one_of(text_cells(cells), column.missing_words)
    for row in np.flatnonzero(missing).tolist():
        texts[row] = ""
    return as_inputs(texts, reader, limit), reader.ranges(limit), missing


def _block_without_range(
    column: Column,
    rows: TableRows,
) -> tuple[NDArray[Any], Ranges, BoolArray]:
    """Return :func:`_block` of a number, date or truth value of which nothing else is declared.

    A cell that cannot be read is missing, and counts in a remark.

    Args:
        column: the column.
        rows: its cells. The remark is added.
    """
    values, missing = values_in(rows.cells[column.name], column)
    unknown = np.isnan(values)
    fault, is_unread = f"no {ONE_OF_TYPE[column.type]}", unknown & ~missing
    rows.unread.append((column, fault, is_unread))
    low, high = -FARTHEST, FARTHEST
    if column.type == "boolean":
        low, high = 0.0, 1.0
    middle = (low + high) / 2
    block = np.where(unknown, middle, values)[:, None]
    return block, ([low], [high]), unknown


def _values(
    column: Column | Label,
    rows: TableRows,
) -> tuple[CellNumbers, BoolArray]:
    """Return :func:`values_in`, and add where cells cannot be read to ``rows``.

    Args:
        column: a column of the schema, or its label.
        rows: its cells. A reason why records cannot be used is added.
    """
    values, missing = values_in(rows.cells[column.name], column)
    expected = {"number": "no number", "category": "no class of the schema"}
    if column.type == "boolean":
        expected["boolean"] = f"neither {' nor '.join(column.values)}"
    if isinstance(column, Column):
        written = "as in 2024-12-31" if column.format is None else f"in the format {column.format}"
        expected["date"] = f"no date {written}"
    is_strange = np.isnan(values) & ~missing
    rows.add(f"{expected[column.type]} in {column.name}", is_strange, column)
    return values, missing


def targets_of(label: Label, rows: TableRows) -> NDArray[Any]:
    """Return targets of the records of a table.

    Args:
        label: the column to predict.
        rows: its cells. Reasons why records cannot be used are added.

    Returns:
        classes, int64, or numbers, float64; shape (records,).
    """
    values, missing = _values(label, rows)
    rows.add(f"no value in {label.name}", missing)
    if label.type == "category":
        labels = np.where(np.isnan(values), NO_LABEL, values)
        return labels.astype(np.int64)
    middle = sum(label.ends) / 2
    return np.where(np.isnan(values), middle, values)


def units_of_column(
    name: str,
    rows: TableRows,
    missing_words: Sequence[str],
) -> NDArray[np.str_]:
    """Return the unit of each record, shape (records,).

    Args:
        name: the column that names units.
        rows: the cells of the table. Reasons why records have no unit are added.
        missing_words: declared words for a missing value.
    """
    cells = rows.cells[name]
    # Floats have the precision of their type.
    is_float = pa.types.is_floating(cells.type)
    values = np.asarray(cells) if is_float else decoded_cells(text_cells(cells))
    units, faults = units_in(values, missing_words)
    of_records = np.array([faults.get(row, "") for row in range(len(rows))])
    for fault in sorted(set(faults.values())):
        rows.add(f"{fault.removeprefix('has ')} in {name}", of_records == fault)
    return units


def declared_by(label: Label | None) -> dict[str, NDArray[Any]]:
    """Return what a label declares, as arrays do: class names, or a range and a transform.

    Args:
        label: the column to predict; None for none.
    """
    if label is None:
        return {}
    if label.type == "category":
        return {CLASSES: np.array(label.classes)}
    low, high = label.ends
    return {
        "target_low": np.array(low),
        "target_high": np.array(high),
        "target_transform": np.array(label.transform),
        "target_name": np.array(label.name),
    }
