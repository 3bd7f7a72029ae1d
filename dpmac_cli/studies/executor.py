"""Running a study: events, repeated attempts, requests to stop. Loads no torch.

Implementations: :mod:`~dpmac_cli.studies.local`, :mod:`~dpmac_cli.studies.ray_cluster` and
:mod:`~dpmac_cli.studies.slurm`, chosen by :mod:`~dpmac_cli.studies.choice`.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.runs import folder

#: How often a run is started whose process dies.
ATTEMPTS = 3
#: Seconds between checks for a request to stop.
PATIENCE = 0.2
#: Seconds until files written by another machine must be visible here.
GRACE = 15.0


@dataclass(frozen=True)
class Moved:
    """Progress of a run of the grid: steps taken, steps in all, accuracy once evaluated."""

    number: int
    step: int
    steps: int
    accuracy: float | None


@dataclass(frozen=True)
class Ended:
    """End of a run, or of one attempt at it.

    Attributes:
        failure: why it failed; None if it finished or was asked to stop.
        again: whether its process died and the run will be started again.
    """

    number: int
    failure: str | None = None
    again: bool = False


@dataclass(frozen=True)
class Died:
    """Unexpected end of the process that trained a run, as an executor reports it."""

    number: int
    why: str


RunEvent = Moved | Ended


class Executor(Protocol):
    """Starts runs and reports on them; :func:`carry_out` decides which, and how often."""

    @property
    def slots(self) -> int:
        """Number of runs that may be under way at once."""

    def start(self, numbers: Sequence[int]) -> None:
        """Start runs, at most as many as there are free slots."""

    def poll(self) -> Iterator[RunEvent | Died]:
        """Wait briefly and yield what happened. Each started run ends with one Ended or Died."""

    def ask_to_stop(self) -> None:
        """Ask every run to finish its step, save and end. Called at most once."""

    def close(self) -> None:
        """Stop what is still running and release processes."""


def carry_out(
    executor: Executor,
    plans: Sequence[TrainPlan],
    numbers: Sequence[int],
    stop: Callable[[], bool],
) -> Iterator[RunEvent]:
    """Carry out some runs of a study and yield what happens to them.

    A run whose process dies is started again, up to :data:`ATTEMPTS` times in all; the others are
    not affected. Every run that was started ends with one :class:`Ended` that is not ``again``.

    Args:
        executor: trains the runs; closed at the end.
        plans: of all runs of the study, each with its ``out``.
        numbers: of the runs to carry out, as indices into ``configs``.
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
                step, attempt = steps.pop(number), attempts[number]
                ended = _judge(event, plans[number], step, attempt, stopped=asked)
                if ended.again:
                    waiting.appendleft(number)
                yield ended
    finally:
        executor.close()


def _judge(end: Ended | Died, plan: TrainPlan, step: int, attempt: int, *, stopped: bool) -> Ended:
    """Decide from how a process ended, after which step and start, whether its run is over."""
    number, failure = end.number, end.failure if isinstance(end, Ended) else None
    if stopped or failure is not None:
        return Ended(number, failure)
    if isinstance(end, Died):
        if _finished(plan):  # killed after its run was finished
            return Ended(number)
        why = end.why
    elif step < plan.steps:
        why = "it was asked to end by its cluster"
    elif _appears(plan):
        return Ended(number)
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


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
