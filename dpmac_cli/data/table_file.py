"""Read tables in CSV or Parquet files according to their schema."""

import csv
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.data.canonical import UNUSABLE, text_of, unit_name, units_in
from dpmac_cli.data.column_schema import Column, Label
from dpmac_cli.data.complaints import refuse
from dpmac_cli.data.schema import UTF8, LeftOut, Source
from dpmac_cli.data.stacking import masks
from dpmac_cli.data.table_schema import TableSchema
from dpmac_cli.data.wordpiece import TextReader
from dpmac_cli.errors import InputError, counted

try:
    import pyarrow as pa
    from pyarrow import parquet
except ModuleNotFoundError as missing_extra:
    raise InputError(
        "Tables require pyarrow, which is not installed: pip install 'dpmac[tables]'"
    ) from missing_extra

from dpmac_cli.data.csv_file import CsvFile, has_lines
from dpmac_cli.data.table_cells import (
    BadRecords,
    BoolArray,
    decoded_cells,
    kind_of,
    places_of,
    text_cells,
    without_missing,
)
from dpmac_cli.data.table_columns import Cells, column_inputs, targets_of
from dpmac_cli.data.table_numbers import points_may_group

NO_UNIT = "no whole number that its type stores exactly (write units as text or integers)"
#: In messages of pyarrow about bytes that are no text, and ours.
NOT_DECODED = "UTF8"
#: Types of columns that are neither numbers nor text.
NO_CELLS = (
    *(pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary),
    pa.types.is_fixed_size_binary,
)


@dataclass(frozen=True)
class TableInputs:
    """Inputs of unlabelled records.

    Attributes:
        inputs: shape (records, inputs).
        rows: number of each record in its file, from 0.
        ids: text of the column that names the records; None without one.
        skipped: why records are left out.
    """

    inputs: NDArray[np.float64]
    rows: list[int]
    ids: list[str] | None
    skipped: LeftOut


@dataclass(frozen=True)
class _Rows:
    """Cells of a table by column, and records that cannot be read.

    ``ragged`` describes records that are not among the cells, by their number from 1, and
    ``broken`` rows of nulls, by their number from 0.
    """

    cells: Cells
    ragged: dict[int, str]
    broken: dict[int, str]

    def __len__(self) -> int:
        return max(map(len, self.cells.values()), default=0)

    def record(self, row: int) -> int:
        """Return the number of a row in its file, from 1 and without the header."""
        number = row + 1
        for ragged in sorted(self.ragged):
            number += ragged <= number
        return number

    def faults(self, bad: Mapping[str, BoolArray]) -> list[str]:
        """Return why records cannot be used, with the first of them and how many others."""
        found = list(self.ragged.values())
        for what, records in bad.items():
            if count := int(records.sum()):
                others = f" and {count - 1} more have" if count > 1 else " has"
                found.append(f"Record {self.record(int(records.argmax()))}{others} {what}")
        return found


def read_table(source: Source) -> tuple[dict[str, NDArray[Any]], LeftOut]:
    """Return arrays like those of an .npz, and the records left out. Raises InputError."""
    path, schema = source.path, source.schema
    if schema is None:
        raise InputError(
            f"{path} needs a schema that declares its columns. Create a draft with: "
            f"dpmac schema {path} --label COLUMN > schema.yaml. Fill it in and add "
            "--schema schema.yaml."
        )
    table = None if source.in_memory is None else _table_of(source.in_memory.frame, source)
    declared, encoding = schema.declared, source.encoding
    names = column_kinds(path, encoding) if table is None else table.column_names
    if source.unit is not None:
        declared = tuple(dict.fromkeys([*declared, source.unit]))
    strange = [name for name in names if name not in declared]
    faults = [f"The schema does not declare the column {n}, to use or to drop it" for n in strange]
    refuse([*_absent(declared, names), *faults], f" Correct {path} or its schema.")
    # With --skip-bad each record is checked by itself, so no record can affect another.
    strict = not source.skip_bad
    rows = _read_rows(path, declared, strict, encoding, table)
    of_records, ends, bad = _contents(source, schema, rows.cells)
    if strict:
        refuse(rows.faults(bad), _remedy(path, schema, bad))
        if table is None:
            _check_no_line_hidden(CsvFile(path, encoding), len(rows), schema.columns, schema.labels)
            _check_points(CsvFile(path, encoding), schema, rows.cells)
    good, left_out = _left_out(bad, rows)
    sides = {"": good}
    if schema.test is not None:
        tested = places_of(rows.cells[schema.test.column], schema.test.values) >= 0
        sides = {"": good & ~tested, "_test": good & tested}
    if len(good) and not all(some.any() for some in sides.values()):
        part = "test" if sides[""].any() else "train"
        refuse([f"{path} has no record left to {part} on", *left_out.reasons])
    arrays: dict[str, NDArray[Any]] = dict(ends)
    for suffix, some in sides.items():
        arrays |= {f"{name}{suffix}": values[some] for name, values in of_records.items()}
    return arrays, left_out


def _remedy(path: Path, schema: TableSchema, bad: Mapping[str, BoolArray]) -> str:
    """Return what to do about records that cannot be used."""
    reasons = {what for what, records in bad.items() if records.any()}
    names = [column.name for column in schema.columns]
    empty = [name for name in names if {f"no value in {name}", f"no text in {name}"} & reasons]
    accept = f" (missing: input accepts records without {' or '.join(empty)})" if empty else ""
    return f" Correct {path} or its schema{accept}, or add --skip-bad to leave these records out."


def _contents(
    source: Source, schema: TableSchema, cells: Cells
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]], BadRecords]:
    """Return arrays with a row per record, what is declared of them, and unusable records."""
    bad = BadRecords(beside_texts=any(c.text for c in schema.columns))
    labels, declared = targets_of(schema.labels, cells, bad)
    of_records: dict[str, NDArray[Any]] = {"y": labels}
    if source.unit is not None:
        words = schema.words_in(source.unit)
        of_records["unit"], unusable = units_in(_unit_values(cells[source.unit]), words)
        for why, records in masks(unusable, len(labels)):
            said = NO_UNIT if why == UNUSABLE else "no value"
            bad[f"{said} in {source.unit}"] = records
    of_records["x"], low, high = column_inputs(
        schema.columns, cells, bad, not source.skip_bad, source.texts
    )
    return of_records, {**declared, "low": low, "high": high}, bad


def read_inputs(
    path: Path,
    columns: Sequence[Column],
    reader: TextReader | None = None,
    named_by: str | None = None,
    skip_bad: bool = False,
    encoding: str = UTF8,
) -> TableInputs:
    """Return the inputs of unlabelled records. Raises InputError with every fault found.

    Args:
        path: the table; columns that are not among ``columns`` are ignored.
        columns: the inputs of the model.
        reader: how columns of text are read.
        named_by: column to keep beside each record; by default ``id``, if there is one.
        skip_bad: leave out unusable records.
        encoding: encoding of a CSV.
    """
    names, wanted = column_kinds(path, encoding), [column.name for column in columns]
    kept = [named_by] if named_by is not None else ["id"] if "id" in names else []
    absent = [f"There is no column {n} for --id" for n in kept if n not in names]
    refuse([*_absent(wanted, names), *absent], f" {path} has the columns {', '.join(names)}.")
    rows = _read_rows(path, tuple(dict.fromkeys([*wanted, *kept])), not skip_bad, encoding)
    bad = BadRecords(beside_texts=any(c.text for c in columns))
    inputs, *_ = column_inputs(columns, rows.cells, bad, False, reader)
    if not skip_bad:
        remedy = (
            f" Correct {path} to fit the schema of the model, or add --skip-bad to leave these "
            "records out."
        )
        refuse(rows.faults(bad), remedy)
        _check_no_line_hidden(CsvFile(path, encoding), len(rows), columns)
    good, left_out = _left_out(bad, rows)
    which = np.flatnonzero(good).tolist()
    ids = None
    for name in kept:
        texts = [text or "" for text in decoded_cells(rows.cells[name].cast(pa.string()))]
        ids = [texts[row] for row in which]
    return TableInputs(inputs[good], which, ids, left_out)


def _left_out(bad: dict[str, BoolArray], rows: _Rows) -> tuple[BoolArray, LeftOut]:
    """Return which records can be used, and a description of the others."""
    lost = np.zeros(len(rows), bool)
    lost[list(rows.broken)] = True
    bad = {why: records & ~lost for why, records in bad.items()}
    good: BoolArray = ~np.logical_or.reduce([lost, *bad.values()])
    named = (rows.broken.get(row, f"record {row + 1}") for row in np.flatnonzero(~good).tolist())
    broken = list(rows.broken.values())
    more = f", and {len(broken) - 1} more lines cannot be read" if len(broken) > 1 else ""
    return good, LeftOut(tuple(named), (*(f"{b}{more}" for b in broken[:1]), *rows.faults(bad)))


def column_kinds(path: Path, encoding: str = UTF8) -> dict[str, str | None]:
    """Return the type that each column declares; None for a CSV, which has no types.

    Reads no records. Raises InputError.
    """
    columns: list[tuple[str, str | None]]
    try:
        if path.suffix == ".parquet":
            columns = [(field.name, kind_of(field.type)) for field in parquet.read_schema(path)]
        else:
            header = CsvFile(path, encoding).header()
            columns = [(name, None) for name in header]
    except (OSError, ValueError, csv.Error, pa.ArrowException) as failure:
        raise _unreadable(path, failure, encoding) from failure
    if not columns:
        raise _unreadable(path, ValueError("its first line does not name the columns"))
    if any("\ufffd" in name for name, _ in columns):
        raise _unreadable(path, ValueError(NOT_DECODED), encoding)
    twice = [name for name, count in Counter(name for name, _ in columns).items() if count > 1]
    refuse([f"{path} has several columns named '{name}'. Rename them" for name in twice])
    return dict(columns)


def has_semicolons(path: Path, encoding: str = UTF8) -> bool:
    """Return whether the columns of a CSV are separated by semicolons."""
    return path.suffix != ".parquet" and CsvFile(path, encoding).delimiter() == ";"


def _check_no_line_hidden(
    file: CsvFile, records: int, columns: Sequence[Column], labels: Sequence[Label] = ()
) -> None:
    """Reject a CSV of which a stray quotation mark hides records in a cell.

    Lines of such a cell look like records, those of a text do not.
    """
    if file.path.suffix == ".parquet" or not has_lines(file.encoding):
        return
    if not file.joins_lines(records):
        return
    table, broken = file.lines()
    plain = [column for column in columns if column.type != "text"]
    cells = {name: table[name].combine_chunks() for name in table.column_names}
    bad = BadRecords(beside_texts=len(plain) < len(columns))
    bad["broken"] = np.isin(np.arange(table.num_rows), list(broken))
    if plain:
        column_inputs(plain, cells, bad, False, None)
    if labels:
        targets_of(labels, cells, bad)
    alone = int((~np.logical_or.reduce(list(bad.values()))).sum()) if len(bad) > 1 else 0
    if alone > records:
        first = next(iter(broken.values()), "")
        raise InputError(
            f"{file.path} has {counted(records, 'record')}, but {alone:,} lines look like records: "
            f"stray quotation marks hide {alone - records} or more of them in a cell ({first} by "
            "itself). Correct them, or add --skip-bad to read each line by itself and leave out "
            "lines with stray marks."
        )


def _check_points(file: CsvFile, schema: TableSchema, cells: Cells) -> None:
    """Reject columns in which points may separate thousands, unless the schema says what they do.

    One record can make this fail, so it is only for tables that any record can make fail.
    """
    semicolons = has_semicolons(file.path, file.encoding)
    forms: dict[str, Column | Label] = {
        column.name: column for column in schema.columns if column.type in ("number", "integer")
    }
    forms |= {label.column: label for label in schema.labels if label.range is not None}
    faults = list[str]()
    for name, form in forms.items():
        if form.decimal is None and form.thousands is None and pa.types.is_string(cells[name].type):
            cell = points_may_group(without_missing(cells[name], form), semicolons)
            if cell is not None:
                faults.append(
                    f"{name} has numbers such as {cell}, which may mean {cell.replace('.', '')} or "
                    f'{float(cell):.15g}: declare thousands: "." or decimal: "." in the schema'
                )
    refuse(faults)


def _absent(wanted: Iterable[str], names: Container[str]) -> list[str]:
    absent = [name for name in wanted if name not in names]
    return [f"There is no column {name}, which the schema declares" for name in absent]


def _table_of(frame: Any, source: Source) -> pa.Table:
    """Convert a pandas or polars data frame to a table. Raises InputError."""
    try:
        if isinstance(frame, pa.Table):
            return frame
        names = list(map(str, frame.columns))
        if len(set(names)) < len(names):
            raise ValueError("several columns have one name; rename them")
        points = {} if source.schema is None else source.schema.points
        cells = [
            _column_of(frame[key], str(key) == source.unit, points.get(str(key), "."))
            for key in frame.columns
        ]
        return pa.table(dict(zip(names, cells, strict=True)))
    except (AttributeError, TypeError, ValueError, pa.ArrowException) as failure:
        raise _unreadable(type(frame).__name__, failure) from failure


def _column_of(column: Any, unit: bool, point: str) -> Any:
    """Return a column of a data frame; objects become text one by one, as in a CSV.

    Numbers among them are written as their schema declares, with ``point`` before the decimals.
    """
    if str(column.dtype).lower() == "object":
        write = unit_name if unit else text_of
        missing = column.isna() if hasattr(column, "isna") else column.is_null()
        values = ((None if m else v) for v, m in zip(column, missing, strict=True))
        texts = [
            text.replace(".", point) if text and isinstance(value, float | Decimal) else text
            for value, text in (
                (value, value if value is None else write(value)) for value in values
            )
        ]
        return pa.array(texts, pa.string())
    return column.to_arrow() if hasattr(column, "to_arrow") else pa.Array.from_pandas(column)


def _read_rows(
    path: Path,
    names: tuple[str, ...],
    strict: bool,
    encoding: str = UTF8,
    table: pa.Table | None = None,
) -> _Rows:
    """Return the cells of some columns, as text for a CSV. Raises InputError."""
    ragged, broken = dict[int, str](), dict[int, str]()
    try:
        if table is None and path.suffix == ".parquet":
            table = parquet.read_table(path, columns=list(names))
        elif table is None and not strict:
            table, broken = CsvFile(path, encoding).lines()
        elif table is None:
            table, ragged = CsvFile(path, encoding).cells(names)
        table = table.select(names)  # a file may have been replaced since its header was read
    except (OSError, ValueError, KeyError, pa.ArrowException) as failure:
        raise _unreadable(path, failure, encoding) from failure
    kinds = {name: table[name].type for name in names}
    strange = [n for n, k in kinds.items() if any(test(k) for test in NO_CELLS)]
    refuse(
        [f"The column {name} contains {kinds[name]}, not numbers or text" for name in strange],
        f" Write plain columns to {path}, or list these under drop in the schema.",
    )
    return _Rows({name: _plain(table[name].combine_chunks()) for name in names}, ragged, broken)


def _unreadable(path: Path | str, failure: Exception, encoding: str = UTF8) -> InputError:
    why = str(failure).strip().partition("\n")[0].rstrip(".")
    if isinstance(failure, UnicodeError) or NOT_DECODED in why:
        why = (
            f"it is not text in {encoding.upper()}: save it with that encoding, or declare its own,"
            " such as --encoding cp1252"
        )
    return InputError(f"{path} cannot be read as a table: {why}.")


def _plain(cells: pa.Array) -> pa.Array:
    cells = cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells
    return cells.cast(pa.float32()) if pa.types.is_float16(cells.type) else cells


def _unit_values(cells: pa.Array) -> Iterator[Any]:
    """Return the cells of a column of units, floats with the precision of their type."""
    if pa.types.is_floating(cells.type):
        yield from cells.to_numpy(zero_copy_only=False)
        return
    yield from decoded_cells(text_cells(cells))
