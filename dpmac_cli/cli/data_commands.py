"""dpmac schema and dpmac cache: drafts of table schemas, and the cache."""

import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import StrictBool
from rich.filesize import decimal
from rich.text import Text

from dpmac_cli.cli import console
from dpmac_cli.cli.options import argument, take, with_options
from dpmac_cli.config.fields import Choice, Flag, options
from dpmac_cli.config.flags import Flags, near
from dpmac_cli.config.settings import Debug
from dpmac_cli.data.column_schema import UTF8, is_encoding
from dpmac_cli.data.table_schema import draft
from dpmac_cli.errors import counted, raise_errors
from dpmac_cli.storage.paths import cache_folder, cache_size

Named = Annotated[str | None, Flag("Table", metavar="COLUMN,...")]


class Columns(Flags, frozen=True):
    """Flags of ``dpmac schema``."""

    label: Named = None
    """Column to predict, or several of numbers, separated by commas."""
    drop: Named = None
    """Columns to leave out, separated by commas."""
    date: Named = None
    """Columns of dates or times, separated by commas."""
    boolean: Named = None
    """Columns of two values, such as ja and nein, separated by commas."""
    text: Named = None
    """Columns of texts, such as notes, separated by commas."""
    encoding: Annotated[
        str,
        Choice((UTF8, "cp1252"), (is_encoding, "another encoding that Python knows")),
        Flag("Table"),
    ] = UTF8
    """Encoding of a CSV, such as cp1252 for files of older Windows programs. The draft declares
    it."""
    debug: Debug = False


class CacheFlags(Flags, frozen=True):
    """Flags of ``dpmac cache``."""

    clear: Annotated[StrictBool, Flag("Cache")] = False
    """Remove all files."""
    debug: Debug = False


@with_options(argument("file", "Table in CSV or Parquet."), options(Columns))
def schema(file: Path, **given: Any) -> None:
    """Draft the schema of a table, which declares the allowed values of each column.

    The draft contains the table's columns and nothing from its records. Fill in the range or
    the categories of each column, and the classes, based on what the columns mean.

    Examples:

        dpmac schema patients.csv --label outcome --drop id,name > schema.yaml

        dpmac schema notes.csv --label outcome --text note --date admitted > schema.yaml

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    from dpmac_cli.data.csv_file import CsvFile  # noqa: PLC0415  (loads pyarrow)
    from dpmac_cli.data.table_file import column_kinds  # noqa: PLC0415

    flags = take(Columns, given)
    kinds = column_kinds(CsvFile(file, flags.encoding))
    typed = {
        **{"label": flags.label, "drop": flags.drop, "text": flags.text, "date": flags.date},
        "boolean": flags.boolean,
    }
    named = {flag: _names_in(text, kinds) for flag, text in typed.items()}
    raise_errors(_faults_of_columns(named, kinds, file))
    labels, drop = named.pop("label"), named.pop("drop")
    kinds |= {name: flag for flag, names in named.items() for name in names}
    # A schema is read as UTF-8, whatever the encoding of the terminal that wrote it.
    escaped = (sys.stdout.encoding or "").lower() != "utf-8"
    console.print_result(draft(file, kinds, labels, drop, escaped, flags.encoding))


def _names_in(text: str | None, columns: Container[str]) -> list[str]:
    """Return the columns that a flag names; a single one may have commas in its name."""
    if text is None or text in columns:
        return [] if text is None else [text]
    return [name.strip() for name in text.split(",") if name.strip()]


def _faults_of_columns(
    named: Mapping[str, Sequence[str]], columns: Iterable[str], file: Path
) -> Iterator[str]:
    """Yield faults of flags that name columns of a table."""
    flags: dict[str, list[str]] = {}
    for flag, names in named.items():
        for name in names:
            flags.setdefault(name, []).append(f"--{flag}")
    for name, some in flags.items():
        if name not in columns:
            yield f"{some[0]} {name}: {file} has no such column.{near(name, columns)}"
        elif len(some) > 1:
            yield f"The column {name} is named twice ({' and '.join(some)}): name it once."


@with_options(options(CacheFlags))
def cache(**given: Any) -> None:
    """Show or clear the cache of decoded images, and of features of public backbones and frozen
    layers.

    They are as private as the records that they were computed from. Runs compute missing
    entries. The least recently used files are removed when the total size exceeds
    DPMAC_CACHE_SIZE (in gigabytes, default 20). Set DPMAC_CACHE_DIR to use another folder.

    Example: dpmac cache --clear

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    from dpmac_cli.storage.cache import kept_files, make_room  # noqa: PLC0415  (loads numpy)

    folder, limit = cache_folder(), cache_size()
    removed = make_room(folder, -1) if take(CacheFlags, given).clear else []
    sizes = [file.stat().st_size for file in kept_files(folder)]
    total, most = decimal(sum(sizes)), decimal(int(limit))
    said = f"{folder}: {counted(len(sizes), 'file')}, {total} of {most}; {len(removed)} removed"
    console.stdout().print(Text(said))
