"""Running a study: jobs watched through the folders of their runs, and repeated attempts.

Implementations: :mod:`~dpmac_cli.studies.local`, :mod:`~dpmac_cli.studies.ray_cluster` and
:mod:`~dpmac_cli.studies.slurm`, chosen by :mod:`~dpmac_cli.studies.choice`. Loads no torch.
"""

import os
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.settings import metric_key
from dpmac_cli.runs import folder
from dpmac_cli.storage import files

#: How often a run is started whose process dies.
ATTEMPTS = 3
#: Seconds between checks for a request to stop.
PATIENCE = 0.2
#: Seconds until files written by another machine must be visible here.
GRACE = 15.0


@dataclass(frozen=True)
class Moved:
    """Progress of a run of the grid: steps taken, steps in all, metric once evaluated."""

    number: int
    step: int
    steps: int
    score: float | None


@dataclass(frozen=True)
class Ended:
    """End of a run, or of one attempt at it.

    Attributes:
        failure: why it failed; None if it finished or was asked to stop.
        again: whether its process died, so that the run is to be started again.
    """

    number: int
    failure: str | None = None
    again: bool = False


RunEvent = Moved | Ended
#: Why a run failed, if it did, and its last step; None if the job ended without a result.
Result = tuple[str | None, int | None]


class Executor(ABC):
    """Runs as jobs, in other processes or on other machines.

    :func:`carry_out` decides which are started, and how often.

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
        """Begin a job of :func:`~dpmac_cli.studies.local.train_job` for each of some runs."""

    @abstractmethod
    def _result(self, job: Any) -> Result | None:
        """Return what a job has returned, or why it ended without a result; None while it runs."""

    @abstractmethod
    def _cancel(self, job: Any) -> None:
        """Send a job a signal that asks it to stop, or take it out of the queue."""

    def start(self, numbers: Sequence[int]) -> None:
        """Submit runs."""
        jobs = self._submit([self.plans[number] for number in numbers])
        self._jobs |= zip(numbers, jobs, strict=True)

    def poll(self) -> Iterator[RunEvent]:
        """Look at every job, then wait. Each started run ends with one Ended."""
        for number, job in list(self._jobs.items()):
            result = self._result(job)
            failure, step = result or (None, 0)
            yield from self._progress(number, step or 0)
            if result:
                del self._jobs[number]
                yield Ended(number, failure, again=step is None)
        time.sleep(self.pause if self._jobs else 0)

    def _progress(self, number: int, step: int) -> Iterator[Moved]:
        """Yield how far a run is by its folder, or by ``step`` where that is further."""
        plan = self.plans[number]
        lines = files.read_lines(plan.folder / folder.METRICS)
        last = lines[-1] if lines else {"step": 0}
        step = max(step, int(last["step"]))
        if step != self._steps.get(number, 0):
            self._steps[number] = step
            yield Moved(number, step, plan.steps, last.get(metric_key(plan.metric)))

    def ask_to_stop(self) -> None:
        """Ask every run to finish its step, save and end."""
        for job in self._jobs.values():
            self._cancel(job)

    def close(self) -> None:
        """End the jobs that are left."""
        self.ask_to_stop()


def carry_out(
    executor: Executor, numbers: Sequence[int], stop: Callable[[], bool]
) -> Iterator[RunEvent]:
    """Carry out some runs of a study and yield what happens to them.

    A run whose process dies is started again, up to :data:`ATTEMPTS` times in all; the others are
    not affected. Every run that was started ends with one :class:`Ended` that is not ``again``.

    Args:
        executor: trains the runs; closed at the end.
        numbers: of the runs to carry out, as indices into its plans.
        stop: called between events; True lets every run finish its step, save and end.
    """
    waiting, attempts, asked = deque(numbers), Counter[int](), False
    steps: dict[int, int] = {}  # of the runs under way
    try:
        while waiting or steps:
            if not asked and stop():
                asked = True
                waiting.clear()
                executor.ask_to_stop()
            free = min(executor.slots - len(steps), len(waiting))
            if starting := [waiting.popleft() for _ in range(free)]:
                attempts.update(starting)
                steps |= dict.fromkeys(starting, 0)
                executor.start(starting)
            for event in executor.poll():
                number = event.number
                if isinstance(event, Moved):
                    steps[number] = event.step
                    yield event
                    continue
                plan, step = executor.plans[number], steps.pop(number)
                ended = _judge(event, plan, step, attempts[number], stopped=asked)
                if ended.again:
                    waiting.appendleft(number)
                yield ended
    finally:
        executor.close()


def _judge(end: Ended, plan: TrainPlan, step: int, attempt: int, *, stopped: bool) -> Ended:
    """Decide from how a process ended, after which step and start, whether its run is over."""
    number, why = end.number, end.failure
    if end.again:
        if stopped or _finished(plan):  # killed after its run was finished
            return Ended(number)
    elif stopped or why is not None:
        return end
    elif step < plan.steps:
        why = "it was asked to end by its cluster"
    elif _appears(plan):
        return end
    else:
        return Ended(
            number,
            f"it ended on another machine, and its folder {plan.folder} is not seen here. Name "
            "an --out on storage that all machines share.",
        )
    if attempt < ATTEMPTS:
        return Ended(number, f"its process died ({why})", again=True)
    return Ended(
        number,
        f"its process died {ATTEMPTS} times ({why}). If memory ran out, try fewer --jobs.",
    )


def _finished(plan: TrainPlan) -> bool:
    return folder.reported_steps(plan.folder) >= plan.steps


def _appears(plan: TrainPlan) -> bool:
    """Wait until the report of a finished run is visible here; False after :data:`GRACE`."""
    deadline = time.monotonic() + GRACE
    while not _finished(plan):
        if time.monotonic() > deadline:
            return False
        time.sleep(PATIENCE)
        if plan.folder.is_dir():
            os.listdir(plan.folder)  # makes a network file system look again
    return True
