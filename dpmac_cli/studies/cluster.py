"""Runs as jobs, in other processes or on other machines, watched through their folders."""

import multiprocessing
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.data.dataset import Data
from dpmac_cli.runs import folder
from dpmac_cli.runs.memory import keep_freed_memory
from dpmac_cli.storage import files
from dpmac_cli.studies.executor import Died, Ended, Moved, RunEvent
from dpmac_cli.studies.worker import train_run

#: Signals that ask a job to stop: ray.cancel and scancel, the end of its time, and preemption.
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
#: Why a run failed, if it did, and its last step.
Result = tuple[str | None, int]


class LostError(Exception):
    """A job ended without a result."""


class Cluster(ABC):
    """Executor whose runs are jobs.

    Args:
        plans: of all runs, each with its ``out``.
        slots: runs at a time.
    """

    #: Seconds between looks at the jobs and the folders of their runs.
    pause = 0.5

    def __init__(self, plans: Sequence[TrainPlan], slots: int) -> None:
        self.plans, self.slots = plans, slots
        self._jobs: dict[int, Any] = {}
        self._steps: dict[int, int] = {}

    @abstractmethod
    def _submit(self, plans: Sequence[TrainPlan]) -> Sequence[Any]:
        """Begin a job of :func:`train_job` for each of some runs."""

    @abstractmethod
    def _result(self, job: Any) -> Result | None:
        """Return what a job has returned; None while it runs. Raises LostError with the reason."""

    @abstractmethod
    def _cancel(self, job: Any) -> None:
        """Send a job one of :data:`REQUESTS`, or take it out of the queue."""

    def start(self, numbers: Sequence[int]) -> None:
        """Submit runs."""
        jobs = self._submit([self.plans[number] for number in numbers])
        self._jobs |= zip(numbers, jobs, strict=True)

    def poll(self) -> Iterator[RunEvent | Died]:
        """Look at every job, then wait."""
        for number, job in list(self._jobs.items()):
            end: Ended | Died | None = None
            step = 0
            try:
                if result := self._result(job):
                    end, step = Ended(number, result[0]), result[1]
            except LostError as lost:
                end = Died(number, str(lost))
            yield from self._progress(number, step)
            if end:
                del self._jobs[number]
                yield end
        time.sleep(self.pause if self._jobs else 0)

    def _progress(self, number: int, step: int) -> Iterator[Moved]:
        """Yield how far a run is by its folder, or by ``step`` where that is further."""
        plan = self.plans[number]
        lines = files.read_lines(plan.folder / folder.METRICS)
        last = lines[-1] if lines else {"step": 0}
        step = max(step, int(last["step"]))
        if step != self._steps.get(number, 0):
            self._steps[number] = step
            yield Moved(number, step, plan.steps, last.get("test_accuracy"))

    def ask_to_stop(self) -> None:
        """Ask every run to finish its step, save and end."""
        for job in self._jobs.values():
            self._cancel(job)

    def close(self) -> None:
        """End the jobs that are left."""
        self.ask_to_stop()


def train_job(plan: TrainPlan, threads: int, data: Data | None = None) -> Result:
    """Train one run on as many threads, until it ends, a signal comes or its parent is gone.

    Args:
        data: on the run's device; None to load it.
    """
    parent = multiprocessing.parent_process()
    asked = threading.Event()
    for number in REQUESTS:
        signal.signal(number, lambda *_: asked.set())
    torch.set_num_threads(threads)
    keep_freed_memory()
    failure, step = None, 0

    def stop() -> bool:
        return asked.is_set() or (parent is not None and not parent.is_alive())

    for event in train_run(0, plan, data, stop):
        if isinstance(event, Ended):
            failure = event.failure
        else:
            step = event.step
    return failure, step
