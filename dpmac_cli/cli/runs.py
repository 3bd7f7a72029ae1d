"""dpmac runs."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console
from dpmac_cli.cli.completion import DEFAULT_ROOT, one_of
from dpmac_cli.cli.failures import explained
from dpmac_cli.cli.options import DEBUG, JSON, argument, option, switch, with_options
from dpmac_cli.config.resolve import near
from dpmac_cli.errors import InputError
from dpmac_cli.runs import listing
from dpmac_cli.runs.listing import CUT_OFF, DAMAGED, DIVERGED, ORDERS, RUNNING, Entry
from dpmac_cli.storage.files import to_json

HELP = """List runs: what was trained, what it cost, how good it is and how it ended.

Runs are looked for in the folders named and below them.

Examples: dpmac runs, dpmac runs --sort accuracy, dpmac runs runs/compare

Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
"""

#: Where there is no report, figures are as of the last epoch that was scored.
UNREPORTED = (RUNNING, DIVERGED, CUT_OFF)
STYLES = {"finished": "", RUNNING: "bold", DIVERGED: "red", CUT_OFF: "red", DAMAGED: "red"}
SEEDED, AUDITED = "*", "!"
#: Units of time in seconds, the largest first.
UNITS = (
    ("years", 31_556_952),
    ("months", 2_629_746),
    ("days", 86_400),
    ("h", 3600),
    ("min", 60),
    ("s", 1),
)
#: Wider than any run's line: where no terminal limits it, a run is a line.
UNLIMITED = 10_000


@with_options(
    argument("folders", "Where to look. [default: runs]", "FOLDER", kind=list[Path] | None),
    option(
        "sort",
        f"One of {', '.join(ORDERS)}: newest, lowest or best first. [default: age]",
        metavar="NAME",
        names=one_of(ORDERS),
        default="age",
    ),
    switch("reverse", "Reverse the order."),
    JSON,
    DEBUG,
)
@explained
def runs(folders: list[Path] | None, sort: str, reverse: bool, json: bool) -> None:
    """Find, sort, print."""
    _check(folders or (), sort)
    roots = folders or [DEFAULT_ROOT]
    found = listing.find_runs(roots)
    entries = listing.ordered(found.entries, sort, reverse=reverse)
    if json:
        values = [_values(entry) for entry in entries]
        console.print_result(to_json({"runs": values, "left_out": found.foreign}))
    elif entries:
        _print(console.stdout(), entries, roots)
    else:
        where = " or ".join(map(str, roots))
        console.stdout().print(
            Text(f"There are no runs in {where} yet. To make one: dpmac train --dataset digits")
        )
    if found.foreign:
        console.print_notes(
            [
                f"left out {found.foreign} folder{'s' if found.foreign > 1 else ''} whose "
                "report.json or model.safetensors is not a run's, or cannot be read."
            ]
        )


def _check(roots: Sequence[Path], sort: str) -> None:
    errors = [f"{root} is a file. Name a folder." for root in roots if root.is_file()]
    errors += [
        f"{root} does not exist. Name a folder of runs, or none for {DEFAULT_ROOT}/."
        for root in roots
        if not root.exists()
    ]
    if sort not in ORDERS:
        errors.append(
            f"--sort: there is no order '{sort}'.{near(sort, ORDERS)} Known: {', '.join(ORDERS)}."
        )
    if errors:
        raise InputError(errors)


def _values(entry: Entry) -> dict[str, Any]:
    """An entry as JSON values: infinity is null, and ``private`` tells it from the unknown."""
    values = {
        **vars(entry),
        "folder": str(entry.folder),
        "changed": datetime.fromtimestamp(entry.changed, UTC).isoformat(timespec="seconds"),
    }
    if entry.epsilon == math.inf:
        values["epsilon"] = None
    return values


def _print(out: Console, entries: Sequence[Entry], roots: Sequence[Path]) -> None:
    # Below a single root its name is said once. It is left whole where a run is the root itself.
    root = roots[0] if len(roots) == 1 else None
    if any(entry.folder == root for entry in entries):
        root = None
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run" if root is None else f"{root}/", overflow="fold")
    table.add_column("data set", overflow="fold")
    table.add_column("optimizer", no_wrap=True)
    varied = [
        ", ".join(itertools.starmap(_setting, settings.items()))
        for settings in listing.told_apart(entries)
    ]
    for title in ("epsilon", "accuracy"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    if any(varied):
        table.add_column("settings", overflow="fold")
    now = time.time()
    for entry, settings in zip(entries, varied, strict=True):
        table.add_row(
            Text(str(entry.folder if root is None else entry.folder.relative_to(root))),
            Text(entry.dataset or "-"),
            Text(entry.optimizer or "-"),
            _epsilon(entry),
            "-" if entry.accuracy is None else f"{entry.accuracy:.2%}",
            Text(entry.state, style=STYLES.get(entry.state, console.ATTENTION)),
            age(now - entry.changed),
            *([Text(settings)] if any(varied) else []),
        )
    if not out.is_terminal:
        out.width = UNLIMITED
    out.print(table)
    for remark in _remarks(entries):
        out.print(Text(remark, style="dim"))


def _setting(name: str, value: object) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"


def _epsilon(entry: Entry) -> Text:
    if entry.private is False:
        return Text("no privacy", style="red")
    if entry.epsilon is None:
        return Text("-")
    marks = SEEDED * bool(entry.seeded) + AUDITED * bool(entry.audit)
    return Text(format_epsilon(entry.epsilon) + marks)


def _remarks(entries: Sequence[Entry]) -> Iterator[str]:
    """What must be said of the figures above."""
    promises = {(entry.delta, entry.adjacency) for entry in entries if entry.private}
    if len(promises) == 1:
        ((delta, adjacency),) = promises
        yield f"epsilon at delta {delta:g}, {adjacency} adjacency"
    elif promises:
        yield "epsilons of different deltas or adjacencies do not compare; --json has each"
    if any(entry.seeded and entry.private for entry in entries):
        yield f"{SEEDED} with --seed: no privacy against anyone who knows the seed"
    if any(entry.audit and entry.private for entry in entries):
        yield f"{AUDITED} an audit run: the model is unfit for release"
    states = [name for name in UNREPORTED if any(entry.state == name for entry in entries)]
    if states:
        yield (
            f"{', '.join(states)}: as of the last epoch that was scored; whether with --seed is "
            "not known"
        )


def age(seconds: float) -> str:
    """A stretch of time in its largest unit, rounded down."""
    unit, size = next((u for u in UNITS if seconds >= u[1]), UNITS[-1])
    count = int(max(seconds, 0) / size)
    return f"1 {unit.removesuffix('s')}" if count == 1 and size > 3600 else f"{count} {unit}"
