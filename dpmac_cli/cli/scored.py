"""dpmac eval and dpmac predict: a trained model on test records and on new ones.

Scores and predictions are exact: they reveal information about the records that they are of, which
epsilon does not cover, and notes say so.
"""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field, StrictBool
from rich.table import Column, Table
from rich.text import Text

from dpmac_cli.accounting.risk import percent
from dpmac_cli.accounting.statements import cost_in_words
from dpmac_cli.cli import console, late
from dpmac_cli.cli.options import ReplaceFile, Trained, command, faults_of_file
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.flags import OneOf, SomePath
from dpmac_cli.config.settings import OWN_DATA, THRESHOLD, DataDir, Device, PrintJson, Quiet
from dpmac_cli.errors import MISFIT, counted, raise_errors
from dpmac_cli.files import finite_or_none, to_json
from dpmac_cli.runs.folder import CARD, WANTED_MODEL
from dpmac_cli.tasks.task import METRICS, Task

if TYPE_CHECKING:
    from dpmac_cli.config.facts import DataFacts
    from dpmac_cli.release.attack import Recipe
    from dpmac_cli.release.model_file import Released
    from dpmac_cli.training.evaluation import Evaluation

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
        description="FILE.py:FACTORY of your own network. Factories named in model files are never "
        "imported."
    ),
]


PublicNetwork = Annotated[
    SomePath | None,
    Field(
        description="Folder of the text encoder, or file of the weights of the backbone, that the "
        "model was trained on. [default: the registered one, or where its run says]"
    ),
]
EvaluatedOn = Annotated[
    str | None,
    OneOf(DATASETS, OWN_DATA),
    Field(description="Dataset to evaluate on. [default: the dataset that it was trained on]"),
]
JudgeAudit = Annotated[
    StrictBool,
    Field(
        description="For a run with --canaries: compare the epsilon that the attack proves with "
        "the guarantee."
    ),
]
AttackRecipe = Annotated[
    StrictBool,
    Field(
        description="Attack the recipe of the run by runs of it on half of the records each. Its "
        "figures, in RUN-attack/attack.json, are only for whoever holds the records."
    ),
]
ShadowRuns = Annotated[
    int | None,
    Field(ge=4, le=10_000, description="Number of runs of --attack with noise. [default: 32]"),
]
AttackJobs = Annotated[
    int | None,
    Field(ge=1, le=1024, description="Number of runs of --attack at a time. [default: 1]"),
]
NewRecords = Annotated[
    Path, typer.Argument(metavar="DATA", help="Images, texts, an .npz or a table.")
]
Predictions = Annotated[SomePath, Field(description="CSV file to write.")]
SkipBad = Annotated[
    StrictBool,
    Field(description="Leave out unusable records and files instead of rejecting all."),
]
IdColumn = Annotated[
    str | None,
    Field(
        description="Column of the table to keep as id beside each prediction. [default: id, if "
        "there is one]"
    ),
]
Continuation = Annotated[
    int | None,
    Field(
        ge=1,
        le=10_000,
        description="Number of tokens that a language model adds to a text. [default: 50]",
    ),
]
Temperature = Annotated[
    float | None,
    Field(
        ge=0,
        le=100,
        description="Of the draws of these tokens; 0 for the most probable ones. [default: 1]",
    ),
]
Threshold = Annotated[
    str | None,
    THRESHOLD,
    Field(
        description="Decision between two classes: balanced, a sensitivity for the last class, a "
        "probability of it, or most-likely. [default: that of the run]"
    ),
]
Level = Annotated[
    float | None,
    Field(
        gt=0,
        lt=1,
        description="Share of the targets that the intervals of predicted numbers have. [default: "
        "0.9]",
    ),
]
#: Why an audit takes no dataset.
GUESSES = "an audit scores guesses, not test samples"
#: Number of runs of an attack by default.
RUNS = 32


@command(
    not_both={
        ("audit", "dataset"): GUESSES,
        ("audit", "data_dir"): GUESSES,
        ("audit", "attack"): "an audit run is attacked by its crafted records",
    }
)
def evaluate(
    run: Trained,
    *,
    dataset: EvaluatedOn = None,
    model: OwnFactory = None,
    public: PublicNetwork = None,
    audit: JudgeAudit = False,
    attack: AttackRecipe = False,
    runs: ShadowRuns = None,
    jobs: AttackJobs = None,
    json: PrintJson = False,
    data_dir: DataDir = None,
    device: Device = "auto",
) -> None:
    """Evaluate a trained model on every test sample, judge its audit, or attack its recipe.

    Examples:

        dpmac eval runs/mnist-dp-macadam-1

        dpmac eval RUN --json

        dpmac eval RUN --attack --jobs 2

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, 4 the model does not fit the data,
    or an audit or attack contradicts the guarantee.
    """
    if not attack:
        faults = list[str]()
        for name, count in (("runs", runs), ("jobs", jobs)):
            if count:
                faults.append(f"{{{name}}} is for {{attack}}.")
        raise_errors(faults)
    if attack:
        recipe = partial(late.attack.Recipe, run, dataset, data_dir, model, device)
        _attack(run, recipe, runs, jobs, json)
        return
    if audit:  # only reads files of the run
        with console.waiting(json, "bounds"):
            guesses, claim = late.audit.read_audit(run)
            assert claim.delta is not None  # noqa: S101  (a claim has one)
            verdict = late.audit.verdict(guesses, claim.training, claim.delta, claim.epsilon)
        _judge(verdict, run, json)
        return
    with console.waiting(json, "scores"), console.kept_clear(json):
        loaded = late.run.load(run, device=device, factory=model, public=public)
        result, known = late.scoring.score(loaded.released, dataset, data_dir)
    if dataset is not None and known.held_out:
        part = f"{counted(result.samples, 'record')} that the run's split holds out"
        console.print_notes([f"{dataset} has no test set: only the {part} are scored."])
    _show(loaded.released, result, known, json)


@command()
def predict(
    run: Trained,
    data: NewRecords,
    *,
    model: OwnFactory = None,
    public: PublicNetwork = None,
    out: Predictions = Path("predictions.csv"),
    force: ReplaceFile = False,
    skip_bad: SkipBad = False,
    id: IdColumn = None,
    length: Continuation = None,
    temperature: Temperature = None,
    threshold: Threshold = None,
    level: Level = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Predict classes or numbers of new records, or continue texts, by a trained model.

    DATA is a folder of images or texts (including subfolders), an .npz with an array x, or a
    table; labels are not needed. Records are read like the training records. The output has one
    row per record: the name of the file or the row from 0, a table's column --id, and the
    predicted class with the probability of each class, the predicted numbers, or how a language
    model continues a text, and the perplexity of that text. It reveals information about these
    records, which the run's epsilon does not cover.

    Example: dpmac predict runs/photos-dp-macadam-1 new-photos --out predictions.csv

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, 4 the model cannot be built, memory
    ran out or the device failed.
    """
    faults = list(faults_of_file(out, (".csv",), force, read=_records_of(run, data)))
    for path, remedy in ((run, f" {WANTED_MODEL}"), (data, "")):
        if not path.exists():
            faults.append(f"{path} does not exist.{remedy}")
    raise_errors(faults)
    with console.waiting(quiet, "loading"), console.kept_clear(json=True):
        loaded = late.run.load(run, device=device, factory=model, public=public)
        predictions = loaded.predict(
            data,
            skip_bad=skip_bad,
            id_column=id,
            length=length,
            temperature=temperature,
            threshold=threshold,
            level=level,
        )
    predictions.write(out)
    if predictions.skipped.records:
        console.print_notes([predictions.skipped.note(str(data))])
    console.print_private_notes(f"{data}: {remark}." for remark in predictions.remarks)
    if predictions.unanswered:
        records = counted(predictions.unanswered, "record")
        console.print_notes([f"{records} without a prediction: the output is NaN"])
    if not quiet:
        records = counted(len(predictions.records), "record")
        console.stdout().print(Text(f"{out}: predictions for {records}"))


def _records_of(run: Path, data: Path) -> dict[Path, str]:
    """Return paths of records that no prediction may replace, with what they are.

    Args:
        run: folder of the run, or its model file. Settings that cannot be read name no records.
        data: the records to predict.
    """
    paths = dict[Path, str]()
    place = run if run.is_dir() else run.parent
    with contextlib.suppress(*late.folder.BROKEN):
        trained_on = late.folder.settings(place)["dataset"]
        paths[Path(str(trained_on))] = f"the records that {run} was trained on"
    return paths | {data: "the table to predict" if data.is_file() else "the records to predict"}


def _by_key(
    values: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    """Return metrics and their intervals for JSON, by key; null for what is not finite.

    Args:
        values: metrics by name.
        intervals: lower and upper ends by name.
    """
    scores, ends = dict[str, Any](), dict[str, list[float | None]]()
    for name, value in values.items():
        scores[METRICS[name].key] = finite_or_none(value)
    for name, interval in intervals.items():
        ends[METRICS[name].key] = [*map(finite_or_none, interval)]
    return {**scores, "intervals": ends}


def _show(released: "Released", result: "Evaluation", known: "DataFacts", json: bool) -> None:
    """Print the scores of a model, with 95% intervals and beside those of constant predictions.

    Doubts about the scores, and that they are not covered by epsilon, are notes on stderr.

    Args:
        released: the model.
        result: its scores.
        known: facts of the dataset that they are of.
        json: whether to print JSON for a program, with null for numbers that are not finite.
    """
    path, facts = released.path, released.facts
    card = path.with_name(CARD)
    headline, values, intervals = result.task.headline, result.metrics, result.intervals()
    details = result.details()
    notes = list(late.display.doubts(result))
    if facts.settings.cover_scores:
        notes.append(
            "these scores are exact and not covered by epsilon, unlike those in report.json"
        )
    console.print_notes(notes)
    if json:
        body = {
            "model": str(path),
            "card": str(card) if card.is_file() else None,
            "dataset": known.name,
            "loss": finite_or_none(result.loss),
            "samples": result.samples,
            **_by_key(values, intervals),
            **details,
            **_by_output(result.task, details),
        }
        console.print_result(to_json(body))
        return
    out = console.stdout()
    units = "" if result.units is None else f" of {counted(len(result.units), 'unit')}"
    out.print(
        f"{path} on {known.name}: {headline.title} "
        f"{headline.text(values[headline.name])}, loss {result.loss:.4f}, "
        f"{result.samples:,} {'held-out ' * known.held_out}samples{units}"
    )
    if "operating_point" in facts.sentences:
        out.print(Text(str(facts.sentences["operating_point"])))
    metrics = Table("", Column("value", style="bold"), "95% interval", "constant")
    for metric in result.task.metrics:
        metrics.add_row(
            metric.title,
            metric.text(values[metric.name]),
            " to ".join(map(metric.text, intervals[metric.name])),
            metric.text(details[metric.constant]) if metric.constant in details else "",
        )
    out.print(*late.display.in_blocks(metrics, out.width), sep="\n")
    if "confusion" in details:
        table = late.display.table_by_class(result.task.names, details)
        out.print(*late.display.in_blocks(table, out.width), sep="\n")
    if card.is_file():
        out.print(f"model card, with the privacy guarantee: {card}")


def _by_output(task: Task, details: Mapping[str, Any]) -> dict[str, Any]:
    """Return sensitivities by the names of classes, or the target that is predicted instead.

    Args:
        task: what was predicted.
        details: see :meth:`~dpmac_cli.tasks.task.Task.details`.
    """
    if "sensitivity" not in details:
        return {"target": task.facts["target"]}
    return {"per_class": dict(zip(task.names, details["sensitivity"], strict=True))}


def _attack(
    run: Path, recipe: "Callable[[], Recipe]", runs: int | None, jobs: int | None, json: bool
) -> None:
    """Attack a recipe, and print what may be shown; exit with code 4 if it contradicts the claim.

    No figure of the attack is printed: a log of the terminal may be read by others.

    Args:
        run: folder of the run whose recipe is attacked.
        recipe: returns what is attacked, with its records.
        runs: number of runs with noise; None for the default.
        jobs: number of runs at a time; None for one.
        json: whether to print JSON for a program.

    Raises:
        Exit: the attack contradicts the claim. Its result was printed before.
    """
    with console.waiting(json, "runs"), console.kept_clear(json):
        result = late.attack.attack(recipe, runs or RUNS, jobs or 1)
    if json:
        bounds = {f"{rate:g}": share for rate, share in result.bounds.items()}
        places = {"run": str(run), "attack": str(result.path)}
        console.print_result(to_json({**places, "bounds": bounds, "holds": result.holds}))
    else:
        out = console.stdout()
        for rate, share in result.bounds.items():
            out.print(
                f"guarantee: at {rate:.1%} false alarms, at most {percent(share)} of members found"
            )
        out.print(f"figures of the attack: {result.path}, which only you can read. Keep them so.")
        out.print(HOLDS if result.holds else BROKEN)
    if not result.holds:
        raise typer.Exit(MISFIT)


def _judge(verdict: Mapping[str, Any], run: Path, json: bool) -> None:
    """Print the result of an audit; exit with code 4 if it contradicts the claim.

    Args:
        verdict: what the guesses of the attack on canaries prove, and the claim, as JSON values.
        run: folder of the run.
        json: whether to print JSON for a program.

    Raises:
        Exit: the attack contradicts the claim. The result was printed before.
    """
    if json:
        console.print_result(to_json({"run": str(run), **verdict}))
    else:
        out = console.stdout()
        out.print(
            f"claimed: {cost_in_words(verdict['claimed_epsilon'], verdict['delta'])}\n"
            f"attack: {verdict['right']:,} of {verdict['guesses']:,} guesses right, "
            f"{verdict['canaries']:,} canaries\n"
            f"proven: epsilon at least {verdict['curve_bound']:.3f}, if only the amount of noise "
            f"may be wrong ({verdict['confidence']:.0%} confidence)"
        )
        out.print(HOLDS if verdict["holds"] else BROKEN)
    if not verdict["holds"]:
        raise typer.Exit(MISFIT)
