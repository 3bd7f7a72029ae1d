"""Calibration: find the noise or steps that meet a target epsilon.

The computed privacy cost of every answer is at most the target.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dpmac_cli.accounting import accountants
from dpmac_cli.accounting.accountants import DEFAULT_ACCOUNTANT, SIGMA_MAX, SIGMA_MIN, total_epsilon
from dpmac_cli.accounting.events import Scores, TrainingEvent
from dpmac_cli.accounting.selection import Search
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.errors import BudgetError

#: Noise multipliers are multiples of 1 over this, so the printed value is the value used.
SIGMA_TICKS = 100_000
LEAST_TICKS, MOST_TICKS = round(SIGMA_MIN * SIGMA_TICKS), round(SIGMA_MAX * SIGMA_TICKS)
#: Maximum steps of a run, and of a search for the longest run.
MOST_STEPS = 10_000_000
#: Relative precision of the epsilon of a trial in a search, and most attempts to find it.
CLOSE, TRIES = 4e-3, 20

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

    The event's noise multiplier is ignored. ``target`` is an epsilon > 0, which also covers
    ``earlier`` events on the same records; for other arguments see
    :func:`~dpmac_cli.accounting.accountants.total_epsilon`.

    Raises:
        BudgetError: no noise multiplier up to 10,000 meets the target.
    """

    def cost(ticks: int, widest: float = accountants.FINE) -> float:
        noisy = replace(event, noise_multiplier=ticks / SIGMA_TICKS)
        return total_epsilon((*earlier, noisy), delta, accountant, widest)

    if event.steps == 0:
        return SIGMA_MIN
    least = cost(MOST_TICKS)
    before = total_epsilon(earlier, delta, accountant)
    if before >= target:
        raise BudgetError(
            f"Epsilon {target:g} is spent: earlier training costs {format_epsilon(before)} at "
            f"delta {delta:g} already. Use a larger epsilon."
        )
    if least > target:
        loudest = replace(event, noise_multiplier=SIGMA_MAX)
        by = accountants.used_accountant((loudest,), delta, accountant)
        raise BudgetError(
            f"No sigma up to {SIGMA_MAX:g} brings training ({event.steps} steps at sampling "
            f"rate {event.sampling_rate:.3g}) down to epsilon {target:g} at delta {delta:g}: with "
            f"{by}, sigma {SIGMA_MAX:g} costs {format_epsilon(least)}. Use a larger "
            "epsilon or delta, fewer epochs or a smaller batch."
        )
    limits = range(LEAST_TICKS, MOST_TICKS + 1)
    coarse = functools.partial(cost, widest=accountants.COARSE)
    rough = _smallest(coarse, target, SIGMA_TICKS, 2, limits)
    return _smallest(cost, target, rough, 1.01, limits) / SIGMA_TICKS


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
    earlier: Sequence[TrainingEvent] = (),
    scores: Scores | None = None,
    base: int = 0,
) -> int:
    """Return the largest T <= event.steps such that ``earlier`` and T steps are within budget.

    The scores that the steps from ``base + 1`` on release are included. Raises BudgetError if the
    first step costs more.
    """

    def cost(steps: int) -> float:
        tested = () if scores is None else (scores.event(base + steps, base + steps, base),)
        return total_epsilon((*earlier, replace(event, steps=steps), *tested), delta)

    if math.isinf(budget):
        return event.steps
    count = _last_within(cost, budget, 0, event.steps)
    if count == 0 < event.steps:
        raise BudgetError(
            f"--max-epsilon {budget:g} allows no further step: with the next one the run costs "
            f"{format_epsilon(cost(1))} at sigma {event.noise_multiplier:g}. Raise --sigma or "
            "--max-epsilon."
        )
    return count


def longest_run(
    event: TrainingEvent, delta: float, budget: float, accountant: str = DEFAULT_ACCOUNTANT
) -> int:
    """Return the largest number of steps, at most :data:`MOST_STEPS`, that the budget allows.

    ``event`` has any number of steps of the run, and ``budget`` is an epsilon > 0; for other
    arguments see :func:`~dpmac_cli.accounting.accountants.total_epsilon`. Raises BudgetError if the
    first step costs more.
    """

    def cost(steps: int, by: str = accountant) -> float:
        return total_epsilon((replace(event, steps=steps),), delta, by)

    if cost(1) > budget:
        raise BudgetError(
            f"Even one step at noise multiplier {event.noise_multiplier:g} and sampling rate "
            f"{event.sampling_rate:.3g} exceeds epsilon {budget:g} at delta {delta:g}: it costs "
            f"{format_epsilon(cost(1))}. Raise the noise or the budget."
        )
    # Start from the answer of RDP, which is fast and an upper bound.
    start = _last_within(functools.partial(cost, by="rdp"), budget, 1, MOST_STEPS)
    low = high = start if cost(start) <= budget else 1
    while high < MOST_STEPS and cost(high) <= budget:
        low, high = high, min(2 * high, MOST_STEPS)
    return _last_within(cost, budget, low, high)


def _smallest(cost: Cost, target: float, guess: int, factor: float, limits: range) -> int:
    """Return the smallest number that costs at most ``target``, for a decreasing cost.

    The search starts at ``guess`` and moves by ``factor``. Returns the largest of ``limits`` if no
    number is found.
    """
    high, low, end = guess, guess, limits[-1]
    while cost(high) > target and high < end:
        low, high = high, min(math.ceil(high * factor), end)
    while cost(low) <= target and low > limits[0]:
        high, low = low, max(math.floor(low / factor), limits[0])
    return _last_within(cost, target, high, low)


def _last_within(cost: Cost, target: float, good: int, bad: int) -> int:
    """Return the last number from ``good`` towards ``bad`` that costs at most ``target``.

    Returns ``good`` if none does. Brent's method needs few of the expensive evaluations.
    """
    from scipy.optimize import brentq  # noqa: PLC0415  (not needed to report mistakes)

    known, above = functools.cache(cost), math.nextafter(target, math.inf)
    if known(bad) <= target:
        return bad
    if known(good) > target:
        return good

    def excess(number: float) -> float:
        return min(known(round(number)), 3 * target) - above

    step = 1 if good < bad else -1
    last: int = round(brentq(excess, good, bad, xtol=0.5))
    while known(last) > target:
        last -= step
    while known(last + step) <= target:
        last += step
    return last
