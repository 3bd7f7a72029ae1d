"""Calibration: find the noise or steps that meet a target epsilon.

The computed privacy cost of every answer is at most the target.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dpmac_cli.accounting import accountants
from dpmac_cli.accounting.accountants import (
    DEFAULT_ACCOUNTANT,
    LARGEST_EPSILON,
    total_epsilon,
)
from dpmac_cli.accounting.events import MOST_STEPS, SIGMA_MAX, SIGMA_MIN, TrainingEvent
from dpmac_cli.accounting.selection import Search
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.errors import BudgetError

#: Noise multipliers are multiples of 1 over this, so the printed value is the value used.
SIGMA_TICKS = 100_000
LEAST_TICKS, MOST_TICKS = round(SIGMA_MIN * SIGMA_TICKS), round(SIGMA_MAX * SIGMA_TICKS)
#: A noise multiplier that nearly all budgets allow. The largest one takes seconds to price.
MUCH_TICKS = 100 * SIGMA_TICKS
#: Relative precision of the epsilon of a trial in a search, and most attempts to find it.
CLOSE, TRIES = 4e-3, 20
#: Least and largest mu of a budget, and how often the ratio between them is halved to find it.
MU_ENDS, HALVINGS = (1e-6, 1e4), 60
#: Evaluations after which every other one halves what is left.
MANY = 8
#: Relative error of the cost at which a search on a coarse grid ends, and the largest one of what
#: earlier events leave of it.
ROUGH, ROUGHEST = 1e-3, 0.5
#: Relative difference of costs that is no more than rounding, so that none is lower for sure.
ROUNDED = 1e-9
#: Derivatives of the logarithm of a cost by that of the noise.
STEEPEST, FLATTEST = -8.0, -0.1

#: Epsilon as a function of a number of steps, or of a noise multiplier.
Cost = Callable[[int], float]


@functools.lru_cache(maxsize=accountants.REMEMBERED)
def calibrate_noise(
    event: TrainingEvent,
    delta: float,
    target: float,
    accountant: str = DEFAULT_ACCOUNTANT,
    earlier: tuple[TrainingEvent, ...] = (),
) -> float:
    """Return the smallest noise multiplier, on a grid of 1e-5, that costs at most ``target``.

    Args:
        event: steps of the training, whose noise multiplier is ignored.
        delta: delta in (0, 1).
        target: epsilon > 0 that the event and ``earlier`` ones keep to together.
        accountant: see :func:`~dpmac_cli.accounting.accountants.total_epsilon`.
        earlier: further events on the same records, with their own noise.

    Returns:
        A multiple of 1e-5; :data:`~.events.SIGMA_MIN` for an event without steps.

    Raises:
        BudgetError: no noise multiplier up to 10,000 meets the target.
        InputError: see :func:`~dpmac_cli.accounting.accountants.check_arguments`.
    """

    def cost(ticks: int, widest: float = accountants.FINE) -> float:
        noisy = replace(event, noise_multiplier=ticks / SIGMA_TICKS)
        return total_epsilon((*earlier, noisy), delta, accountant, widest)

    accountants.check_arguments((event, *earlier), delta, target)
    if event.steps == 0:
        return SIGMA_MIN
    before = total_epsilon(earlier, delta, accountant)
    coarse = functools.partial(cost, widest=accountants.COARSE)
    if before >= target or coarse(MUCH_TICKS) > target:
        _check_reachable(event, delta, target, accountant, earlier)
    ends = MOST_TICKS, LEAST_TICKS - 1
    # What the event adds to the cost of earlier ones is nearly straight in logarithms.
    left, base = target - before, total_epsilon(earlier, delta, accountant, accountants.COARSE)
    close = min(ROUGH * target / left, ROUGHEST)
    start = _last_within(coarse, base + left, *ends, SIGMA_TICKS, power=-2, floor=base, close=close)
    near = start - start // 50 if start > SIGMA_TICKS else start + start // 50
    added = [_logarithm((coarse(number) - base) / left) for number in (start, near)]
    power = (added[1] - added[0]) / math.log(near / start)
    if not STEEPEST <= power <= FLATTEST:  # rounding, where next to nothing is left
        power = -2.0
    ticks = _last_within(cost, target, *ends, start, power, floor=before)
    if ticks == MOST_TICKS:  # perhaps because no other one is within the target
        _check_reachable(event, delta, target, accountant, earlier)
    return ticks / SIGMA_TICKS


def _check_reachable(
    event: TrainingEvent,
    delta: float,
    target: float,
    accountant: str,
    earlier: tuple[TrainingEvent, ...],
) -> None:
    """Raise BudgetError if no noise multiplier meets a target: see :func:`calibrate_noise`."""
    before = total_epsilon(earlier, delta, accountant)
    if before >= target:
        cost = f"{format_epsilon(before)} at delta {delta:g}"
        if not any(event.trains for event in earlier):  # counts with as much noise as there is
            raise BudgetError(
                f"Epsilon {target:g} is too small: noisy counts of the records alone cost {cost}. "
                "Use a larger epsilon."
            )
        raise BudgetError(
            f"Epsilon {target:g} is spent: earlier training costs {cost} already. Use a larger "
            "epsilon."
        )
    loudest = replace(event, noise_multiplier=SIGMA_MAX)
    least = total_epsilon((*earlier, loudest), delta, accountant)
    if least > target:
        by = accountants.used_accountant((loudest,), delta, accountant)
        raise BudgetError(
            f"No sigma up to {SIGMA_MAX:g} brings training ({event.steps} steps at sampling "
            f"rate {event.sampling_rate:.3g}) down to epsilon {target:g} at delta {delta:g}: with "
            f"{by}, sigma {SIGMA_MAX:g} costs {format_epsilon(least)}. Use a larger "
            "epsilon or delta, fewer epochs or a smaller batch."
        )


def noise_of_share(epsilon: float, delta: float, share: float) -> float:
    """Return the noise multiplier of one Gaussian mechanism that has a share of a budget.

    >>> noise_of_share(epsilon=3, delta=1e-5, share=1) < noise_of_share(3, 1e-5, share=0.1)
    True

    The budget is the mu of (epsilon, delta): ``delta = Phi(mu / 2 - epsilon / mu) - e^epsilon
    Phi(-mu / 2 - epsilon / mu)`` (Dong, Roth and Su 2022, Corollary 1). Squares of mu add up, and
    that of a mechanism is 1 / sigma^2. So ``sigma = 1 / (mu sqrt(share))``, rounded up to the grid
    of noise multipliers.

    Args:
        epsilon: epsilon > 0 of the budget.
        delta: delta of the budget, in (0, 1).
        share: share of mu^2, from above 0 to 1.
    """
    (low, high), epsilon = MU_ENDS, min(epsilon, LARGEST_EPSILON)
    for _ in range(HALVINGS):
        mu = math.sqrt(low * high)
        spent = _tail(epsilon / mu - mu / 2) - math.exp(epsilon) * _tail(epsilon / mu + mu / 2)
        if spent <= delta:
            low = mu
        else:
            high = mu
    sigma = math.ceil(SIGMA_TICKS / (low * math.sqrt(share))) / SIGMA_TICKS
    return min(max(sigma, SIGMA_MIN), SIGMA_MAX)


def _tail(x: float) -> float:
    """Return the probability that a standard normal is above x."""
    return math.erfc(x / math.sqrt(2)) / 2


def calibrate_search(search_of: Callable[[float], Search], delta: float, target: float) -> float:
    """Return an epsilon of one trial at which a search costs at most ``target``, and hardly less.

    Args:
        search_of: function from epsilon of one trial to the search.
        delta: delta of both epsilons.
        target: epsilon > 0 of the whole search.

    Raises:
        BudgetError: no noise meets the target.
    """
    good, bad = (0.0, 0.0), (target, math.inf)  # epsilons of a trial, and what searches cost
    guess = target / 1.5
    for _ in range(TRIES):
        cost = search_of(guess).epsilon(delta)
        good, bad = ((guess, cost), bad) if cost <= target else (good, (guess, cost))
        if good[1] >= (1 - CLOSE) * target:
            break
        # Between two costs it is nearly linear. Aim a little below the target.
        aim, (low, below), (high, above) = (1 - CLOSE / 2) * target, good, bad
        slope = (above - below) / (high - low) if math.isfinite(above) else cost / guess
        guess = min(low + (aim - below) / slope, (low + 49 * high) / 50)
    if good[0] > 0:
        return good[0]
    raise BudgetError(
        f"No trial of a search costs so little that the search is within epsilon {target:g} at "
        f"delta {delta:g}. Use a larger epsilon or delta, or fewer trials."
    )


def affordable_steps(
    event: TrainingEvent,
    delta: float,
    budget: float,
    others: Sequence[TrainingEvent] = (),
    price: Callable[[tuple[TrainingEvent, ...]], float] | None = None,
) -> int:
    """Return the largest T <= event.steps such that ``others`` and T steps are within budget.

    Args:
        event: event of all steps that are planned.
        delta: delta of the guarantee.
        budget: epsilon that everything together keeps to; infinite for all steps.
        others: the other events that the budget pays for: earlier ones, and a covered score at the
            end.
        price: epsilon of events, by default :func:`total_epsilon`.

    Returns:
        T, at least 1, or 0 for an event without steps.

    Raises:
        BudgetError: the first step costs more.
    """

    def cost(steps: int) -> float:
        events = (*others, replace(event, steps=steps))
        return total_epsilon(events, delta) if price is None else price(events)

    if math.isinf(budget):
        return event.steps
    count = _last_within(cost, budget, 0, event.steps + 1, event.steps, power=0.5)
    if count == 0 < event.steps:
        raise BudgetError(
            f"{{max_epsilon=}}{budget:g} allows no further step: with the next one the run costs "
            f"{format_epsilon(cost(1))} at sigma {event.noise_multiplier:g}. Raise {{sigma}} or "
            "{max_epsilon}."
        )
    return count


def longest_run(
    event: TrainingEvent,
    delta: float,
    budget: float,
    accountant: str = DEFAULT_ACCOUNTANT,
    others: tuple[TrainingEvent, ...] = (),
) -> int:
    """Return the largest number of steps, at most :data:`MOST_STEPS`, that the budget allows.

    Args:
        event: some steps of the run, whose number is ignored.
        delta: delta in (0, 1).
        budget: epsilon > 0 of the run and ``others`` together.
        accountant: see :func:`~dpmac_cli.accounting.accountants.total_epsilon`.
        others: further events on the same records.

    Raises:
        BudgetError: the first step costs more.
        InputError: see :func:`~dpmac_cli.accounting.accountants.check_arguments`.
    """

    def cost(steps: int, by: str = accountant) -> float:
        return total_epsilon((*others, replace(event, steps=steps)), delta, by)

    accountants.check_arguments((event, *others), delta, budget)
    if cost(1) > budget:
        raise BudgetError(
            f"Even one step at noise multiplier {event.noise_multiplier:g} and sampling rate "
            f"{event.sampling_rate:.3g} exceeds epsilon {budget:g} at delta {delta:g}: it costs "
            f"{format_epsilon(cost(1))}. Raise the noise or the budget."
        )
    # Start from the answer of RDP, which is fast and an upper bound.
    by_rdp = functools.partial(cost, by="rdp")
    start = _last_within(by_rdp, budget, 1, MOST_STEPS + 1, guess=1000, power=0.5)
    return _last_within(cost, budget, 1, MOST_STEPS + 1, start, power=0.5)


def _last_within(
    cost: Cost,
    target: float,
    good: int,
    bad: int,
    guess: int,
    power: float,
    floor: float = 0.0,
    close: float = 0.0,
) -> int:
    """Return the last number from ``good`` towards ``bad`` that costs at most ``target``.

    Evaluations are expensive, so it follows the secant in logarithms, in which costs above a floor
    are nearly straight, and halves what is left when that takes long.

    Args:
        cost: monotone function, increasing from ``good`` to ``bad``.
        target: cost > 0.
        good, bad: a number that costs at most ``target`` or is returned if none does, and one
            behind the last that is tried; neither is evaluated.
        guess: where to start, between them.
        power: roughly, the derivative of the logarithm of the cost by that of the number.
        floor: a part of every cost, and of the target, which the number does not change.
        close: relative error of the cost at which the search ends early, on either side.
    """
    number, before, tries = guess, (guess, math.nan), 0
    while abs(good - bad) > 1:
        spent = cost(number)
        excess = _logarithm((spent - floor) / max(target - floor, math.ulp(target)))
        if abs(excess) <= close or 0 <= target - spent <= ROUNDED * target:
            return number
        good, bad = (number, bad) if spent <= target else (good, number)
        if tries:
            secant = (excess - before[1]) / math.log(number / before[0])
            power = secant if 0.1 < secant / power < 10 else power
        before, tries = (number, excess), tries + 1
        aim = number * math.exp(min(max(-excess / power, -3.0), 3.0))
        if tries > MANY and tries % 2:
            aim = (good + bad) / 2
        number = math.floor(aim) if good < bad else math.ceil(aim)
        number = min(max(number, min(good, bad) + 1), max(good, bad) - 1)
    return good


def _logarithm(ratio: float) -> float:
    """Return the logarithm of a ratio from 0 to infinity, which is limited."""
    return math.log(min(max(ratio, 1e-3), 1e3))
