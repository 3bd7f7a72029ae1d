"""Terminal output of a comparison: its progress, and the plan of --dry-run."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli.console import ATTENTION
from dpmac_cli.config.settings import METRICS
from dpmac_cli.studies.executor import Ended, Moved, RunEvent
from dpmac_cli.studies.grid import Grid, row_name


class Display:
    """One line per finished run; below them, on a terminal, a bar of the study's steps."""

    def __init__(self, console: Console, grid: Grid, missing: Sequence[int]) -> None:
        self.console, self._grid = console, grid
        self._left = {n: grid.runs[n].plan.steps for n in missing}
        self._scores: dict[int, str] = {}
        self._ended = 0
        self._bar = Progress(
            TextColumn("{task.fields[text]}"),
            BarColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=console.quiet or not console.is_terminal,
        )
        found = len(grid.runs) - len(missing)
        console.print(f"{len(grid.runs)} runs{f', {found} of them found finished' * bool(found)}")
        self._steps = self._bar.add_task("", total=max(1, sum(self._left.values())), text="")
        self._bar.start()

    def show(self, event: RunEvent) -> None:
        """Move the bar, and print a line when a run ends."""
        if isinstance(event, Moved):
            left = event.steps - event.step
            self._bar.advance(self._steps, self._left[event.number] - left)
            self._left[event.number] = left
            if event.score is not None:
                metric = METRICS[self._grid.plan.metric]
                self._scores[event.number] = f"  test {metric} {event.score:.2%}"
        else:
            self._end(event)
        self._bar.update(self._steps, text=f"{self._ended}/{len(self._left)} runs")

    def _end(self, event: Ended) -> None:
        number, done = event.number, self._left[event.number] == 0
        run = self._grid.runs[number]
        name = f"{row_name(run.labels)}  sigma {run.plan.sigma:.4g}  seed {run.seed}"
        self._ended += not event.again and (event.failure is not None or done)
        if event.again:
            line = Text(f"{name}: {event.failure}; going on with it", style=ATTENTION)
            self.console.print(line)
        elif event.failure:
            self.console.print(Text(f"{name}: failed: {event.failure}", style="red"))
        elif done:
            count = f"{self._ended}/{len(self._left)}"
            self.console.print(Text(f"{count}  {name}{self._scores.get(number, '')}"))

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()


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
