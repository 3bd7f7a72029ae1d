"""Privacy costs before they are rendered: rows with all they depend on, and the course of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from dpmac_cli.accounting.accountants import COARSE, choose_accountant, total_epsilon
from dpmac_cli.accounting.events import ADJACENCY, TrainingEvent
from dpmac_cli.accounting.risk import Risk
from dpmac_cli.accounting.statements import RECORD, common, statement


@dataclass(frozen=True, kw_only=True)
class Row:
    """A privacy cost and all it depends on; None for what differs between parts.

    Attributes:
        statement: the guarantee in plain sentences. unit: that of privacy, in words.
        events: what happened, one per part.
        noise_multiplier, sampling_rate, dataset_size, batch_size: sigma, q, n, B.
        compositions: mechanisms on all records.
        solved: the setting that was worked out; None for epsilon.
        risk: what an attacker can learn, where that was asked for.
    """

    statement: str
    events: tuple[TrainingEvent, ...]
    epsilon: float
    delta: float
    noise_multiplier: float | None
    sampling_rate: float | None
    steps: int
    epochs: float | None
    sampler: str
    accountant: str
    adjacency: str = ADJACENCY
    compositions: int
    dataset_size: int | None = None
    batch_size: int | None = None
    solved: str | None = None
    risk: Risk | None = None
    unit: str = RECORD


def price(
    events: tuple[TrainingEvent, ...],
    delta: float,
    accountant: str | None = None,
    unit: str = RECORD,
) -> Row:
    """Return what one or more trainings on the same records cost together.

    ``unit`` is that of privacy; the other arguments are those of
    :func:`~dpmac_cli.accounting.accountants.total_epsilon`.
    """
    epsilon = total_epsilon(events, delta, accountant)
    trained = [event for event in events if event.records == "training"]
    last = trained[-1]
    rate = common(event.sampling_rate for event in trained)
    steps = sum(event.steps for event in trained)
    noisy = [event for event in events if event.noise_multiplier > 0]
    return Row(
        statement=statement(epsilon, delta, events, unit),
        events=events,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=common(event.noise_multiplier for event in trained),
        sampling_rate=rate,
        steps=steps,
        epochs=None if rate is None else steps / last.steps_per_epoch,
        sampler=last.sampler,
        accountant=choose_accountant(noisy, accountant),
        compositions=sum(event.compositions for event in trained),
        unit=unit,
    )


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
        delta, accountant: see :func:`~dpmac_cli.accounting.accountants.total_epsilon`.
        epoch: steps of an epoch; points fall on the ends of epochs where their number allows.
        earlier: what else was done with the records before or beside.
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
