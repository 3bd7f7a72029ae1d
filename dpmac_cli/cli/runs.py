"""dpmac runs: one line per run, from its public files alone. Loads no torch.

A run is listed whatever its state: in training, ended, cut off without a report, or damaged. So
what a run on some records has cost is not overlooked because its files cannot be read.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console, late
from dpmac_cli.cli.options import command
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.settings import PrintJson
from dpmac_cli.errors import InputError, escaped, raise_errors
from dpmac_cli.files import finite_or_none, to_json
from dpmac_cli.runs import folder
from dpmac_cli.runs.ledger import spent_account
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
#: Space between columns.
GAP = "  "


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
    faults = list[str]()
    for root in folders or ():
        if not root.is_dir():
            fault = "is a file" if root.exists() else "does not exist"
            faults.append(f"{root} {fault}. Use a folder of runs, or none for {ROOT}/.")
    raise_errors(faults)
    places = dict[Path, Path]()  # a folder below two roots is listed once
    for root in roots:
        for where in _runs_below(root):
            places[where.resolve()] = where
    listed = [*map(_facts, places.values())]
    listed.sort(key=lambda run: run["changed"], reverse=True)
    if json:
        console.print_result(to_json({"runs": listed}))
    elif listed:
        _print(console.stdout(), listed)
    else:
        searched = " or ".join(map(str, roots))
        hint = "To train one: dpmac train --dataset digits"
        console.stdout().print(Text(f"There are no runs in {searched} yet. {hint}"))


def _runs_below(root: Path) -> Iterator[Path]:
    """Yield the folders of the runs in a folder and below it, in the order of their names.

    Folders within a run, hidden folders, links to folders, and what cannot be read are skipped.

    Args:
        root: where to look, which may itself be a run.
    """
    for name, folders, _ in os.walk(root):
        where = Path(name)
        if _is_run(where):
            folders.clear()
            yield where
        else:
            folders[:] = sorted(below for below in folders if not below.startswith("."))


def _is_run(where: Path) -> bool:
    """Return whether a folder is a run's, whole or damaged.

    It has the folder of checkpoints and a lock, a configuration that dpmac wrote, or a report.
    """
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
    """Return the facts of a run by the keys of :data:`UNKNOWN`.

    Those that cannot be read are None, and the state says "damaged". "changed" is the time of the
    last change of its files, in UTC in the format of ISO 8601.

    Args:
        where: folder of the run.
    """
    changed = 0.0
    for name in (folder.CONFIG, folder.METRICS, folder.REPORT):
        file = where / name
        if file.exists():
            changed = max(changed, file.stat().st_mtime)
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
    """Return the facts in the report of a run: all but "folder", "state" and "changed"."""
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
    """Return the facts in settings and ledger of a run without a report. Raises ``DAMAGE``."""
    settings = folder.config(where)
    name, optimizer = str(settings["dataset"]), str(settings["optimizer"])
    if not f"{name}{optimizer}".isprintable():
        raise ValueError(f"{folder.CONFIG} was changed")
    facts = {
        "dataset": name if name in DATASETS else Path(name).stem,
        "optimizer": optimizer,
        "private": not settings.get("no-dp", False),
        "audit": settings.get("canaries", 0) > 0,
    }
    account = spent_account(where)
    if account is not None and facts["private"]:
        epsilon = finite_or_none(account.epsilon)
        facts |= {"epsilon": epsilon, "delta": account.delta, "seeded": account.seeded}
    return facts


def _print(out: Console, facts_of_runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a line per run, and what its marks mean.

    On a terminal that is too narrow for it, the folder of a run has a line of its own.

    Args:
        out: the console for results, which is widened unless it is a terminal.
        facts_of_runs: facts by the keys of :data:`UNKNOWN`, in the order of the lines.
    """
    console.widen(out)
    rows = [tuple(COLUMNS)]
    for run in facts_of_runs:
        rows.append(tuple(cell_of(run) or "-" for cell_of in COLUMNS.values()))
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    is_wide = sum(widths) + len(GAP) * (len(widths) - 1) <= out.width
    style = "bold"
    for row in rows:
        line = f"{row[0]}\n{GAP}{_line(row[1:], widths[1:])}"
        out.print(Text(_line(row, widths) if is_wide else line, style=style))
        style = ""
    if any(run["seeded"] and run["private"] for run in facts_of_runs):
        out.print(f"{SEEDED} with --seed: no privacy against anyone who knows the seed")
    if any(run["audit"] for run in facts_of_runs):
        out.print(f"{AUDITED} an audit run: the model is unfit for release")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return the cells of a row, aligned.

    >>> _line(["run", "state"], [6, 8])
    'run     state'
    """
    aligned = (set_cell_size(cell, width) for cell, width in zip(cells, widths, strict=True))
    return GAP.join(aligned).rstrip()


def _epsilon(run: Mapping[str, Any]) -> str:
    """Return epsilon and delta in words; "" if they are not known."""
    if run["private"] is False:
        return "no privacy"
    if run["seeded"] is None:  # neither a report nor a ledger
        return ""
    marks = SEEDED if run["seeded"] else ""
    if run["audit"]:
        marks += AUDITED
    return f"{format_epsilon(run['epsilon'])}{marks} at {run['delta']:g}"


def _score(run: Mapping[str, Any]) -> str:
    """Return the score and its name; "" if there is none."""
    metric = METRICS.get(run["metric"] or "")
    if metric is None or run["score"] is None:
        return ""
    return f"{metric.title} {metric.text(run['score'])}"


#: Cells of a run by the names of columns.
COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "run": lambda run: escaped(run["folder"]),
    "dataset": lambda run: run["dataset"],
    "optimizer": lambda run: run["optimizer"],
    "epsilon at delta": _epsilon,
    "score": _score,
    "state": lambda run: run["state"],
    "changed": lambda run: run["changed"][:10],
}
