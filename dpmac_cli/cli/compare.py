"""dpmac compare: train many runs, and show a table of results."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, StrictBool
from rich.console import Console
from rich.progress import BarColumn
from rich.table import Table
from rich.text import Text

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console
from dpmac_cli.cli.failures import stop, stop_request
from dpmac_cli.cli.options import take, with_options
from dpmac_cli.config.checks import fault_of_package
from dpmac_cli.config.fields import Choice, Flag, SomePath, options
from dpmac_cli.config.flags import Flags
from dpmac_cli.config.settings import OUTPUT, Debug, Quiet
from dpmac_cli.errors import INTERRUPTED, MISFIT, InputError, counted, raise_errors
from dpmac_cli.runs import folder
from dpmac_cli.studies import tables
from dpmac_cli.studies.executor import Ended, Executor, Moved, StudyEvent, carry_out
from dpmac_cli.studies.grid import ONE_VALUE, STUDIED, STUDY, Grid, Run, StudyFlags, plan, row_name
from dpmac_cli.studies.results import collect, finished_report
from dpmac_cli.tasks.known import METRICS

#: Folder of the runs of a study, in its own.
RUNS = "runs"


class CompareFlags(Flags, frozen=True):
    """Flags of the command besides the study."""

    jobs: Annotated[
        int | None,
        Field(ge=1, le=1024),
        Flag(STUDY, otherwise="one per core or GPU"),
    ] = None
    """Maximum number of runs at a time."""
    executor: Annotated[
        str,
        Choice(("local", "ray")),
        Flag(STUDY),
    ] = "local"
    """Executor of the runs. Ray needs --out, the data and the current folder on shared storage."""
    cluster: Annotated[
        str | None,
        Flag(STUDY, otherwise="RAY_ADDRESS, or a new one on this machine", metavar="ADDRESS"),
    ] = None
    """Address of the Ray cluster."""
    dry_run: Annotated[
        StrictBool,
        Flag(STUDY),
    ] = False
    """Show runs, their privacy costs and steps, without training."""
    config: Annotated[SomePath | None, Flag(STUDY, metavar="FILE")] = None
    """YAML file with settings by the same names. Flags take precedence."""
    out: Annotated[SomePath, Flag(OUTPUT, metavar="FOLDER")] = Path("runs/compare")
    """Folder of the study."""
    json: Annotated[StrictBool, Flag(OUTPUT)] = False
    """Print compare.json."""
    quiet: Quiet = False
    debug: Debug = False


@with_options(
    options(StudyFlags),
    options(CompareFlags),
    {name: replace(option, several=name not in ONE_VALUE) for name, option in STUDIED.items()},
)
def compare(**given: Any) -> None:
    """Compare optimizers, noise levels or any other setting, over several seeds.

    Every setting accepts several values (0.5,0.6,0.7). Values of sigma or epsilon become the
    columns of the table, combinations of other values its rows. Runs are ordinary training runs
    in --out, which are found by their settings: finished runs are reused, interrupted runs are
    resumed, and failed runs are tried again.

    Example: dpmac compare --dataset mnist --optimizers all --sigma 0.5,1.0 --seeds 3

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, 3 privacy budget infeasible, 4 some
    run failed (the others are in the table), 130 interrupted (run the same command to resume).
    """
    flags = take(CompareFlags, given)
    both = "--dry-run and --json contradict each other: a plan has no table. Give one."
    raise_errors([*_faults_of_ray(flags), *[both] * (flags.dry_run and flags.json)])
    with console.waiting(flags.quiet, "settings"):
        grid = plan(given, flags.config, flags.out / RUNS)
        planned = planned_runs(grid) if flags.dry_run else None
    if not flags.quiet:
        console.print_notes(grid.notes)
    if planned is not None:
        console.stdout().print(planned)
        return
    out = flags.out
    if out.is_dir() and any(out.iterdir()) and not (out / RUNS).is_dir():
        raise InputError(
            f"--out {out} contains files that do not belong to a study. Use a new or empty folder."
        )
    screen = console.for_display(flags.quiet, flags.json)
    failures, interrupted = _carry_out(grid, flags, screen)
    with console.waiting(flags.quiet, "table"):
        texts = tables.write_comparison(collect(grid, failures), flags.out)
    if flags.json:
        console.print_result(texts[tables.COMPARE_JSON])
    elif not flags.quiet:
        written = f"{flags.out}: {', '.join([*texts, folder.SUMS])}"
        console.stdout().print(Text(f"{texts[tables.COMPARE_MD]}\n{written}"))
    console.print_errors(_failed(grid, failures), label="failed")
    if interrupted:
        stop("interrupted; run the same command to resume.", INTERRUPTED)
    if failures:
        raise typer.Exit(MISFIT)


def _faults_of_ray(flags: CompareFlags) -> Iterator[str]:
    if flags.executor == "ray":
        yield from fault_of_package("ray", "ray", "--executor ray")
    elif flags.cluster is not None:
        yield "--cluster is the address of a Ray cluster. Add --executor ray, or leave it out."


def _carry_out(grid: Grid, flags: CompareFlags, screen: Console) -> tuple[dict[int, str], bool]:
    """Train unfinished runs; return reasons of failures by number, and whether interrupted."""
    with console.waiting(screen.quiet, "data"):
        from dpmac_cli.studies import local  # noqa: PLC0415  (loads torch)

        # Nothing is written if the data or the cluster is not available.
        data = local.share_data([grid.runs[number] for number in _missing(grid)])
    failures: dict[int, str] = {}
    with contextlib.ExitStack() as held:
        asked = held.enter_context(stop_request())
        executor: Executor | None = None
        if data and flags.executor == "ray":
            from dpmac_cli.studies import ray_cluster  # noqa: PLC0415  (loads ray)

            held.enter_context(ray_cluster.connected(flags.cluster))
            executor = ray_cluster.Tasks(grid.runs, flags.jobs)
        elif data:
            executor = local.Pool(grid.runs, flags.jobs, data)
        folder.make_folder(flags.out / RUNS)
        held.enter_context(folder.locked(flags.out))
        missing = _missing(grid)
        display = StudyDisplay(screen, grid, missing)
        held.enter_context(display.bar)
        if executor is None or not missing:
            return failures, False
        for event in carry_out(executor, grid.runs, missing, asked):
            display.show(event)
            if isinstance(event, Ended) and event.failure:
                failures[event.number] = event.failure
        return failures, asked()


def _missing(grid: Grid) -> list[int]:
    """Return the numbers of the runs that are not finished."""
    return [number for number, run in enumerate(grid.runs) if finished_report(run) is None]


def _failed(grid: Grid, failures: Mapping[int, str]) -> Iterator[str]:
    """Yield one line per reason, with the first run that failed for that reason."""
    by_reason: dict[str, list[Run]] = {}
    for number, why in failures.items():
        by_reason.setdefault(why, []).append(grid.runs[number])
    for why, (first, *others) in by_reason.items():
        more = f" and {len(others)} more" if others else ""
        yield f"{first.folder.name} (seed {first.seed}){more}: {why}"


class StudyDisplay:
    """One line per finished run; below them, on a terminal, :attr:`bar` of the study's steps."""

    def __init__(self, screen: Console, grid: Grid, missing: Sequence[int]) -> None:
        self._screen, self._grid, self._count = screen, grid, len(missing)
        self._moved: dict[int, Moved] = {}
        self._ended = 0
        self.bar = console.bar("{task.fields[text]}", BarColumn(), console=screen)
        found = len(grid.runs) - len(missing)
        screen.print(
            f"{counted(len(grid.runs), 'run')}{f', {found} of them found finished' * bool(found)}"
        )
        total = sum(grid.runs[number].plan.privacy.steps for number in missing)
        self._task = self.bar.add_task("", total=max(1, total), text="")

    def show(self, event: StudyEvent) -> None:
        """Update the bar, and print a line when a run ends."""
        if isinstance(event, Moved):
            self._moved[event.number] = event
        else:
            self._end(event)
        done = sum(moved.step for moved in self._moved.values())
        self.bar.update(self._task, completed=done, text=f"{self._ended}/{self._count} runs")

    def _end(self, event: Ended) -> None:
        run, moved = self._grid.runs[event.number], self._moved.get(event.number)
        done = moved is not None and moved.step == run.plan.privacy.steps
        name = f"{row_name(run.labels)}  sigma {run.plan.privacy.sigma:.4g}  seed {run.seed}"
        self._ended += event.failure is not None or done
        if event.failure:
            self._screen.print(Text(f"{name}: failed: {event.failure}", style="red"))
        elif moved and done:
            metric = METRICS[run.plan.settings.metric]
            known = moved.score is not None
            score = f"  test {metric.title} {metric.text(moved.score)}" if known else ""
            self._screen.print(Text(f"{self._ended}/{self._count}  {name}{score}"))


def planned_runs(grid: Grid) -> Table:
    """Return a table of the runs of a study, the privacy cost of each, and their steps."""
    count = len(grid.runs)
    said = f"{count} run{'s' if count > 1 else ''}; finished runs are not repeated"
    table = Table(box=None, pad_edge=False, caption=said, caption_justify="left", caption_style="")
    column = "sigma" if grid.column == "sigma" else "target"
    for title in ("run", column, "epsilon", "steps", "seeds"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for run in grid.runs[:: len(grid.seeds)]:  # the first of each cell
        cost, steps = "no privacy", f"{run.plan.privacy.steps:,}"
        if run.plan.privacy.private:
            cost = format_epsilon(total_epsilon((run.plan.privacy.event,), run.plan.privacy.delta))
        table.add_row(row_name(run.labels), f"{run.column:g}", cost, steps, str(len(grid.seeds)))
    return table
