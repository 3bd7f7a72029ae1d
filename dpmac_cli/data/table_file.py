"""Read tables in CSV or Parquet files according to their schema."""

import codecs
import csv
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.data.canonical import UNUSABLE, text_of, unit_name, units_in
from dpmac_cli.data.complaints import refuse
from dpmac_cli.data.schema import Source
from dpmac_cli.data.stacking import masks
from dpmac_cli.data.table_schema import Column
from dpmac_cli.data.wordpiece import TextReader
from dpmac_cli.errors import InputError

try:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv
    from pyarrow import parquet
except ModuleNotFoundError as missing_extra:
    raise InputError(
        "Tables require pyarrow, which is not installed: pip install 'dpmac[tables]'"
    ) from missing_extra

from dpmac_cli.data.table_columns import (
    BoolArray,
    Cells,
    column_inputs,
    is_number,
    places_of,
    targets_of,
    text_cells,
)

NO_UNIT = "no whole number that its type stores exactly (write units as text or integers)"
#: Types of columns that are neither numbers nor text.
NO_CELLS = (
    *(pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary),
    pa.types.is_fixed_size_binary,
)


def read_table(source: Source) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    """Return arrays like those of an .npz, and the records left out. Raises InputError."""
    table = None if source.in_memory is None else _table_of(source.in_memory.frame, source.unit)
    path, schema = source.path, source.schema
    if schema is None:
        raise InputError(
            f"{path} needs a schema that declares its columns. Create a draft with: "
            f"dpmac schema {path} --label COLUMN > schema.yaml. Fill it in and add "
            "--schema schema.yaml."
        )
    declared = schema.declared
    names = numeric_columns(path) if table is None else table.column_names
    if source.unit is not None:
        declared = tuple(dict.fromkeys([*declared, source.unit]))
    strange = [name for name in names if name not in declared]
    faults = [f"The schema does not declare the column {n}, to use or to drop it" for n in strange]
    refuse([*_absent(declared, names), *faults], f" Correct {path} or its schema.")
    # With --skip-bad each record is checked by itself, so no record can affect another.
    strict = not source.skip_bad
    cells, ragged = _cells(path, declared, strict, table)
    bad: dict[str, BoolArray] = {}
    labels, arrays = targets_of(schema.label, cells[schema.label.column], bad)
    of_records: dict[str, NDArray[Any]] = {"y": labels}
    if source.unit is not None:
        of_records["unit"], unusable = units_in(_unit_values(cells[source.unit]))
        for why, records in masks(unusable, len(labels)):
            said = NO_UNIT if why == UNUSABLE else "no value"
            bad[f"{said} in {source.unit}"] = records
    of_records["x"], low, high = column_inputs(schema.columns, cells, bad, strict, source.texts)
    if strict:
        remedy = f" Correct {path} or its schema, or add --skip-bad to leave these records out."
        refuse([*ragged, *_reasons(bad)], remedy)
    good = ~np.logical_or.reduce(list(bad.values()))
    skipped = (*ragged, *(f"record {row + 1}" for row in np.flatnonzero(~good)))
    sides = {"": good}
    if schema.test is not None:
        tested = places_of(cells[schema.test.column], schema.test.values) >= 0
        sides = {"": good & ~tested, "_test": good & tested}
    arrays |= {"low": low, "high": high}
    for suffix, rows in sides.items():
        arrays |= {f"{name}{suffix}": values[rows] for name, values in of_records.items()}
    return arrays, skipped


def read_inputs(
    path: Path, columns: Sequence[Column], reader: TextReader | None = None
) -> tuple[NDArray[np.float64], list[str] | None]:
    """Return the inputs of unlabelled records, and their column ``id`` if there is one.

    ``reader`` reads columns of text. Other columns are ignored. Raises InputError with every fault
    found.
    """
    names, wanted = numeric_columns(path), [column.name for column in columns]
    refuse(_absent(wanted, names), f" {path} has the columns {', '.join(names)}.")
    kept = ["id"] if "id" in names else []
    cells, ragged = _cells(path, tuple(dict.fromkeys([*wanted, *kept])), strict=True)
    bad: dict[str, BoolArray] = {}
    inputs, *_ = column_inputs(columns, cells, bad, True, reader)
    refuse([*ragged, *_reasons(bad)], f" Correct {path}.")
    return inputs, cells["id"].cast(pa.string()).fill_null("").to_pylist() if kept else None


def numeric_columns(path: Path) -> dict[str, bool | None]:
    """Return whether each column's type is numeric; None for a CSV, which has no types.

    Reads no records. Raises InputError.
    """
    columns: list[tuple[str, bool | None]]
    try:
        if path.suffix == ".parquet":
            columns = [(field.name, is_number(field.type)) for field in parquet.read_schema(path)]
        else:
            with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
                header = next(csv.reader(file, delimiter=_delimiter(path)), [])
            columns = [(name, None) for name in header]
    except (OSError, csv.Error, pa.ArrowException) as failure:
        raise _unreadable(path, failure) from failure
    if not columns:
        raise _unreadable(path, ValueError("its first line does not name the columns"))
    if any("\ufffd" in name for name, _ in columns):
        raise _unreadable(path, ValueError("UTF8"))
    twice = [name for name, count in Counter(name for name, _ in columns).items() if count > 1]
    refuse([f"{path} has several columns named '{name}'. Rename them" for name in twice])
    return dict(columns)


def _absent(wanted: Iterable[str], names: Container[str]) -> list[str]:
    absent = [name for name in wanted if name not in names]
    return [f"There is no column {name}, which the schema declares" for name in absent]


def _delimiter(path: Path) -> str:
    """Return the most frequent of comma, semicolon and tab in the header."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return max(",;\t", key=file.readline().count)


def _table_of(frame: Any, unit: str | None) -> pa.Table:
    """Convert a pandas or polars data frame to a table. Raises InputError."""
    try:
        if isinstance(frame, pa.Table):
            return frame
        names = list(map(str, frame.columns))
        if len(set(names)) < len(names):
            raise ValueError("several columns have one name; rename them")
        cells = [_column_of(frame[key], str(key) == unit) for key in frame.columns]
        return pa.table(dict(zip(names, cells, strict=True)))
    except (AttributeError, TypeError, ValueError, pa.ArrowException) as failure:
        raise _unreadable(type(frame).__name__, failure) from failure


def _column_of(column: Any, unit: bool) -> Any:
    """Return a column of a data frame; objects become text one by one, as in a CSV."""
    if str(column.dtype).lower() == "object":
        write = unit_name if unit else text_of
        missing = column.isna() if hasattr(column, "isna") else column.is_null()
        texts = [None if m else write(value) for value, m in zip(column, missing, strict=True)]
        return pa.array(texts, pa.string())
    return column.to_arrow() if hasattr(column, "to_arrow") else pa.Array.from_pandas(column)


def _cells(
    path: Path, names: tuple[str, ...], strict: bool, table: pa.Table | None = None
) -> tuple[Cells, list[str]]:
    """Return columns, as text for a CSV, and a message for each row that cannot be read."""
    ragged: list[str] = []

    def note(row: Any) -> str:
        found = f"{row.actual_columns} values for {row.expected_columns} columns"
        ragged.append(f"Row {row.number} has {found}")
        return "skip"

    try:
        if table is None and path.suffix == ".parquet":
            table = parquet.read_table(path, columns=list(names))
        elif table is None and not strict:
            table, ragged = _lines(path)
        elif table is None:
            table = arrow_csv.read_csv(
                path,
                arrow_csv.ReadOptions(use_threads=False),  # threads lose the row numbers
                arrow_csv.ParseOptions(
                    delimiter=_delimiter(path), newlines_in_values=True, invalid_row_handler=note
                ),
                arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
            )
        table = table.select(names)  # a file may have been replaced since its header was read
    except (OSError, ValueError, KeyError, pa.ArrowException) as failure:
        raise _unreadable(path, failure) from failure
    kinds = {name: table[name].type for name in names}
    strange = [n for n, k in kinds.items() if any(test(k) for test in NO_CELLS)]
    refuse(
        [f"The column {name} contains {kinds[name]}, not numbers or text" for name in strange],
        f" Write plain columns to {path}, or list these under drop in the schema.",
    )
    return {name: _plain(table[name].combine_chunks()) for name in names}, ragged


def _lines(path: Path) -> tuple[pa.Table, list[str]]:
    """Return a CSV as text, each line by itself, and a message for each that cannot be read.

    No quotation mark can join a line to the next one.
    """
    delimiter, ragged, cells = _delimiter(path), list[str](), list[list[str]]()
    lines = re.split(rb"\r\n|\n|\r", path.read_bytes().removeprefix(codecs.BOM_UTF8))
    header = next(csv.reader([lines[0].decode()], delimiter=delimiter))
    for number, line in enumerate(lines[1:], 2):
        try:
            text = line.decode(errors="replace")
            found = next(csv.reader([text], delimiter=delimiter, strict=True), [])
        except csv.Error as failure:
            ragged.append(f"Line {number} cannot be read ({failure})")
            continue
        if not found:  # an empty line
            continue
        if len(found) == len(header):
            cells.append(found)
        else:
            ragged.append(f"Line {number} has {len(found)} values for {len(header)} columns")
    columns = zip(*cells, strict=True) if cells else [()] * len(header)
    return pa.table([pa.array(column, pa.string()) for column in columns], header), ragged


def _unreadable(path: Path | str, failure: Exception) -> InputError:
    why = str(failure).strip().partition("\n")[0].rstrip(".")
    if "UTF8" in why:
        why = "it is not text in UTF-8: save it with that encoding"
    return InputError(f"{path} cannot be read as a table: {why}.")


def _plain(cells: pa.Array) -> pa.Array:
    cells = cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells
    return cells.cast(pa.float32()) if pa.types.is_float16(cells.type) else cells


def _unit_values(cells: pa.Array) -> Iterator[Any]:
    """Return the cells of a column of units, floats with the precision of their type."""
    if pa.types.is_floating(cells.type):
        yield from cells.to_numpy(zero_copy_only=False)
        return
    raw = text_cells(cells).cast(pa.binary()).to_pylist()
    yield from (None if value is None else value.decode(errors="replace") for value in raw)


def _reasons(bad: dict[str, BoolArray]) -> Iterator[str]:
    """Yield a message per reason with the first bad record and the number of bad records."""
    for what, records in bad.items():
        if count := int(records.sum()):
            others = f" and {count - 1} more have" if count > 1 else " has"
            yield f"Record {int(records.argmax()) + 1}{others} {what}"
