"""Terminal output of a comparison: its progress, and the plan of --dry-run."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli.console import ATTENTION
from dpmac_cli.studies.executor import Moved, RunEvent
from dpmac_cli.studies.grid import Grid, row_name


class Display:
    """One line per finished run; below them, on a terminal, bars of the study and of its runs."""

    def __init__(self, console: Console, grid: Grid, missing: Sequence[int]) -> None:
        self.console, self._grid = console, grid
        self._left = {n: grid.runs[n].plan.steps for n in missing}
        self._accuracy: dict[int, str] = {}
        self._ended = 0
        name = Column(no_wrap=True, ratio=1, overflow="ellipsis")
        self._bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=name),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, justify="right")),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            refresh_per_second=4,
            expand=True,
            disable=console.quiet or not console.is_terminal,
        )
        self._live: dict[int, TaskID] = {}
        found = len(grid.runs) - len(missing)
        console.print(f"{len(grid.runs)} runs{f', {found} of them found finished' * bool(found)}")
        self._all = self._bars.add_task("all", total=max(1, sum(self._left.values())), text="")
        self._bars.start()

    def show(self, event: RunEvent) -> None:
        """Move the bars, and print a line when a run ends."""
        number = event.number
        if isinstance(event, Moved):
            self._move(event)
        else:
            if not event.again and (event.failure or self._left[number] == 0):
                self._ended += 1
            name, count = self._name(number), f"{self._ended}/{len(self._left)}"
            if event.again:
                line = Text(f"{name}: {event.failure}; going on with it", style=ATTENTION)
                self.console.print(line)
            elif event.failure:
                self.console.print(Text(f"{name}: failed: {event.failure}", style="red"))
            elif self._left[number] == 0:
                self.console.print(Text(f"{count}  {name}{self._accuracy.get(number, '')}"))
            if number in self._live:
                self._bars.remove_task(self._live.pop(number))
        self._bars.update(self._all, text=f"{self._ended}/{len(self._left)} runs")

    def _move(self, event: Moved) -> None:
        number, left = event.number, event.steps - event.step
        self._bars.advance(self._all, self._left[number] - left)
        self._left[number] = left
        if event.accuracy is not None:
            self._accuracy[number] = f"  test accuracy {event.accuracy:.2%}"
        if number not in self._live:
            name = self._name(number)
            self._live[number] = self._bars.add_task(name, total=event.steps, text="")
        accuracy = "" if event.accuracy is None else f"  {event.accuracy:.2%}"
        text = f"{event.step}/{event.steps}{accuracy}"
        self._bars.update(self._live[number], completed=event.step, text=text)

    def _name(self, number: int) -> str:
        run = self._grid.runs[number]
        return f"{row_name(run.labels)}  sigma {run.plan.sigma:.4g}  seed {run.seed}"

    def close(self) -> None:
        """Remove the bars."""
        self._bars.stop()


def print_plan(out: Console, grid: Grid) -> None:
    """Print the runs of a study, the privacy cost of each, and their steps."""
    table = Table(box=None, pad_edge=False)
    for title in ("run", grid.column, "epsilon", "steps", "seeds"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for run in grid.runs[:: len(grid.seeds)]:  # the first of each cell
        plan = run.plan
        epsilon = total_epsilon((plan.event,), plan.delta) if plan.private else None
        price = "no privacy" if epsilon is None else format_epsilon(epsilon)
        steps, seeds = f"{plan.steps:,}", str(len(grid.seeds))
        table.add_row(row_name(run.labels), f"{run.column:g}", price, steps, seeds)
    out.print(table)
    count = len(grid.runs)
    out.print(f"{count} run{'s' if count > 1 else ''}; finished ones are not run again")
