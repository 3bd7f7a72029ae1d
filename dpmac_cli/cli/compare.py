"""dpmac compare: train many runs, and show a table of results.

The grid of runs is validated as a whole before anything is trained. Then runs that are not
finished are trained by commands (:mod:`dpmac_cli.studies.local`) or by tasks of Ray
(:mod:`dpmac_cli.studies.ray_cluster`), and the table is made from the reports of all runs. One
command at a time works in the folder of a study.
"""

import contextlib
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID
from rich.text import Text

from dpmac_cli.cli import console, late
from dpmac_cli.cli.options import command, faults_of_plot, stop, stop_request
from dpmac_cli.config.checks import fault_of_package
from dpmac_cli.config.flags import OneOf, SomePath
from dpmac_cli.config.settings import Config, DryRun, PrintJson, Quiet, SmallCount
from dpmac_cli.errors import INTERRUPTED, MISFIT, InputError, counted, raise_errors
from dpmac_cli.files import to_json
from dpmac_cli.release.plots import KINDS, write_figure
from dpmac_cli.runs import folder, lock, new_folder
from dpmac_cli.studies import local
from dpmac_cli.studies.compare import RUNS, unfinished
from dpmac_cli.studies.grid import ONE_VALUE, STUDIED, Grid, Run, StudyFlags, plan
from dpmac_cli.studies.results import collect, finished_report, score_in
from dpmac_cli.studies.written import COMPARE_JSON, COMPARE_MD, study_figure, write_comparison
from dpmac_cli.tasks.task import METRICS

#: Largest number of seeds that are listed one by one.
MOST_LISTED = 5
STOPPING = "stopping: each run finishes its step and saves; repeat to stop immediately"

Jobs = Annotated[
    SmallCount | None,
    Field(description="Maximum number of runs at a time. [default: one per core or GPU]"),
]
ExecutorName = Annotated[
    str,
    OneOf(("local", "ray")),
    Field(
        description="Executor of the runs. Ray needs --out, the data and the current folder on "
        "shared storage."
    ),
]
Cluster = Annotated[
    str | None,
    Field(
        description="Address of the Ray cluster. [default: RAY_ADDRESS, or a new one on this "
        "machine]"
    ),
]
StudyPlot = Annotated[
    SomePath | None,
    Field(
        description="Draw scores over epsilon, and over epochs (.png, .svg or .pdf). An existing "
        "file is replaced."
    ),
]
StudyFolder = Annotated[SomePath, Field(description="Folder of the study.")]


@command(
    StudyFlags.model_fields,
    STUDIED,
    several=STUDIED.keys() - {*ONE_VALUE},
)
def compare(
    *,
    jobs: Jobs = None,
    executor: ExecutorName = "local",
    cluster: Cluster = None,
    dry_run: DryRun = False,
    config: Config = None,
    out: StudyFolder = Path("runs/compare"),
    plot: StudyPlot = None,
    json: PrintJson = False,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Compare optimizers, noise levels or any other setting, over several seeds.

    Every setting accepts several values (0.5,0.6,0.7). Values of sigma or epsilon become the
    columns of the table, combinations of other values its rows. Each run is a command dpmac train
    in a process of its own. Its folder in --out is found by its settings: finished runs are
    reused, interrupted runs are resumed, and failed runs are tried again. With --dry-run --json,
    the commands that are left are printed, to run them elsewhere.

    Examples:

        dpmac compare --dataset mnist --optimizers all --sigma 0.5,1.0 --seeds 3

        dpmac compare --dataset digits --epsilon 1,3 --plot digits.png

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, 3 privacy budget infeasible, 4 some
    run failed (the others are in the table), 130 interrupted (run the same command to resume).
    """
    raise_errors(_faults(executor, cluster, plot))
    with console.waiting(quiet, "settings"):
        grid = plan(settings, config, out / RUNS)
    if not quiet:
        console.print_notes(grid.notes)
        console.print_private_notes(grid.private_notes)
    if dry_run:
        _print_plan(grid, quiet=quiet, json=json)
        return
    if out.is_dir() and any(out.iterdir()) and not (out / RUNS).is_dir():
        raise InputError(
            f"--out {out} contains files that do not belong to a study. Use a new or empty folder."
        )
    screen = console.for_display(quiet, json)
    failures, interrupted = _carry_out(grid, out, screen, executor, jobs, cluster)
    with console.waiting(quiet, "table"):
        texts = write_comparison(collect(grid, failures), out)
        if plot is not None:
            write_figure(study_figure(grid), plot)
    if json:
        console.print_result(texts[COMPARE_JSON])
    elif not quiet:
        written = f"{out}: {', '.join([*texts, folder.SUMS])}"
        written += "" if plot is None else f"; {plot}"
        console.stdout().print(Text(f"{texts[COMPARE_MD]}\n{written}"))
    console.print_errors(_failed(failures), label="failed")
    if interrupted:
        stop("interrupted; run the same command to resume.", INTERRUPTED)
    if failures:
        raise typer.Exit(MISFIT)


def _faults(executor: str, cluster: str | None, plot: Path | None) -> Iterator[str]:
    """Yield the faults of flags of the study itself."""
    if executor == "ray":
        yield from fault_of_package("ray", "ray", "--executor ray")
    elif cluster is not None:
        yield "--cluster is the address of a Ray cluster. Add --executor ray, or leave it out."
    if plot is not None:
        yield from faults_of_plot(plot, KINDS)


def _print_plan(grid: Grid, *, quiet: bool, json: bool) -> None:
    """Print the runs of a study and their cost; with ``json``, the commands that are left."""
    if json:
        console.print_result(to_json({"runs": len(grid.runs), "commands": [*_commands(grid)]}))
        return
    with console.waiting(quiet, "privacy costs"):
        titles, *rows = grid.planned()
    out = console.stdout()
    out.print(console.plain_table(titles, rows))
    out.print(f"{counted(len(grid.runs), 'run')}; {_seeds(grid)}; finished runs are not repeated")


def _carry_out(
    grid: Grid, out: Path, screen: Console, executor: str, jobs: int | None, cluster: str | None
) -> tuple[dict[Run, str], bool]:
    """Train the runs that are not finished.

    Args:
        grid: the study.
        out: its folder, which is locked meanwhile.
        screen: where progress is shown.
        executor: "local", or "ray".
        jobs: largest number of runs at a time; None for the default of the executor.
        cluster: address of a Ray cluster; None for the default.

    Returns:
        Why runs failed, and whether the study was interrupted.

    Raises:
        InputError: the cluster does not answer, or the folder is in use or cannot be written.
    """
    failures: dict[Run, str] = {}
    with contextlib.ExitStack() as resources:
        stop_asked = resources.enter_context(stop_request())
        workers: local.Executor | None = None
        if unfinished(grid) and executor == "ray":
            # Nothing is written if the cluster is not available.
            resources.enter_context(late.ray_cluster.connected(cluster))
            workers = late.ray_cluster.Tasks(grid.runs, jobs)
        elif unfinished(grid):
            workers = local.Commands(grid.runs, jobs)
        new_folder.make_folder(out / RUNS)
        resources.enter_context(lock.locked(out))
        missing = unfinished(grid)
        display = resources.enter_context(contextlib.closing(StudyDisplay(screen, grid, missing)))
        if workers is not None:
            for look in local.carry_out(workers, missing, stop_asked):
                display.show(look, stopping=stop_asked())
                failures |= {run: failure for run, failure in look.ended if failure}
        return failures, stop_asked()


def _commands(grid: Grid) -> Iterator[str]:
    """Yield the command of each run that is not finished, quoted for a shell."""
    for run in unfinished(grid):
        yield shlex.join(["dpmac", *local.arguments(run, run.plan.settings.device)])


def _failed(failures: Mapping[Run, str]) -> Iterator[str]:
    """Yield one line per reason, with the first run that failed for that reason.

    Reasons are the same if they differ in the folder of the run only.

    Args:
        failures: why runs failed.
    """
    by_reason: dict[str, list[Run]] = {}
    for run, why in failures.items():
        by_reason.setdefault(why.replace(str(run.folder), ""), []).append(run)
    for first, *others in by_reason.values():
        more = f" and {len(others)} more" if others else ""
        yield f"{first.folder.name} (seed {first.seed}){more}: {failures[first]}"


class StudyDisplay:
    """A line per finished run and, on a terminal, bars below them.

    There is a bar for each run in training, and one for the steps of all runs with the time left.
    It is for one call of the command: :meth:`show` takes each look in turn, and :meth:`close` ends
    it.
    """

    def __init__(self, screen: Console, grid: Grid, missing: Sequence[Run]) -> None:
        """Print how many runs there are, and begin the bars.

        Args:
            screen: where to print.
            grid: the study.
            missing: the runs that are not finished.
        """
        self.screen = screen
        self._count, self._ended = len(missing), 0
        self._stopping = False
        self._steps = dict.fromkeys(missing, 0)
        finished = len(grid.runs) - len(missing)
        again = f", {finished} of them found finished" if finished else ""
        screen.print(f"{counted(len(grid.runs), 'run')}{again}; {_seeds(grid)}")
        self._bar = console.bar(
            *("{task.description}", BarColumn(), MofNCompleteColumn()),
            console=screen,
            speed_estimate_period=math.inf,  # steps are only seen at evaluations
        )
        total = sum(run.plan.event.steps for run in missing)
        self._all_runs = self._bar.add_task("all runs, steps", total=total)
        self._bars = dict[Run, TaskID]()
        self._bar.start()

    def show(self, look: local.Look, *, stopping: bool) -> None:
        """Print a line for each run that has ended, and update the bars.

        Args:
            look: the runs in training, and those that have ended since the last look. A run that
                neither failed nor finished, because it was interrupted, has no line.
            stopping: whether the user has asked the study to stop. The first time, this is
                confirmed.
        """
        if stopping and not self._stopping:
            self._stopping = True
            self.screen.print(Text(STOPPING, console.ATTENTION))
        for run, failure in look.ended:
            self._print_ended(run, failure)
        if not self._bar.disable:
            self._update_bars(look.running)

    def close(self) -> None:
        """Remove the bars; lines that were printed remain. A second call does nothing."""
        self._bar.stop()

    def _print_ended(self, run: Run, failure: str | None) -> None:
        """Print how a run ended.

        Args:
            run: the run.
            failure: why it failed; None if it did not.
        """
        report = finished_report(run)
        self._steps[run] = run.plan.event.steps
        if failure:
            self._ended += 1
            self.screen.print(Text(f"{run.name}: failed: {failure}", style="red"))
        elif report is not None:
            self._ended += 1
            metric = METRICS[run.plan.settings.metric]
            value = score_in(report, metric.key)
            score = "" if value is None else f"  test {metric.title} {metric.text(value)}"
            self.screen.print(Text(f"{self._ended}/{self._count}  {run.name}{score}"))

    def _update_bars(self, running: Sequence[Run]) -> None:
        """Show a bar for each run in training, and remove those of others."""
        for run in self._bars.keys() - set(running):
            self._bar.remove_task(self._bars.pop(run))
        for run in running:
            if run not in self._bars:
                total = run.plan.event.steps
                self._bars[run] = self._bar.add_task(escape(run.name), total=total)
            self._steps[run] = steps_so_far(run)
            self._bar.update(self._bars[run], completed=self._steps[run])
        self._bar.update(self._all_runs, completed=sum(self._steps.values()))


def _seeds(grid: Grid) -> str:
    """Return which seeds the runs of each cell have, and the flag for others."""
    seeds = grid.seeds
    if len(seeds) > MOST_LISTED:
        return f"{len(seeds)} seeds in each cell (--seeds)"
    title = "seed" if len(seeds) == 1 else "seeds"
    return f"{title} {', '.join(map(str, seeds))} in each cell (--seeds)"


def steps_so_far(run: Run) -> int:
    """Return the last step of a run that its metrics have: a lower bound of those it has trained.

    Args:
        run: a run of a study, which another process may be training.

    Returns:
        The step, from the last line of metrics.jsonl. 0 before the first evaluation, and if the
        file is missing or its last line is not complete.
    """
    try:
        lines = (run.folder / folder.METRICS).read_text(encoding="utf-8").splitlines()
        return int(loads(lines[-1])["step"])
    except (*folder.BROKEN, IndexError):
        return 0
