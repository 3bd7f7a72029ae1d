"""Cells of a table from a CSV or Parquet file or a data frame, and its unusable records."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet

from dpmac_cli.data.canonical import text_of, unit_name
from dpmac_cli.data.column_schema import Column, Label
from dpmac_cli.data.complaints import NAMED, refuse, some_of
from dpmac_cli.data.csv_file import CsvFile
from dpmac_cli.data.schema import LeftOut, Source
from dpmac_cli.data.table_cells import BoolArray, decoded_cells, kind_of, text_cells
from dpmac_cli.errors import InputError

#: Types of columns that are neither numbers nor text.
NO_CELLS = (
    *(pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary),
    pa.types.is_fixed_size_binary,
)
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


class TableRows:
    """Cells of a table, and which records cannot be used.

    Attributes:
        cells: columns, shape (records,) each.
        broken: why records cannot be read, by their number; their cells are null.
        bad: masks of other records that cannot be used, by the reason as a message says it.
    """

    def __init__(self, cells: Cells, broken: dict[int, str], texts: bool) -> None:
        self.cells, self.broken, self._texts = cells, broken, texts
        self.bad: dict[str, BoolArray] = {}
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

    def left_out(self) -> tuple[BoolArray, LeftOut]:
        """Return which records can be used, and a description of the others."""
        good = ~np.logical_or.reduce([self._lost, *self.bad.values()])
        named = (self.broken.get(r, f"record {r + 1}") for r in np.flatnonzero(~good).tolist())
        return good, LeftOut(tuple(named), tuple(self.faults()))


def column_kinds(file: CsvFile) -> dict[str, str | None]:
    """Return the type that each column declares; None for a CSV, which has no types.

    Reads no records. Raises InputError.
    """
    columns: list[tuple[str, str | None]]
    path = file.path
    try:
        if path.suffix == ".parquet":
            columns = [(field.name, kind_of(field.type)) for field in parquet.read_schema(path)]
        else:
            columns = [(name, None) for name in file.header()]
    except (OSError, ValueError, csv.Error, pa.ArrowException) as failure:
        raise _unreadable(path, failure) from failure
    if not columns:
        raise _unreadable(path, ValueError("its first line does not name the columns"))
    if any("\ufffd" in name for name, _ in columns):
        what = f"line 1 is not text in {file.encoding.upper()}: declare its own encoding"
        raise _unreadable(path, ValueError(what))
    twice = [name for name, count in Counter(name for name, _ in columns).items() if count > 1]
    refuse([f"{path} has several columns named '{name}'. Rename them" for name in twice])
    return dict(columns)


def table_of(frame: Any, source: Source) -> pa.Table:
    """Convert a pandas or polars data frame to a table. Raises InputError."""
    try:
        if isinstance(frame, pa.Table):
            return frame
        names = list(map(str, frame.columns))
        if len(set(names)) < len(names):
            raise ValueError("several columns have one name; rename them")
        cells = [_column_of(frame[key], str(key) == source.unit) for key in frame.columns]
        return pa.table(dict(zip(names, cells, strict=True)))
    except (AttributeError, TypeError, ValueError, pa.ArrowException) as failure:
        raise _unreadable(type(frame).__name__, failure) from failure


def _column_of(column: Any, unit: bool) -> Any:
    """Return a column of a data frame; objects become text one by one, as in a CSV."""
    if str(column.dtype).lower() == "object":
        write = unit_name if unit else text_of
        missing = column.isna() if hasattr(column, "isna") else column.is_null()
        texts = [None if m else write(v) for v, m in zip(column, missing, strict=True)]
        return pa.array(texts, pa.string())
    return column.to_arrow() if hasattr(column, "to_arrow") else pa.Array.from_pandas(column)


def read_rows(
    file: CsvFile,
    names: tuple[str, ...],
    columns: Sequence[Column],
    skip_bad: bool,
    table: pa.Table | None = None,
) -> TableRows:
    """Return the cells of some columns, as text for a CSV. Raises InputError."""
    path, broken, parsed = file.path, dict[int, str](), False
    try:
        if table is None and path.suffix == ".parquet":
            table = parquet.read_table(path, columns=list(names))
        elif table is None:
            (table, broken), parsed = file.cells(names, skip_bad), True
        table = table.select(names)  # a file may have been replaced since its header was read
    except (OSError, ValueError, KeyError, pa.ArrowException) as failure:
        raise _unreadable(path, failure) from failure
    kinds = {name: table[name].type for name in names}
    strange = [n for n, k in kinds.items() if any(test(k) for test in NO_CELLS)]
    refuse(
        [f"The column {name} contains {kinds[name]}, not numbers or text" for name in strange],
        f" Write plain columns to {path}, or list these under drop in the schema.",
    )
    texts = {column.name for column in columns if column.type == "text"}
    rows = TableRows({n: _plain(table[n].combine_chunks()) for n in names}, broken, bool(texts))
    for name in names if parsed else ():  # a stray quotation mark hides lines in a cell
        if name not in texts:
            breaks = compute.match_substring_regex(rows.cells[name], r"[\r\n]")
            rows.add(f"a line break in {name}", np.asarray(breaks.fill_null(False)))
    return rows


def _unreadable(path: Path | str, failure: Exception) -> InputError:
    if isinstance(failure, InputError):
        return failure
    why = str(failure).strip().partition("\n")[0].rstrip(".")
    return InputError(f"{path} cannot be read as a table: {why}.")


def _plain(cells: pa.Array) -> pa.Array:
    cells = cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells
    return cells.cast(pa.float32()) if pa.types.is_float16(cells.type) else cells
