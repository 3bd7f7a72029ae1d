"""What happened to the data, as a privacy event, and what it costs.

Every figure is for Poisson sampling under add-or-remove-one adjacency: two data sets are
neighbours when one holds one record more. The price is a rigorous upper bound computed by
dp-accounting's privacy loss distributions with the Connect-the-Dots discretisation
(Doroshenko et al. 2022). Nothing here imports torch, and dp-accounting, which takes a second to
import, is loaded when the first price is asked for.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from dpmac_cli.errors import BudgetError, InputError

ADJACENCY = "add-or-remove-one"
SAMPLER = "poisson"
ACCOUNTANT = f"pld (Connect-the-Dots, dp-accounting {version('dp-accounting')})"

#: Noise multipliers are solved on a grid of this many to 1, so the one printed is the one used.
SIGMA_TICKS = 100_000
#: Below, the price is astronomical and its computation overflows; above, noise is all there is.
SIGMA_MIN, SIGMA_MAX = 0.01, 1e4
LEAST_TICKS = round(SIGMA_MIN * SIGMA_TICKS)
# Whole orders only: the fractional ones do not always converge, and here a bracket will do.
RDP_ORDERS = [*range(2, 64), 80, 100, 128, 192, 256, 512]

# Widths of the grid on which privacy loss is rounded up: every width gives an upper bound. The
# loss itself grows like 1/sigma^2, and the grid with it, so that small sigma costs no more time.
FINE = 1e-4
COARSE = 1e-3  # a tenth of the time; adds at most 0.3% to an epsilon near 1, less above
FINE_FROM_SIGMA = 0.4


@dataclass(frozen=True)
class TrainingEvent:
    """What a training run did to its data: ``steps`` Poisson-sampled Gaussian mechanisms.

    Attributes:
        sampling_rate: q = B/n, the chance that a record is in a step, in (0, 1].
        noise_multiplier: sigma, standard deviation of the noise over the sensitivity, >= 0.
        steps: T, how many steps saw data (an empty batch counts), >= 0.
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int

    def dp_event(self) -> Any:
        """The same as a dp-accounting event, for any accountant of that library."""
        import dp_accounting  # noqa: PLC0415

        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(
                self.sampling_rate, dp_accounting.GaussianDpEvent(self.noise_multiplier)
            ),
            self.steps,
        )

    def epsilon(self, delta: float) -> float:
        """The epsilon of (epsilon, delta)-DP; ``inf`` without noise, 0 before the first step."""
        if self.steps == 0:
            return 0.0
        if self.noise_multiplier == 0:
            return math.inf
        if not SIGMA_MIN <= self.noise_multiplier <= SIGMA_MAX:
            raise InputError(
                f"A noise multiplier of {self.noise_multiplier:g} cannot be priced: it must be at "
                f"least {SIGMA_MIN:g} and at most {SIGMA_MAX:g}."
            )
        return _price(self, delta, grid_width(self.noise_multiplier))


@functools.lru_cache(maxsize=64)
def total_epsilon(events: tuple[TrainingEvent, ...], delta: float) -> float:
    """The price of several trainings on the same records, one after another or as branches."""
    merged = _merged(events)
    if len(merged) == 1:
        return merged[0].epsilon(delta)
    if any(event.noise_multiplier == 0 for event in merged):
        return math.inf
    if not merged:
        return 0.0
    width = max(grid_width(event.noise_multiplier) for event in merged)
    return _read_epsilon(_compose(merged, width), delta)


def _merged(events: Sequence[TrainingEvent]) -> list[TrainingEvent]:
    """Steps of the same kind counted together; none that took no step."""
    steps: dict[tuple[float, float], int] = {}
    for event in events:
        kind = event.sampling_rate, event.noise_multiplier
        steps[kind] = steps.get(kind, 0) + event.steps
    return [TrainingEvent(*kind, taken) for kind, taken in steps.items() if taken]


def _compose(events: Sequence[TrainingEvent], width: float) -> Any:
    plds = [
        _one_step(event.sampling_rate, event.noise_multiplier, width).self_compose(event.steps)
        for event in events
    ]
    return functools.reduce(lambda a, b: a.compose(b), plds)


def grid_width(noise_multiplier: float, finest: float = FINE) -> float:
    """The width of the privacy loss grid for a run with this noise, at least ``finest``."""
    if noise_multiplier >= FINE_FROM_SIGMA:
        return finest
    return max(finest, COARSE * (FINE_FROM_SIGMA / noise_multiplier) ** 2)


@functools.lru_cache(maxsize=4)
def _one_step(sampling_rate: float, noise_multiplier: float, width: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution  # noqa: PLC0415

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_rate, value_discretization_interval=width
    )


def _price(event: TrainingEvent, delta: float, width: float) -> float:
    one_step = _one_step(event.sampling_rate, event.noise_multiplier, width)
    return _read_epsilon(one_step.self_compose(event.steps), delta)


def _read_epsilon(pld: Any, delta: float) -> float:
    import numpy as np  # noqa: PLC0415

    with np.errstate(over="ignore"):  # in the thousands a ratio of masses may overflow to inf
        return float(pld.get_epsilon_for_delta(delta))


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
    event: TrainingEvent, delta: float, epoch: int, earlier: Sequence[TrainingEvent] = ()
) -> EpsilonSchedule:
    """Price the run at some 20 to 100 evenly spaced steps, by one coarse convolution each.

    The last point is exactly ``total_epsilon((*earlier, event), delta)``, and no point lies above
    it.

    Args:
        event: the whole run, from its first step or from where it branched off.
        delta: in (0, 1).
        epoch: steps of an epoch; points fall on the ends of epochs where their number allows.
        earlier: what else was done with the records before or beside.
    """
    if event.steps == 0:
        return EpsilonSchedule(((0, total_epsilon(tuple(earlier), delta)),))
    end = total_epsilon((*earlier, event), delta)
    if math.isinf(end):
        return EpsilonSchedule(((event.steps, end),))
    stride = _stride(event.steps, epoch)
    before = _merged(earlier)
    width = max(grid_width(e.noise_multiplier, COARSE) for e in (*before, event))
    block = _one_step(event.sampling_rate, event.noise_multiplier, width).self_compose(stride)
    computed: list[tuple[int, float]] = []
    pld = block.compose(_compose(before, width)) if before else block
    for step in range(stride, event.steps, stride):
        computed.append((step, min(end, _read_epsilon(pld, delta))))
        pld = pld.compose(block)
    return EpsilonSchedule((*computed, (event.steps, end)))


def _stride(steps: int, epoch: int, points: int = 100) -> int:
    """Steps between points: some epochs, or a whole fraction of one where it has one."""
    least = max(1, math.ceil(steps / points))
    if epoch <= least:
        return math.ceil(least / epoch) * epoch
    return next(stride for stride in range(least, epoch + 1) if epoch % stride == 0)


def calibrate_noise(sampling_rate: float, steps: int, delta: float, target: float) -> float:
    """The smallest noise multiplier, on a grid of 1e-5, whose run costs at most ``target``.

    Args:
        sampling_rate: q in (0, 1].
        steps: T >= 1.
        delta: in (0, 1).
        target: epsilon > 0, never exceeded by the answer.

    Raises:
        BudgetError: no noise multiplier up to 10,000 meets the target.
    """

    def price(finest: float) -> Callable[[int], float]:
        def at(ticks: int) -> float:
            sigma = ticks / SIGMA_TICKS
            event = TrainingEvent(sampling_rate, sigma, steps)
            return _price(event, delta, grid_width(sigma, finest))

        return at

    bound = _rdp_noise(sampling_rate, steps, delta, target)
    rough = _smallest(price(COARSE), target, bound, spread=1.5)
    return _smallest(price(FINE), target, rough, spread=1.01) / SIGMA_TICKS


def _smallest(price: Callable[[int], float], target: float, guess: int, spread: float) -> int:
    """The smallest tick whose price is at most ``target``, for a price that falls with ticks.

    False position on (log ticks, log price), which is nearly straight: evaluations are dear. The
    bracket stays honest throughout: ``low`` costs more than the target, ``high`` does not.
    """
    high, high_price = guess, price(guess)
    while high_price > target:
        high = math.ceil(high * spread)
        high_price = price(high)
    low, low_price = LEAST_TICKS - 1, math.inf
    probe = max(LEAST_TICKS, math.floor(high / spread))
    while high - low > 1:
        cost = price(probe)
        if cost > target:
            low, low_price = probe, cost
        else:
            high, high_price = probe, cost
        probe = _next_probe(low, low_price, high, high_price, target, spread)
    return high


def _next_probe(
    low: int, low_price: float, high: int, high_price: float, target: float, spread: float
) -> int:
    if math.isinf(low_price):
        return max(low + 1, math.floor(high / spread))
    if high - low <= 8 or high_price <= 0:
        return (low + high) // 2
    slope = math.log(high_price / low_price) / math.log(high / low)
    root = low * math.exp(math.log(target / low_price) / slope)
    # Step two ticks past the estimate, towards the farther end, so that both ends close in.
    root += 2 if root - low < high - root else -2
    return min(max(math.floor(root), low + 1), high - 1)


def _rdp_noise(sampling_rate: float, steps: int, delta: float, target: float) -> int:
    """A noise multiplier (in grid ticks) that meets the target under the looser RDP bound."""
    from dp_accounting.rdp import rdp_privacy_accountant  # noqa: PLC0415

    def fits(sigma: float) -> bool:
        accountant = rdp_privacy_accountant.RdpAccountant(RDP_ORDERS)
        accountant.compose(TrainingEvent(sampling_rate, sigma, steps).dp_event())
        return bool(accountant.get_epsilon(delta) <= target)

    low, high = SIGMA_MIN, 1.0
    while not fits(high):
        low, high = high, 2 * high
        if high > SIGMA_MAX:
            raise BudgetError(
                f"No noise up to sigma {SIGMA_MAX:g} brings {steps} steps at sampling rate "
                f"{sampling_rate:.3g} down to epsilon {target:g} at delta {delta:g}. "
                "Ask for a larger epsilon, fewer epochs or a smaller batch."
            )
    for _ in range(5):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return math.ceil(high * SIGMA_TICKS)


def affordable_steps(
    event: TrainingEvent, delta: float, budget: float, earlier: Sequence[TrainingEvent] = ()
) -> int:
    """The largest T <= event.steps with which ``earlier`` and T steps cost at most ``budget``."""
    low, high = 0, event.steps
    while low < high:
        middle = (low + high + 1) // 2
        cost = total_epsilon((*earlier, replace(event, steps=middle)), delta)
        low, high = (middle, high) if cost <= budget else (low, middle - 1)
    return low


def format_epsilon(epsilon: float) -> str:
    """Four digits, rounded up: a price is never shown smaller than it is."""
    if epsilon == 0 or not math.isfinite(epsilon):
        return "0" if epsilon == 0 else "infinite"
    scale = 10.0 ** (3 - math.floor(math.log10(epsilon)))
    return f"{math.ceil(epsilon * scale * (1 - 1e-12)) / scale:.4g}"


NO_PRIVACY = "No privacy: nothing was clipped and no noise was added."


def statement(epsilon: float, delta: float, events: Sequence[TrainingEvent]) -> str:
    """What the guarantee says, in plain sentences."""
    if any(event.noise_multiplier == 0 for event in events):
        return NO_PRIVACY
    if not math.isfinite(epsilon):
        return (
            f"No finite epsilon could be shown at delta {delta:g}: gradients were clipped and "
            "noise was added, but nothing can be promised. Price the run at a larger delta."
        )
    price = format_epsilon(epsilon)
    done = " and ".join(
        f"{event.steps} Poisson-sampled steps at rate {event.sampling_rate:.4g} with noise "
        f"multiplier {event.noise_multiplier:g}"
        for event in _merged(events)
    )
    return (
        f"Leaving out or adding any one training record changes the probability of whatever the "
        f"model and its report may show by a factor of at most e^{price}, but for a probability "
        f"of {delta:g}: ({price}, {delta:g})-differential privacy under {ADJACENCY} adjacency, for "
        f"{done or 'no step'}. The number of training records is public. Test records are not "
        "protected. Publishing the best of several runs costs more."
    )
