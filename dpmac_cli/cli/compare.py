"""dpmac compare: train many runs, and show a table of results."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn
from rich.table import Table
from rich.text import Text

from dpmac_cli.cli import console, late
from dpmac_cli.cli.options import command, stop, stop_request
from dpmac_cli.config.checks import fault_of_package
from dpmac_cli.config.flags import OneOf, SomePath
from dpmac_cli.config.settings import Config, DryRun, PrintJson, Quiet, SmallCount
from dpmac_cli.errors import INTERRUPTED, MISFIT, InputError, counted, raise_errors
from dpmac_cli.runs import folder
from dpmac_cli.studies.grid import ONE_VALUE, STUDIED, Grid, Run, StudyFlags, plan
from dpmac_cli.studies.results import (
    COMPARE_JSON,
    COMPARE_MD,
    collect,
    finished_report,
    write_comparison,
)
from dpmac_cli.tasks.task import METRICS

#: Folder of the runs of a study, in its own.
RUNS = "runs"


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
StudyFolder = Annotated[SomePath, Field(description="Folder of the study.")]


@command(
    StudyFlags.model_fields,
    STUDIED,
    several=STUDIED.keys() - {*ONE_VALUE},
    not_both={("dry_run", "json"): "a plan has no table"},
)
def compare(
    *,
    jobs: Jobs = None,
    executor: ExecutorName = "local",
    cluster: Cluster = None,
    dry_run: DryRun = False,
    config: Config = None,
    out: StudyFolder = Path("runs/compare"),
    json: PrintJson = False,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Compare optimizers, noise levels or any other setting, over several seeds.

    Every setting accepts several values (0.5,0.6,0.7). Values of sigma or epsilon become the
    columns of the table, combinations of other values its rows. Runs are ordinary training runs
    in --out, which are found by their settings: finished runs are reused, interrupted runs are
    resumed, and failed runs are tried again.

    Example: dpmac compare --dataset mnist --optimizers all --sigma 0.5,1.0 --seeds 3

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, 3 privacy budget infeasible, 4 some
    run failed (the others are in the table), 130 interrupted (run the same command to resume).
    """
    if executor == "ray":
        raise_errors(fault_of_package("ray", "ray", "--executor ray"))
    elif cluster is not None:
        raise InputError(
            "--cluster is the address of a Ray cluster. Add --executor ray, or leave it out."
        )
    with console.waiting(quiet, "settings"):
        grid = plan(given, config, out / RUNS)
        planned = planned_runs(grid) if dry_run else None
    if not quiet:
        console.print_notes(grid.notes)
        console.print_private_notes(grid.private_notes)
    if planned is not None:
        console.stdout().print(planned)
        return
    if out.is_dir() and any(out.iterdir()) and not (out / RUNS).is_dir():
        raise InputError(
            f"--out {out} contains files that do not belong to a study. Use a new or empty folder."
        )
    screen = console.for_display(quiet, json)
    failures, interrupted = _carry_out(grid, out, screen, executor, jobs, cluster)
    with console.waiting(quiet, "table"):
        texts = write_comparison(collect(grid, failures), out)
    if json:
        console.print_result(texts[COMPARE_JSON])
    elif not quiet:
        written = f"{out}: {', '.join([*texts, folder.SUMS])}"
        console.stdout().print(Text(f"{texts[COMPARE_MD]}\n{written}"))
    console.print_errors(_failed(grid, failures), label="failed")
    if interrupted:
        stop("interrupted; run the same command to resume.", INTERRUPTED)
    if failures:
        raise typer.Exit(MISFIT)


def _carry_out(
    grid: Grid, out: Path, screen: Console, executor: str, jobs: int | None, cluster: str | None
) -> tuple[dict[int, str], bool]:
    """Train unfinished runs; return reasons of failures by number, and whether interrupted."""
    with console.waiting(screen.quiet, "data"):
        # Nothing is written if the data or the cluster is not available.
        data = late.local.share_data([grid.runs[number] for number in _missing(grid)])
    failures: dict[int, str] = {}
    with contextlib.ExitStack() as held:
        asked = held.enter_context(stop_request())
        workers: late.local.Executor | None = None
        if data and executor == "ray":
            held.enter_context(late.ray_cluster.connected(cluster))
            workers = late.ray_cluster.Tasks(grid.runs, jobs)
        elif data:
            workers = late.local.Pool(grid.runs, jobs, data)
        folder.make_folder(out / RUNS)
        held.enter_context(folder.locked(out))
        missing = _missing(grid)
        events = late.local.carry_out(workers, grid.runs, missing, asked) if workers else ()
        for number, failure in shown(events, screen, grid, len(missing)):
            if failure:
                failures[number] = failure
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


def shown(
    events: Iterable[tuple[int, str | None]], screen: Console, grid: Grid, missing: int
) -> Iterator[tuple[int, str | None]]:
    """Yield the runs that ended, and why they failed.

    Print a line per finished run; below them, on a terminal, a bar.
    """
    found, ended = len(grid.runs) - missing, 0
    screen.print(
        f"{counted(len(grid.runs), 'run')}{f', {found} of them found finished' * bool(found)}"
    )
    with console.bar("{task.completed}/{task.total} runs", BarColumn(), console=screen) as bar:
        task = bar.add_task("", total=missing)
        for number, failure in events:
            run = grid.runs[number]
            name = run.name
            report = finished_report(run)
            ended += report is not None or failure is not None
            bar.update(task, completed=ended)
            if failure:
                screen.print(Text(f"{name}: failed: {failure}", style="red"))
            elif report is not None:
                metric = METRICS[run.plan.settings.metric]
                value = report["test"].get(metric.key)
                score = "" if value is None else f"  test {metric.title} {metric.text(value)}"
                screen.print(Text(f"{ended}/{missing}  {name}{score}"))
            yield number, failure


def planned_runs(grid: Grid) -> Table:
    """Return a table of the runs of a study, the privacy cost of each, and their steps."""
    said = f"{counted(len(grid.runs), 'run')}; finished runs are not repeated"
    titles, *rows = grid.planned()
    return console.plain_table(titles, rows, caption=said, caption_justify="left")
