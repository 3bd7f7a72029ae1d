"""Read tables in CSV or Parquet files, or data frames, according to their schema.

The columns of a table are compared with its schema first: every column must be declared, to use or
to drop it. Then each cell is read by itself, as its column declares, in these steps:

1. The file is opened and its cells become columns of pyarrow, text for a CSV
   (:class:`OpenedTable`).
2. Cells become numbers (``table_cells.py``), and numbers become inputs and targets
   (``table_inputs.py``).
3. Records that cannot be used are an error, or with ``skip_bad`` left out.

Nothing is guessed from the records: neither types, nor decimal signs, nor categories. Damaged files
are reported without the message of their parser, which may quote cells.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute, parquet

from dpmac_cli.config.facts import TABLES, refuse
from dpmac_cli.data.column_schema import Column
from dpmac_cli.data.csv_file import UTF16, CsvFile
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.hugging_face import is_hugging_face
from dpmac_cli.data.memory import check_memory
from dpmac_cli.data.reader import ArrayDict, Reading, register_reader
from dpmac_cli.data.row_text import keys_of
from dpmac_cli.data.table_cells import (
    BoolArray,
    decoded_cells,
    is_one_of,
    plain_cells,
    schema_type,
    text_cells,
)
from dpmac_cli.data.table_inputs import (
    TableRows,
    declared_by,
    inputs_in,
    names_of_texts,
    records_in,
    targets_of,
    units_of_column,
)
from dpmac_cli.data.table_schema import TableSchema, as_list
from dpmac_cli.data.units import unit_name
from dpmac_cli.data.values import NOT_TEXT, text_of
from dpmac_cli.errors import InputError
from dpmac_cli.tasks.task import is_labelled

#: Types of columns that are neither numbers nor text.
NO_CELLS = (
    *(pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary),
    pa.types.is_fixed_size_binary,
)
#: Fewest bytes of memory that a cell takes once it is an input.
CELL = 4


def _is_table(declared: Declaration) -> bool:
    """Return whether a dataset is a table in a file, or a data frame."""
    if declared.in_memory is not None:
        frame, schema = declared.in_memory.frame, declared.schema
        return frame is not None and (schema is not None or not is_hugging_face(frame))
    return declared.path.is_file() and declared.path.suffix in TABLES


@register_reader("tables", _is_table)
def read_table(declared: Declaration) -> Reading:
    """Return the records of a table.

    Args:
        declared: the dataset, with its schema.

    Raises:
        InputError: with every fault found.
    """
    return _read_labelled(declared) if declared.labels else read_inputs(declared)


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
                cells[name] = _as_read(table[name].combine_chunks())
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


def _read_labelled(declared: Declaration) -> Reading:
    """Return the records of a table to train on.

    Args:
        declared: the dataset, with its schema.

    Raises:
        InputError: with every fault found.
    """
    schema, settings = declared.schema, declared.settings
    unit = settings.unit
    if schema is None:
        raise _without_schema(declared)
    table = OpenedTable(declared, schema)
    used = _used(schema, unit, table)
    # Without a test set and units, the text of a whole row decides on which side it is.
    by_contents = schema.test is None and unit is None
    others = [name for name in table.names if by_contents and name not in used]
    rows = table.rows(used, schema.columns, settings.skip_bad, others)
    label = schema.label if is_labelled(settings.task) else None
    if label is None and is_labelled(settings.task):
        raise InputError(
            "The schema declares no label: the column to predict. Add it, or train a language "
            "model on texts: {task=}language-model."
        )
    of_records: dict[str, NDArray[Any]] = {}
    if label is not None:
        of_records["y"] = targets_of(label, rows)
    if unit is not None:
        of_records["unit"] = units_of_column(unit, rows, schema.words_in(unit))
    if by_contents:
        of_records["key"] = keys_of([rows.cells[name] for name in table.names])
    of_records["x"], low, high = inputs_in(schema.columns, rows, declared.texts)
    rows.remark_unread()
    good, left_out = rows.used(
        settings.skip_bad,
        f" Correct {table.path} or its schema (missing: input accepts records without a value), or "
        "add {skip_bad=True} to leave these records out.",
    )
    arrays: ArrayDict = {"low": low, "high": high, **declared_by(label)}
    sides = _sides(schema, rows, good, left_out.reasons, table.path)
    for side, is_in in sides.items():
        chosen = slice(None) if is_in.all() else is_in
        for name, values in of_records.items():
            arrays[f"{name}{side}"] = values[chosen]
    return Reading(
        arrays,
        left_out,
        numbers=records_in(schema.columns, declared.texts),
        remarks=tuple(rows.remarks),
    )


def _used(
    schema: TableSchema,
    unit: str | None,
    table: OpenedTable,
) -> tuple[str, ...]:
    """Return the columns that are read as the schema declares them, and that of the unit.

    Args:
        schema: the schema of the table.
        unit: column that names the unit of each record; None for none.
        table: the table.

    Raises:
        InputError: the table has other columns than the schema declares.
    """
    declared = schema.declared
    if unit is not None:
        declared = tuple(dict.fromkeys([*declared, unit]))
    faults = _absent(declared, table.names)
    for name in table.names:
        if name not in declared:
            faults.append(
                f"The schema does not declare the column {as_list([name])}, to use or to drop it"
            )
    refuse(faults, f" Correct {table.path} or its schema.")
    return tuple(name for name in declared if name not in schema.drop or name == unit)


def _sides(
    schema: TableSchema,
    rows: TableRows,
    good: BoolArray,
    reasons: Sequence[str],
    path: Path,
) -> dict[str, BoolArray]:
    """Return which records are trained on and, if the schema says so, tested on.

    Args:
        schema: the schema, which may declare a test set.
        rows: the cells of the table.
        good: which records can be used, shape (records,).
        reasons: why others are left out.
        path: the table, for the message.

    Returns:
        masks by the endings of the names of arrays, shape (records,) each.

    Raises:
        InputError: no record is left to train on, or to test on.
    """
    sides = {"": good}
    if schema.test is not None:
        cells = text_cells(rows.cells[schema.test.column])
        is_test = is_one_of(cells, schema.test.values)
        sides = {"": good & ~is_test, "_test": good & is_test}
    if len(good) and not all(is_in.any() for is_in in sides.values()):
        part = "test" if sides[""].any() else "train"
        refuse([f"{path} has no record left to {part} on", *reasons])
    return sides


def _without_schema(declared: Declaration) -> InputError:
    """Return the error of a table without a schema."""
    path = declared.path
    if declared.in_memory is not None:
        return InputError(
            f"{path} needs a schema that declares its columns, as in docs/own-tables.md. Add "
            "{schema=}schema.yaml, or pass from_dataframe(frame, label=...)."
        )
    return InputError(
        f"{path} needs a schema that declares its columns. Create one with: dpmac schema {path} "
        "--label COLUMN --kinds > schema.yaml. Check it and add {schema=}schema.yaml."
    )


def read_inputs(declared: Declaration) -> Reading:
    """Return the inputs of unlabelled records.

    Columns that are no inputs of the schema are ignored. Their name is their row in the file, from
    0, and their ``id`` the text of the column that names them; by default ``id``, if there is one.

    Args:
        declared: new records, with the schema of the model.

    Raises:
        InputError: with every fault found.
    """
    schema, skip_bad = declared.schema, declared.settings.skip_bad
    assert schema is not None  # noqa: S101  (the model has one)
    table = OpenedTable(declared, schema)
    inputs = [column.name for column in schema.columns]
    named_by = declared.id_column or ("id" if "id" in table.names else None)
    used = inputs if named_by is None else list(dict.fromkeys([*inputs, named_by]))
    faults = _absent(inputs, table.names)
    if named_by is not None and named_by not in table.names:
        faults.append(f"There is no column {named_by} for {{id}}")
    refuse(faults, f" {table.path} has the columns {as_list(table.names)}.")
    rows = table.rows(used, schema.columns, skip_bad)
    x, _, _ = inputs_in(schema.columns, rows, declared.texts)
    if skip_bad:
        rows.reject_unread()
    else:
        rows.remark_unread()
    good, left_out = rows.used(
        skip_bad,
        f" Correct {table.path} to fit the schema of the model, or add {{skip_bad=True}} to leave "
        "these records out.",
    )
    arrays: ArrayDict = {"x": x[good], "name": np.flatnonzero(good).tolist()}
    if named_by is not None:
        cells = rows.cells[named_by].filter(pa.array(good))
        arrays["id"] = list(decoded_cells(cells.cast(pa.string())))
    return Reading(
        arrays,
        left_out,
        numbers=records_in(schema.columns, declared.texts),
        remarks=tuple(rows.remarks),
    )


def _absent(
    wanted: Iterable[str],
    names: Container[str],
) -> list[str]:
    """Return faults of columns that a schema declares and a table does not have."""
    faults = []
    for name in wanted:
        if name not in names:
            faults.append(f"There is no column {as_list([name])}, which the schema declares")
    return faults


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


def _as_read(cells: pa.Array) -> pa.Array:
    """Return a column without a dictionary, and floats in a type that pyarrow computes with."""
    cells = plain_cells(cells)
    if pa.types.is_float16(cells.type):
        return cells.cast(pa.float32())
    return cells
