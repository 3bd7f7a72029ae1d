"""Run a study: jobs, monitored through the folders of their runs.

Implementations: :mod:`~dpmac_cli.studies.local` and :mod:`~dpmac_cli.studies.ray_cluster`. Loads no
torch.
"""

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dpmac_cli.runs import folder
from dpmac_cli.storage import files
from dpmac_cli.studies.grid import Run
from dpmac_cli.tasks.known import METRICS

#: Seconds between checks for a request to stop.
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
#: A job as its executor knows it.
Job = TypeVar("Job")


class Executor(ABC, Generic[Job]):
    """Interface that runs jobs in other processes or on other machines, for :func:`carry_out`.

    Args:
        runs: all runs of the study.
        slots: maximum number of runs at a time.
    """

    #: Seconds between checks of the jobs and the folders of their runs.
    pause = 0.5

    def __init__(self, runs: Sequence[Run], slots: int) -> None:
        self.runs, self.slots = runs, slots

    @abstractmethod
    def submit(self, run: Run) -> Job:
        """Start a job of :func:`~dpmac_cli.studies.local.train_job` for a run."""

    @abstractmethod
    def result(self, job: Job) -> Result | None:
        """Return a job's result, or why it ended without one; None while it runs."""

    @abstractmethod
    def cancel(self, job: Job) -> None:
        """Signal a job to stop, or remove it from the queue."""

    def wait(self, job: Job) -> None:
        """Wait for a cancelled job to end, if it runs locally: others outlive the command."""


def carry_out(
    executor: Executor[Job], numbers: Sequence[int], stop: Callable[[], bool]
) -> Iterator[StudyEvent]:
    """Carry out some runs of a study and yield their progress and results.

    Every run that was started ends with one :class:`Ended`. Others go on if its process dies.

    Args:
        executor: trains the runs. Jobs that remain at the end are cancelled.
        numbers: indices of the runs to carry out in the executor's runs.
        stop: called between checks of the jobs; if True, every run finishes its step and saves.
    """
    waiting, asked = deque(numbers), False
    jobs: dict[int, Job] = {}  # jobs of the runs in progress
    steps = dict.fromkeys(numbers, 0)
    try:
        while waiting or jobs:
            if not asked and stop():
                asked = True
                waiting.clear()
                for job in jobs.values():
                    executor.cancel(job)
            while waiting and len(jobs) < executor.slots:
                number = waiting.popleft()
                jobs[number] = executor.submit(executor.runs[number])
            for number, job in list(jobs.items()):
                result = executor.result(job)
                moved = _progress(number, executor.runs[number], result)
                if moved.step != steps[number]:
                    steps[number] = moved.step
                    yield moved
                if result is not None:
                    del jobs[number]
                    yield _end(moved, executor.runs[number], result, asked)
            time.sleep(executor.pause if jobs else 0)
    finally:
        for job in jobs.values():
            executor.cancel(job)
        for job in jobs.values():
            executor.wait(job)


def _progress(number: int, run: Run, result: Result | None) -> Moved:
    """Return the progress of a run by its folder, or by its result if that is further."""
    lines = files.read_lines(run.folder / folder.METRICS)
    last = lines[-1] if lines else {"step": 0}
    step = max(int(last["step"]), (result and result[1]) or 0)
    return Moved(number, step, last.get(METRICS[run.plan.run.metric].logged))


def _end(moved: Moved, run: Run, result: Result, stopped: bool) -> Ended:
    """Return how a run ended, from its progress and its job's result."""
    (why, reached), number = result, moved.number
    if reached is None:  # perhaps after its run had finished
        died = f"its process died ({why}). If memory ran out, use fewer --jobs."
        return Ended(number, None if stopped or _finished(run) else died)
    if stopped or why is not None:
        return Ended(number, why)
    if moved.step < run.plan.privacy.steps:
        return Ended(number, "its cluster asked it to stop")
    unseen = (
        f"it ended on another machine, but its folder {run.folder} is not visible here. Set --out "
        "to a folder on shared storage."
    )
    return Ended(number, None if _appears(run) else unseen)


def _finished(run: Run) -> bool:
    return folder.reported_steps(run.folder) >= run.plan.privacy.steps


def _appears(run: Run) -> bool:
    """Wait until the report of a finished run is visible here; False after :data:`GRACE`."""
    deadline = time.monotonic() + GRACE
    while not _finished(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(PATIENCE)
        if run.folder.is_dir():
            os.listdir(run.folder)  # makes a network file system refresh
    return True
