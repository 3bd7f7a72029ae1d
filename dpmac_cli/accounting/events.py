"""Privacy events: what a training run did to its records, and how it drew its batches."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpmac_cli.errors import InputError

#: Smaller rates are priced as this one, which costs more: the arithmetic of privacy losses fails.
LEAST_RATE = 1e-6
#: Adjacency of every privacy cost: neighbours differ by one record.
ADJACENCY = "add-or-remove-one"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A way to draw batches: one line for help, and what its steps are called.

    ``once_an_epoch``: a record is in exactly one batch of each epoch. An epoch that has begun is
    then priced as a whole.
    """

    summary: str
    done: str
    once_an_epoch: bool = False


SAMPLERS: Mapping[str, Sampling] = {
    "poisson": Sampling(
        summary="each record is in each step independently with probability B/n",
        done="Poisson-sampled",
    ),
    "random-allocation": Sampling(
        summary="each record goes to one of an epoch's batches, independently",
        done="randomly allocated",
        once_an_epoch=True,
    ),
}
#: Earlier names, which are still read.
ALIASES: Mapping[str, str] = {"balls-in-bins": "random-allocation"}


@dataclass(frozen=True)
class TrainingEvent:
    """Gaussian mechanisms on sampled batches.

    Attributes:
        sampling_rate: q = B/n, in (0, 1].
        noise_multiplier: sigma, standard deviation of the noise over the clipping norm, >= 0.
        steps: T, how many steps saw data (an empty batch counts), >= 0.
        sampler: a key of :data:`SAMPLERS`; an earlier name is replaced by it.
        steps_per_epoch: ceil(n/B); matters where a record is in one batch of each epoch.
        records: the split that it is on, "training" or "test". No record is in both, so that
            events on one cost a record of the other nothing (parallel composition).

    Raises:
        InputError: steps are negative; summed with others, they would lower the privacy cost.
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int
    sampler: str = "poisson"
    steps_per_epoch: int = 1
    records: str = "training"

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise InputError(f"steps must be at least 0, not {self.steps}.")
        object.__setattr__(self, "sampler", ALIASES.get(self.sampler, self.sampler))

    @property
    def sampling(self) -> Sampling:
        """How its batches were drawn."""
        return SAMPLERS[self.sampler]

    @property
    def compositions(self) -> int:
        """Number of mechanisms that are priced alike: steps, or epochs begun."""
        if self.sampling.once_an_epoch:
            return math.ceil(self.steps / self.steps_per_epoch)
        return self.steps

    @property
    def rate(self) -> float:
        """Probability, as it is priced, that a record is in one of the compositions."""
        return 1.0 if self.sampling.once_an_epoch else max(self.sampling_rate, LEAST_RATE)

    def dp_event(self) -> Any:
        """Return the event in the terms of dp-accounting, for any accountant of that library.

        It has no term for random allocation: an epoch counts as one mechanism on all records.
        """
        import dp_accounting  # noqa: PLC0415  (a second to load)

        one: Any = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        if not self.sampling.once_an_epoch:
            one = dp_accounting.PoissonSampledDpEvent(self.rate, one)
        return dp_accounting.SelfComposedDpEvent(one, self.compositions)


@dataclass(frozen=True)
class Scores:
    """Scores of test records, released with Gaussian noise.

    Attributes:
        noise_multiplier: standard deviation of the noise over the sensitivity of a score.
        every: steps between scores. There is one more after the last step.
        by_class: whether each is of every class as well.
    """

    noise_multiplier: float
    every: int
    by_class: bool = False

    def due(self, step: int, end: int) -> bool:
        """Return whether a score is released after a step of a run that ends at step ``end``."""
        return step == end or (step > 0 and step % self.every == 0)

    def event(self, begun: int, end: int, base: int = 0) -> TrainingEvent:
        """Return what the scores after steps ``base + 1, ..., begun`` do to the test records."""
        count = begun // self.every - base // self.every
        count += base < end <= begun and end % self.every > 0
        return TrainingEvent(1.0, self.noise_multiplier, count, records="test")


def by_records(events: Iterable[TrainingEvent]) -> tuple[tuple[TrainingEvent, ...], ...]:
    """Group events by the split that they are on. The privacy cost is that of the worst group."""
    splits: dict[str, tuple[TrainingEvent, ...]] = {}
    for event in events:
        splits[event.records] = (*splits.get(event.records, ()), event)
    return tuple(splits.values())


def merged(
    events: Iterable[TrainingEvent], unit: str = "compositions"
) -> tuple[TrainingEvent, ...]:
    """Add up the steps of equal mechanisms, or their compositions, which are then whole epochs."""
    counts: dict[TrainingEvent, int] = {}
    for event in events:
        once = event.sampling.once_an_epoch
        kind = replace(event, steps=0, steps_per_epoch=event.steps_per_epoch if once else 1)
        of_epochs = kind.steps_per_epoch if unit == "compositions" else 1
        counts[kind] = counts.get(kind, 0) + getattr(event, unit) * of_epochs
    return tuple(replace(kind, steps=count) for kind, count in counts.items() if count)
