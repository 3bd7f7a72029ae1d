"""dpmac compare: many runs, and the table of what came out."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from dpmac_cli.cli import console
from dpmac_cli.cli.compare_display import Display, print_plan
from dpmac_cli.cli.failures import explained, stop, stop_request
from dpmac_cli.cli.options import DEBUG, one_of, option, path_option, switch, with_options
from dpmac_cli.cli.train import text_option
from dpmac_cli.config.given import parse
from dpmac_cli.config.settings import OUTPUT, SETTINGS
from dpmac_cli.dp.optimizers import OPTIMIZERS
from dpmac_cli.errors import INTERRUPTED, MISFIT, InputError
from dpmac_cli.runs import folder
from dpmac_cli.storage import files
from dpmac_cli.studies import tables
from dpmac_cli.studies.choice import EXECUTORS, Choice, opened
from dpmac_cli.studies.executor import Ended, carry_out
from dpmac_cli.studies.grid import DEFAULT_SEEDS, STUDIED, Grid, Run, plan
from dpmac_cli.studies.results import collect, finished_report, was_changed

#: Files of a comparison in its folder, beside the folder of its runs.
RUNS, JSON, CSV, MARKDOWN = "runs", "compare.json", "compare.csv", "compare.md"
#: Folder for what jobs on a cluster print and are told; only its owner can read it.
JOBS = "jobs"
DEFAULT_OUT = Path("runs") / "compare"
#: Group of options in the help.
STUDY = "Study"


@with_options(
    path_option("config", "YAML with the same names; flags win.", STUDY),
    option(
        "optimizers",
        "Which, or all. [default: all]",
        STUDY,
        "NAME,...",
        one_of(("all", *OPTIMIZERS), several=True),
    ),
    option(
        "seeds",
        f"How many (5), or which (3,7,8; one alone: 3,). [default: {DEFAULT_SEEDS}]",
        STUDY,
        "INT,...",
    ),
    option("jobs", "Runs at a time. [default: one per core or GPU]", STUDY, "INT", kind=int | None),
    option(
        "executor",
        f"Who carries them out: {', '.join(EXECUTORS)}. Clusters need --out, data and the "
        "folder that this is typed in on storage that all machines share. [default: local]",
        STUDY,
        "NAME",
        one_of(EXECUTORS),
        default="local",
    ),
    option(
        "cluster",
        "Address of the Ray cluster. [default: RAY_ADDRESS, or one on this machine]",
        STUDY,
        "STR",
    ),
    option(
        "slurm",
        "sbatch options of a job: partition=gpu,time=60,gpus=1. Each run is a job.",
        STUDY,
        "KEY=VALUE,...",
    ),
    switch("dry_run", "Show runs, their privacy cost and steps; train nothing.", STUDY),
    *(text_option(name, SETTINGS[name], several=name != "metric") for name in STUDIED),
    option("out", f"Folder of the study. [default: {DEFAULT_OUT}]", OUTPUT, "PATH"),
    switch("json", "Print compare.json.", OUTPUT),
    switch("quiet", "Print nothing but errors.", OUTPUT),
    DEBUG,
)
@explained
def compare(**flags: Any) -> None:
    """Run the command; ``flags`` are the studied settings and the options above."""
    out: Path = parse({"out": flags.pop("out")}).get("out", DEFAULT_OUT)
    file = flags.pop("config")
    choice = Choice(*(flags.pop(name) for name in ("executor", "jobs", "cluster", "slurm")))
    dry_run, as_json, quiet = flags.pop("dry_run"), flags.pop("json"), flags.pop("quiet")
    errors = list(choice.faults())
    if dry_run and as_json:
        errors.append("--dry-run and --json contradict each other: a plan has no table. Give one.")
    if errors:
        raise InputError(errors)
    grid = plan(flags, file, out / RUNS)
    if not quiet:
        console.print_notes(grid.notes)
    if dry_run:
        print_plan(console.stdout(), grid)
        return
    if out.is_dir() and any(out.iterdir()) and not (out / RUNS).is_dir():
        raise InputError(
            f"--out {out} holds files that are not a study's. Name a new or an empty folder."
        )
    errors = [
        f"{run.folder} holds a run with other settings, so it is no run of this study. Move it "
        "out of that folder: the same command then trains it again, from scratch."
        for run in grid.runs
        if was_changed(run)
    ]
    if errors:
        raise InputError(errors)
    failures, interrupted = _carry_out(grid, out, choice, console.for_display(quiet, as_json))
    document, summary = _write_results(grid, out, failures)
    if as_json:
        console.print_result(document)
    elif not quiet:
        console.stdout().print(Text(summary))
    console.print_errors(_failed(grid, failures), label="failed")
    if interrupted:
        stop("interrupted; the same command goes on.", INTERRUPTED)
    if failures:
        raise typer.Exit(MISFIT)


def _carry_out(
    grid: Grid, out: Path, choice: Choice, screen: Console
) -> tuple[dict[int, str], bool]:
    """Train unfinished runs; return why some failed, by number, and whether it was interrupted."""
    from dpmac_cli.studies.local import share_data  # noqa: PLC0415  (loads torch)

    plans = [run.plan for run in grid.runs]
    # Without data, or a cluster, nothing is written.
    data = share_data([plans[number] for number in _missing(grid)])
    failures: dict[int, str] = {}
    with contextlib.ExitStack() as held:
        asked = held.enter_context(stop_request())
        executor = held.enter_context(opened(choice, plans, data, out / JOBS)) if data else None
        folder.make_folder(out / RUNS)
        held.enter_context(folder.locked(out))
        missing = _missing(grid)
        console.print_notes(_damages(grid.runs[number] for number in missing))
        display = held.enter_context(contextlib.closing(Display(screen, grid, missing)))
        if executor is None or not missing:
            return failures, False
        for event in carry_out(executor, missing, asked):
            display.show(event)
            if isinstance(event, Ended) and event.failure and not event.again:
                failures[event.number] = event.failure
        return failures, asked()


def _missing(grid: Grid) -> list[int]:
    """Return the numbers of the runs that are not finished."""
    return [number for number, run in enumerate(grid.runs) if finished_report(run) is None]


def _damages(runs: Iterable[Run]) -> Iterator[str]:
    """Yield which files of finished runs are damaged."""
    for run in runs:
        for name in (folder.REPORT, folder.METRICS, folder.MODEL):
            if folder.vouched(run.folder, name) is False:
                yield f"{run.folder / name} is damaged: the run goes on from its checkpoint."


def _write_results(grid: Grid, out: Path, failures: Mapping[int, str]) -> tuple[str, str]:
    """Write the table in all its forms; return its JSON, and its text with the files' names."""
    comparison = collect(grid, failures)
    document, text = files.to_json(tables.as_values(comparison)), tables.as_markdown(comparison)
    texts = {JSON: document, CSV: tables.as_csv(comparison), MARKDOWN: text}
    (out / folder.SUMS).unlink(missing_ok=True)
    for name, content in texts.items():
        files.write_atomically(out / name, content.encode())
    folder.seal(out, texts)
    return document, f"{text}\n{out}: {', '.join([*texts, folder.SUMS])}"


def _failed(grid: Grid, failures: Mapping[int, str]) -> Iterator[str]:
    """Yield one line per reason, with the first of the runs that failed for it."""
    by_reason: dict[str, list[Run]] = {}
    for number, why in failures.items():
        by_reason.setdefault(why, []).append(grid.runs[number])
    for why, (first, *others) in by_reason.items():
        more = f" and {len(others)} more" if others else ""
        yield f"{first.folder.name} (seed {first.seed}){more}: {why}"
