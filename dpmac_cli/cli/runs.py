"""dpmac runs: what lies in run folders."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console
from dpmac_cli.cli.failures import explained
from dpmac_cli.cli.options import DEBUG, JSON, argument, with_options
from dpmac_cli.errors import InputError
from dpmac_cli.storage.files import to_json

if TYPE_CHECKING:
    from dpmac_cli.runs.listing import Entry

DEFAULT_ROOT = Path("runs")
#: States without a report: figures are as of the last epoch that was scored.
UNREPORTED = ("running", "diverged", "cut-off")
STYLES = {"finished": "", "running": "bold", "diverged": "red", "cut-off": "red", "damaged": "red"}
SEEDED, AUDITED = "*", "!"
#: Units of time in seconds, the largest first.
UNITS = {"d": 86_400, "h": 3600, "min": 60, "s": 1}


@with_options(
    argument("folders", "Where to look. [default: runs]", "FOLDER", kind=list[Path] | None),
    JSON,
    DEBUG,
)
@explained
def runs(folders: list[Path] | None, json: bool) -> None:
    """Find and print runs, the newest first."""
    from dpmac_cli.runs.listing import find_runs  # noqa: PLC0415  (loads pydantic)

    _check(folders or ())
    roots = folders or [DEFAULT_ROOT]
    entries = sorted(find_runs(roots), key=lambda entry: -entry.changed)
    if json:
        console.print_result(to_json({"runs": [_values(entry) for entry in entries]}))
    elif entries:
        _print(console.stdout(), entries, roots)
    else:
        where = " or ".join(map(str, roots))
        hint = "To make one: dpmac train --dataset digits"
        console.stdout().print(Text(f"There are no runs in {where} yet. {hint}"))


def _check(roots: Iterable[Path]) -> None:
    errors = [
        f"{root} {'is a file' if root.exists() else 'does not exist'}. Name a folder of runs, or "
        f"none for {DEFAULT_ROOT}/."
        for root in roots
        if not root.is_dir()
    ]
    if errors:
        raise InputError(errors)


def _values(entry: "Entry") -> dict[str, Any]:
    """Return JSON values; an infinite epsilon is null, and then ``private`` is false."""
    changed = datetime.fromtimestamp(entry.changed, UTC).isoformat(timespec="seconds")
    epsilon = None if entry.epsilon == math.inf else entry.epsilon
    return {**vars(entry), "folder": str(entry.folder), "changed": changed, "epsilon": epsilon}


def _print(out: Console, entries: Sequence["Entry"], roots: Sequence[Path]) -> None:
    # The name of a single root is printed once, in the header.
    below = len(roots) == 1 and all(entry.folder != roots[0] for entry in entries)
    root = roots[0] if below else None
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run" if root is None else f"{root}/", overflow="fold")
    table.add_column("data set", overflow="fold")
    for name in ("optimizer", "epsilon", "accuracy", "state", "age"):
        right = name in ("epsilon", "accuracy", "age")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for entry in entries:
        table.add_row(
            Text(str(entry.folder if root is None else entry.folder.relative_to(root))),
            Text(entry.dataset or "-"),
            Text(entry.optimizer or "-"),
            _epsilon(entry),
            "-" if entry.accuracy is None else f"{entry.accuracy:.2%}",
            Text(entry.state, style=STYLES.get(entry.state, console.ATTENTION)),
            age(time.time() - entry.changed),
        )
    if not out.is_terminal:
        out.width = 10_000  # one line per run
    out.print(table)
    for remark in _remarks(entries):
        out.print(Text(remark, style="dim"))


def _epsilon(entry: "Entry") -> Text:
    if entry.private is False:
        return Text("no privacy", style="red")
    if entry.epsilon is None:
        return Text("-")
    marks = SEEDED * bool(entry.seeded) + AUDITED * bool(entry.audit)
    return Text(format_epsilon(entry.epsilon) + marks)


def _remarks(entries: Sequence["Entry"]) -> Iterator[str]:
    private = [entry for entry in entries if entry.private]
    promises = {(entry.delta, entry.adjacency) for entry in private}
    if len(promises) == 1:
        ((delta, adjacency),) = promises
        yield f"epsilon at delta {delta:g}, {adjacency} adjacency"
    elif promises:
        yield "epsilons of different deltas or adjacencies do not compare; --json has each"
    if any(entry.seeded for entry in private):
        yield f"{SEEDED} with --seed: no privacy against anyone who knows the seed"
    if any(entry.audit for entry in private):
        yield f"{AUDITED} an audit run: the model is unfit for release"
    states = {entry.state for entry in entries}
    if shown := ", ".join(name for name in UNREPORTED if name in states):
        yield f"{shown}: as of the last epoch that was scored; whether with --seed is not known"


def age(seconds: float) -> str:
    """Return a duration in its largest unit, rounded down."""
    unit, size = next((pair for pair in UNITS.items() if seconds >= pair[1]), ("s", 1))
    return f"{int(max(seconds, 0) / size)} {unit}"
