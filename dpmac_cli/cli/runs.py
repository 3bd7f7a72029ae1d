"""dpmac runs: one line per run."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console
from dpmac_cli.cli.options import JsonFlags, argument, take, with_options
from dpmac_cli.config.fields import options
from dpmac_cli.errors import raise_errors
from dpmac_cli.storage.files import to_json
from dpmac_cli.tasks.known import METRICS

if TYPE_CHECKING:
    from dpmac_cli.release.listing import ListedRun

#: Where runs are, unless a folder is named.
ROOT = Path("runs")
#: States without a report: figures are as of the last epoch that was scored.
UNREPORTED = ("running", "diverged", "cut-off")
STYLES = {"finished": "", "running": "bold", "diverged": "red", "cut-off": "red", "damaged": "red"}
SEEDED, AUDITED = "*", "!"
#: Units of time in seconds, the largest first.
UNITS = {"d": 86_400, "h": 3600, "min": 60, "s": 1}


@with_options(
    argument("folders", "Where to look. [default: runs]", required=False, several=True),
    options(JsonFlags),
)
def runs(folders: list[Path] | None, **given: Any) -> None:
    """List runs, the newest first: what was trained, its epsilon, its accuracy and how it ended.

    Runs are looked for in these folders and below them. A setting is shown if it had an effect,
    and if runs of the same dataset and optimizer differ in it.

    Example: dpmac runs runs/compare

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    from dpmac_cli.release.listing import find_runs  # noqa: PLC0415  (loads the accountants)

    flags, roots = take(JsonFlags, given), folders or [ROOT]
    raise_errors(
        f"{root} {'is a file' if root.exists() else 'does not exist'}. Use a folder of runs, or "
        f"none for {ROOT}/."
        for root in folders or ()
        if not root.is_dir()
    )
    found = find_runs(roots)
    if flags.json:
        console.print_result(to_json({"runs": [_values(run) for run in found]}))
    elif found:
        _print(console.stdout(), found, roots)
    else:
        where = " or ".join(map(str, roots))
        hint = "To train one: dpmac train --dataset digits"
        console.stdout().print(Text(f"There are no runs in {where} yet. {hint}"))


def _values(run: "ListedRun") -> dict[str, Any]:
    """Return JSON values; an infinite epsilon is null, and then ``private`` is false."""
    changed = datetime.fromtimestamp(run.changed, UTC).isoformat(timespec="seconds")
    epsilon = None if run.epsilon == math.inf else run.epsilon
    return {**vars(run), "folder": str(run.folder), "changed": changed, "epsilon": epsilon}


def _print(out: Console, found: Sequence["ListedRun"], roots: Sequence[Path]) -> None:
    """Print a table. What all runs have in common stands above it, so that a run fits in a line."""
    same = [name for name in COMMON if len({getattr(run, name) for run in found}) == 1]
    if shared := [str(value) for name in same if (value := getattr(found[0], name))]:
        out.print(Text(" with ".join(shared), style="bold"))
    console.widen(out)
    out.print(_table(found, roots, [column for column in COLUMNS if column not in same]))
    for remark in _remarks(found):
        out.print(Text(remark, style="dim"))


def _table(found: Sequence["ListedRun"], roots: Sequence[Path], columns: Sequence[str]) -> Table:
    from dpmac_cli.release.listing import varied_settings  # noqa: PLC0415  (loads the accountants)

    below = len(roots) == 1 and all(run.folder != roots[0] for run in found)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(f"{roots[0]}/" if below else "run", overflow="ellipsis", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    varied = [", ".join(_settings(settings)) for settings in varied_settings(found)]
    if any(varied):
        table.add_column("settings")  # the only one that is made narrower, see below
    for run, settings in zip(found, varied, strict=True):
        path = run.folder.relative_to(roots[0]) if below else run.folder
        cells = [COLUMNS[name](run) for name in columns]
        last = [Text(settings, overflow="ellipsis", no_wrap=True)] if any(varied) else []
        table.add_row(Text(str(path)), *cells, *last)
    return table


def _settings(settings: dict[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, bool):
            yield name if value else f"no {name}"
        else:
            yield f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"


def _epsilon(run: "ListedRun") -> Text:
    if run.private is False:
        return Text("no privacy", style="red")
    if run.epsilon is None:
        return Text("-")
    marks = SEEDED * bool(run.seeded) + AUDITED * bool(run.audit)
    return Text(format_epsilon(run.epsilon) + marks)


def _remarks(found: Iterable["ListedRun"]) -> Iterator[str]:
    private = [run for run in found if run.private]
    deltas = {run.delta for run in private}
    if len(deltas) == 1:
        yield f"epsilon at delta {deltas.pop():g}"
    elif deltas:
        yield "epsilons at different deltas do not compare; --json has each"
    if any(run.seeded for run in private):
        yield f"{SEEDED} with --seed: no privacy against anyone who knows the seed"
    if any(run.audit for run in private):
        yield f"{AUDITED} an audit run: the model is unfit for release"
    states = {run.state for run in found}
    if shown := ", ".join(name for name in UNREPORTED if name in states):
        yield f"{shown}: as of the last epoch that was scored; whether with --seed is not known"


def age(seconds: float) -> str:
    """Return a duration in its largest unit, rounded down."""
    unit, size = next((pair for pair in UNITS.items() if seconds >= pair[1]), ("s", 1))
    return f"{int(max(seconds, 0) / size)} {unit}"


def _score(run: "ListedRun") -> str:
    """Return the accuracy, or the name and value of another score."""
    metric = METRICS.get(run.metric or "")
    if metric is None or run.score is None:
        return "-"
    return f"{metric.title} " * (metric.name != "accuracy") + metric.text(run.score)


#: Cells of a run by the names of columns.
COLUMNS: Mapping[str, Callable[["ListedRun"], Text | str]] = {
    "dataset": lambda run: Text(run.dataset or "-"),
    "optimizer": lambda run: Text(run.optimizer or "-"),
    "epsilon": _epsilon,
    "score": _score,
    "state": lambda run: Text(run.state, style=STYLES.get(run.state, console.ATTENTION)),
    "age": lambda run: age(time.time() - run.changed),
}
#: Columns that are left out if all runs have the same value, and columns of numbers.
COMMON, NUMBERS = ("dataset", "optimizer"), ("epsilon", "score", "age")
