"""From a price to a setting: the noise, the steps or the batch that a budget pays for.

Every answer is on the paying side: priced forward, it costs at most the target.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dpmac_cli.accounting.accountants import (
    COARSE,
    FINE,
    SIGMA_MAX,
    SIGMA_MIN,
    choose_accountant,
    total_delta,
    total_epsilon,
)
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import PLD_ENDS, format_epsilon
from dpmac_cli.errors import BudgetError

#: Noise multipliers are solved on a grid of this many to 1, so the one printed is the one used.
SIGMA_TICKS = 100_000
LEAST_TICKS, MOST_TICKS = round(SIGMA_MIN * SIGMA_TICKS), round(SIGMA_MAX * SIGMA_TICKS)
LEAST_DELTA = 1e-300
FEW = 8

#: Epsilon of a number of steps, of a batch size, ...
Price = Callable[[int], float]


def calibrate_noise(
    event: TrainingEvent, delta: float, target: float, accountant: str | None = None
) -> float:
    """The smallest noise multiplier, on a grid of 1e-5, whose run costs at most ``target``.

    Args:
        event: the run; its own noise multiplier does not matter.
        delta: in (0, 1).
        target: epsilon > 0, never exceeded by the answer.
        accountant: see :func:`dpmac_cli.accounting.accountants.total_epsilon`.

    Raises:
        BudgetError: no noise multiplier up to 10,000 meets the target, or none has a price.
    """
    name = choose_accountant([_with_noise(event, LEAST_TICKS)], accountant)
    if event.steps == 0:
        return SIGMA_MIN

    def price(widest: float) -> Price:
        return lambda ticks: total_epsilon((_with_noise(event, ticks),), delta, name, widest)

    least = price(FINE)(MOST_TICKS)
    check_within_reach(least, delta)
    if least > target:
        raise BudgetError(
            f"No noise up to sigma {SIGMA_MAX:g} brings training ({event.steps} steps at sampling "
            f"rate {event.sampling_rate:.3g}) down to epsilon {target:g} at delta {delta:g}: by "
            f"{name}, sigma {SIGMA_MAX:g} costs {format_epsilon(least)}. Ask for a larger epsilon "
            "or delta, fewer epochs or a smaller batch."
        )
    rough = _smallest(price(COARSE), target, SIGMA_TICKS, spread=2)
    return _smallest(price(FINE), target, rough, spread=1.01) / SIGMA_TICKS


def check_within_reach(least: float, delta: float) -> None:
    """Refuse a delta at which no price, the least neither, can be shown. Raises BudgetError."""
    if math.isinf(least):
        raise BudgetError(f"No finite epsilon can be shown at delta {delta:g}. {PLD_ENDS}")


def least_delta(
    events: tuple[TrainingEvent, ...], target: float, accountant: str | None = None
) -> float:
    """A delta, as small as can be shown, at which ``events`` cost at most ``target``; 1 if none.

    Read off directly it may, in its last digits, price forward to more than the target, and it may
    underflow to 0, which no Gaussian noise gives.
    """
    delta, step = max(total_delta(events, target, accountant), LEAST_DELTA), 1e-9
    while delta < 1 and total_epsilon(events, delta, accountant) > target:
        delta *= 1 + step
        step *= 4
    return min(delta, 1.0)


def _with_noise(event: TrainingEvent, ticks: int) -> TrainingEvent:
    return replace(event, noise_multiplier=ticks / SIGMA_TICKS)


def _smallest(
    price: Price, target: float, guess: int, spread: float, least: int = LEAST_TICKS
) -> int:
    """Return the fewest ticks that cost at most ``target``; the cost falls with their number.

    False position on (log ticks, log price), which is nearly straight: evaluations are expensive.
    Throughout, ``low`` costs more than the target, and ``high`` does not.
    """
    high, high_price = guess, price(guess)
    while high_price > target and high < MOST_TICKS:  # on a coarse grid these may cost more, too
        high = min(math.ceil(high * spread), MOST_TICKS)
        high_price = price(high)
    low, low_price = least - 1, math.inf
    probe = max(least, math.floor(high / spread))
    while high - low > 1:
        cost = price(probe)
        if cost > target:
            low, low_price = probe, cost
        else:
            high, high_price = probe, cost
        if math.isinf(low_price):
            probe = max(low + 1, math.floor(high / spread))
        else:
            probe = _next_probe(low, low_price, high, high_price, target)
    return high


def _next_probe(low: int, low_price: float, high: int, high_price: float, target: float) -> int:
    """Where the straight line through two (log number, log price) meets the target."""
    known = 0 < low_price < math.inf and 0 < high_price < math.inf and low_price != high_price
    if high - low <= 8 or low <= 0 or not known:
        return (low + high) // 2
    slope = math.log(high_price / low_price) / math.log(high / low)
    root = low * math.exp(math.log(target / low_price) / slope)
    # Step two past the estimate, towards the farther end, so that both ends close in.
    root += 2 if root - low < high - root else -2
    return min(max(math.floor(root), low + 1), high - 1)


def affordable_steps(
    event: TrainingEvent,
    delta: float,
    budget: float,
    earlier: Sequence[TrainingEvent] = (),
    accountant: str | None = None,
) -> int:
    """The largest T <= event.steps with which ``earlier`` and T steps cost at most ``budget``."""

    def price(steps: int) -> float:
        return total_epsilon((*earlier, replace(event, steps=steps)), delta, accountant)

    return _largest(price, budget, 0, event.steps)


#: Steps beyond which nobody trains, and at which a search for as many as possible ends.
MOST_STEPS = 10_000_000


def longest_run(
    event: TrainingEvent, delta: float, budget: float, accountant: str | None = None
) -> int:
    """The largest number of steps, up to :data:`MOST_STEPS`, that costs at most ``budget``.

    Args:
        event: one step of the run, or any number.
        delta: in (0, 1).
        budget: epsilon > 0.
        accountant: see :func:`dpmac_cli.accounting.accountants.total_epsilon`.

    Raises:
        BudgetError: the first step costs more.
    """

    def price(steps: int, by: str | None = accountant) -> float:
        return total_epsilon((replace(event, steps=steps),), delta, by)

    check_within_reach(price(1), delta)
    if price(1) > budget:
        raise BudgetError(
            f"Not one step at noise multiplier {event.noise_multiplier:g} and sampling rate "
            f"{event.sampling_rate:.3g} costs epsilon {budget:g} or less at delta {delta:g}: the "
            f"first costs {format_epsilon(price(1))}. Raise the noise or the budget."
        )
    # From where RDP would stop, which is cheap to find and on the paying side.
    low = _largest(lambda steps: price(steps, "rdp"), budget, 1, MOST_STEPS)
    low = low if price(low) <= budget else 1
    high = low
    while high < MOST_STEPS and price(high) <= budget:
        low, high = high, min(2 * high, MOST_STEPS)
    return _largest(price, budget, low, high)


def _largest(price: Price, budget: float, low: int, high: int) -> int:
    """The largest number in [low, high] that costs at most ``budget``; ``low`` is known to.

    False position, as in :func:`_smallest`, for a price that rises.
    """
    high_price = price(high)
    if high_price <= budget:
        return high
    low_price = price(low)
    while high - low > 1:
        probe = _next_probe(low, low_price, high, high_price, budget)
        cost = price(probe)
        if cost <= budget:
            low, low_price = probe, cost
        else:
            high, high_price = probe, cost
    return low


def largest_batch(
    event_of: Callable[[int], TrainingEvent],
    dataset_size: int,
    delta: float,
    budget: float,
    accountant: str | None = None,
) -> int:
    """The largest batch size whose run costs at most ``budget``.

    Epsilon is a sawtooth in the batch: with every step less that an epoch takes, ceil(n/B), it
    falls, and between two such drops it rises. So the answer lies in the first stretch, from the
    largest batches down, whose smallest batch is affordable. Stretches of k steps an epoch that
    are too dear even at the rate 1/k, which no batch of theirs is below, are skipped by a root
    search, for along these the price falls with k, but for the very first.

    Args:
        event_of: the run with a given batch size.
        dataset_size: n.
        delta: in (0, 1).
        budget: epsilon > 0.
        accountant: see :func:`dpmac_cli.accounting.accountants.total_epsilon`.

    Raises:
        BudgetError: even a batch of one record costs more.
    """

    @functools.cache
    def price(batch: int) -> float:
        return total_epsilon((event_of(batch),), delta, accountant)

    def floor_price(steps_per_epoch: int) -> float:
        """Of the stretch with so many steps an epoch, at the rate 1/k that bounds it below."""
        first = event_of(math.ceil(dataset_size / steps_per_epoch))
        return total_epsilon(
            (replace(first, sampling_rate=1 / steps_per_epoch),), delta, accountant
        )

    def fits(steps_per_epoch: int) -> bool:
        return price(math.ceil(dataset_size / steps_per_epoch)) <= budget

    if math.isinf(price(dataset_size)):
        check_within_reach(price(1), delta)
    # Few steps an epoch, where the price need not fall with them, are tried one by one.
    stretch = next((k for k in range(1, min(FEW, dataset_size)) if fits(k)), 0)
    if not stretch:
        stretch = min(64, dataset_size)
        while stretch < dataset_size and floor_price(stretch) > budget:
            stretch = min(2 * stretch, dataset_size)
        if floor_price(stretch) <= budget:
            stretch = _smallest(floor_price, budget, stretch, 2, least=min(FEW, dataset_size))
        while stretch < dataset_size and not fits(stretch):
            stretch += 1
    first = math.ceil(dataset_size / stretch)
    if price(first) > budget:
        cheapest = min((first, dataset_size), key=price)
        raise BudgetError(
            f"No batch size brings training down to epsilon {budget:g} at delta {delta:g}: the "
            f"cheapest, {cheapest}, costs epsilon {format_epsilon(price(cheapest))} even so. "
            "Raise the noise or the budget, or train less."
        )
    last = math.ceil(dataset_size / (stretch - 1)) - 1 if stretch > 1 else dataset_size
    return _largest(price, budget, first, max(first, last))
