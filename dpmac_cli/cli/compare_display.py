"""Terminal output of a comparison: progress, results, and the plan of --dry-run."""

import sys
import time
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli.console import ATTENTION, expendable
from dpmac_cli.studies import tables
from dpmac_cli.studies.executor import Moved, RunEvent
from dpmac_cli.studies.grid import Grid, row_name
from dpmac_cli.studies.results import Cell, Comparison

#: Blanks between columns.
GAP = 2


class Lines:
    """One line per run: for files, pipes and logs."""

    _tells_time = True

    def __init__(self, console: Console, grid: Grid, missing: Sequence[int]) -> None:
        self.console, self._grid = console, grid
        self._left = {n: grid.runs[n].config.steps for n in missing}
        self._done, self._total = 0, sum(self._left.values())
        self._accuracy: dict[int, float | None] = {}
        self._ended, self._began = 0, time.monotonic()
        found = len(grid.runs) - len(missing)
        console.print(f"{len(grid.runs)} runs{f', {found} of them found finished' * bool(found)}")

    def show(self, event: RunEvent) -> None:
        """Count steps, and print a line when a run ends."""
        number, name = event.number, self._name(event.number)
        if isinstance(event, Moved):
            steps = self._grid.runs[number].config.steps - event.step
            self._done += self._left[number] - steps
            self._left[number], self._accuracy[number] = steps, event.accuracy
        elif event.again:
            self.console.print(Text(f"{name}: {event.failure}; going on with it", style=ATTENTION))
        elif event.failure:
            self._ended += 1
            self.console.print(Text(f"{name}: failed: {event.failure}", style="red"))
        elif self._left[number] == 0:
            self._ended += 1
            accuracy = self._accuracy.get(number)
            shown = "" if accuracy is None else f"  test accuracy {accuracy:.2%}"
            left = self._time_left() if self._tells_time else ""
            self.console.print(Text(f"{self._count()}  {name}{shown}{left}"))

    def close(self) -> None:
        """End the display."""

    def _name(self, number: int) -> str:
        run = self._grid.runs[number]
        return f"{row_name(run.labels)}  sigma {run.config.sigma:.4g}  seed {run.seed}"

    def _count(self) -> str:
        return f"{self._ended}/{len(self._left)}"

    def _time_left(self) -> str:
        taken = time.monotonic() - self._began
        seconds = taken * (self._total - self._done) / self._done if self._done else 0.0
        return "" if seconds < 1 else f"  {tables.clock(seconds)} left"


class LiveRuns(Lines):
    """Lines, and below them the bars of the whole study and of each run that is under way."""

    _tells_time = False  # the bar does

    def __init__(self, console: Console, grid: Grid, missing: Sequence[int]) -> None:
        super().__init__(console, grid, missing)
        name = Column(no_wrap=True, ratio=1, overflow="ellipsis")
        self._bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=name),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, justify="right")),
            console=console,
            transient=True,
            refresh_per_second=4,
            expand=True,
        )
        self._all = self._bars.add_task("all", total=max(1, self._total), text="")
        self._live: dict[int, TaskID] = {}
        self._bars.start()

    def show(self, event: RunEvent) -> None:
        """Move the bars."""
        super().show(event)
        number = event.number
        if isinstance(event, Moved):
            if number not in self._live:
                name = self._name(number)
                self._live[number] = self._bars.add_task(name, total=event.steps, text="")
            accuracy = "" if event.accuracy is None else f"  {event.accuracy:.2%}"
            text = f"{event.step}/{event.steps}{accuracy}"
            self._bars.update(self._live[number], completed=event.step, text=text)
        elif number in self._live:
            self._bars.remove_task(self._live.pop(number))
        text = f"{self._count()} runs{self._time_left()}"
        self._bars.update(self._all, completed=self._done, text=text)

    def close(self) -> None:
        """Remove the bars."""
        self._bars.stop()


def choose_display(grid: Grid, missing: Sequence[int], quiet: bool, json: bool) -> Lines:
    """Return a display: silent if quiet, on stderr if stdout is for JSON, bars on a terminal."""
    if quiet:
        return Lines(Console(quiet=True), grid, missing)
    console = expendable(sys.stderr if json else sys.stdout)
    return (LiveRuns if console.is_terminal else Lines)(console, grid, missing)


def print_comparison(out: Console, comparison: Comparison, where: str) -> None:
    """Print the table, its remarks, and where the files are."""
    for table in _tables(comparison, out):
        out.print(table)
    plain = tables.TEST.replace("Bold", "*", 1)
    for remark in tables.remarks(comparison):
        told = remark if out.is_terminal else remark.replace(tables.TEST, plain)
        out.print(Text(told, style="dim"))
    out.print(Text(where))


def _tables(comparison: Comparison, out: Console) -> Iterator[Table]:
    """Split the comparison into as few tables below one another as the screen can show."""
    names = [Text(name) for name, _ in comparison.rows]
    titles, epsilons = tables.titles_of(comparison)
    rows = [[_text(cell, out) for cell in cells] for _, cells in comparison.rows]
    columns = [
        (f"{title}\nε {epsilon}", list(cells))
        for title, epsilon, *cells in zip(titles, epsilons, *rows, strict=True)
    ]
    columns.append(("a run\ntakes", [Text(t) for t in tables.run_times(comparison)]))
    left = room = out.width - max(name.cell_len for name in names)
    shown: list[tuple[str, list[Text]]] = []
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


def _text(cell: Cell | None, out: Console) -> Text:
    if out.is_terminal:
        best = cell is not None and cell.standing == "best"
        return Text(tables.marked(cell, "{}"), style="bold" if best else "")
    return Text(tables.marked(cell, "{} *"))


def print_plan(out: Console, grid: Grid) -> None:
    """Print the runs of a study, the privacy cost of each, and their steps."""
    table = Table(box=None, pad_edge=False)
    for title in ("run", grid.column, "epsilon", "steps", "seeds"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for run in grid.runs[:: len(grid.seeds)]:  # the first of each cell
        config = run.config
        epsilon = total_epsilon((config.event,), config.delta) if config.private else None
        price = "no privacy" if epsilon is None else format_epsilon(epsilon)
        steps, seeds = f"{config.steps:,}", str(len(grid.seeds))
        table.add_row(row_name(run.labels), f"{run.column:g}", price, steps, seeds)
    out.print(table)
    count = len(grid.runs)
    out.print(f"{count} run{'s' if count > 1 else ''}; finished ones are not run again")
