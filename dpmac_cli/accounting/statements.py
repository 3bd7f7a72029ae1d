"""Privacy guarantees in plain sentences."""

import math
from collections.abc import Iterable, Iterator, Sequence

from dpmac_cli.accounting.events import ADJACENCY, TrainingEvent, merged
from dpmac_cli.accounting.selection import Search

BY_RDP = (
    "delta {} is too small for privacy loss distributions in float64 arithmetic, so epsilon is an "
    "upper bound from the RDP accountant, which is less tight. A larger --delta may cost less."
)
#: Unit of privacy: the difference of neighbouring datasets; ``COVERED_`` if scores are covered.
RECORD, COVERED_RECORD = "training record", "training or test record"
UNIT, COVERED_UNIT = "unit with all of its training records", "unit with all of its records"
NO_PRIVACY = "No privacy: no noise was added."
NO_BOUND = (
    "No guarantee at delta {}: epsilon is infinite there, because events that it leaves out, such "
    "as steps with too many records, are more likely than that. There is one at a larger delta."
)
SEED_GIVEN = (
    "Trained with a chosen seed, to be reproducible. There is no guarantee against anyone who "
    "knows or guesses the seed, because they can compute the same noise and subtract it. The "
    "guarantee holds only against those who do not know the seed, and for one run alone: two runs "
    "with it share their noise, which cancels in their difference."
)


def common(values: Iterable[float]) -> float | None:
    """Return the common value of all items; None if they differ, or without any.

    >>> common([1.0, 1.0]), common([1.0, 2.0]), common([])
    (1.0, None, None)
    """
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def format_epsilon(epsilon: float | None) -> str:
    """Return four digits, rounded up, so a cost is never understated.

    Args:
        epsilon: the cost; None is infinity, as in JSON.

    >>> format_epsilon(2.99991), format_epsilon(None)
    ('3', 'infinite')
    """
    if epsilon is None:
        return "infinite"
    if epsilon == 0 or not math.isfinite(epsilon):
        return "0" if epsilon == 0 else "infinite"
    if epsilon < 1e-300:  # the scale would overflow
        return "1e-300"
    scale = 10.0 ** (3 - math.floor(math.log10(epsilon)))
    return f"{math.ceil(epsilon * scale * (1 - 1e-12)) / scale:.4g}"


def cost_in_words(epsilon: float | None, delta: float) -> str:
    """Return a privacy cost in words.

    Args:
        epsilon: the cost, which is rounded up; None is infinity.
        delta: its delta.

    >>> cost_in_words(3, 1e-5)
    'epsilon 3 at delta 1e-05'
    """
    return f"epsilon {format_epsilon(epsilon)} at delta {delta:g}"


def statement(
    epsilon: float,
    delta: float,
    events: Sequence[TrainingEvent],
    unit: str = RECORD,
    *,
    seeded: bool = False,
) -> str:
    """Return the meaning of a guarantee, and its limits.

    Args:
        epsilon: privacy cost of the events at ``delta``.
        delta: delta of the guarantee.
        events: all events that it covers.
        unit: unit of privacy in words, such as :data:`RECORD`.
        seeded: whether a seed was chosen for any of them.
    """
    if not all(event.noisy for event in events):
        return NO_PRIVACY
    promise = _promise(epsilon, delta, unit)
    done = " and ".join(_all_done(events, short(unit))) or "no step"
    tested = "Test records are not protected"
    if unit in (COVERED_RECORD, COVERED_UNIT):
        tested = (
            f"A {short(unit)} is used for training or for testing, never both, so this is the "
            "larger of two costs. Exact test scores are not protected"
        )
    return (
        f"{promise} This is for {done}. The number of {short(unit)}s is public. {tested}, and "
        "measured times are not covered. Neither is what was computed from these records before, "
        "such as loaded weights, stored outputs of a teacher, or means to normalise by. Publishing "
        "the best of several runs costs more."
    ) + f" {SEED_GIVEN}" * seeded


def search_statement(epsilon: float, delta: float, search: Search, unit: str = RECORD) -> str:
    """Return the meaning of the guarantee of a search: of everything that is learnt from it.

    Args:
        epsilon: privacy cost of the whole search at ``delta``.
        delta: delta of the guarantee.
        search: the trials, and what each may cost.
        unit: unit of privacy in words.
    """
    if search.noiseless:
        return NO_PRIVACY
    promise = _promise(epsilon, delta, unit)
    trials, one = search.trials, format_epsilon(search.trial_epsilon(delta))
    return (
        f"{promise} This is for a whole search: the best of a secret random number of trials (mean "
        f"{trials.mean:g}, at most {trials.most:,}), each with settings drawn at random and a "
        f"covered score. One trial alone costs epsilon {one}. The number of {short(unit)}s is "
        "public. Measured times are not covered, nor what was computed from these records before. "
        "Other runs on the same records cost more."
    )


def unit_of(*, covered: bool, several: bool) -> str:
    """Return the unit of privacy in words.

    Args:
        covered: whether scores are covered, and so test records, too.
        several: whether a unit may have several records.

    >>> unit_of(covered=True, several=False)
    'training or test record'
    """
    if covered:
        return COVERED_UNIT if several else COVERED_RECORD
    return UNIT if several else RECORD


def short(unit: str) -> str:
    """Return a short name of a unit of privacy: "unit", "training record" or "record".

    Args:
        unit: the unit in words, such as :data:`COVERED_RECORD`.

    >>> short(RECORD), short(COVERED_RECORD), short(UNIT)
    ('training record', 'record', 'unit')
    """
    return {RECORD: RECORD, COVERED_RECORD: "record"}.get(unit, "unit")


def meaning(epsilon: str, delta: str, unit: str = RECORD) -> str:
    """Return the meaning of (epsilon, delta)-differential privacy, in one sentence.

    Args:
        epsilon, delta: as they are written in it: rounded numbers, or names.
        unit: unit of privacy in words, such as :data:`RECORD`.
    """
    return (
        f"Adding or removing any one {unit} changes the probability of anything that the model "
        f"and its report may show by a factor of at most e^{epsilon}, except with probability "
        f"{delta}: ({epsilon}, {delta})-differential privacy under {ADJACENCY} adjacency."
    )


def _promise(epsilon: float, delta: float, unit: str) -> str:
    """Return the meaning of a guarantee, or that there is none at this delta."""
    if math.isinf(epsilon):
        return NO_BOUND.format(format_epsilon(delta))
    return meaning(format_epsilon(epsilon), format_epsilon(delta), unit)


def _all_done(events: Sequence[TrainingEvent], unit: str) -> Iterator[str]:
    """Yield events in words, those of equal mechanisms together, and counts at the end.

    Counts include the sums that follow some of them, for a mean and a spread.
    """
    counts = list[TrainingEvent]()
    for event in merged(events, "steps"):
        if event.histogram:
            counts.append(event)
        else:
            yield _done(event, unit)
    if len(counts) > 1:
        noises = [event.noise_multiplier for event in counts]
        yield (
            f"{sum(event.steps for event in counts)} noisy counts or sums of {unit}s with noise "
            f"multipliers from {min(noises):.10g} to {max(noises):.10g}"
        )
    elif counts:
        yield _done(counts[0], unit)


def _done(event: TrainingEvent, unit: str) -> str:
    """Return an event in words, such as "300 Poisson-sampled steps at rate 0.02 with ..."."""
    several, sigma = "s" * (event.steps > 1), event.noise_multiplier
    if event.records == "test":
        return f"{event.steps} score{several} of test records with noise multiplier {sigma:.10g}"
    if event.histogram:
        some = f" at rate {event.sampling_rate:.4g}" if event.sampling_rate < 1 else ""
        return f"{event.steps} histogram{several}{some} with noise multiplier {sigma:.10g}"
    steps = f"{event.steps} {event.sampling.done} step{several}"
    how = f"at rate {event.sampling_rate:.4g}"
    if event.sampling.once_an_epoch:
        how = f"(each {unit} in one of every {event.steps_per_epoch})"
    return f"{steps} {how} with noise multiplier {sigma:.10g}"
