"""How a comparison looks, while it runs and when it is done."""

import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli.console import ATTENTION, expendable
from dpmac_cli.config.budget import training_event
from dpmac_cli.studies import tables
from dpmac_cli.studies.executors import Moved, RunEvent
from dpmac_cli.studies.grid import Grid, Run
from dpmac_cli.studies.results import TEST, Cell, Comparison

if TYPE_CHECKING:
    from dpmac_cli.studies.local import Timed


class Display:
    """Shows the runs of a comparison as they happen; by itself nothing."""

    def show(self, event: RunEvent) -> None:
        """Something happened to a run."""

    def close(self) -> None:
        """Nothing more will come."""


class Lines(Display):
    """One line per run: for files, pipes and logs."""

    _tells_time = True

    def __init__(self, console: Console, grid: Grid, missing: Sequence[int]) -> None:
        self.console, self._grid = console, grid
        self._left = {n: grid.runs[n].config.total_steps for n in missing}
        self._done, self._total = 0, sum(self._left.values())
        self._accuracy: dict[int, float | None] = {}
        self._ended, self._began = 0, time.monotonic()
        self._missing = len(missing)
        found = len(grid.runs) - self._missing
        console.print(f"{len(grid.runs)} runs{f', {found} of them found finished' * bool(found)}")

    def show(self, event: RunEvent) -> None:
        """Count, and print a line when a run ends."""
        if isinstance(event, Moved):
            steps = self._grid.runs[event.number].config.total_steps
            self._done += self._left[event.number] - (steps - event.step)
            self._left[event.number] = steps - event.step
            self._accuracy[event.number] = event.accuracy
            return
        name = _name(self._grid.runs[event.number])
        if event.again:
            self.console.print(Text(f"{name}: {event.failure}; going on with it", style=ATTENTION))
        elif event.failure:
            self._ended += 1
            self.console.print(Text(f"{name}: failed: {event.failure}", style="red"))
        elif self._left[event.number] == 0:
            self._ended += 1
            accuracy = self._accuracy.get(event.number)
            shown = "" if accuracy is None else f"  test accuracy {accuracy:.2%}"
            count = f"{self._ended}/{self._missing}"
            left = self._time_left() if self._tells_time else ""
            self.console.print(Text(f"{count}  {name}{shown}{left}"))

    def _time_left(self) -> str:
        taken = time.monotonic() - self._began
        seconds = taken * (self._total - self._done) / self._done if self._done else 0.0
        return "" if seconds < 1 else f"  {tables.clock(seconds)} left"


class LiveRuns(Lines):
    """Lines, and below them one line per live run and the whole study's bar."""

    _tells_time = False  # the bar does

    def __init__(self, console: Console, grid: Grid, missing: Sequence[int]) -> None:
        super().__init__(console, grid, missing)
        self._live: dict[int, Moved] = {}
        self._bar = Progress(
            TextColumn("all"), BarColumn(bar_width=None), TextColumn("{task.fields[text]}")
        )
        self._task = self._bar.add_task("", total=max(1, self._total), text="")
        self._view = Live(console=console, transient=True, refresh_per_second=4)
        self._view.start()

    def show(self, event: RunEvent) -> None:
        """Move the lines."""
        super().show(event)
        if isinstance(event, Moved):
            self._live[event.number] = event
        else:
            self._live.pop(event.number, None)
        text = f"{self._ended}/{self._missing} runs{self._time_left()}"
        self._bar.update(self._task, completed=self._done, text=text)
        self._view.update(self._render())

    def close(self) -> None:
        """The lines go."""
        self._view.stop()

    def _render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, show_header=False, expand=True)
        table.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True, style="bold")
        for number, moved in sorted(self._live.items()):
            accuracy = "" if moved.accuracy is None else f"{moved.accuracy:.2%}"
            step = f"{moved.step}/{moved.steps}"
            table.add_row(_name(self._grid.runs[number]), step, accuracy)
        return Group(table, self._bar)


def choose_display(grid: Grid, missing: Sequence[int], quiet: bool, json: bool) -> Display:
    """Nothing when quiet; on stderr when stdout is for JSON; live lines on a terminal only."""
    if quiet:
        return Display()
    console = expendable(sys.stderr if json else sys.stdout)
    return (LiveRuns if console.is_terminal else Lines)(console, grid, missing)


def _row(run: Run) -> str:
    return " ".join(v if k == "optimizer" else f"{k} {v}" for k, v in run.labels if v)


def _name(run: Run) -> str:
    return f"{_row(run)}  sigma {run.config.sigma:.4g}  seed {run.seed}"


def timed(
    times: Generator["Timed", None, dict[int, float]], grid: Grid, quiet: bool
) -> dict[int, float]:
    """What comes of timing configurations, each of them shown meanwhile unless quiet.

    A line each; on a terminal one line, which goes when all is done.
    """
    out = expendable(sys.stdout)
    with out.status("loading") if out.is_terminal and not quiet else nullcontext() as status:
        while True:
            try:
                event = next(times)
            except StopIteration as end:
                return cast(dict[int, float], end.value)
            text = f"timing {_row(grid.runs[event.number])} ({event.done + 1} of {event.count})"
            if status:
                status.update(Text(text))
            elif not quiet:
                out.print(Text(text))


def print_comparison(out: Console, comparison: Comparison, where: str) -> None:
    """The table, its remarks, and where the files are."""
    for table in _tables(comparison, out):
        out.print(table)
    for remark in (*comparison.remarks, *tables.warnings(comparison)):
        told = remark if out.is_terminal else remark.replace(TEST, TEST.replace("Bold", "*", 1))
        out.print(Text(told, style="dim"))
    out.print(Text(where))


#: Blanks between columns.
GAP = 2


def _tables(comparison: Comparison, out: Console) -> Iterator[Table]:
    """The comparison in as few tables below one another as a screen can show."""
    names = [Text(name) for name, _ in comparison.rows]
    columns = [
        (
            f"{tables.column_title(comparison, column)}\nε {epsilon}",
            [_cell(cell, out) for cell in cells],
        )
        for column, epsilon, cells in zip(
            comparison.columns,
            tables.epsilons(comparison),
            zip(*(cells for _, cells in comparison.rows), strict=True),
            strict=True,
        )
    ]
    columns.append(("a run\ntakes", [Text(t) for t in tables.run_times(comparison)]))
    left = out.width - max(name.cell_len for name in names)
    shown: list[tuple[str, list[Text]]] = []
    room = left
    for title, cells in columns:
        needed = GAP + max(map(cell_len, [*title.splitlines(), *(cell.plain for cell in cells)]))
        if shown and needed > room:
            yield _table(names, shown)
            shown, room = [], left
        shown.append((title, cells))
        room -= needed
    yield _table(names, shown)


def _table(names: Sequence[Text], columns: Sequence[tuple[str, Sequence[Text]]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    table.add_column("", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for row in zip(names, *(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    return table


def _cell(cell: Cell | None, out: Console) -> Text:
    text = tables.accuracy_text(cell)
    if cell is None:
        return Text(text)
    if cell.standing == "best":
        return Text(text, style="bold") if out.is_terminal else Text(f"{text} *")
    return Text(f"{text} ~" if cell.standing == "tied" else text)


def print_plan(out: Console, grid: Grid, seconds: Mapping[int, float], jobs: int) -> None:
    """The runs of a study, their prices and their time.

    Args:
        out: to print on.
        grid: the study.
        seconds: a step of each distinct configuration takes, by the first run that has it.
        jobs: processes at a time.
    """
    table = Table(box=None, pad_edge=False)
    for title in ("run", grid.column, "epsilon", "steps", "seeds", "each"):
        table.add_column(title, justify="left" if title == "run" else "right")
    total = 0.0
    for number, a_step in seconds.items():
        run = grid.runs[number]
        config = run.config
        each = a_step * config.total_steps
        total += each * len(grid.seeds)
        epsilon = total_epsilon((training_event(config, config.total_steps),), config.delta)
        price = "no privacy" if config.no_dp else format_epsilon(epsilon)
        facts = price, f"{config.total_steps:,}", str(len(grid.seeds)), tables.clock(each)
        table.add_row(_row(run), f"{run.column or 0:g}", *facts)
    out.print(table)
    wall, count = total / max(1, jobs), len(grid.runs)
    out.print(
        f"{count} run{'s' if count > 1 else ''}, about {tables.clock(total)} of one process, "
        f"{tables.clock(wall)} in {jobs}; finished ones are not run again"
    )
