"""Training loop: steps, progress and evaluation events."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.evaluation import Evaluation
from dpmac_cli.training.private_scores import PrivateScore

#: Seconds between progress events.
PROGRESS_EVERY = 0.1


@dataclass(frozen=True)
class Progress:
    """Steps done so far, reported a few times per second."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Evaluated:
    """Scores on the test set after a step."""

    step: int
    epoch: float  # t / ceil(n/B)
    seconds: float  # training time so far, without evaluation
    result: Evaluation | PrivateScore
    last: bool  # whether no step follows in this session


def fit(
    trainer: Trainer,
    stop: Callable[[], bool] = lambda: False,
    pause: Callable[[int], bool] = lambda step: False,
    seconds: float = 0.0,
    before: Callable[[int], None] = lambda step: None,
) -> Iterator[Progress | Evaluated]:
    """Train to the plan's end, scoring the test set after each epoch and at the end.

    Args:
        trainer: a fresh or partly trained trainer.
        stop: called after every step; True ends the run early, after a last evaluation.
        pause: called after every step; True yields a Progress immediately.
        seconds: previous training time of a resumed run.
        before: called with the number of each step before it begins.

    Raises DivergedError, and RunError if memory ran out with a single sample at a time.
    """
    plan, state = trainer.plan, trainer.state
    chunk = state.chunk
    reported = mark = time.perf_counter()
    while state.step < plan.steps:
        before(state.step + 1)
        trainer.step()
        stopping = stop()
        now = time.perf_counter()
        reduced, chunk = state.chunk < chunk, state.chunk
        if stopping or reduced or now - reported > PROGRESS_EVERY or pause(state.step):
            yield Progress(state.step, seconds + now - mark)
            reported = time.perf_counter()
            mark += reported - now  # exclude the handling of events from training time
        last = stopping or state.step == plan.steps
        if last or state.step % plan.steps_per_epoch == 0:
            trainer.check_finite()
            seconds += time.perf_counter() - mark
            result = trainer.score()
            trainer.check_network()
            epoch = state.step / plan.steps_per_epoch
            yield Evaluated(state.step, epoch, seconds, result, last)
            mark = time.perf_counter()
        if stopping:
            return
