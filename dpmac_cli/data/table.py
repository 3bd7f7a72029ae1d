"""Read tables in CSV or Parquet files, or data frames, according to their schema.

The columns of a table are compared with its schema first: every column must be declared, to use or
to drop it. Then each cell is read by itself, as its column declares, in these steps:

1. The file is opened and its cells become columns of pyarrow, text for a CSV (``table_file.py``).
2. Cells become numbers (``table_cells.py``), and numbers become inputs and targets
   (``table_inputs.py``).
3. Records that cannot be used are an error, or with ``skip_bad`` left out (``table_rows.py``).

Nothing is guessed from the records: neither types, nor decimal signs, nor categories.
"""

from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpmac_cli.config.facts import TABLES, refuse
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.hugging_face import is_hugging_face
from dpmac_cli.data.reader import ArrayDict, Reading, register_reader
from dpmac_cli.data.row_text import keys_of
from dpmac_cli.data.table_cells import BoolArray, decoded_cells, is_one_of, text_cells
from dpmac_cli.data.table_file import OpenedTable
from dpmac_cli.data.table_inputs import (
    declared_by,
    inputs_in,
    records_in,
    targets_of,
    units_of_column,
)
from dpmac_cli.data.table_rows import TableRows
from dpmac_cli.data.table_schema import TableSchema, as_list
from dpmac_cli.errors import InputError
from dpmac_cli.tasks.task import is_labelled


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
