"""Commands that only read: card, report, recipes, env, schema and cache."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, StrictBool
from pydantic.fields import FieldInfo
from rich.filesize import decimal
from rich.text import Text

from dpmac_cli.cli import console, late
from dpmac_cli.cli.options import ReplaceFile, RunFolder, command, faults_of_file
from dpmac_cli.config.flags import Fields, OneOf, Several, SomePath, near
from dpmac_cli.config.named import SHOWN, recipe_rows
from dpmac_cli.config.settings import PrintJson
from dpmac_cli.data.column_schema import UTF8, is_encoding
from dpmac_cli.data.table_schema import draft
from dpmac_cli.errors import InputError, counted, raise_errors
from dpmac_cli.files import cache_folder, cache_size, to_json, write_atomically
from dpmac_cli.release.card import QUESTIONS, answered_card, run_page
from dpmac_cli.studies.written import COMPARE_JSON, study_page


def _answers() -> Fields:
    """Return the answers of a model card as options, by name."""
    options = dict[str, FieldInfo]()
    for row, text in QUESTIONS.items():
        option = FieldInfo(annotation=str, default=None, description=text)
        options[row.replace(" ", "_")] = option
    return options


@command(_answers())
def card(run: RunFolder, **answers: str | None) -> None:
    """Print the model card of a run as Markdown.

    The card answers the questions of NIST SP 800-226. Answers that only you know are "to be
    filled in" until you provide them here. For a web page, use dpmac report.

    Example: dpmac card runs/scans-dp-adam-1 --contact "dpo@clinic.example" > card.md

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    rows = dict[str, str]()
    for name, text in answers.items():
        in_one_line = " ".join((text or "").split())
        if in_one_line:
            rows[name.replace("_", " ")] = in_one_line
    console.print_result(answered_card(run, rows))


@command()
def report(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A run folder, or a folder of dpmac compare.")
    ],
    *,
    html: Annotated[SomePath, Field(description="File to write.")] = Path("report.html"),
    force: ReplaceFile = False,
) -> None:
    """Write a web page for a run or a comparison: one self-contained file with figures.

    For a run: its model card, accuracy and epsilon over time, bounds on membership attacks, and
    its settings. For a comparison: the table, with significance tests, and a figure.

    Examples:

        dpmac report runs/mnist-dp-macadam-1

        dpmac report runs/compare --html study.html

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    raise_errors(faults_of_file(html, (".html",), force, "html"))
    with console.waiting(quiet=False, first="report"):
        is_study = (path / COMPARE_JSON).is_file()
        page = study_page(path) if is_study else run_page(path)
    write_atomically(html, page.encode())
    console.stdout().print(Text(f"{html}: web page of {path}, in one file"))


@command()
def recipes(*, json: PrintJson = False) -> None:
    """List recipes: what each reaches, its epsilon, its time, and the command that runs it.

    --epsilon means the recipe best: the best run for this budget, by one rule. --sigma means the
    recipe paper: the run that the paper describes. The others are files of settings by name.

    Example: dpmac recipes

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage.
    """
    out, rows = console.stdout(), recipe_rows()
    if json:
        console.print_result(to_json({"recipes": rows}))
        return
    console.widen(out)
    cells = list[list[str]]()
    for row in rows:
        cells.append([row.get(name, "") for name in SHOWN])
    out.print(console.plain_table(SHOWN, cells, no_wrap=True, padding=(0, 1, 0, 0)))
    out.print(Text("\nto run one of them:", style="bold"))
    out.print(*(Text(row["command"]) for row in rows), sep="\n", soft_wrap=True)
    out.print("accuracy: test accuracy in percent. minutes: of the whole command, on two cores.")


@command()
def env(*, json: PrintJson = False) -> None:
    """Print what a bug report needs: versions, processor, libraries, folders and fallbacks.

    Fallbacks are tried on a tiny network: how its layers must run on this machine so that no
    record's result is rounded by the other records of a batch. They cost time, not privacy.

    Example: dpmac env

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage.
    """
    facts = late.environment.facts()
    if json:
        console.print_result(to_json(facts))
        return
    console.print_result("".join(f"{name}: {_text(value)}\n" for name, value in facts.items()))


def _text(value: Any) -> str:
    """Return a value in one line, or in one line for each of its parts."""
    if isinstance(value, dict):
        lines = list[str]()
        for name, part in value.items():
            lines.append(f"\n  {name}: {'none' if part is None else part}")
        return "".join(lines) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)


Label = Annotated[Several[str], Field(description="Column to predict.")]
Dropped = Annotated[Several[str], Field(description="Columns to leave out, separated by commas.")]
Dates = Annotated[
    Several[str], Field(description="Columns of dates or times, separated by commas.")
]
Booleans = Annotated[
    Several[str],
    Field(description="Columns of two values, such as ja and nein, separated by commas."),
]
Texts = Annotated[
    Several[str], Field(description="Columns of texts, such as notes, separated by commas.")
]
Encoding = Annotated[
    str,
    OneOf((UTF8, "cp1252"), (is_encoding, "another encoding that Python knows")),
    Field(
        description="Encoding of a CSV, such as cp1252 for files of older Windows programs. The "
        "draft declares it."
    ),
]


FromRecords = Annotated[
    bool,
    Field(
        description="Read the kind of each column, and the classes, from the records. They are "
        "facts of them: check the draft."
    ),
]


@command()
def schema(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Table in CSV or Parquet.")],
    *,
    label: Label = (),
    drop: Dropped = (),
    date: Dates = (),
    boolean: Booleans = (),
    text: Texts = (),
    encoding: Encoding = UTF8,
    kinds: FromRecords = False,
) -> None:
    """Draft the schema of a table, which declares the allowed values of each column.

    The draft contains the table's columns and nothing from its records. Fill in the range or
    the categories of each column, and the classes, based on what the columns mean. With --kinds
    it is ready to use: the kind of each column and the classes are read from the records.

    Examples:

        dpmac schema patients.csv --label outcome --drop id,name > schema.yaml

        dpmac schema notes.csv --label outcome --text note --date admitted > schema.yaml

        dpmac schema patients.csv --label outcome --drop id,name --kinds > kinds.yaml

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    columns = late.table_file.column_kinds(late.csv_file.CsvFile(file, encoding))
    declared = {"date": date, "boolean": boolean, "text": text}
    raise_errors(_faults_of_columns({"label": label, "drop": drop, **declared}, columns, file))
    if kinds and text:
        raise InputError("--kinds and --text contradict each other: texts need declared columns.")
    target = label[0] if label else None
    kind_of = dict[str, str]()
    for kind, names in declared.items():
        kind_of |= dict.fromkeys(names, kind)
    # A schema is read as UTF-8, whatever the encoding of the terminal that wrote it.
    escaped = (sys.stdout.encoding or "").lower() != "utf-8"
    if not kinds:
        all_columns = columns | kind_of
        console.print_result(draft(file, all_columns, target, drop, escaped, encoding))
        return
    table = late.kinds.cells_of(file, encoding)
    schema_of_table = late.kinds.schema_of_kinds(table, target, kind_of, drop=drop)
    console.print_result(late.kinds.draft_of_kinds(file, table, schema_of_table, escaped, encoding))


def _faults_of_columns(
    named: Mapping[str, Sequence[str]], columns: Iterable[str], file: Path
) -> Iterator[str]:
    """Yield faults of flags that name columns of a table; nothing if there are none.

    A column must be in the table, be named once, and there is one to predict.

    Args:
        named: names of columns, by the flag that they were typed for, without dashes.
        columns: names of the columns of the table.
        file: the table.
    """
    labels = named["label"]
    if len(labels) > 1:
        yield (
            f"--label {','.join(labels)}: a model predicts one column. Train one model for each "
            f"number, with a schema of its own: --label {labels[0]} --drop {','.join(labels[1:])}."
        )
    flags: dict[str, list[str]] = {}
    for flag, names in named.items():
        for name in names:
            flags.setdefault(name, []).append(f"--{flag}")
    for name, of_column in flags.items():
        if name not in columns:
            yield f"{of_column[0]} {name}: {file} has no such column.{near(name, columns)}"
        elif len(of_column) > 1:
            yield f"The column {name} is named twice ({' and '.join(of_column)}): name it once."


@command()
def cache(*, clear: Annotated[StrictBool, Field(description="Remove all files.")] = False) -> None:
    """Show or clear the cache of decoded images, and of features of public backbones and frozen
    layers.

    They are as private as the records that they were computed from. Runs compute missing
    entries. The least recently used files are removed when the total size exceeds
    DPMAC_CACHE_SIZE (in gigabytes, default 20). Set DPMAC_CACHE_DIR to use another folder.

    Example: dpmac cache --clear

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    folder, limit = cache_folder(), cache_size()
    removed = late.cache.make_room(folder, -1) if clear else []
    sizes = [file.stat().st_size for file in late.cache.kept_files(folder)]
    used = f"{decimal(sum(sizes))} of {decimal(int(limit))}"
    line = f"{folder}: {counted(len(sizes), 'file')}, {used}; {len(removed)} removed"
    console.stdout().print(Text(line))
