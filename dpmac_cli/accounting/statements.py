"""Privacy guarantees in plain sentences."""

import math
from collections.abc import Iterable, Sequence

from dpmac_cli.accounting.events import ADJACENCY, TrainingEvent, merged

PLD_ENDS = (
    "Privacy loss distributions end near a delta of 1e-14: ask for a larger delta, or price by "
    "RDP, which reaches further (dpmac account --accountant rdp)."
)
#: Unit of privacy: what neighbouring data sets differ by; ``COVERED_`` where scores are covered.
RECORD, COVERED_RECORD = "training record", "training or test record"
UNIT, COVERED_UNIT = "unit with all of its training records", "unit with all of its records"
NO_PRIVACY = "No privacy: no noise was added."


def common(values: Iterable[float]) -> float | None:
    """Return the value that all have, or None."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def format_epsilon(epsilon: float) -> str:
    """Return four digits, rounded up: a cost is never shown smaller than it is."""
    if epsilon == 0 or not math.isfinite(epsilon):
        return "0" if epsilon == 0 else "infinite"
    if epsilon < 1e-300:  # where the scale would overflow
        return "1e-300"
    scale = 10.0 ** (3 - math.floor(math.log10(epsilon)))
    return f"{math.ceil(epsilon * scale * (1 - 1e-12)) / scale:.4g}"


def statement(
    epsilon: float, delta: float, events: Sequence[TrainingEvent], unit: str = RECORD
) -> str:
    """Return what a guarantee says, and what it does not cover."""
    if any(event.noise_multiplier == 0 for event in events):
        return NO_PRIVACY
    if not math.isfinite(epsilon):
        return (
            f"No finite epsilon could be shown at delta {delta:g}: gradients were clipped and "
            f"noise was added, but nothing can be promised. {PLD_ENDS}"
        )
    promise = meaning(format_epsilon(epsilon), format_epsilon(delta), unit)
    done = " and ".join(map(_done, merged(events, "steps"))) or "no step"
    tested = "Test records are not protected"
    if unit in (COVERED_RECORD, COVERED_UNIT):
        tested = (
            f"A {short(unit)} is trained on or tested on, never both, so this is the larger of two "
            "costs. Exact test scores are not protected"
        )
    return (
        f"{promise} This is for {done}. The number of {short(unit)}s is public. {tested}, and "
        "measured times not covered. Publishing the best of several runs costs more."
    )


def short(unit: str) -> str:
    """Return a unit of privacy in a word or two: "unit", "training record" or "record"."""
    return {RECORD: RECORD, COVERED_RECORD: "record"}.get(unit, "unit")


def meaning(epsilon: str, delta: str, unit: str = RECORD) -> str:
    """Return what (epsilon, delta)-differential privacy promises."""
    return (
        f"Leaving out or adding any one {unit} changes the probability of whatever the model and "
        f"its report may show by a factor of at most e^{epsilon}, except with probability {delta}: "
        f"({epsilon}, {delta})-differential privacy under {ADJACENCY} adjacency."
    )


def _done(event: TrainingEvent) -> str:
    several, rate, sigma = "s" * (event.steps > 1), event.sampling_rate, event.noise_multiplier
    if event.records == "test":
        return f"{event.steps} score{several} of test records with noise multiplier {sigma:.10g}"
    steps = f"{event.steps} {event.sampling.done} step{several}"
    return f"{steps} at rate {rate:.4g} with noise multiplier {sigma:.10g}"
