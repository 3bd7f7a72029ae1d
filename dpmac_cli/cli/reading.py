"""Commands that only read: eval, predict, card, report, recipes, env, schema and cache."""

import math
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field, StrictBool
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console
from dpmac_cli.cli.options import (
    JsonFlags,
    ReplaceFile,
    argument,
    faults_of_file,
    take,
    with_options,
)
from dpmac_cli.config.flags import Choice, Flag, Flags, SomePath, near, options
from dpmac_cli.config.named import BEST, PAPER, RECIPES
from dpmac_cli.config.settings import (
    OWN_DATA,
    SETTINGS,
    DataDir,
    Debug,
    Device,
    PrintJson,
    Quiet,
)
from dpmac_cli.data.column_schema import UTF8, is_encoding
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.data.table_schema import draft
from dpmac_cli.errors import MISFIT, counted, raise_errors
from dpmac_cli.release.card import answered_card
from dpmac_cli.release.page import run_page
from dpmac_cli.runs.folder import CARD, WANTED_MODEL
from dpmac_cli.storage.files import finite_or_none, to_json, write_atomically
from dpmac_cli.storage.paths import cache_folder, cache_size
from dpmac_cli.studies.results import COMPARE_JSON, study_page
from dpmac_cli.tasks.known import METRICS

DEBUG = {"debug": SETTINGS["debug"]}


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


class ReportFlags(Flags, frozen=True):
    """Flags of ``dpmac report``."""

    html: Annotated[SomePath, Flag(metavar="FILE")] = Path("report.html")
    """File to write."""
    force: ReplaceFile = False
    debug: Debug = False


@with_options(argument("run", "A run folder."), options(CardAnswers), DEBUG)
def card(run: Path, **given: Any) -> None:
    """Print the model card of a run as Markdown.

    The card answers the questions of NIST SP 800-226. Answers that only you know are "to be
    filled in" until you provide them here. For a web page, use dpmac report.

    Example: dpmac card runs/scans-dp-adam-1 --contact "dpo@clinic.example" > card.md

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    answers = take(CardAnswers, given)
    rows = {
        name.replace("_", " "): " ".join(text.split()) for name, text in answers.explicit.items()
    }
    written = {name: text for name, text in rows.items() if text}
    console.print_result(answered_card(run, written))


@with_options(argument("path", "A run folder, or a folder of dpmac compare."), options(ReportFlags))
def report(path: Path, **given: Any) -> None:
    """Write a web page for a run or a comparison: one self-contained file with figures.

    For a run: its model card, accuracy and epsilon over time, bounds on membership attacks, and
    its settings. For a comparison: the table, with significance tests, and a figure.

    Examples:

        dpmac report runs/mnist-dp-macadam-1

        dpmac report runs/compare --html study.html

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    flags = take(ReportFlags, given)
    html = flags.html
    raise_errors(faults_of_file(html, (".html",), flags.force, "html"))
    with console.waiting(quiet=False, first="report"):
        is_study = (path / COMPARE_JSON).is_file()
        page = study_page(path) if is_study else run_page(path)
    write_atomically(html, page.encode())
    console.stdout().print(Text(f"{html}: web page of {path}, in one file"))


#: Recipes without a file, with the command that runs each.
RULES = {
    BEST: ("the best run for an epsilon, by rule", "dpmac train --dataset NAME --epsilon 3"),
    PAPER: ("the run of the paper at a noise multiplier", "dpmac train --dataset NAME --sigma 0.8"),
}


@with_options(options(JsonFlags))
def recipes(**given: Any) -> None:
    """List recipes: what each reaches, its epsilon, its time, and the command that runs it.

    --epsilon means the recipe best: the best run for this budget, by one rule. --sigma means the
    recipe paper: the run that the paper describes. The others are files of settings by name.

    Example: dpmac recipes

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage.
    """
    flags, out = take(JsonFlags, given), console.stdout()
    rules = [{"name": n, "about": about, "command": line} for n, (about, line) in RULES.items()]
    named = [
        {**vars(recipe), "name": name, "command": recipe.line(name)}
        for name, recipe in RECIPES.items()
    ]
    if flags.json:
        console.print_result(to_json({"recipes": [*rules, *named]}))
        return
    console.widen(out)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    columns = ("name", "accuracy", "epsilon", "minutes", "extra")
    for name in columns:
        table.add_column(name, no_wrap=True)
    for row in (*rules, *named):
        table.add_row(*(Text(row.get(name, "")) for name in columns))
    out.print(table)
    out.print(Text("\nto run one of them:", style="bold"))
    out.print(*(Text(row["command"]) for row in (*rules, *named)), sep="\n", soft_wrap=True)
    out.print("accuracy: test accuracy in percent. minutes: of the whole command, on two cores.")


@with_options(options(JsonFlags))
def env(**given: Any) -> None:
    """Print what a bug report needs: versions, processor, libraries, folders and fallbacks.

    Fallbacks are tried on a tiny network: how its layers must run on this machine so that no
    record's result is rounded by the other records of a batch. They cost time, not privacy.

    Example: dpmac env

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage.
    """
    flags = take(JsonFlags, given)
    from dpmac_cli.runs.environment import facts  # noqa: PLC0415  (loads torch)

    found = facts()
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


Named = Annotated[str | None, Flag(metavar="COLUMN,...")]


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
    ] = UTF8
    """Encoding of a CSV, such as cp1252 for files of older Windows programs. The draft declares
    it."""
    debug: Debug = False


class CacheFlags(Flags, frozen=True):
    """Flags of ``dpmac cache``."""

    clear: StrictBool = False
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


if TYPE_CHECKING:
    from dpmac_cli.release.audit import Audit
    from dpmac_cli.release.scoring import Scored

HOLDS = (
    "The attack does not contradict the claim. That does not prove it: a better attack might find "
    "more."
)
BROKEN = (
    "The attack contradicts the claim, which may happen by chance in 1 of 20 correct runs. Train "
    "and attack again. If the result is the same, training has a bug: publish none of its models."
)


OwnFactory = Annotated[
    str | None,
    Field(
        description="Factory of your own network. Factories named in model files are never "
        "imported."
    ),
    Flag(metavar="FILE.py:FACTORY"),
]


class EvalFlags(Flags, frozen=True):
    """Flags of ``dpmac eval``."""

    dataset: Annotated[
        str | None,
        Choice(tuple(DATASETS), OWN_DATA),
        Flag(otherwise="the dataset that it was trained on"),
    ] = None
    """Dataset to evaluate on."""
    model: OwnFactory = None
    audit: StrictBool = False
    """For a run with --canaries: compare the epsilon that the attack proves with the guarantee."""
    json: PrintJson = False
    data_dir: DataDir = None
    device: Device = "auto"
    debug: Debug = False


class PredictFlags(Flags, frozen=True):
    """Flags of ``dpmac predict``."""

    model: OwnFactory = None
    out: Annotated[SomePath, Flag(metavar="FILE")] = Path("predictions.csv")
    """CSV file to write."""
    force: ReplaceFile = False
    skip_bad: StrictBool = False
    """Leave out unusable records and files instead of rejecting all."""
    id: Annotated[
        str | None,
        Flag(otherwise="id, if there is one", metavar="COLUMN"),
    ] = None
    """Column of the table to keep as id beside each prediction."""
    device: Device = "auto"
    quiet: Quiet = False
    debug: Debug = False


@with_options(argument("run", "A run folder, or a model.safetensors."), options(EvalFlags))
def evaluate(run: Path, **given: Any) -> None:
    """Evaluate a trained model on every test sample, or evaluate the audit of a run.

    Examples:

        dpmac eval runs/mnist-dp-macadam-1

        dpmac eval RUN --json

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, 4 the model does not fit the data,
    or the audit contradicts the guarantee.
    """
    flags = take(EvalFlags, given)
    if flags.audit:  # only reads files of the run
        others = {"dataset": flags.dataset, "data-dir": flags.data_dir}
        what = "--audit scores guesses, not test samples: leave out"
        raise_errors(f"{what} --{name}." for name, value in others.items() if value is not None)
        with console.waiting(flags.json, "bounds"):
            from dpmac_cli.release.audit import read_audit  # noqa: PLC0415  (loads numpy)

            found = read_audit(run)
            verdict = found.verdict()
        _judge(found, verdict, run, flags.json)
        return
    with console.waiting(flags.json, "scores"), console.kept_clear(flags.json):
        from dpmac_cli.release.scoring import score  # noqa: PLC0415  (loads torch)

        scored = score(run, flags.dataset, flags.data_dir, flags.device, flags.model)
    if flags.dataset is not None and scored.held_out:
        part = f"{counted(scored.result.samples, 'record')} that the run's split holds out"
        console.print_notes([f"{flags.dataset} has no test set: only the {part} are scored."])
    _show(scored, flags.json)


@with_options(
    argument("run", "A run folder, or a model.safetensors."),
    argument("data", "Images, texts, an .npz or a table."),
    options(PredictFlags),
)
def predict(run: Path, data: Path, **given: Any) -> None:
    """Predict classes or numbers of new, unlabelled records with a trained model.

    DATA is a folder of images or texts (including subfolders), an .npz with an array x, or a
    table. Records are read like the training records. The output has one row per record: the
    name of the file or the row from 0, a table's column --id, and the predicted class with the
    probability of each class, or the predicted numbers. It reveals information about these
    records, which the run's epsilon does not cover.

    Example: dpmac predict runs/photos-dp-macadam-1 new-photos --out predictions.csv

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, 4 the model cannot be built, memory
    ran out or the device failed.
    """
    flags = take(PredictFlags, given)
    out, quiet = flags.out, flags.quiet
    nowhere = {run: f" {WANTED_MODEL}", data: ""}
    absent = [
        f"{path} does not exist.{wanted}" for path, wanted in nowhere.items() if not path.exists()
    ]
    raise_errors([*faults_of_file(out, (".csv",), flags.force), *absent])
    with console.waiting(quiet, "loading"), console.kept_clear(json=True):
        from dpmac_cli.release.prediction import predict  # noqa: PLC0415  (loads torch)

        found = predict(
            *(run, data, flags.device, flags.model),
            skip_bad=flags.skip_bad,
            id_column=flags.id,
        )
    found.write(out)
    if found.skipped.records:
        console.print_notes([found.skipped.note(str(data))])
    if lost := found.unanswered:
        they = "it has" if lost == 1 else "they have"
        some = f"for {counted(lost, 'record')} the output is NaN, so {they} {found.task.unknown}"
        console.print_notes([some])
    if not quiet:
        written = counted(len(found.records), "record")
        console.stdout().print(Text(f"{out}: predictions for {written}"))


def _show(scored: "Scored", json: bool) -> None:
    """Print the scores of a model."""
    from dpmac_cli.cli import display  # noqa: PLC0415  (loads torch)

    result, card = scored.result, scored.path.with_name(CARD)
    results, headline = result.results, result.task.headline
    values = results.metrics()
    intervals = results.intervals(values)
    exact = "these scores are exact and not covered by epsilon, unlike those in report.json"
    console.print_notes([*display.doubts(result), *[exact] * scored.covered])
    if json:
        body = {
            "model": str(scored.path),
            "card": str(card) if card.is_file() else None,
            "dataset": scored.dataset,
            "loss": finite_or_none(result.loss),
            "samples": result.samples,
            **{METRICS[name].key: finite_or_none(value) for name, value in values.items()},
            "intervals": {
                METRICS[name].key: [*map(finite_or_none, ends)] for name, ends in intervals.items()
            },
            **results.details(),
        }
        console.print_result(to_json(body))
        return
    out = console.stdout()
    out.print(
        f"{scored.path} on {scored.dataset}: {headline.title} "
        f"{headline.text(values[headline.name])}, loss {result.loss:.4f}, "
        f"{result.samples:,} {'held-out ' * scored.held_out}samples"
    )
    out.print(display.metrics_table(values, intervals))
    if (table := results.table()) is not None:
        out.print(display.as_table(table))
    if card.is_file():
        out.print(f"model card, with the privacy guarantee: {card}")


def _judge(found: "Audit", verdict: Mapping[str, Any], run: Path, json: bool) -> None:
    """Print the result of an audit; exit with code 4 if it contradicts the claim."""
    if json:
        console.print_result(to_json({"run": str(run), **verdict}))
    else:
        claimed, out = math.inf if found.claimed is None else found.claimed, console.stdout()
        out.print(
            f"claimed: epsilon {format_epsilon(claimed)} at delta {found.delta:g}\n"
            f"attack: {found.right:,} of {found.guesses:,} guesses right, "
            f"{len(found.coins):,} canaries\n"
            f"proven: epsilon at least {found.curve_bound:.3f}, if only the amount of noise may be "
            f"wrong ({verdict['confidence']:.0%} confidence)"
        )
        out.print(HOLDS if found.holds else BROKEN)
    if not found.holds:
        raise typer.Exit(MISFIT)
