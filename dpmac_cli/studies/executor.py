"""Run a study: the jobs of an executor, and why some of them failed.

Executors: :mod:`~dpmac_cli.studies.local` and :mod:`~dpmac_cli.studies.ray_cluster`. Loads no
torch.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from dpmac_cli.studies.grid import Run
from dpmac_cli.studies.results import finished_report

#: Seconds between requests to stop.
PATIENCE = 0.2
#: Seconds within which files written by another machine must become visible.
GRACE = 15.0


@dataclass(frozen=True)
class Ended:
    """End of a run in the grid; ``failure`` is None if it finished or was asked to stop."""

    number: int
    failure: str | None = None


class LostJobError(Exception):
    """A job ended without a result."""


class Executor(Protocol):
    """Trains runs in other processes or on other machines, at most ``slots`` at a time."""

    slots: int

    def train(self, run: Run, stop: threading.Event) -> str | None:
        """Train a run until it ends; return why it failed. Once ``stop`` is set, ask it to stop.

        Raises LostJobError.
        """


def carry_out(
    executor: Executor, runs: Sequence[Run], numbers: Sequence[int], stop: Callable[[], bool]
) -> Iterator[Ended]:
    """Carry out some runs of a study and yield the end of each that was started.

    Others go on if its process dies.

    Args:
        executor: trains the runs. Those that remain at the end are asked to stop.
        runs: all runs of the study.
        numbers: indices of the runs to carry out.
        stop: called between looks at the runs; if True, every run finishes its step and saves.
    """
    asked = threading.Event()
    with ThreadPoolExecutor(executor.slots) as threads:
        started = [] if stop() else numbers
        jobs = {threads.submit(executor.train, runs[n], asked): n for n in started}
        try:
            while jobs:
                ended, _ = wait(jobs, PATIENCE, FIRST_COMPLETED)
                if stop():
                    asked.set()
                    jobs = {job: number for job, number in jobs.items() if not job.cancel()}
                for job in ended:
                    number = jobs.pop(job)
                    yield Ended(number, _failure(job, runs[number], asked.is_set()))
        finally:
            asked.set()
            for job in jobs:
                job.cancel()


def _failure(job: Future[str | None], run: Run, stopped: bool) -> str | None:
    """Return why a run failed; None if it finished, or was asked to stop."""
    try:
        why = job.result()
    except LostJobError as failure:  # perhaps after its run had finished
        died = f"its process died ({failure}). If memory ran out, use fewer --jobs."
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
