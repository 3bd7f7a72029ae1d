"""dpmac runs: one line per run, from its public files alone. Loads no torch."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console, late
from dpmac_cli.cli.options import command
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.settings import PrintJson
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.files import to_json
from dpmac_cli.runs import folder
from dpmac_cli.tasks.task import METRICS

if TYPE_CHECKING:
    from dpmac_cli.release.report import Report

#: Where runs are, unless a folder is named.
ROOT = Path("runs")
#: Facts of a run by their keys in JSON; None if unknown, as epsilon without privacy.
UNKNOWN: Mapping[str, Any] = dict.fromkeys(
    (
        *("folder", "state", "changed", "dataset", "optimizer", "private", "epsilon", "delta"),
        *("metric", "score", "seeded", "audit"),
    )
)
#: Exceptions raised while reading a damaged file.
DAMAGE = (*folder.BROKEN, InputError)
SEEDED, AUDITED = "*", "!"


@command()
def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDERS", help="Where to look. [default: runs]"),
    ] = None,
    *,
    json: PrintJson = False,
) -> None:
    """List runs, the newest first: what was trained, its epsilon, its accuracy and how it ended.

    Runs are looked for in these folders and below them.

    Example: dpmac runs runs/compare

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    roots = folders or [ROOT]
    raise_errors(
        f"{root} {'is a file' if root.exists() else 'does not exist'}. Use a folder of runs, or "
        f"none for {ROOT}/."
        for root in folders or ()
        if not root.is_dir()
    )
    places = {where.resolve(): where for root in roots for where in _runs_below(root)}
    found = sorted(map(_facts, places.values()), key=lambda run: run["changed"], reverse=True)
    if json:
        console.print_result(to_json({"runs": found}))
    elif found:
        _print(console.stdout(), found)
    else:
        where = " or ".join(map(str, roots))
        hint = "To train one: dpmac train --dataset digits"
        console.stdout().print(Text(f"There are no runs in {where} yet. {hint}"))


def _runs_below(root: Path) -> Iterator[Path]:
    """Yield runs in a folder and below it.

    Folders within a run, hidden folders, links to folders, and what cannot be read are skipped.
    """
    for name, folders, _ in os.walk(root):
        where = Path(name)
        is_run = _is_run(where)
        folders[:] = [] if is_run else sorted(f for f in folders if not f.startswith("."))
        if is_run:
            yield where


def _is_run(where: Path) -> bool:
    """Return whether a folder is a run's, whole or damaged."""
    with contextlib.suppress(*DAMAGE):
        if (where / folder.CHECKPOINTS).is_dir() and (where / folder.LOCK).is_file():
            return True
        if folder.is_configured(where):
            return True
        # Any report, also one that cannot be read, so that what it cost is not overlooked.
        report = loads((where / folder.REPORT).read_bytes())
        return folder.is_report(report)
    return False


def _facts(where: Path) -> dict[str, Any]:
    """Return the facts of a run by the keys of :data:`UNKNOWN`."""
    files = (where / name for name in (folder.CONFIG, folder.METRICS, folder.REPORT))
    changed = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    state, report = late.report.how_it_ended(where)
    facts = {
        **UNKNOWN,
        "folder": str(where),
        "state": state,
        "changed": datetime.fromtimestamp(changed, UTC).isoformat(timespec="seconds"),
    }
    if report is not None:
        return facts | _reported(report)
    if state == late.report.DAMAGED:
        return facts
    with contextlib.suppress(*DAMAGE):
        return facts | _unreported(where)
    damaged = state if state == late.report.RUNNING else late.report.DAMAGED
    return facts | {"state": damaged}


def _reported(report: "Report") -> dict[str, Any]:
    """Return the facts in the report of a run."""
    metric, score = report.score
    return {
        "dataset": report.data.name,
        "optimizer": report.settings.optimizer,
        "private": report.private,
        "epsilon": report.epsilon,
        "delta": report.delta,
        "metric": metric.name,
        "score": score.value,
        "seeded": report.seeded,
        "audit": report.settings.canaries is not None,
    }


def _unreported(where: Path) -> dict[str, Any]:
    """Return what the settings say of a run without a report. Raises ``DAMAGE``."""
    settings = folder.config(where)
    name, optimizer = str(settings["dataset"]), str(settings["optimizer"])
    if not f"{name}{optimizer}".isprintable():
        raise ValueError(f"{folder.CONFIG} was changed")
    return {
        "dataset": name if name in DATASETS else Path(name).stem,
        "optimizer": optimizer,
        "private": not settings.get("no-dp", False),
        "audit": settings.get("canaries", 0) > 0,
    }


def _print(out: Console, found: Sequence[Mapping[str, Any]]) -> None:
    console.widen(out)
    rows = ([show(run) or "-" for show in COLUMNS.values()] for run in found)
    out.print(console.plain_table(COLUMNS, rows, no_wrap=True, padding=(0, 1, 0, 0)))
    if any(run["seeded"] and run["private"] for run in found):
        out.print(f"{SEEDED} with --seed: no privacy against anyone who knows the seed")
    if any(run["audit"] for run in found):
        out.print(f"{AUDITED} an audit run: the model is unfit for release")


def _epsilon(run: Mapping[str, Any]) -> str:
    """Return epsilon and delta in words; "" if they are not known."""
    if run["private"] is False:
        return "no privacy"
    if run["seeded"] is None:  # without a report, none is known yet
        return ""
    marks = SEEDED * bool(run["seeded"]) + AUDITED * bool(run["audit"])
    return f"{format_epsilon(run['epsilon'])}{marks} at {run['delta']:g}"


def _score(run: Mapping[str, Any]) -> str:
    """Return the score and its name; "" if there is none."""
    metric = METRICS.get(run["metric"] or "")
    known = metric is not None and run["score"] is not None
    return f"{metric.title} {metric.text(run['score'])}" if metric and known else ""


#: Cells of a run by the names of columns.
COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str | Text]] = {
    "run": lambda run: Text(run["folder"], overflow="ellipsis"),
    "dataset": lambda run: run["dataset"],
    "optimizer": lambda run: run["optimizer"],
    "epsilon at delta": _epsilon,
    "score": _score,
    "state": lambda run: run["state"],
    "changed": lambda run: run["changed"][:10],
}
