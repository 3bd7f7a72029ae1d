"""Read tables in CSV or Parquet files, or data frames, according to their schema."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute, parquet

from dpmac_cli.config.facts import TABLES, refuse
from dpmac_cli.data.column_schema import Column, Label
from dpmac_cli.data.csv_file import UTF16, CsvFile
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.hugging_face import is_hugging_face
from dpmac_cli.data.memory import check_memory
from dpmac_cli.data.reader import Reading, register_reader
from dpmac_cli.data.row_text import keys_of
from dpmac_cli.data.table_cells import (
    decoded_cells,
    is_one_of,
    kind_of,
    text_cells,
)
from dpmac_cli.data.table_inputs import TableRows, inputs_in, records_in, targets_of
from dpmac_cli.data.table_schema import TableSchema
from dpmac_cli.data.targets import CLASSES, DECLARED
from dpmac_cli.data.units import unit_name, units_in
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
    """Return the records of a table. Raises InputError with every fault found."""
    return _read_labelled(declared) if declared.labels else read_inputs(declared)


def _read_labelled(declared_as: Declaration) -> Reading:
    """Return the records of a table to train on. Raises InputError with every fault found."""
    path, schema, settings = declared_as.path, declared_as.schema, declared_as.settings
    unit, skip_bad = settings.unit, settings.skip_bad
    if schema is None:
        raise _without_schema(declared_as)
    file, table, names = _opened(declared_as, schema)
    declared = schema.declared
    if unit is not None:
        declared = tuple(dict.fromkeys([*declared, unit]))
    strange = [name for name in names if name not in declared]
    faults = [f"The schema does not declare the column {n}, to use or to drop it" for n in strange]
    refuse([*_absent(declared, names), *faults], f" Correct {path} or its schema.")
    used = tuple(name for name in declared if name not in schema.drop or name == unit)
    # Without a test set and units, the text of a whole row decides on which side it is.
    split = schema.test is None and unit is None
    more = tuple(name for name in names if name not in used) if split else ()
    rows = read_rows(file, used, schema.columns, skip_bad, table, more)
    if schema.label is None and is_labelled(settings.task):
        refuse(
            ["The schema declares no label: the column to predict"],
            " Add it, or train a language model on texts: {task=}language-model.",
        )
    label = schema.label if is_labelled(settings.task) else None
    of_records = {} if label is None else {"y": targets_of(label, rows)}
    if unit is not None:
        of_records["unit"] = _units(unit, rows, schema.words_in(unit))
    if split:
        of_records["key"] = keys_of([rows.cells[name] for name in names])
    of_records["x"], *ends = inputs_in(schema.columns, rows, declared_as.texts)
    good, left_out = rows.used(
        skip_bad,
        f" Correct {path} or its schema (missing: input accepts records without a value), or add "
        "{skip_bad} to leave these records out.",
    )
    sides = {"": good}
    if schema.test is not None:
        is_test = is_one_of(text_cells(rows.cells[schema.test.column]), schema.test.values)
        sides = {"": good & ~is_test, "_test": good & is_test}
    if len(good) and not all(some.any() for some in sides.values()):
        part = "test" if sides[""].any() else "train"
        refuse([f"{path} has no record left to {part} on", *left_out.reasons])
    arrays: dict[str, NDArray[Any]] = dict(zip(("low", "high"), ends, strict=True))
    arrays |= {} if label is None else _declared_of(label)
    for suffix, some in sides.items():
        kept = slice(None) if some.all() else some
        arrays |= {f"{name}{suffix}": values[kept] for name, values in of_records.items()}
    return Reading(
        arrays,
        left_out,
        numbers=records_in(schema.columns, declared_as.texts),
        remarks=tuple(rows.remarks),
    )


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


def _opened(
    declared: Declaration, schema: TableSchema
) -> tuple[CsvFile, pa.Table | None, list[str]]:
    """Return a table in a file, or in memory, and the names of its columns. Raises InputError."""
    file = CsvFile(declared.path, schema.encoding, schema.delimiter)
    if declared.in_memory is None:
        return file, None, list(column_kinds(file))
    table = table_of(declared.in_memory.frame, declared.settings.unit)
    return file, table, table.column_names


def _units(name: str, rows: TableRows, missing_words: Sequence[str]) -> NDArray[np.str_]:
    """Return the unit of each record, and add those that have none to ``rows``."""
    cells = rows.cells[name]
    # Floats have the precision of their type.
    floats = pa.types.is_floating(cells.type)
    values = np.asarray(cells) if floats else decoded_cells(text_cells(cells))
    units, unusable = units_in(values, missing_words)
    for why in sorted(set(unusable.values())):
        bad = [row for row, fault in unusable.items() if fault == why]
        rows.add(f"{why.removeprefix('has ')} in {name}", np.isin(range(len(rows)), bad))
    return units


def _declared_of(label: Label) -> dict[str, NDArray[Any]]:
    """Return what a label declares, as arrays do."""
    if label.type == "category":
        return {CLASSES: np.array(label.classes)}
    return dict(
        zip(DECLARED, map(np.array, (*label.ends, label.transform, label.name)), strict=True)
    )


def read_inputs(declared: Declaration) -> Reading:
    """Return the inputs of unlabelled records. Raises InputError with every fault found.

    Columns that are no inputs of the schema are ignored. Their name is their row in the file, from
    0, and their ``id`` the text of the column that names them; by default ``id``, if there is one.
    """
    path, schema, skip_bad = declared.path, declared.schema, declared.settings.skip_bad
    assert schema is not None  # noqa: S101  (the model has one)
    file, table, names = _opened(declared, schema)
    columns = schema.columns
    wanted = [column.name for column in columns]
    named_by = declared.id_column or ("id" if "id" in names else None)
    kept = [] if named_by is None else [named_by]
    absent = [f"There is no column {n} for {{id}}" for n in kept if n not in names]
    refuse([*_absent(wanted, names), *absent], f" {path} has the columns {', '.join(names)}.")
    rows = read_rows(file, tuple(dict.fromkeys([*wanted, *kept])), columns, skip_bad, table)
    inputs, *_ = inputs_in(columns, rows, declared.texts)
    good, left_out = rows.used(
        skip_bad,
        f" Correct {path} to fit the schema of the model, or add {{skip_bad}} to leave these "
        "records out.",
    )
    arrays = {"x": inputs[good], "name": np.flatnonzero(good).tolist()}
    if named_by is not None:
        cells = rows.cells[named_by].filter(pa.array(good)).cast(pa.string())
        arrays["id"] = [text or "" for text in decoded_cells(cells)]
    return Reading(
        arrays,
        left_out,
        numbers=records_in(columns, declared.texts),
        remarks=tuple(rows.remarks),
    )


def _absent(wanted: Iterable[str], names: Container[str]) -> list[str]:
    absent = [name for name in wanted if name not in names]
    return [f"There is no column {name}, which the schema declares" for name in absent]


def column_kinds(file: CsvFile) -> dict[str, str | None]:
    """Return the type that each column declares; None for a CSV, which has no types.

    Reads no records. Raises InputError.
    """
    path, columns = file.path, list[tuple[str, str | None]]()
    try:
        if path.suffix == ".parquet":
            columns = [(field.name, kind_of(field.type)) for field in _parquet_schema(path)]
        else:
            columns = [(name, None) for name in file.header()]
        if not columns:
            raise ValueError("its first line does not name the columns")
        if any(NOT_TEXT in name for name, _ in columns):
            remedy = (
                "declare its own encoding, with encoding: cp1252 in the schema or dpmac schema "
                "--encoding cp1252"
            )
            remedy = "save the table as UTF-8" if file.codec() == UTF16 else remedy
            raise ValueError(f"line 1 is not text in {file.named}: {remedy}")
    except Exception as failure:  # its parsers raise whatever a damaged file leads to
        raise _unreadable(path, failure) from failure
    twice = [name for name, count in Counter(name for name, _ in columns).items() if count > 1]
    refuse([f"{path} has several columns named '{name}'. Rename them" for name in twice])
    return dict(columns)


def _parquet_schema(path: Path) -> pa.Schema:
    """Return the columns of a Parquet file. Raises ValueError for a size that cannot be read."""
    metadata = parquet.read_metadata(path)
    rows, groups = metadata.num_rows, range(metadata.num_row_groups)
    if rows != sum(metadata.row_group(group).num_rows for group in groups) or rows < 0:
        raise ValueError(f"its header declares {rows:,} records, and its parts have others")
    check_memory(rows * metadata.num_columns * CELL, f"{rows:,} records")
    return metadata.schema.to_arrow_schema()


def table_of(frame: Any, unit: str | None = None) -> pa.Table:
    """Convert a pandas or polars data frame to a table. Raises InputError."""
    kind = type(frame).__name__
    if isinstance(frame, Mapping):
        said = f"{kind} has the splits {', '.join(frame)}: pass one of them as a table."
        raise InputError(said)
    try:
        if is_hugging_face(frame):
            frame = frame.with_format("arrow")[:]
        if isinstance(frame, pa.Table):
            return frame
        names = list(map(str, frame.columns))
        twice = [name for name, count in Counter(names).items() if count > 1]
        refuse([f"{kind} has several columns named '{name}'. Rename them" for name in twice])
        cells = [_column_of(frame[key], str(key) == unit) for key in frame.columns]
        return pa.table(dict(zip(names, cells, strict=True)))
    except Exception as failure:  # frames raise whatever a cell leads to
        raise _damaged(kind, failure) from failure


def _column_of(column: Any, unit: bool) -> Any:
    """Return a column of a data frame; objects become text one by one, as in a CSV."""
    # A category may be an object, too.
    kind = getattr(getattr(column.dtype, "categories", None), "dtype", column.dtype)
    if str(kind).lower() == "object":
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
    more: tuple[str, ...] = (),
) -> TableRows:
    """Return the cells of some columns, as text for a CSV. Raises InputError.

    Args:
        file: the table.
        names: columns whose cells must be numbers or text.
        columns: those that are inputs.
        skip_bad: leave out records that cannot be read.
        table: a data frame instead of the file.
        more: other columns, of any type.
    """
    path, broken = file.path, dict[int, str]()
    parsed = table is None and path.suffix != ".parquet"
    try:
        if parsed:
            table, broken = file.cells((*names, *more), skip_bad)
        elif table is None:
            table = parquet.read_table(path, columns=[*names, *more])
        cells = {name: _plain(table[name].combine_chunks()) for name in (*names, *more)}
    except Exception as failure:  # its parsers raise whatever a damaged file leads to
        raise _damaged(path, failure) from failure
    strange = [name for name in names if any(test(cells[name].type) for test in NO_CELLS)]
    refuse(
        [f"The column {n} contains {cells[n].type}, not numbers or text" for n in strange],
        f" Write plain columns to {path}, or list these under drop in the schema.",
    )
    texts = {column.name for column in columns if column.type == "text"}
    rows = TableRows(cells, broken, bool(texts))
    for name in names if parsed else ():  # a stray quotation mark hides lines in a cell
        if name not in texts:
            breaks = compute.match_substring_regex(cells[name], r"[\r\n]")
            rows.add(f"a line break in {name}", np.asarray(breaks.fill_null(False)))
    return rows


def _damaged(path: Path | str, failure: Exception) -> InputError:
    """Return an error of code that has seen records, which the failure's own message may quote."""
    if isinstance(failure, InputError):
        return failure
    why = getattr(failure, "reason", None) or f"damaged cells ({type(failure).__name__})"
    return InputError(f"{path} cannot be read as a table: {why}.")


def _unreadable(path: Path, failure: Exception) -> InputError:
    """Return an error of code that has seen the header alone."""
    if isinstance(failure, InputError):
        return failure
    why = str(failure).strip().partition("\n")[0].rstrip(".") or type(failure).__name__
    return InputError(f"{path} cannot be read as a table: {why}.")


def _plain(cells: pa.Array) -> pa.Array:
    cells = cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells
    return cells.cast(pa.float32()) if pa.types.is_float16(cells.type) else cells
