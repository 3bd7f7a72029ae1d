"""Commands for trained models: evaluation, audits, prediction, model cards and web pages."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console
from dpmac_cli.cli.options import argument, with_options
from dpmac_cli.config.given import parse
from dpmac_cli.config.settings import DETAILS
from dpmac_cli.errors import MISFIT, InputError, raise_errors
from dpmac_cli.plots import faults_of_picture
from dpmac_cli.runs.card import FORMATS, render_card, run_page
from dpmac_cli.runs.folder import CARD
from dpmac_cli.storage.files import shown, to_json, write_atomically

if TYPE_CHECKING:
    from dpmac_cli.runs.audit import Audit
    from dpmac_cli.runs.scoring import Scored

HOLDS = (
    "The attack does not contradict the claim. That does not prove it: a better attack might find "
    "more."
)
BROKEN = (
    "The attack contradicts the claim, which may happen by chance in 1 of 20 correct runs. Train "
    "and attack again. If the result is the same, training has a bug: publish none of its models."
)


@with_options(
    "eval",
    argument("run", "A run folder, or a model.safetensors."),
    details={"dataset": DETAILS["dataset"]},
)
def evaluate(
    run: Path,
    dataset: str | None,
    model: str | None,
    data_dir: str | None,
    device: str,
    plot: Path | None,
    audit: bool,
    json: bool,
) -> None:
    """Load a model, score the test set and print the result."""
    if audit:  # only reads files of the run
        others = {"dataset": dataset, "data-dir": data_dir, "plot": plot}
        what = "--audit scores guesses, not test samples: leave out"
        raise_errors(f"{what} --{name}." for name, given in others.items() if given is not None)
        with console.waiting(json, "bounds"):
            from dpmac_cli.runs.audit import read_audit  # noqa: PLC0415  (loads numpy)

            found = read_audit(run)
            verdict = found.verdict()
        _judge(found, verdict, run, json)
        return
    raise_errors(faults_of_picture(plot))
    given = parse({"dataset": dataset, "data_dir": data_dir, "device": device})
    with console.waiting(json, "scores"), console.kept_clear(json):
        from dpmac_cli.runs.scoring import score  # noqa: PLC0415  (loads torch)

        scored = score(run, dataset, given.get("data_dir"), device, model)
    if dataset is not None and scored.held_out:
        part = f"{scored.result.samples:,} records that the run's split holds out"
        console.print_notes([f"{dataset} has no test set: only the {part} are scored."])
    _show(scored, plot, json)


@with_options(
    "predict",
    argument("run", "A run folder, or a model.safetensors."),
    argument("data", "Images, an .npz or a table."),
)
def predict(
    run: Path, data: Path, model: str | None, device: str, out: Path, force: bool, quiet: bool
) -> None:
    """Load a model, predict and write a file."""
    raise_errors(_faults_of_file(out, (".csv",), force))
    parse({"device": device})
    with console.waiting(quiet, "loading"), console.kept_clear(json=True):
        from dpmac_cli.runs.prediction import predict  # noqa: PLC0415  (loads torch)

        found = predict(run, data, device, model)
    found.write(out)
    if lost := found.unanswered:
        console.print_notes([f"for {lost:,} records the output is NaN, so they have no class"])
    if not quiet:
        console.stdout().print(Text(f"{out}: predictions for {len(found.records):,} records"))


@with_options("card", argument("run", "A run folder."), details={"format": {"choices": FORMATS}})
def card(run: Path, format: str, **answers: str | None) -> None:
    """Print the model card."""
    if format not in FORMATS:
        raise InputError(f"--format must be {', '.join(FORMATS)}, not '{format}'.")
    written = {name.replace("_", " "): " ".join((a or "").split()) for name, a in answers.items()}
    console.print_result(render_card(run, format, {row: a for row, a in written.items() if a}))


@with_options("report", argument("path", "A run folder, or a folder of dpmac compare."))
def report(path: Path, html: Path, force: bool) -> None:
    """Write a web page."""
    raise_errors(_faults_of_file(html, (".html",), force, "html"))
    with console.waiting(quiet=False, first="report"):
        if (path / "compare.json").is_file():
            from dpmac_cli.studies.tables import study_page  # noqa: PLC0415  (loads torch)

            page = study_page(path)
        else:
            page = run_page(path)
    write_atomically(html, page.encode())
    console.stdout().print(Text(f"{html}: web page of {path}, in one file"))


def _faults_of_file(
    path: Path, kinds: Sequence[str], force: bool, flag: str = "out"
) -> Iterator[str]:
    """Yield faults of the path of a file to write."""
    if path.suffix not in kinds:
        yield f"--{flag} {path} must end in {' or '.join(kinds)}."
    if not path.parent.is_dir():
        yield f"The folder {path.parent} of --{flag} does not exist."
    if path.exists() and not (force and path.is_file()):
        yield f"{path} already exists. Add --force to replace it, or use another --{flag}."


def _show(scored: "Scored", plot: Path | None, json: bool) -> None:
    """Print the scores of a model, and draw them if requested."""
    from dpmac_cli.cli import display  # noqa: PLC0415  (loads torch)
    from dpmac_cli.runs.scoring import draw_evaluation  # noqa: PLC0415  (loads torch)
    from dpmac_cli.training import metrics  # noqa: PLC0415  (loads numpy)

    result, card = scored.result, scored.path.with_name(CARD)
    answers = result.answers
    values = metrics.all_metrics(answers)
    intervals = metrics.intervals(answers, values)
    if plot:
        draw_evaluation(answers, values["calibration-error"], scored.classes, plot)
    exact = "these scores are exact and not covered by epsilon, unlike those in report.json"
    console.print_notes([*display.doubts(result), *[exact] * scored.covered])
    if json:
        shares = metrics.as_values(answers, values)
        body = {
            "model": str(scored.path),
            "card": str(card) if card.is_file() else None,
            "dataset": scored.dataset,
            "loss": shown(result.loss),
            "samples": result.samples,
            **shares,
            "intervals": {
                name.replace("-", "_"): [*map(shown, ends)] for name, ends in intervals.items()
            },
            "per_class": dict(zip(scored.classes, shares["sensitivity"], strict=True)),
            "confusion": result.confusion.tolist(),
        }
        console.print_result(to_json(body))
        return
    out = console.stdout()
    out.print(
        f"{scored.path} on {scored.dataset}: accuracy {result.accuracy:.2%}, "
        f"loss {result.loss:.4f}, {result.samples:,} {'held-out ' * scored.held_out}samples"
    )
    out.print(display.metrics_table(values, intervals))
    out.print(display.evaluation_table(result, scored.classes))
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
            f"proven: epsilon at least {found.lower_bound:.3f} for any training, and at least "
            f"{found.curve_bound:.3f} if only the amount of noise may be wrong "
            f"({verdict['confidence']:.0%} confidence)"
        )
        for rate, share in found.true_positive_rates.items():
            out.print(f"included canaries found at {rate:.1%} false alarms: {share:.1%}")
        out.print(HOLDS if found.holds else BROKEN)
    if not found.holds:
        raise typer.Exit(MISFIT)
