"""Privacy events: mechanisms that a training run applied to its records, and batch sampling."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from dpmac_cli.errors import raise_errors
from dpmac_cli.libraries import dp_accounting

#: Smaller rates are rounded up to this one, because privacy loss arithmetic fails for them.
LEAST_RATE = 1e-6
#: At smaller noise multipliers no amplification by random allocation is claimed.
LEAST_NOISE = 0.4
#: Bounds of noise multipliers: below, computations overflow; above, noise dominates everything.
SIGMA_MIN, SIGMA_MAX = 0.01, 1e4
#: Largest number of steps of an event, and of steps per epoch, exact in float64.
MOST_STEPS, MOST_COUNT = 10_000_000, 1 << 53
#: Largest probability that a composition draws more records than it has random places for. With
#: rounding, it is what :data:`~.accountants.ROUNDING` takes from delta.
MOST_OVERFLOW = 5e-16
#: Adjacency of every privacy cost: neighbours differ by one record.
ADJACENCY = "add-or-remove-one"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Batch sampling method."""

    summary: str  # for help
    done: str  # description of its steps
    #: Whether a record is in exactly one batch of each epoch. Any epoch that has begun then counts
    #: as a whole.
    once_an_epoch: bool = False


SAMPLERS: Mapping[str, Sampling] = {
    "poisson": Sampling(
        summary="each step includes each record independently with probability B/n",
        done="Poisson-sampled",
    ),
    "random-allocation": Sampling(
        summary="each record is assigned to one batch of each epoch, independently",
        done="randomly allocated",
        once_an_epoch=True,
    ),
}
#: Splits of the records. No record is in both.
SPLITS = ("training", "test")


def _sampler(name: str) -> str:
    if name not in SAMPLERS:
        raise ValueError(f"is not one of {', '.join(SAMPLERS)}")
    return name


#: Fields of an event, with the bounds of those in files.
Sampler = Annotated[str, AfterValidator(_sampler), Field(json_schema_extra={"enum": [*SAMPLERS]})]
Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]
Steps = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Noise = Literal[0] | Annotated[float, Field(ge=SIGMA_MIN, le=SIGMA_MAX)]
#: Keys that an event in a file must have, because their defaults may change the privacy cost.
IN_FILES = (
    *("sampling_rate", "noise_multiplier", "steps", "sampler", "steps_per_epoch"),
    "overflow",
)


@dataclass(frozen=True)
class TrainingEvent:
    """Steps that used one set of keys: Gaussian mechanisms on sampled batches.

    A pydantic model that has events as a field rejects those of a file that lack a key, have
    another one, which may change the privacy cost, or numbers beyond the bounds of their types.

    Raises:
        InputError: lists every number that is not as stated, which would make the privacy cost
            too low.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        revalidate_instances="always",
        use_attribute_docstrings=True,
        json_schema_extra={"required": [*IN_FILES]},
    )

    sampling_rate: Annotated[float, Field(ge=1e-9, le=1)]
    """Sampling rate q."""
    noise_multiplier: Noise
    """Noise multiplier sigma; 0 for no noise."""
    steps: Steps
    """T, number of steps of the part. An empty batch is a step."""
    sampler: Sampler = "poisson"
    """How batches were sampled."""
    steps_per_epoch: Count = 1
    """ceil(n/B). It determines the privacy cost of samplers that work by epochs."""
    records: Literal["training", "test"] = "training"
    """The split that was used: training, or test for scores released with noise. No record is in
    both."""
    histogram: bool = False
    """Whether noisy counts of records in the cells of a histogram were released, instead of clipped
    sums of gradients."""
    overflow: Annotated[float, Field(ge=0, le=MOST_OVERFLOW)] = 0.0
    """Probability that a composition has more records than random places, which delta covers."""

    @model_validator(mode="before")
    @classmethod
    def _is_complete(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and not values.keys() >= set(IN_FILES):
            raise ValueError(f"an event has {', '.join(IN_FILES)}")
        return values

    def __post_init__(self) -> None:
        raise_errors(self._faults())

    def _faults(self) -> Iterator[str]:
        if not 0 <= self.sampling_rate <= 1:
            yield f"sampling_rate must be from 0 to 1, not {self.sampling_rate!r}."
        if not self.noise_multiplier >= 0:
            yield f"noise_multiplier must be at least 0, not {self.noise_multiplier!r}."
        if not 0 <= self.overflow <= MOST_OVERFLOW:
            yield f"overflow must be from 0 to {MOST_OVERFLOW:g}, not {self.overflow!r}."
        counts = {"steps": (self.steps, 0), "steps_per_epoch": (self.steps_per_epoch, 1)}
        for name, (number, least) in counts.items():
            if not number >= least:
                yield f"{name} must be at least {least}, not {number!r}."
            elif number % 1 != 0:
                yield f"{name} must be an integer, not {number!r}."
        if self.sampler not in SAMPLERS:
            yield f"sampler must be {' or '.join(SAMPLERS)}, not {self.sampler!r}."
        if self.records not in SPLITS:
            yield f"records must be {' or '.join(SPLITS)}, not {self.records!r}."

    @property
    def sampling(self) -> Sampling:
        """Return the sampling method of its batches."""
        return SAMPLERS[self.sampler]

    @property
    def compositions(self) -> int:
        """Return the number of composed mechanisms: steps, or epochs that have begun."""
        if self.sampling.once_an_epoch:
            return math.ceil(self.steps / self.steps_per_epoch)
        return self.steps

    @property
    def rate(self) -> float:
        """Return the accounted probability that a record is in one of the compositions."""
        return 1.0 if self.sampling.once_an_epoch else max(self.sampling_rate, LEAST_RATE)

    @property
    def trains(self) -> bool:
        """Return whether it is steps of a training."""
        return self.records == "training" and not self.histogram

    @property
    def noisy(self) -> bool:
        """Return whether its mechanisms add noise; without, its privacy cost is infinite."""
        return self.noise_multiplier > 0

    def with_noise_of(self, other: "TrainingEvent") -> "TrainingEvent":
        """Return a copy of the event with the noise multiplier of another one.

        Args:
            other: the event whose noise it gets.
        """
        return replace(self, noise_multiplier=other.noise_multiplier)

    def signal(self, size: float) -> float:
        """Return T equal sums of some norm over the noise in their total.

        That noise has standard deviation sigma sqrt(T). Infinite without noise.

        Args:
            size: norm of one sum.

        >>> TrainingEvent(0.01, 2.0, 100).signal(1.0)
        5.0
        """
        return size * math.sqrt(self.steps) / self.noise_multiplier if self.noisy else math.inf

    def first(self, steps: int) -> "TrainingEvent":
        """Return the event of the first steps, which may also be more than it has.

        Args:
            steps: number of steps.
        """
        return replace(self, steps=steps)

    def dp_event(self) -> Any:
        """Return the event as a dp-accounting event, for any accountant of that library.

        It does not support random allocation: an epoch counts as one mechanism on all records.
        """
        one: Any = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        if not self.sampling.once_an_epoch:
            one = dp_accounting.PoissonSampledDpEvent(self.rate, one)
        return dp_accounting.SelfComposedDpEvent(one, self.compositions)


def score_event(noise_multiplier: float) -> TrainingEvent:
    """Return the event of one score of the test records, released with Gaussian noise.

    Args:
        noise_multiplier: standard deviation of the noise over the sensitivity of the score.
    """
    return TrainingEvent(1.0, noise_multiplier, 1, records="test")


def histogram_event(noise_multiplier: float, sampling_rate: float = 1.0) -> TrainingEvent:
    """Return the event of one histogram of the training records with Gaussian noise.

    Args:
        noise_multiplier: standard deviation of the noise of a count over the sensitivity of all
            counts: see :class:`~dpmac_cli.dp.histogram.NoisyHistogram`.
        sampling_rate: probability with which each record is counted, in secret.
    """
    return TrainingEvent(sampling_rate, noise_multiplier, 1, histogram=True)


def by_records(events: Iterable[TrainingEvent]) -> tuple[tuple[TrainingEvent, ...], ...]:
    """Group events by the split that they used.

    No record is in both splits, so the total privacy cost is that of the most expensive group.

    Args:
        events: events in any order.

    Returns:
        One tuple of events for each split that was used; () without events.
    """
    splits: dict[str, list[TrainingEvent]] = {}
    for event in events:
        splits.setdefault(event.records, []).append(event)
    return tuple(map(tuple, splits.values()))


def merged(
    events: Iterable[TrainingEvent], counted: str = "compositions"
) -> tuple[TrainingEvent, ...]:
    """Return events with those of equal mechanisms in one, in the order of the first of each.

    Events without steps are left out.

    Args:
        events: events on the same records.
        counted: what is added up: "compositions", in which an epoch that has begun counts as a
            whole, for a privacy cost; or "steps", to say what was done.

    >>> [event.steps for event in merged([TrainingEvent(0.1, 1.0, 2), TrainingEvent(0.1, 1.0, 3)])]
    [5]
    """
    counts: dict[TrainingEvent, int] = {}
    for event in events:
        once = event.sampling.once_an_epoch
        kind = replace(event, steps=0, steps_per_epoch=event.steps_per_epoch if once else 1)
        of_epochs = kind.steps_per_epoch if counted == "compositions" else 1
        counts[kind] = counts.get(kind, 0) + getattr(event, counted) * of_epochs
    events_of_kinds = list[TrainingEvent]()
    for kind, count in counts.items():
        if count:
            events_of_kinds.append(replace(kind, steps=count))
    return tuple(events_of_kinds)


def without(
    events: Iterable[TrainingEvent], others: Iterable[TrainingEvent]
) -> tuple[TrainingEvent, ...]:
    """Return events without others, each of which takes away one of those that equal it.

    Args:
        events: events, whose order stays.
        others: events to take away. One that equals none is ignored.
    """
    remaining = list(events)
    for event in others:
        if event in remaining:
            remaining.remove(event)
    return tuple(remaining)


def covers(more: Iterable[TrainingEvent], fewer: Iterable[TrainingEvent]) -> bool:
    """Return whether there are at least as many steps of each mechanism as in other events.

    Args:
        more: events that are to count at least as much.
        fewer: the other events; () is always covered.

    >>> covers([TrainingEvent(0.1, 1.0, 5)], [TrainingEvent(0.1, 1.0, 2)])
    True
    """
    return _steps_by_mechanism(fewer) <= _steps_by_mechanism(more)


def _steps_by_mechanism(events: Iterable[TrainingEvent]) -> Counter[TrainingEvent]:
    """Return the number of steps of each mechanism, which is an event without steps."""
    return Counter({replace(event, steps=0): event.steps for event in merged(events)})
