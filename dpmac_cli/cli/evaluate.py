"""dpmac eval: metrics of a trained model on test records, or its audit."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console
from dpmac_cli.cli.failures import explained
from dpmac_cli.cli.options import (
    DEBUG,
    JSON,
    argument,
    one_of,
    option,
    path_option,
    switch,
    with_options,
)
from dpmac_cli.config.given import parse
from dpmac_cli.config.settings import OWN_DATA
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import MISFIT, InputError
from dpmac_cli.runs.audit import CONFIDENCE, Audit, read_audit
from dpmac_cli.runs.folder import CARD
from dpmac_cli.storage.files import to_json

if TYPE_CHECKING:
    from dpmac_cli.runs.scoring import Scored

WHAT = (
    f"What to score on: {', '.join(DATASETS)}; or {OWN_DATA[1]}. [default: what it was trained on]"
)
PICTURES = (".png", ".svg", ".pdf")
OWN_MODEL = "Where a network of your own is. What a model file names is never imported."
HOLDS = (
    "The attack does not contradict the claim. That does not prove it: a better attack might find "
    "more."
)
BROKEN = (
    "The attack contradicts the claim, as of 20 sound runs one may by chance. Train and attack "
    "again: if that says the same, what trains has a bug, and none of its models may be published."
)


@with_options(
    argument("run", "A run folder, or a model.safetensors.", "RUN", kind=Path, default=...),
    option("dataset", WHAT, "Task", "NAME|PATH", one_of(DATASETS)),
    option("model", OWN_MODEL, "Task", "FILE.py:FACTORY"),
    option("data_dir", "Where data sets lie (or DPMAC_DATA_DIR).", "Run", "PATH"),
    option("device", "auto, cpu, cuda or cuda:N. [default: auto]", "Run", "STR", default="auto"),
    path_option("plot", "Draw ROC and calibration (.png, .svg or .pdf).", "Output", metavar="FILE"),
    switch("audit", "Of a run with --canaries: what the attack proves, what it claims.", "Task"),
    JSON,
    DEBUG,
)
@explained
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
    """Load a model, score the test set, print the result."""
    if audit:  # reads what its run has written, and nothing else
        others = {"dataset": dataset, "data-dir": data_dir, "plot": plot}
        what = "--audit scores guesses, not test samples: leave out"
        if errors := [f"{what} --{name}." for name, given in others.items() if given is not None]:
            raise InputError(errors)
        _judge(read_audit(run), run, json)
        return
    if plot and (plot.suffix.lower() not in PICTURES or not plot.parent.is_dir()):
        raise InputError(
            f"--plot {plot} must be a file in a folder that exists, ending in one of "
            f"{', '.join(PICTURES)}."
        )
    given = parse({"dataset": dataset, "data_dir": data_dir, "device": device})
    from dpmac_cli.runs.scoring import score  # noqa: PLC0415  (loads torch)

    with console.kept_clear(json):
        scored = score(run, dataset, given.get("data_dir"), device, model)
    _show(scored, plot, json)


def _show(scored: "Scored", plot: Path | None, json: bool) -> None:
    """Print what a model scores, and draw it if asked."""
    from dpmac_cli.cli import display  # noqa: PLC0415  (loads torch)
    from dpmac_cli.runs.scoring import draw_evaluation  # noqa: PLC0415  (loads torch)
    from dpmac_cli.training import metrics  # noqa: PLC0415  (loads numpy)

    result, card = scored.result, scored.path.with_name(CARD)
    answers = result.answers
    values = metrics.all_metrics(answers)
    intervals = metrics.intervals(answers, values)
    if plot:
        draw_evaluation(answers, values["calibration-error"], scored.classes, plot)
    console.print_notes(display.doubts(result))
    if json:
        body = {
            "model": str(scored.path),
            "card": str(card) if card.is_file() else None,
            "dataset": scored.dataset,
            "loss": metrics.shown(result.loss),
            "samples": result.samples,
            **metrics.as_values(answers, values),
            "intervals": {
                name.replace("-", "_"): [*map(metrics.shown, ends)]
                for name, ends in intervals.items()
            },
            "per_class": dict(
                zip(scored.classes, map(metrics.shown, result.per_class), strict=True)
            ),
            "confusion": result.confusion.tolist(),
        }
        console.print_result(to_json(body))
        return
    out = console.stdout()
    out.print(display.evaluation_table(result, scored.classes))
    out.print(display.metrics_table(values, intervals))
    out.print(
        f"{scored.path} on {scored.dataset}: accuracy {result.accuracy:.2%}, "
        f"loss {result.loss:.4f}, {result.samples:,} samples"
    )
    if card.is_file():
        out.print(f"what it is and what its privacy is worth: {card}")


def _judge(found: Audit, run: Path, json: bool) -> None:
    """Print what an audit proves; exit code 4 if it is that the claim is false."""
    if json:
        console.print_result(to_json({"run": str(run), **found.verdict()}))
    else:
        claimed = math.inf if found.claimed is None else found.claimed
        console.stdout().print(
            f"claimed: epsilon {format_epsilon(claimed)} at delta {found.delta:g}\n"
            f"attack: {found.right:,} of {found.guesses:,} guesses right, "
            f"{len(found.coins):,} canaries\n"
            f"proven: epsilon at least {found.lower_bound:.3f} (lower bound at "
            f"{CONFIDENCE:.0%} confidence)\n{HOLDS if found.holds else BROKEN}"
        )
    if not found.holds:
        raise typer.Exit(MISFIT)
