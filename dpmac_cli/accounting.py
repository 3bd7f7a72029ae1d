"""What happened to the records, as a privacy event, and what it costs.

An event says how records were sampled and what noise was added; an accountant of dp-accounting
prices it: ``pld``, privacy loss distributions with the Connect-the-Dots discretisation
(Doroshenko et al. 2022), or ``rdp``, Renyi differential privacy (Mironov 2017). Both are rigorous
upper bounds, and each is for the adjacency that belongs to the sampler. Nothing here imports torch,
and dp-accounting, which takes a second to import, is loaded when the first price is asked for.
"""

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.metadata import version
from typing import Any

from dpmac_cli.errors import InputError

#: Accountants by name, and what each is.
ACCOUNTANTS: Mapping[str, str] = {
    "pld": f"pld (Connect-the-Dots, dp-accounting {version('dp-accounting')})",
    "rdp": f"rdp (Renyi orders up to 1024, dp-accounting {version('dp-accounting')})",
}

ADD_OR_REMOVE, ZERO_OUT, REPLACE = "add-or-remove-one", "zero-out", "replace-one"
#: What each adjacency compares, in plain words.
NEIGHBOURS: Mapping[str, str] = {
    ADD_OR_REMOVE: "Leaving out or adding any one training record",
    ZERO_OUT: "Replacing any one training record by a blank that takes its place in every batch",
    REPLACE: "Replacing any one training record by any other",
}


@dataclass(frozen=True)
class Sampling:
    """A way to draw batches, and how it is priced.

    Attributes:
        adjacency: under which its privacy cost holds. Costs under different ones do not compare.
        summary: one line for help.
        done: what its steps are called.
        accountants: that support it, the default first.
        once_an_epoch: whether a record is in one batch of each epoch. A batch's sum is then all
            that an epoch says of it: one Gaussian, with no amplification.
        sensitivity: how far one change between neighbours moves the sum of a batch, in clipping
            norms.
    """

    adjacency: str
    summary: str
    done: str
    accountants: tuple[str, ...] = ("pld", "rdp")
    once_an_epoch: bool = False
    sensitivity: float = 1


SAMPLERS: Mapping[str, Sampling] = {
    "poisson": Sampling(
        ADD_OR_REMOVE,
        "each record is in each step independently with probability B/n",
        "Poisson-sampled",
    ),
    "balls-in-bins": Sampling(
        ADD_OR_REMOVE,
        "each record goes to one of an epoch's batches, independently",
        "balls-in-bins",
        once_an_epoch=True,
    ),
    # Taking out a record would shift the others to other batches: fixed slots need zero-out.
    "shuffle": Sampling(
        ZERO_OUT,
        "each epoch deals all records out in random order",
        "shuffled",
        once_an_epoch=True,
    ),
    # Replacing one sample by another moves the sum by 2.
    "fixed-size": Sampling(
        REPLACE,
        "each step takes B different records",
        "fixed-size",
        accountants=("rdp",),
        sensitivity=2,
    ),
}

#: Below, the arithmetic of privacy losses gives out: smaller rates are priced as this one, which
#: costs more.
LEAST_RATE = 1e-6
#: Below, the price is astronomical and its computation overflows; above, noise is all there is.
SIGMA_MIN, SIGMA_MAX = 0.01, 1e4

# Widths of the grid on which privacy loss is rounded up: every width gives an upper bound. The
# loss itself grows like 1/sigma^2, and the grid with it, so that small sigma costs no more time.
FINE = 1e-4
COARSE = 1e-3  # a tenth of the time, for a percent or less
FINE_FROM_SIGMA = 0.4
POINTS = 400_000  # of a grid for one composition: with more, time and memory run away
BLOCK = 300


@dataclass(frozen=True)
class TrainingEvent:
    """What a training run did to its data: ``steps`` Gaussian mechanisms on sampled batches.

    Attributes:
        sampling_rate: q = B/n, in (0, 1].
        noise_multiplier: sigma, standard deviation of the noise over the clipping norm, >= 0.
        steps: T, how many steps saw data (an empty batch counts), >= 0.
        sampler: a key of :data:`SAMPLERS`.
        steps_per_epoch: ceil(n/B); matters where the sampler goes by epochs.
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int
    sampler: str = "poisson"
    steps_per_epoch: int = 1

    @property
    def sampling(self) -> Sampling:
        """How its batches were drawn."""
        return SAMPLERS[self.sampler]

    @property
    def compositions(self) -> int:
        """How many mechanisms on all records it is priced as: steps, or epochs begun."""
        if self.sampling.once_an_epoch:
            return math.ceil(self.steps / self.steps_per_epoch)
        return self.steps

    @property
    def rate(self) -> float:
        """The chance, as it is priced, that a record is in one of the compositions."""
        return 1.0 if self.sampling.once_an_epoch else max(self.sampling_rate, LEAST_RATE)

    def dp_event(self) -> Any:
        """Return the same as a dp-accounting event, for any accountant of that library."""
        import dp_accounting  # noqa: PLC0415

        one: Any = dp_accounting.GaussianDpEvent(self.noise_multiplier / self.sampling.sensitivity)
        if self.sampler == "fixed-size":
            rate = Fraction(self.rate).limit_denominator(10**9)
            one = dp_accounting.SampledWithoutReplacementDpEvent(
                rate.denominator, rate.numerator, one
            )
        elif not self.sampling.once_an_epoch:
            one = dp_accounting.PoissonSampledDpEvent(self.rate, one)
        return dp_accounting.SelfComposedDpEvent(one, self.compositions)

    def epsilon(self, delta: float, accountant: str | None = None) -> float:
        """The epsilon of (epsilon, delta)-DP; ``inf`` without noise, 0 before the first step."""
        return total_epsilon((self,), delta, accountant)


@functools.lru_cache(maxsize=64)
def total_epsilon(
    events: tuple[TrainingEvent, ...],
    delta: float,
    accountant: str | None = None,
    widest: float = FINE,
) -> float:
    """The price of several trainings on the same records, one after another or as branches.

    Args:
        events: under one adjacency.
        delta: in (0, 1).
        accountant: a key of :data:`ACCOUNTANTS`; None for the sampler's default.
        widest: the widest grid on which losses may be rounded up.

    Raises:
        InputError: the accountant cannot price them.
    """
    merged = _merged(events)
    if not merged:
        return 0.0
    if any(event.noise_multiplier == 0 for event in merged):
        return math.inf
    if choose_accountant(merged, accountant) == "pld":
        return _read_epsilon(_compose(tuple(merged), _width(merged, widest)), delta)
    return float(_rdp(merged).get_epsilon(delta))


@functools.lru_cache(maxsize=64)
def total_delta(
    events: tuple[TrainingEvent, ...], epsilon: float, accountant: str | None = None
) -> float:
    """The least delta shown to hold at an epsilon; 1 without noise. As :func:`total_epsilon`."""
    merged = _merged(events)
    if not merged:
        return 0.0
    if any(event.noise_multiplier == 0 for event in merged):
        return 1.0
    if choose_accountant(merged, accountant) == "pld":
        delta = _compose(tuple(merged), _width(merged)).get_delta_for_epsilon(epsilon)
    else:
        delta = _rdp_delta(merged, epsilon)
    return min(1.0, float(delta))


def repeat_and_select(events: tuple[TrainingEvent, ...], delta: float, mean: float) -> float:
    """Epsilon of the best of a random number of like trainings, by RDP.

    The number of trainings is Poisson with the given mean, and only the best is ever seen
    (Papernot and Steinke 2022, arXiv 2110.03620).

    Raises:
        InputError: see :func:`choose_accountant`.
    """
    from dp_accounting import dp_event  # noqa: PLC0415

    merged = _merged(events)
    if not merged:
        return 0.0
    if any(event.noise_multiplier == 0 for event in merged):
        return math.inf
    choose_accountant(merged, "rdp")
    accountant = rdp_accountant(merged[0].sampling.adjacency)
    once = dp_event.ComposedDpEvent([event.dp_event() for event in merged])
    accountant.compose(dp_event.RepeatAndSelectDpEvent(once, mean, math.inf))
    return float(accountant.get_epsilon(delta))


def common(values: Iterable[float]) -> float | None:
    """The value that all have, or None."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def choose_accountant(events: Sequence[TrainingEvent], wanted: str | None = None) -> str:
    """The accountant asked for, or the samplers' default.

    Raises:
        InputError: it cannot price these events, or no accountant can price them together.
    """
    names = sorted({event.sampler for event in events})
    if len({SAMPLERS[name].adjacency for name in names}) > 1:
        raise InputError(
            f"{' and '.join(names)} sampling are priced under different adjacencies, so a run that "
            "used both has no price."
        )
    for event in events:
        if not SIGMA_MIN <= event.noise_multiplier <= SIGMA_MAX:
            raise InputError(
                f"A noise multiplier of {event.noise_multiplier:g} cannot be priced: it must be "
                f"at least {SIGMA_MIN:g} and at most {SIGMA_MAX:g}, or 0 for no noise at all."
            )
    offered = [name for name in ACCOUNTANTS if all(name in SAMPLERS[s].accountants for s in names)]
    if wanted is not None and wanted not in offered:
        raise InputError(
            f"The {wanted} accountant cannot price {' and '.join(names)} sampling; "
            f"{' or '.join(offered)} can."
        )
    return wanted or offered[0]


def _merged(events: Iterable[TrainingEvent], unit: str = "compositions") -> list[TrainingEvent]:
    """Add up the compositions (or steps) of equal mechanisms; each sum becomes an event's steps."""
    counts: dict[TrainingEvent, int] = {}
    for event in events:
        kind = replace(event, steps=0, steps_per_epoch=1)
        counts[kind] = counts.get(kind, 0) + getattr(event, unit)
    return [replace(kind, steps=count) for kind, count in counts.items() if count]


@functools.lru_cache(maxsize=2)
def _compose(merged: tuple[TrainingEvent, ...], width: float) -> Any:
    plds = [
        _repeated(_sampled_gaussian(event.rate, event.noise_multiplier, width), event.steps)
        for event in merged
    ]
    return functools.reduce(lambda a, b: a.compose(b), plds)


def _repeated(pld: Any, times: int) -> Any:
    """Composed with itself; very often by way of blocks, for the library goes step by step."""
    if times < BLOCK**2:
        return pld.self_compose(times)
    blocks, rest = divmod(times, BLOCK)
    most = pld.self_compose(BLOCK).self_compose(blocks)
    return most.compose(pld.self_compose(rest)) if rest else most


def _width(merged: Sequence[TrainingEvent], widest: float = FINE) -> float:
    """One grid for all: wide enough for the largest losses, else fine enough for the smallest.

    Rounding a composition's loss, about q/sigma, by a tenth of it adds 0.1% to epsilon; a coarse
    grid may round by three tenths, which adds 1%.
    """
    least_noise = min(event.noise_multiplier for event in merged)
    if least_noise < FINE_FROM_SIGMA:
        return COARSE * (FINE_FROM_SIGMA / least_noise) ** 2
    share = 0.1 * math.sqrt(widest / FINE)
    small = min(share * event.rate / event.noise_multiplier for event in merged)
    large = max(map(_largest_loss, merged))
    return min(widest, max(large / POINTS, small))


def _largest_loss(event: TrainingEvent) -> float:
    """Of one composition, with its noise 10 standard deviations out; sigma is not small here."""
    sigma = event.noise_multiplier
    return math.log1p(event.rate * math.expm1(10 / sigma + 0.5 / sigma**2))


@functools.lru_cache(maxsize=4)
def _sampled_gaussian(sampling_rate: float, noise_multiplier: float, width: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution  # noqa: PLC0415

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_rate, value_discretization_interval=width
    )


def _read_epsilon(pld: Any, delta: float) -> float:
    import numpy as np  # noqa: PLC0415

    with np.errstate(over="ignore"):  # in the thousands a ratio of masses may overflow to inf
        return float(pld.get_epsilon_for_delta(delta))


def _rdp_delta(merged: Sequence[TrainingEvent], epsilon: float) -> float:
    try:
        return float(_rdp(merged).get_delta(epsilon))
    except ValueError:  # divergences below 1e-16 end in a logarithm of 0: more steps cost more
        return _rdp_delta([replace(event, steps=1000 * event.steps) for event in merged], epsilon)


def _rdp(merged: Sequence[TrainingEvent]) -> Any:
    """An RDP accountant that has seen the events."""
    accountant = rdp_accountant(merged[0].sampling.adjacency)
    for event in merged:
        accountant.compose(event.dp_event())
    return accountant


def rdp_accountant(adjacency: str) -> Any:
    """Return a fresh RDP accountant under an adjacency."""
    from dp_accounting import NeighboringRelation  # noqa: PLC0415
    from dp_accounting.rdp import rdp_privacy_accountant  # noqa: PLC0415

    # It leaves out the orders at which a series does not converge, and says so each time.
    logging.getLogger("absl").setLevel(logging.ERROR)
    relation = {
        ADD_OR_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
        ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
        REPLACE: NeighboringRelation.REPLACE_ONE,
    }[adjacency]
    return rdp_privacy_accountant.RdpAccountant(neighboring_relation=relation)


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


def format_epsilon(epsilon: float) -> str:
    """Four digits, rounded up: a price is never shown smaller than it is."""
    if epsilon == 0 or not math.isfinite(epsilon):
        return "0" if epsilon == 0 else "infinite"
    if epsilon < 1e-300:  # where the scale would overflow
        return "1e-300"
    scale = 10.0 ** (3 - math.floor(math.log10(epsilon)))
    return f"{math.ceil(epsilon * scale * (1 - 1e-12)) / scale:.4g}"


PLD_ENDS = (
    "Privacy loss distributions end near a delta of 1e-14: ask for a larger delta, or price by "
    "RDP, which reaches further (dpmac account --accountant rdp)."
)
NO_PRIVACY = "No privacy: no noise was added."


def statement(epsilon: float, delta: float, events: Sequence[TrainingEvent]) -> str:
    """What the guarantee says, in plain sentences."""
    if any(event.noise_multiplier == 0 for event in events):
        return NO_PRIVACY
    if not math.isfinite(epsilon):
        return (
            f"No finite epsilon could be shown at delta {delta:g}: gradients were clipped and "
            f"noise was added, but nothing can be promised. {PLD_ENDS}"
        )
    price = format_epsilon(epsilon)
    adjacency = events[0].sampling.adjacency
    promise = meaning(adjacency, price, format_epsilon(delta))
    done = " and ".join(map(_done, _merged(events, "steps"))) or "no step"
    return (
        f"{promise} This is for {done}. The number of training records is public. Test records are "
        "not protected, and measured times not covered. Publishing the best of several runs costs "
        "more."
    )


def meaning(adjacency: str, epsilon: str, delta: str) -> str:
    """What (epsilon, delta)-differential privacy under an adjacency promises."""
    return (
        f"{NEIGHBOURS[adjacency]} changes the probability of whatever the model and its report may "
        f"show by a factor of at most e^{epsilon}, but for a probability of {delta}: "
        f"({epsilon}, {delta})-differential privacy under {adjacency} adjacency."
    )


def _done(event: TrainingEvent) -> str:
    steps = f"{event.steps} {event.sampling.done} step{'s' if event.steps > 1 else ''}"
    rate, sigma = event.sampling_rate, event.noise_multiplier
    return f"{steps} at rate {rate:.4g} with noise multiplier {sigma:.10g}"
