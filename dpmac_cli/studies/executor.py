"""Run a study: jobs of an executor, monitored through the folders of their runs.

Executors: :mod:`~dpmac_cli.studies.local` and :mod:`~dpmac_cli.studies.ray_cluster`. Loads no
torch.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from dpmac_cli.runs import folder
from dpmac_cli.storage import files
from dpmac_cli.studies.grid import Run
from dpmac_cli.studies.results import finished_report
from dpmac_cli.tasks.known import METRICS

#: Seconds between looks at the folders of the runs, and at requests to stop.
PATIENCE = 0.2
#: Seconds within which files written by another machine must become visible.
GRACE = 15.0


@dataclass(frozen=True)
class Moved:
    """Progress of a run in the grid: steps taken, and the metric once evaluated."""

    number: int
    step: int
    score: float | None


@dataclass(frozen=True)
class Ended:
    """End of a run; ``failure`` is None if it finished or was asked to stop."""

    number: int
    failure: str | None = None


StudyEvent = Moved | Ended
#: Reason why a run failed, if it did, and its last step; None if the job ended without a result.
Result = tuple[str | None, int | None]


class Executor(Protocol):
    """Trains runs in other processes or on other machines, at most ``slots`` at a time."""

    slots: int

    def train(self, run: Run, stop: threading.Event) -> Result:
        """Train a run, and wait until it ends; once ``stop`` is set, ask it to stop."""


def carry_out(
    executor: Executor, runs: Sequence[Run], numbers: Sequence[int], stop: Callable[[], bool]
) -> Iterator[StudyEvent]:
    """Carry out some runs of a study and yield their progress and results.

    Every run that was started ends with one :class:`Ended`. Others go on if its process dies.

    Args:
        executor: trains the runs. Those that remain at the end are asked to stop.
        runs: all runs of the study.
        numbers: indices of the runs to carry out.
        stop: called between looks at the runs; if True, every run finishes its step and saves.
    """
    asked, steps = threading.Event(), dict.fromkeys(numbers, 0)
    with ThreadPoolExecutor(executor.slots) as threads:
        started = [] if stop() else numbers
        jobs = {n: threads.submit(executor.train, runs[n], asked) for n in started}
        try:
            while jobs:
                wait(jobs.values(), PATIENCE, FIRST_COMPLETED)
                if stop():
                    asked.set()
                    jobs = {number: job for number, job in jobs.items() if not job.cancel()}
                for number in [n for n, job in jobs.items() if job.running() or job.done()]:
                    result = jobs[number].result() if jobs[number].done() else None
                    moved = _progress(number, runs[number], result)
                    if moved.step != steps[number]:
                        steps[number] = moved.step
                        yield moved
                    if result is not None:
                        del jobs[number]
                        yield Ended(number, _failure(runs[number], result, asked.is_set()))
        finally:
            asked.set()
            for job in jobs.values():
                job.cancel()


def _progress(number: int, run: Run, result: Result | None) -> Moved:
    """Return the progress of a run by its folder, or by its result if that is further."""
    lines = files.read_lines(run.folder / folder.METRICS)
    last = lines[-1] if lines else {"step": 0}
    step = max(int(last["step"]), (result and result[1]) or 0)
    return Moved(number, step, last.get(METRICS[run.plan.settings.metric].logged))


def _failure(run: Run, result: Result, stopped: bool) -> str | None:
    """Return why a run failed; None if it finished, or was asked to stop."""
    why, reached = result
    if reached is None:  # perhaps after its run had finished
        died = f"its process died ({why}). If memory ran out, use fewer --jobs."
        return None if stopped or finished_report(run) else died
    if stopped or why is not None or _appears(run):
        return why
    return (
        f"it ended on another machine that was asked to stop, or its folder {run.folder} is not "
        "visible here. Set --out to a folder on shared storage."
    )


def _appears(run: Run) -> bool:
    """Wait until the report of a finished run is visible here; False after :data:`GRACE`."""
    deadline = time.monotonic() + GRACE
    while finished_report(run) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(PATIENCE)
        if run.folder.is_dir():
            os.listdir(run.folder)  # makes a network file system refresh
    return True
