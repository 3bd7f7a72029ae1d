"""Commands that only read: card, report, recipes, env, schema and cache."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import StrictBool
from rich.filesize import decimal
from rich.text import Text

from dpmac_cli.cli import console, late
from dpmac_cli.cli.options import (
    JsonFlags,
    ReplaceFile,
    argument,
    command,
    faults_of_file,
)
from dpmac_cli.config.flags import Flags, OneOf, Several, SomePath, near
from dpmac_cli.config.named import SHOWN, recipe_rows
from dpmac_cli.config.settings import (
    Debug,
)
from dpmac_cli.data.column_schema import UTF8, is_encoding
from dpmac_cli.data.table_schema import draft
from dpmac_cli.errors import counted, raise_errors
from dpmac_cli.files import cache_folder, cache_size, to_json, write_atomically
from dpmac_cli.release.card import answered_card, run_page
from dpmac_cli.studies.results import COMPARE_JSON, study_page

Answer = str | None


class CardAnswers(Flags, frozen=True):
    """Answers of a model card that only its publisher knows."""

    data_curator: Answer = None
    """Person or organisation that publishes the model."""
    intended_use: Answer = None
    """What the model is intended for, and what it is not."""
    contact: Answer = None
    """Contact for questions."""
    region: Answer = None
    """Region that the records come from."""
    access_and_collection: Answer = None
    """Who can access the records, and what else is collected about the same people."""
    justification: Answer = None
    """Justification of epsilon, delta and the unit of privacy."""
    debug: Debug = False


class ReportFlags(Flags, frozen=True):
    """Flags of ``dpmac report``."""

    html: SomePath = Path("report.html")
    """File to write."""
    force: ReplaceFile = False
    debug: Debug = False


@command(argument("run", "A run folder."), CardAnswers)
def card(answers: CardAnswers, run: Path) -> None:
    """Print the model card of a run as Markdown.

    The card answers the questions of NIST SP 800-226. Answers that only you know are "to be
    filled in" until you provide them here. For a web page, use dpmac report.

    Example: dpmac card runs/scans-dp-adam-1 --contact "dpo@clinic.example" > card.md

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    rows = {
        name.replace("_", " "): " ".join(text.split())
        for name, text in answers.explicit.items()
        if name != "debug"
    }
    written = {name: text for name, text in rows.items() if text}
    console.print_result(answered_card(run, written))


@command(argument("path", "A run folder, or a folder of dpmac compare."), ReportFlags)
def report(flags: ReportFlags, path: Path) -> None:
    """Write a web page for a run or a comparison: one self-contained file with figures.

    For a run: its model card, accuracy and epsilon over time, bounds on membership attacks, and
    its settings. For a comparison: the table, with significance tests, and a figure.

    Examples:

        dpmac report runs/mnist-dp-macadam-1

        dpmac report runs/compare --html study.html

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    html = flags.html
    raise_errors(faults_of_file(html, (".html",), flags.force, "html"))
    with console.waiting(quiet=False, first="report"):
        is_study = (path / COMPARE_JSON).is_file()
        page = study_page(path) if is_study else run_page(path)
    write_atomically(html, page.encode())
    console.stdout().print(Text(f"{html}: web page of {path}, in one file"))


@command(JsonFlags)
def recipes(flags: JsonFlags) -> None:
    """List recipes: what each reaches, its epsilon, its time, and the command that runs it.

    --epsilon means the recipe best: the best run for this budget, by one rule. --sigma means the
    recipe paper: the run that the paper describes. The others are files of settings by name.

    Example: dpmac recipes

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage.
    """
    out, rows = console.stdout(), recipe_rows()
    if flags.json:
        console.print_result(to_json({"recipes": rows}))
        return
    console.widen(out)
    cells = ([row.get(name, "") for name in SHOWN] for row in rows)
    out.print(console.plain_table(SHOWN, cells, no_wrap=True, padding=(0, 1, 0, 0)))
    out.print(Text("\nto run one of them:", style="bold"))
    out.print(*(Text(row["command"]) for row in rows), sep="\n", soft_wrap=True)
    out.print("accuracy: test accuracy in percent. minutes: of the whole command, on two cores.")


@command(JsonFlags)
def env(flags: JsonFlags) -> None:
    """Print what a bug report needs: versions, processor, libraries, folders and fallbacks.

    Fallbacks are tried on a tiny network: how its layers must run on this machine so that no
    record's result is rounded by the other records of a batch. They cost time, not privacy.

    Example: dpmac env

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage.
    """
    found = late.environment.facts()
    if flags.json:
        console.print_result(to_json(found))
        return
    console.print_result("".join(f"{name}: {_text(value)}\n" for name, value in found.items()))


def _text(value: Any) -> str:
    """Return a value in one line, or in one line for each of its parts."""
    if isinstance(value, dict):
        parts = [f"\n  {name}: {'none' if v is None else v}" for name, v in value.items()]
        return "".join(parts) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)


Named = Several[str] | None


class Columns(Flags, frozen=True):
    """Flags of ``dpmac schema``."""

    label: Named = None
    """Column to predict."""
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
        OneOf((UTF8, "cp1252"), (is_encoding, "another encoding that Python knows")),
    ] = UTF8
    """Encoding of a CSV, such as cp1252 for files of older Windows programs. The draft declares
    it."""
    debug: Debug = False


class CacheFlags(Flags, frozen=True):
    """Flags of ``dpmac cache``."""

    clear: StrictBool = False
    """Remove all files."""
    debug: Debug = False


@command(argument("file", "Table in CSV or Parquet."), Columns)
def schema(flags: Columns, file: Path) -> None:
    """Draft the schema of a table, which declares the allowed values of each column.

    The draft contains the table's columns and nothing from its records. Fill in the range or
    the categories of each column, and the classes, based on what the columns mean.

    Examples:

        dpmac schema patients.csv --label outcome --drop id,name > schema.yaml

        dpmac schema notes.csv --label outcome --text note --date admitted > schema.yaml

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    kinds = late.table.column_kinds(late.csv_file.CsvFile(file, flags.encoding))
    named = {n: [*of] for n, of in flags.explicit.items() if isinstance(of, tuple)}
    raise_errors(_faults_of_columns(named, kinds, file))
    label, drop = next(iter(named.pop("label", [])), None), named.pop("drop", [])
    kinds |= {name: flag for flag, names in named.items() for name in names}
    # A schema is read as UTF-8, whatever the encoding of the terminal that wrote it.
    escaped = (sys.stdout.encoding or "").lower() != "utf-8"
    console.print_result(draft(file, kinds, label, drop, escaped, flags.encoding))


def _faults_of_columns(
    named: Mapping[str, Sequence[str]], columns: Iterable[str], file: Path
) -> Iterator[str]:
    """Yield faults of flags that name columns of a table."""
    if len(labels := named.get("label", ())) > 1:
        yield (
            f"--label {','.join(labels)}: a model predicts one column. Train one model for each "
            f"number, with a schema of its own: --label {labels[0]} --drop {','.join(labels[1:])}."
        )
    flags: dict[str, list[str]] = {}
    for flag, names in named.items():
        for name in names:
            flags.setdefault(name, []).append(f"--{flag}")
    for name, some in flags.items():
        if name not in columns:
            yield f"{some[0]} {name}: {file} has no such column.{near(name, columns)}"
        elif len(some) > 1:
            yield f"The column {name} is named twice ({' and '.join(some)}): name it once."


@command(CacheFlags)
def cache(flags: CacheFlags) -> None:
    """Show or clear the cache of decoded images, and of features of public backbones and frozen
    layers.

    They are as private as the records that they were computed from. Runs compute missing
    entries. The least recently used files are removed when the total size exceeds
    DPMAC_CACHE_SIZE (in gigabytes, default 20). Set DPMAC_CACHE_DIR to use another folder.

    Example: dpmac cache --clear

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    folder, limit = cache_folder(), cache_size()
    removed = late.cache.make_room(folder, -1) if flags.clear else []
    sizes = [file.stat().st_size for file in late.cache.kept_files(folder)]
    total, most = decimal(sum(sizes)), decimal(int(limit))
    said = f"{folder}: {counted(len(sizes), 'file')}, {total} of {most}; {len(removed)} removed"
    console.stdout().print(Text(said))
