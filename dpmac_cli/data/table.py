"""Read tables in CSV or Parquet files, or data frames, according to their schema."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpmac_cli.data.canonical import NO_NAME, UNUSABLE, units_in
from dpmac_cli.data.column_schema import Column, Label
from dpmac_cli.data.complaints import refuse
from dpmac_cli.data.csv_file import CsvFile
from dpmac_cli.data.schema import LeftOut, Source
from dpmac_cli.data.table_cells import (
    YEAR,
    BoolArray,
    CellNumbers,
    decoded_cells,
    has_text,
    is_one_of,
    text_cells,
    values_in,
)
from dpmac_cli.data.table_file import TableRows, column_kinds, read_rows, table_of
from dpmac_cli.data.table_schema import TableSchema
from dpmac_cli.data.targets import CLASSES, NO_LABEL
from dpmac_cli.data.texts import NEEDS_ENCODER, as_inputs, is_blank
from dpmac_cli.data.tokens import TextReader
from dpmac_cli.errors import InputError

NO_UNIT = "no whole number that its type stores exactly (write units as text or integers)"


@dataclass(frozen=True)
class TableInputs:
    """Inputs of unlabelled records.

    Attributes:
        inputs: shape (records, inputs).
        rows: number of each record in its file, from 0.
        ids: text of the column that names the records; None without one.
        skipped: why records are left out.
    """

    inputs: CellNumbers
    rows: list[int]
    ids: list[str] | None
    skipped: LeftOut


def read_table(source: Source) -> tuple[dict[str, NDArray[Any]], LeftOut]:
    """Return arrays like those of an .npz, and the records left out. Raises InputError."""
    path, schema = source.path, source.schema
    if schema is None:
        raise InputError(
            f"{path} needs a schema that declares its columns. Create a draft with: "
            f"dpmac schema {path} --label COLUMN > schema.yaml. Fill it in and add "
            "--schema schema.yaml."
        )
    table = None if source.in_memory is None else table_of(source.in_memory.frame, source)
    file, declared = CsvFile(path, schema.encoding, schema.delimiter), schema.declared
    names = table.column_names if table is not None else list(column_kinds(file))
    if source.unit is not None:
        declared = tuple(dict.fromkeys([*declared, source.unit]))
    strange = [name for name in names if name not in declared]
    faults = [f"The schema does not declare the column {n}, to use or to drop it" for n in strange]
    refuse([*_absent(declared, names), *faults], f" Correct {path} or its schema.")
    used = tuple(name for name in declared if name not in schema.drop or name == source.unit)
    rows = read_rows(file, used, schema.columns, source.skip_bad, table)
    of_records, ends = _contents(source, schema, rows)
    if not source.skip_bad:
        remedy = (
            f" Correct {path} or its schema (missing: input accepts records without a value), or "
            "add --skip-bad to leave these records out."
        )
        refuse(rows.faults(), remedy)
    good, left_out = rows.left_out()
    sides = {"": good}
    if schema.test is not None:
        is_test = is_one_of(text_cells(rows.cells[schema.test.column]), schema.test.values)
        sides = {"": good & ~is_test, "_test": good & is_test}
    if len(good) and not all(some.any() for some in sides.values()):
        part = "test" if sides[""].any() else "train"
        refuse([f"{path} has no record left to {part} on", *left_out.reasons])
    arrays: dict[str, NDArray[Any]] = dict(ends)
    for suffix, some in sides.items():
        kept = slice(None) if some.all() else some
        arrays |= {f"{name}{suffix}": values[kept] for name, values in of_records.items()}
    return arrays, left_out


def _contents(
    source: Source, schema: TableSchema, rows: TableRows
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return arrays with a row per record, and what is declared of them."""
    of_records = {"y": _targets(schema.labels, rows)}
    if source.unit is not None:
        words = schema.words_in(source.unit)
        of_records["unit"], unusable = units_in(_unit_values(rows.cells[source.unit]), words)
        for why, what in ((UNUSABLE, NO_UNIT), (NO_NAME, "no value")):
            records = [row for row, fault in unusable.items() if fault == why]
            rows.add(f"{what} in {source.unit}", np.isin(range(len(rows)), records))
    of_records["x"], low, high = _inputs(schema.columns, rows, source.texts)
    declared = {"low": low, "high": high}
    if schema.labels[0].classes:
        declared[CLASSES] = np.array(schema.labels[0].classes)
    return of_records, declared


def read_inputs(
    path: Path,
    schema: TableSchema,
    reader: TextReader | None = None,
    named_by: str | None = None,
    skip_bad: bool = False,
) -> TableInputs:
    """Return the inputs of unlabelled records. Raises InputError with every fault found.

    Args:
        path: the table; columns that are no inputs of the schema are ignored.
        schema: schema of the model.
        reader: how columns of text are read.
        named_by: column to keep beside each record; by default ``id``, if there is one.
        skip_bad: leave out unusable records.
    """
    file, columns = CsvFile(path, schema.encoding, schema.delimiter), schema.columns
    names, wanted = column_kinds(file), [column.name for column in columns]
    kept = [named_by] if named_by is not None else ["id"] if "id" in names else []
    absent = [f"There is no column {n} for --id" for n in kept if n not in names]
    refuse([*_absent(wanted, names), *absent], f" {path} has the columns {', '.join(names)}.")
    rows = read_rows(file, tuple(dict.fromkeys([*wanted, *kept])), columns, skip_bad)
    inputs, *_ = _inputs(columns, rows, reader)
    if not skip_bad:
        remedy = (
            f" Correct {path} to fit the schema of the model, or add --skip-bad to leave these "
            "records out."
        )
        refuse(rows.faults(), remedy)
    good, left_out = rows.left_out()
    which = np.flatnonzero(good).tolist()
    ids = None
    for name in kept:
        texts = [text or "" for text in decoded_cells(rows.cells[name].cast(pa.string()))]
        ids = [texts[row] for row in which]
    return TableInputs(inputs[good], which, ids, left_out)


def _inputs(
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
    x = np.zeros((len(rows), sum(column.inputs for column in columns)))
    low, high, first = np.full(x.shape[1], -1.0), np.ones(x.shape[1]), 0
    for column in columns:
        here = slice(first, first + column.inputs)
        first += column.inputs
        if column.type == "text" and reader is not None:
            missing = _add_tokens(column, rows.cells[column.name], reader, x[:, here])
            low[here], high[here] = reader.ends
        else:
            missing, (low[here.start], high[here.start]) = _add_values(column, rows, x[:, here])
        if column.missing == "input":
            x[:, here.stop - 1], low[here.stop - 1], high[here.stop - 1] = missing, -1, 1
        else:
            rows.add(f"no {'text' if column.type == 'text' else 'value'} in {column.name}", missing)
    return x, low, high


def _add_values(
    column: Column, rows: TableRows, x: CellNumbers
) -> tuple[BoolArray, tuple[float, float]]:
    """Write the inputs of a column; return where there is no value, and the ends of the first.

    Flags are in [-1, 1], so that standardisation does not change them.
    """
    values, missing = values_in(rows.cells[column.name], column)
    unread = np.isnan(values) & ~missing
    if column.type == "category":
        count = len(column.categories)
        x[:, :count] = values[:, None] == np.arange(count)
        x[:, count] = unread
        return missing, (-1, 1)
    rows.add(f"{_expected(column)} in {column.name}", unread, column)
    ends = (0.0, 1.0) if column.type == "boolean" else column.ends
    if column.type == "date":  # years until the last day
        values, ends = (ends[1] - values) / YEAR, (0, (ends[1] - ends[0]) / YEAR)
    x[:, 0] = np.where(np.isnan(values), sum(ends) / 2, values)
    return missing, ends


def _expected(column: Column) -> str:
    """Return what a cell is not that cannot be read."""
    if column.type == "boolean":
        return f"neither {' nor '.join(column.categories)}"
    if column.type == "number":
        return "no number"
    written = "as in 2024-12-31" if column.format is None else f"in the format {column.format}"
    return f"no date {written}"


def _add_tokens(column: Column, cells: pa.Array, reader: TextReader, x: CellNumbers) -> BoolArray:
    """Write the inputs of texts, and return where there is none."""
    texts = [text or "" for text in decoded_cells(cells)]
    missing = np.array([is_blank(text) for text in texts], np.bool_)
    missing |= is_one_of(text_cells(cells), column.missing_words)
    kept = ("" if m else text for m, text in zip(missing, texts, strict=True))
    inputs = as_inputs(kept, reader, column.text)
    x[:, : inputs.shape[1]] = inputs
    return missing


def _targets(labels: Sequence[Label], rows: TableRows) -> NDArray[Any]:
    """Return classes, shape (records,), or numbers, shape (records, numbers)."""
    columns = []
    for label in labels:
        values, missing = values_in(rows.cells[label.column], label)
        unread = np.isnan(values) & ~missing
        if label.range is None:
            rows.add(f"no class of the schema in {label.column}", missing)
            rows.add(f"no class of the schema in {label.column}", unread, label)
            return np.where(np.isnan(values), NO_LABEL, values).astype(np.int64)
        rows.add(f"no number in {label.column}", unread, label)
        rows.add(f"no value in {label.column}", missing)
        columns.append(np.where(np.isnan(values), sum(label.ends) / 2, values))
    return np.stack(columns, 1)


def _absent(wanted: Iterable[str], names: Container[str]) -> list[str]:
    absent = [name for name in wanted if name not in names]
    return [f"There is no column {name}, which the schema declares" for name in absent]


def _unit_values(cells: pa.Array) -> Iterator[Any]:
    """Return the cells of a column of units, floats with the precision of their type."""
    if pa.types.is_floating(cells.type):
        yield from cells.to_numpy(zero_copy_only=False)
        return
    yield from decoded_cells(text_cells(cells))
