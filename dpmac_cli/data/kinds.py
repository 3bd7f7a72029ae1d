"""Kinds of the columns of a table, drafted from its records.

A kind that was read from the records is a fact of them, which epsilon does not cover: one cell may
decide it. Who trains on them checks the draft, and so declares it.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from pyarrow import compute, parquet

from dpmac_cli.config.facts import refuse
from dpmac_cli.data.column_schema import FALSE, TRUE, UTF8, Column
from dpmac_cli.data.csv_file import CsvFile
from dpmac_cli.data.table_cells import decoded_cells, is_one_of, kind_of, text_cells, values_in
from dpmac_cli.data.table_schema import is_named_as_id, quoted
from dpmac_cli.data.values import MISSING
from dpmac_cli.errors import InputError

#: Share of the cells with a value that are of a kind from which a column is drafted as one of it.
NEARLY_ALL = 0.95
#: Largest number of different values of a column to predict that are drafted as classes.
CLASSES = 20
#: What is declared of numbers to predict.
NUMBER = {"type": "number"}
#: First lines of a draft from records.
WARNING = """\
# Kinds of the columns of {file}, read from its records: facts of these records, which epsilon does
# not cover. Check each line, and correct what the column does not mean. A number that names
# something, such as a postcode, is a category. A column that should not be used goes under drop.
# Then remove the line from_records: as long as it is there, the report says that nobody checked.
"""
#: Line of a draft on columns that name records.
IDENTIFIERS = """\
# {columns}: names of records, as it seems, which say nothing about new ones. Move them to drop.
"""
#: Fewest records with a value, all different, that make a column one of names.
FEWEST_NAMES = 20


def kinds_of(table: pa.Table) -> dict[str, str]:
    """Return the kind of each column of a table, as a schema names it."""
    return {name: _kind(name, table[name].combine_chunks()) for name in table.column_names}


def _kind(name: str, cells: pa.Array) -> str:
    """Return the kind that nearly all cells of a column have."""
    cells = cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells
    if (declared := kind_of(cells.type)) not in ("category", "number"):
        return declared
    text = compute.utf8_lower(text_cells(cells))
    missing = np.asarray(cells.is_null()) | is_one_of(text_cells(cells), MISSING)
    with_value = ~missing
    words = set(decoded_cells(text.filter(pa.array(with_value)).unique()))
    if words <= {*FALSE, *TRUE} and len(words) == len({word in TRUE for word in words}) == 2:
        return "boolean"
    for kind in ("number", "date"):
        values, _ = values_in(cells, Column.model_validate({"name": name, "type": kind}))
        if with_value.any() and (~np.isnan(values[with_value])).mean() >= NEARLY_ALL:
            return kind
    return "category"


def names_records(name: str, kind: str, cells: pa.Array) -> bool:
    """Return whether a column seems to name records instead of saying something about them.

    That is so if its name ends in id, or if each record has a value of its own and the values are
    words, or whole numbers without a gap.

    Args:
        name: name of the column.
        kind: its kind, as a schema names it.
        cells: its cells, shape (records,).
    """
    if is_named_as_id(name):
        return True
    cells = cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells
    text = text_cells(cells)
    known = text.filter(pa.array(~is_one_of(text, MISSING))).drop_null()
    different = len(known.unique())
    if different < max(FEWEST_NAMES, len(known)):
        return False
    if kind == "number":
        numbers, _ = values_in(cells, Column.model_validate({"name": name, "type": kind}))
        numbers = numbers[~np.isnan(numbers)]
        return len(numbers) == different == np.ptp(numbers) + 1
    return kind == "category"


def cells_of(path: Path, encoding: str = UTF8) -> pa.Table:
    """Return all cells of a table in a file, as text for a CSV. Raises InputError."""
    if path.suffix == ".parquet":
        return parquet.read_table(path)
    file = CsvFile(path, encoding)
    table, _ = file.cells(tuple(file.header()), skip_bad=True)
    return table


def classes_of(cells: pa.Array) -> list[str]:
    """Return the different values of a column, sorted; [] for more than :data:`CLASSES`."""
    text = text_cells(cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells)
    known = text.filter(pa.array(~is_one_of(text, MISSING))).drop_null().unique()
    return sorted(cell or "" for cell in decoded_cells(known)) if len(known) <= CLASSES else []


def schema_of_kinds(
    table: pa.Table,
    label: str | None,
    kinds: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    drop: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the contents of a schema that declares kinds alone.

    Args:
        table: all cells.
        label: column to predict; None for none.
        kinds: kinds of columns by their names; others are read from the records. That of a label
            may be number.
        classes: classes of the label; None to read them from the records.
        drop: columns to leave out.

    Raises:
        InputError: there is no such column, or nothing is left to learn from.
    """
    declared, dropped = dict(kinds or {}), [*drop]
    names = [*([] if label is None else [label]), *declared, *dropped]
    refuse(
        [f"There is no column {name}" for name in names if name not in table.column_names],
        f" The table has the columns {', '.join(table.column_names)}.",
    )
    used = [name for name in table.column_names if name not in (label, *dropped)]
    if not used:
        raise InputError("There is no column to learn from besides the label.")
    read = kinds_of(table.select([name for name in used if name not in declared]))
    schema = dict[str, Any]()
    if label is not None:
        is_number = declared.get(label) == "number"
        values = [] if is_number else list(classes or classes_of(table[label].combine_chunks()))
        schema["label"] = {"column": label, **({"classes": values} if values else NUMBER)}
    schema["columns"] = {name: {"type": declared.get(name) or read[name]} for name in used}
    schema["drop"] = dropped
    return schema


def draft_of_kinds(
    file: Path,
    table: pa.Table,
    schema: Mapping[str, Any],
    escaped: bool = False,
    encoding: str = UTF8,
) -> str:
    """Return the contents of a schema as YAML, with a warning.

    Args:
        file: the table.
        table: all cells.
        schema: see :func:`schema_of_kinds`.
        escaped: whether to write letters beyond ASCII as escapes.
        encoding: encoding of a CSV.
    """
    written = {} if encoding == UTF8 else {"encoding": encoding}
    contents = {"from_records": True, **written, **schema}
    text: str = yaml.safe_dump(
        contents,
        sort_keys=False,
        default_flow_style=None,  # a line for each column
        width=10**6,
        allow_unicode=not escaped,
    )
    names = [
        quoted(name, escaped)
        for name, column in schema["columns"].items()
        if names_records(name, column["type"], table[name].combine_chunks())
    ]
    identifiers = IDENTIFIERS.format(columns=", ".join(names)) if names else ""
    return WARNING.format(file=file.name) + identifiers + text
