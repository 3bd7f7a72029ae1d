"""Tables as they are opened: a CSV, a Parquet file, or a data frame, as columns of pyarrow.

The names of the columns are known first, and cells are read when they are asked for, text for a
CSV. Damaged files are reported without the message of their parser, which may quote cells.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet

from dpmac_cli.config.facts import refuse
from dpmac_cli.data.column_schema import Column
from dpmac_cli.data.csv_file import UTF16, CsvFile
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.hugging_face import is_hugging_face
from dpmac_cli.data.memory import check_memory
from dpmac_cli.data.table_cells import plain_cells, schema_type
from dpmac_cli.data.table_rows import TableRows, names_of_texts
from dpmac_cli.data.table_schema import TableSchema
from dpmac_cli.data.units import unit_name
from dpmac_cli.data.values import NOT_TEXT, text_of
from dpmac_cli.errors import InputError

#: Types of columns that are neither numbers nor text.
NO_CELLS = (
    *(pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary),
    pa.types.is_fixed_size_binary,
)
#: Fewest bytes of memory that a cell takes once it is an input.
CELL = 4


class OpenedTable:
    """A table in a file or in memory, whose columns are known and whose cells are not read yet.

    Args:
        declared: the dataset.
        schema: its schema, with the encoding and the delimiter of a CSV.

    Attributes:
        path: the file; for a data frame its name in brackets.
        names: names of all columns, in order.

    Raises:
        InputError: the names of the columns cannot be read.
    """

    def __init__(self, declared: Declaration, schema: TableSchema) -> None:
        self.path, self._drafted = declared.path, declared.labels
        self._file = CsvFile(declared.path, schema.encoding, schema.delimiter)
        self._frame: pa.Table | None = None
        if declared.in_memory is None:
            self.names = list(column_kinds(self._file))
        else:
            self._frame = table_of(declared.in_memory.frame, declared.settings.unit)
            self.names = self._frame.column_names

    def rows(
        self,
        used: Sequence[str],
        columns: Sequence[Column],
        skip_bad: bool,
        others: Sequence[str] = (),
    ) -> TableRows:
        """Return the cells of some columns, as text for a CSV.

        Args:
            used: names of columns whose cells must be numbers or text.
            columns: columns of the schema that are inputs.
            skip_bad: whether records that cannot be read are left out.
            others: names of further columns, of any type.

        Raises:
            InputError: the table is damaged, or a column is neither numbers nor text.
        """
        is_csv = self._frame is None and self.path.suffix != ".parquet"
        try:
            table, broken = self._table((*used, *others), skip_bad)
            cells = {}
            for name in (*used, *others):
                cells[name] = plain_cells(table[name].combine_chunks())
        except Exception as failure:  # its parsers raise whatever a damaged file leads to
            raise _damaged(self.path, failure) from failure
        faults = []
        for name in used:
            kind = cells[name].type
            if any(is_kind(kind) for is_kind in NO_CELLS):
                faults.append(f"The column {name} contains {kind}, not numbers or text")
        remedy = f" Write plain columns to {self.path}"
        if self._drafted:
            remedy += ", or list these under drop in the schema"
        refuse(faults, f"{remedy}.")
        texts = names_of_texts(columns)
        rows = TableRows(cells, broken, bool(texts), self._drafted)
        if is_csv:  # a stray quotation mark hides lines in a cell
            for name in used:
                if name not in texts:
                    breaks = compute.match_substring_regex(cells[name], r"[\r\n]")
                    rows.add(f"a line break in {name}", np.asarray(breaks.fill_null(False)))
        return rows

    def _table(
        self,
        names: tuple[str, ...],
        skip_bad: bool,
    ) -> tuple[pa.Table, dict[int, str]]:
        """Return a table with some columns, and why records cannot be read, by their numbers."""
        if self._frame is not None:
            return self._frame, {}
        if self.path.suffix == ".parquet":
            return parquet.read_table(self.path, columns=list(names)), {}
        return self._file.cells(names, skip_bad)


def column_kinds(file: CsvFile) -> dict[str, str | None]:
    """Return the type that each column declares, by its name.

    Reads no records.

    Args:
        file: a CSV, or the path of a Parquet file.

    Returns:
        types of columns in a schema; None for a CSV, which has no types.

    Raises:
        InputError: the names of the columns cannot be read, or one is there twice.
    """
    path = file.path
    kinds: dict[str, str | None]
    try:
        if path.suffix == ".parquet":
            columns = _parquet_schema(path)
            names = columns.names
            kinds = dict(zip(names, map(schema_type, columns.types), strict=True))
        else:
            names = file.header()
            kinds = dict.fromkeys(names)
        if not names:
            raise ValueError("its first line does not name the columns")
        if NOT_TEXT in "".join(names):
            remedy = (
                "save the table so, or before training declare its own encoding, with encoding: "
                "cp1252 in the schema or dpmac schema --encoding cp1252"
            )
            if file.codec() == UTF16:
                remedy = "save the table as UTF-8"
            raise ValueError(f"line 1 is not text in {file.named}: {remedy}")
    except Exception as failure:  # its parsers raise whatever a damaged file leads to
        raise _unreadable(path, failure) from failure
    _refuse_repeated(names, str(path))
    return kinds


def _refuse_repeated(names: Iterable[str], table: str) -> None:
    """Raise InputError if several columns have one name.

    Args:
        names: names of all columns.
        table: name of the table in the message.
    """
    faults = []
    for name, count in Counter(names).items():
        if count > 1:
            faults.append(f"{table} has several columns named '{name}'. Rename them")
    refuse(faults)


def _parquet_schema(path: Path) -> pa.Schema:
    """Return the columns of a Parquet file.

    Raises:
        ValueError: it declares a size that it does not have, or that does not fit into memory.
    """
    metadata = parquet.read_metadata(path)
    rows = metadata.num_rows
    in_groups = sum(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))
    if rows != in_groups or rows < 0:
        raise ValueError(f"its header declares {rows:,} records, and its parts have others")
    check_memory(rows * metadata.num_columns * CELL, f"{rows:,} records")
    return metadata.schema.to_arrow_schema()


def table_of(frame: Any, unit: str | None = None) -> pa.Table:
    """Convert a data frame to a table of pyarrow.

    Args:
        frame: a data frame of pandas, polars or pyarrow, or a dataset of Hugging Face.
        unit: column that names the unit of each record; None for none.

    Raises:
        InputError: it cannot be converted. The message quotes no cell.
    """
    kind = type(frame).__name__
    if isinstance(frame, Mapping):
        raise InputError(f"{kind} has the splits {', '.join(frame)}: pass one of them as a table.")
    try:
        if is_hugging_face(frame):
            frame = frame.with_format("arrow")[:]
        if isinstance(frame, pa.Table):
            return frame
        names = list(map(str, frame.columns))
        _refuse_repeated(names, kind)
        cells = [_column_of(frame[key], str(key) == unit) for key in frame.columns]
        return pa.table(dict(zip(names, cells, strict=True)))
    except Exception as failure:  # frames raise whatever a cell leads to
        raise _damaged(kind, failure) from failure


def _column_of(column: Any, is_unit: bool) -> Any:
    """Return a column of a data frame; objects become text one by one, as in a CSV.

    Args:
        column: a column of pandas or polars.
        is_unit: whether it names the unit of each record.
    """
    # A category may be an object, too.
    kind = getattr(getattr(column.dtype, "categories", None), "dtype", column.dtype)
    if str(kind).lower() == "object":
        write = unit_name if is_unit else text_of
        missing = column.isna() if hasattr(column, "isna") else column.is_null()
        texts = []
        for value, is_missing in zip(column, missing, strict=True):
            texts.append(None if is_missing else write(value))
        return pa.array(texts, pa.string())
    if hasattr(column, "to_arrow"):
        return column.to_arrow()
    return pa.Array.from_pandas(column)


def _damaged(path: Path | str, failure: Exception) -> InputError:
    """Return an error of code that has seen records, which the failure's own message may quote.

    Args:
        path: name of the table in the message.
        failure: what was raised. An InputError is returned as it is.
    """
    if isinstance(failure, InputError):
        return failure
    why = getattr(failure, "reason", None) or f"damaged cells ({type(failure).__name__})"
    return InputError(f"{path} cannot be read as a table: {why}.")


def _unreadable(path: Path, failure: Exception) -> InputError:
    """Return an error of code that has seen the header alone.

    Args:
        path: the table.
        failure: what was raised. An InputError is returned as it is.
    """
    if isinstance(failure, InputError):
        return failure
    first, _, _ = str(failure).strip().partition("\n")
    why = first.rstrip(".") or type(failure).__name__
    return InputError(f"{path} cannot be read as a table: {why}.")
