"""Epsilon at several steps of a run, composed once."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dpmac_cli.accounting.accountants import (
    COARSE,
    _compose,
    _merged,
    _read_epsilon,
    _width,
    choose_accountant,
    total_epsilon,
)
from dpmac_cli.accounting.events import TrainingEvent


@dataclass(frozen=True)
class EpsilonSchedule:
    """Epsilon at a few steps of a run, composed once.

    Attributes:
        points: ``(step, epsilon)`` pairs, both increasing, the last one at the planned end.
    """

    points: tuple[tuple[int, float], ...]

    def at(self, step: int) -> float:
        """An upper bound on epsilon after ``step`` steps: the next computed point's value."""
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
    """Price the run at some 20 to 100 evenly spaced steps, by one coarse convolution each.

    The last point is exactly ``total_epsilon((*earlier, event), delta)``, and no point lies above
    it.

    Args:
        event: the whole run, from its first step or from where it branched off.
        delta: in (0, 1).
        epoch: steps of an epoch; points fall on the ends of epochs where their number allows.
        earlier: what else was done with the records before or beside.
        accountant: see :func:`total_epsilon`.
    """
    if event.steps == 0:
        return EpsilonSchedule(((0, total_epsilon(tuple(earlier), delta, accountant)),))
    end = total_epsilon((*earlier, event), delta, accountant)
    if math.isinf(end):
        return EpsilonSchedule(((event.steps, end),))
    steps = range(stride := _stride(event, epoch), event.steps, stride)
    if choose_accountant((*earlier, event), accountant) == "pld":
        prices = _pld_prices(event, delta, steps, _merged(earlier))
    else:
        parts = (replace(event, steps=step) for step in steps)
        prices = (total_epsilon((*earlier, part), delta, "rdp") for part in parts)
    points = [(step, min(end, price)) for step, price in zip(steps, prices, strict=True)]
    return EpsilonSchedule((*points, (event.steps, end)))


def _pld_prices(
    event: TrainingEvent, delta: float, steps: range, before: Sequence[TrainingEvent]
) -> Iterable[float]:
    """The price at each of evenly spaced steps, on a coarse grid."""
    width = _width([*before, event], COARSE)
    block = _compose(tuple(_merged([replace(event, steps=steps.step)])), width)
    pld = _compose(tuple(before), width) if before else None
    for _ in steps:
        pld = block if pld is None else pld.compose(block)
        yield _read_epsilon(pld, delta)


def _stride(event: TrainingEvent, epoch: int, points: int = 100) -> int:
    """Steps between points: some epochs, or a whole fraction of one where it has one."""
    least = max(1, math.ceil(event.steps / points))
    if event.sampling.once_an_epoch or epoch <= least:
        return math.ceil(least / epoch) * epoch
    return next(stride for stride in range(least, epoch + 1) if epoch % stride == 0)
