"""Epsilon at several steps of a run, known before it starts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from dpmac_cli.accounting.accountants import COARSE, total_epsilon
from dpmac_cli.accounting.events import TrainingEvent


@dataclass(frozen=True)
class EpsilonSchedule:
    """``(step, epsilon)`` pairs, both increasing, the last one at the planned end."""

    points: tuple[tuple[int, float], ...]

    def at(self, step: int) -> float:
        """Return an upper bound on epsilon after ``step`` steps: the next point's epsilon."""
        if step <= 0:
            return 0.0
        for point, epsilon in self.points:
            if step <= point:
                return epsilon
        raise ValueError(f"the schedule ends at step {self.points[-1][0]}, asked for {step}")


def epsilon_schedule(
    event: TrainingEvent,
    delta: float,
    epoch: int,
    earlier: Sequence[TrainingEvent] = (),
    accountant: str | None = None,
) -> EpsilonSchedule:
    """Price a run at some 20 to 100 evenly spaced steps, on a coarse grid.

    The last point is exactly ``total_epsilon((*earlier, event), delta)``; no other is above it.

    Args:
        event: the whole run, from the first step that is drawn with its keys.
        delta: in (0, 1).
        epoch: steps of an epoch; points fall on the ends of epochs where their number allows.
        earlier: what else was done with the records before or beside.
        accountant: see :func:`total_epsilon`.
    """
    end = total_epsilon((*earlier, event), delta, accountant)
    if event.steps == 0 or math.isinf(end):
        return EpsilonSchedule(((event.steps, end),))
    steps = range(stride := _stride(event, epoch), event.steps, stride)
    parts = (replace(event, steps=step) for step in steps)
    costs = (total_epsilon((*earlier, part), delta, accountant, COARSE) for part in parts)
    points = [
        (step, min(end, cost)) for step, cost in zip(steps, accumulate(costs, max), strict=True)
    ]
    return EpsilonSchedule((*points, (event.steps, end)))


def _stride(event: TrainingEvent, epoch: int, points: int = 100) -> int:
    """Return steps between points: whole epochs, or a whole fraction of one."""
    least = max(1, math.ceil(event.steps / points))
    if event.sampling.once_an_epoch or epoch <= least:
        return math.ceil(least / epoch) * epoch
    return next(stride for stride in range(least, epoch + 1) if epoch % stride == 0)
