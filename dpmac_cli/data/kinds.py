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
from dpmac_cli.data.table_cells import (
    decoded_cells,
    is_one_of,
    plain_cells,
    schema_type,
    text_cells,
    values_in,
)
from dpmac_cli.data.table_schema import as_list, is_named_as_id, quoted
from dpmac_cli.data.values import MISSING
from dpmac_cli.errors import InputError

#: Share of the cells with a value that are of a kind from which a column is drafted as one of it.
NEARLY_ALL = 0.95
#: Largest number of different values of a column to predict that are drafted as classes.
MOST_CLASSES = 20
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
#: Line of a draft on columns of which many records share a value with few others.
UNITS = """\
# {columns}: many different values. If they name persons or other units with several records, move
# them to drop, and train with --unit.
"""
#: Largest mean number of records per value of such a column.
MOST_PER_VALUE = 20
#: Fewest records with a value, all different, that make a column one of names.
FEWEST_NAMES = 20


def kinds_of(table: pa.Table) -> dict[str, str]:
    """Return the kind of each column of a table, as a schema names it.

    Args:
        table: all cells, as text for a CSV.

    Example:
        >>> kinds_of(pa.table({"age": ["41", "7"], "smokes": ["yes", "no"], "job": ["a", "b"]}))
        {'age': 'number', 'smokes': 'boolean', 'job': 'category'}
    """
    kinds = {}
    for name in table.column_names:
        kinds[name] = _kind(name, table[name].combine_chunks())
    return kinds


def _kind(name: str, cells: pa.Array) -> str:
    """Return the kind that nearly all cells of a column have.

    Args:
        name: name of the column.
        cells: its cells, shape (records,). Their type decides if it is one of dates or of truth
            values.
    """
    cells = plain_cells(cells)
    declared = schema_type(cells.type)
    if declared not in ("category", "number"):
        return declared
    text = text_cells(cells)
    is_empty = np.asarray(cells.is_null())
    with_value = ~(is_empty | is_one_of(text, MISSING))
    lower = compute.utf8_lower(text)
    different = lower.filter(pa.array(with_value)).unique()
    if _are_truth_values(set(decoded_cells(different))):
        return "boolean"
    for kind in ("number", "date"):
        values, _ = values_in(cells, Column.model_validate({"name": name, "type": kind}))
        is_of_kind = ~np.isnan(values[with_value])
        if len(is_of_kind) and is_of_kind.mean() >= NEARLY_ALL:
            return kind
    return "category"


def _are_truth_values(words: set[str]) -> bool:
    """Return whether words, in lower case, are one for true and one for false."""
    true, false = words & {*TRUE}, words & {*FALSE}
    return len(words) == 2 and len(true) == len(false) == 1


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
    cells = plain_cells(cells)
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


def names_units(kind: str, cells: pa.Array) -> bool:
    """Return whether a column of words may name units, such as patients, with some records each.

    That is so if there are at least :data:`FEWEST_NAMES` different words, one for at most
    :data:`MOST_PER_VALUE` records on average.

    Args:
        kind: kind of the column, as a schema names it.
        cells: its cells, shape (records,).
    """
    if kind != "category":
        return False
    text = text_cells(plain_cells(cells))
    known = text.filter(pa.array(~is_one_of(text, MISSING))).drop_null()
    return len(known.unique()) >= max(FEWEST_NAMES, len(known) / MOST_PER_VALUE)


def cells_of(path: Path, encoding: str = UTF8) -> pa.Table:
    """Return all cells of a table in a file, as text for a CSV.

    Args:
        path: a CSV or a Parquet file, whose columns could be read.
        encoding: encoding of a CSV.

    Raises:
        InputError: its first line is no text. Other records that cannot be read are null.
    """
    if path.suffix == ".parquet":
        return parquet.read_table(path)
    file = CsvFile(path, encoding)
    table, _ = file.cells(tuple(file.header()), skip_bad=True)
    return table


def classes_of(cells: pa.Array) -> list[str]:
    """Return the different values of a column, sorted; [] for more than :data:`MOST_CLASSES`.

    Words for a missing value do not count.

    Args:
        cells: a column of any type, shape (records,).

    Example:
        >>> classes_of(pa.array(["yes", "no", "yes", "NA"]))
        ['no', 'yes']
    """
    text = text_cells(plain_cells(cells))
    has_value = pa.array(~is_one_of(text, MISSING))
    different = text.filter(has_value).drop_null().unique()
    if len(different) > MOST_CLASSES:
        return []
    return sorted(decoded_cells(different))


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

    Returns:
        a mapping with the keys label, columns and drop.

    Raises:
        InputError: there is no such column, or nothing is left to learn from.
    """
    declared, dropped = dict(kinds or {}), [*drop]
    names = [*declared, *dropped]
    if label is not None:
        names.insert(0, label)
    faults = []
    for name in names:
        if name not in table.column_names:
            faults.append(f"There is no column {as_list([name])}")
    refuse(faults, f" The table has the columns {as_list(table.column_names)}.")
    used = [name for name in table.column_names if name not in (label, *dropped)]
    if not used:
        raise InputError("There is no column to learn from besides the label.")
    undeclared = [name for name in used if name not in declared]
    drafted = {**kinds_of(table.select(undeclared)), **declared}
    schema = dict[str, Any]()
    if label is not None:
        values = list[str]()
        if declared.get(label) != "number":
            values = list(classes or classes_of(table[label].combine_chunks()))
        schema["label"] = {"column": label}
        schema["label"] |= {"classes": values} if values else NUMBER
    schema["columns"] = {name: {"type": drafted[name]} for name in used}
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
    of_records, of_units = list[str](), list[str]()
    for name, column in schema["columns"].items():
        kind, cells = column["type"], table[name].combine_chunks()
        if names_records(name, kind, cells):
            of_records.append(quoted(name, escaped))
        elif names_units(kind, cells):
            of_units.append(quoted(name, escaped))
    comments = WARNING.format(file=file.name)
    for line, names in ((IDENTIFIERS, of_records), (UNITS, of_units)):
        if names:
            comments += line.format(columns=", ".join(names))
    return comments + text
