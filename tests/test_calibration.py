"""From a budget to a setting: priced forward, every answer is on the paying side, and just so."""

import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare, norm

from dpmac_cli.accounting.accountants import COARSE, FINE, total_epsilon
from dpmac_cli.accounting.calibration import (
    affordable_steps,
    calibrate_noise,
    calibrate_search,
    longest_run,
)
from dpmac_cli.accounting.events import (
    MOST_STEPS,
    SAMPLERS,
    SIGMA_MAX,
    TrainingEvent,
    histogram_event,
    score_event,
)
from dpmac_cli.accounting.risk import assess_risk
from dpmac_cli.accounting.selection import Search, Trials, trials_of
from dpmac_cli.errors import BudgetError, InputError
from tests.tiers import rest_long

pytestmark = pytest.mark.promise("target")

DELTA = 1e-5
MNIST_RATE = 256 / 60_000
DIGITS_RATE = 128 / 1437
#: Every sampler with its own accountant, and Poisson with the other one.
PRICED = (*((name, "pld") for name in SAMPLERS), ("poisson", "rdp"))


def digits(sampler: str = "poisson", sigma: float = 0.0, steps: int = 24) -> TrainingEvent:
    """Epochs of 12 steps, two unless told otherwise."""
    return TrainingEvent(DIGITS_RATE, sigma, steps, sampler, 12)


@pytest.mark.parametrize("number", [math.nan, "a", -1, 2.0])
def test_what_no_delta_can_be_is_refused(number: Any) -> None:
    event = digits(sigma=1.0)
    solvers = (partial(calibrate_noise, target=1.0), partial(longest_run, budget=1.0))
    for cost in (total_epsilon, *solvers):
        events: Any = (event,) if cost is total_epsilon else event
        with pytest.raises(InputError, match=r"^delta must be a number between 0 and 1, not "):
            cost(events, number)


@pytest.mark.parametrize("number", [math.nan, "3", 0, -1])
def test_what_no_epsilon_can_be_is_refused(number: Any) -> None:
    for solve in (calibrate_noise, longest_run):
        with pytest.raises(InputError, match=r"^epsilon must be a number above 0, not "):
            solve(digits(sigma=1.0), DELTA, number)


def test_what_no_events_can_be_is_refused() -> None:
    event = digits(sigma=1.0)
    wrong: tuple[Any, ...] = ([event], event, "text", (event, "text"), ("text",))
    for events in wrong:
        with pytest.raises(InputError, match=r"^events must be a tuple"):
            total_epsilon(events, DELTA)
    for records in (0, -1, math.nan):
        with pytest.raises(InputError, match="dataset_size must be at least 1"):
            assess_risk((event,), records)


def test_a_target_below_the_cost_of_counts_is_too_small() -> None:
    counts = (histogram_event(SIGMA_MAX),)
    with pytest.raises(BudgetError, match="too small: noisy counts of the records alone cost"):
        calibrate_noise(digits(), DELTA, 1e-9, earlier=counts)
    with pytest.raises(BudgetError, match="is spent: earlier training costs"):
        calibrate_noise(digits(), DELTA, 1e-9, earlier=(*counts, digits(sigma=9.0)))


# The noise.


@pytest.mark.parametrize(
    ("event", "delta", "target", "accountant"),
    rest_long(
        [
            (TrainingEvent(DIGITS_RATE, 0, 12), 1e-5, 1.0, "pld"),
            *((digits(sampler), 1e-5, 3.0, accountant) for sampler, accountant in PRICED),
            (TrainingEvent(1.0, 0, 1), 1e-6, 40.0, "pld"),
            (TrainingEvent(MNIST_RATE, 0, 1175), 1e-5, 8.0, "pld"),
        ],
    ),
    ids=str,
)
def test_calibrated_noise_is_the_least_that_meets_the_target(
    event: TrainingEvent, delta: float, target: float, accountant: str
) -> None:
    def price(sigma: float) -> float:
        return total_epsilon((replace(event, noise_multiplier=sigma),), delta, accountant)

    sigma = calibrate_noise(event, delta, target, accountant)
    assert sigma == round(sigma, 5), "what is printed is what is used"
    assert price(sigma) <= target < price(round(sigma - 1e-5, 5))


def test_calibrated_noise_covers_what_was_trained_before() -> None:
    earlier, event = (digits(sigma=4.0, steps=12),), digits(steps=12)

    def price(sigma: float) -> float:
        return total_epsilon((*earlier, replace(event, noise_multiplier=sigma)), DELTA)

    sigma = calibrate_noise(event, DELTA, 1.0, earlier=earlier)
    assert price(sigma) <= 1.0 < price(round(sigma - 1e-5, 5))
    assert sigma > calibrate_noise(event, DELTA, 1.0)
    spent = total_epsilon(earlier, DELTA)
    with pytest.raises(BudgetError, match="is spent"):
        calibrate_noise(event, DELTA, spent * 0.99, earlier=earlier)


@pytest.mark.parametrize("above", [1.001, 1.0001])
def test_noise_for_the_little_that_is_left_is_found_in_few_trials(
    above: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs just above that of earlier events are far from straight in logarithms."""
    earlier, event = (digits(sigma=1.0, steps=120),), digits(steps=12)
    target, trials = above * total_epsilon(earlier, DELTA), list[float]()

    def priced(events: Any, delta: float, accountant: str, widest: float = FINE) -> float:
        trials.append(events[-1].noise_multiplier)
        return total_epsilon(events, delta, accountant, widest)

    monkeypatch.setattr("dpmac_cli.accounting.calibration.total_epsilon", priced)
    sigma = calibrate_noise(event, DELTA, target, earlier=earlier)
    assert len(trials) < 30  # 70 by the whole cost
    trained, quieter = digits(sigma=sigma, steps=12), digits(sigma=0.99 * sigma, steps=12)
    assert total_epsilon((*earlier, trained), DELTA) <= target
    assert total_epsilon((*earlier, quieter), DELTA) > target


def test_noise_that_only_the_coarse_grid_finds_affordable_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Costs on two grids round differently: what they agree on is not left to their order."""

    def priced(events: Any, delta: float, accountant: str, widest: float = FINE) -> float:
        rounded = 2.0 if widest == FINE else 0.5
        return math.fsum(rounded + 1 / event.noise_multiplier for event in events)

    monkeypatch.setattr("dpmac_cli.accounting.calibration.total_epsilon", priced)
    with pytest.raises(BudgetError, match="No sigma up to 10000"):
        calibrate_noise(digits(steps=36), DELTA, 1.0)


# The length of a run.

DIGITS_RUN = digits(sigma=1.5, steps=240)


@pytest.mark.parametrize("budget", [0.61, 2.0])
def test_affordable_steps_are_as_many_as_the_budget_pays_for(budget: float) -> None:
    steps = affordable_steps(DIGITS_RUN, DELTA, budget)
    assert total_epsilon((replace(DIGITS_RUN, steps=steps),), DELTA) <= budget
    assert total_epsilon((replace(DIGITS_RUN, steps=steps + 1),), DELTA) > budget


@pytest.mark.parametrize("sampler", rest_long(SAMPLERS))
def test_what_was_spent_before_is_taken_off_the_budget(sampler: str) -> None:
    earlier = (digits(sampler, 4.0, 6),)
    event = digits(sampler, 3.0, 40)
    budget = total_epsilon((*earlier, replace(event, steps=15)), DELTA) * 1.0001
    steps = affordable_steps(event, DELTA, budget, earlier)
    # Where epochs are paid for, one begun is one that may as well be finished.
    assert steps == (24 if SAMPLERS[sampler].once_an_epoch else 15)
    assert affordable_steps(event, DELTA, budget) >= steps
    spent = total_epsilon(earlier, DELTA)
    with pytest.raises(BudgetError, match="allows no further step"):
        affordable_steps(event, DELTA, spent * 0.99, earlier)


@pytest.mark.parametrize(("sampler", "accountant"), rest_long(PRICED))
def test_the_longest_run_is_the_longest(sampler: str, accountant: str) -> None:
    event = digits(sampler, 4.0, 1)
    steps = longest_run(event, DELTA, 3.0, accountant)
    assert 5 < steps < MOST_STEPS
    assert total_epsilon((replace(event, steps=steps),), DELTA, accountant) <= 3.0
    assert total_epsilon((replace(event, steps=steps + 1),), DELTA, accountant) > 3.0
    if SAMPLERS[sampler].once_an_epoch:
        assert steps % 12 == 0
    assert longest_run(replace(event, steps=777), DELTA, 3.0, accountant) == steps


def test_a_target_that_only_the_fine_grid_shows_is_met() -> None:
    """On the coarse grid even the largest noise costs more than the target."""
    event, target = TrainingEvent(0.01, SIGMA_MAX, 1000), 5.76e-6
    assert total_epsilon((event,), DELTA, widest=COARSE) > target
    sigma = calibrate_noise(event, DELTA, target)
    assert total_epsilon((replace(event, noise_multiplier=sigma),), DELTA) <= target


def test_the_number_of_trials_is_drawn_from_its_distribution() -> None:
    trials = Trials(3, 6)
    found = Counter(trials.draw() for _ in range(4000))
    assert set(found) <= set(range(1, 7))
    seen = [found[k] for k in range(1, 7)]
    assert chisquare(seen, 4000 * trials.probabilities).pvalue > 1e-4


@pytest.mark.promise("search")
@pytest.mark.parametrize(("mean", "most"), [(1, 4), (1.9, 8), (1001, 4004), (3, 3), (math.nan, 8)])
def test_a_number_of_trials_that_is_not_secret_is_refused(mean: float, most: int) -> None:
    with pytest.raises(InputError, match="number of trials must be"):
        Trials(mean, most)


@pytest.mark.promise("search")
def test_no_seed_of_a_program_decides_the_number_of_trials() -> None:
    """It is secret, also where a program sets its seeds as usual."""
    found = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        found.append([Trials(100, 400).draw() for _ in range(20)])
    assert found[0] != found[1]


def exact_delta(trials: Trials, sigma: float, epsilon: float, *, high: bool, added: bool) -> float:
    """Delta of the best of K normal numbers, with mean 1 or 0, by quadrature.

    Args:
        high: whether the highest wins, or the lowest. added: whether the mean is 1 in A or in A'.
    """
    y = np.linspace(-12 * sigma, 12 * sigma + 1, 20_001)
    means = (1.0, 0.0) if added else (0.0, 1.0)
    one, other = (
        norm.pdf(y, mean, sigma) * trials.slope((norm.cdf if high else norm.sf)(y, mean, sigma))
        for mean in means
    )
    assert np.trapezoid(one, y) == pytest.approx(1, abs=1e-6)
    return float(np.trapezoid(np.maximum(one - math.exp(epsilon) * other, 0), y))


@pytest.mark.parametrize("sigma", rest_long([2.0, 0.7, 8.0], 1))
@pytest.mark.parametrize(("mean", "most"), rest_long([(10, 40), (10, 400), (2, 8), (100, 150)]))
def test_the_cost_covers_the_best_of_normal_numbers(sigma: float, mean: float, most: int) -> None:
    trials = Trials(mean, most)
    search = Search(trials, ((TrainingEvent(1.0, sigma, 1),),))
    epsilons, deltas = search.curve()
    for delta, looser in ((1e-5, 2.5), (1e-3, 3.0)):  # how much higher than needed, at most
        claim = search.epsilon(delta)
        cases = [(high, added) for high in (True, False) for added in (True, False)]
        worst = max(exact_delta(trials, sigma, claim, high=h, added=a) for h, a in cases)
        assert worst <= delta
        nearer = max(exact_delta(trials, sigma, claim / looser, high=h, added=a) for h, a in cases)
        assert nearer > delta  # the bound is not empty
        for epsilon in (0.0, claim / 3, claim / 2, claim):
            known = float(deltas[np.searchsorted(epsilons, epsilon, "right") - 1])
            exact = max(exact_delta(trials, sigma, epsilon, high=h, added=a) for h, a in cases)
            assert exact <= known + 1e-9


@pytest.mark.parametrize(("mean", "most"), [(2, 8), (10, 40), (10, 400)])
def test_the_surcharge_covers_every_place_of_a_normal_number(mean: float, most: int) -> None:
    trials, sigma = Trials(mean, most), 2.0
    search = Search(trials, ((TrainingEvent(1.0, sigma, 1),),))
    y = np.linspace(-20.0, 20.0, 4001)
    ratio = np.log(trials.slope(norm.cdf(y, 0, sigma)) / trials.slope(norm.cdf(y, 1, sigma))).max()
    assert ratio > 0.1
    claimed = search.epsilon(DELTA) - search.trial_epsilon(DELTA / mean)
    assert ratio <= claimed <= 1.5 * ratio


def with_score(event: TrainingEvent, delta: float) -> tuple[TrainingEvent, TrainingEvent]:
    """Training, and one covered score of its result that costs at most as much."""
    sigma = calibrate_noise(score_event(0.0), delta, total_epsilon((event,), delta))
    return event, score_event(sigma)


def test_every_candidate_and_every_score_is_charged() -> None:
    cheap, dear = (with_score(TrainingEvent(1.0, sigma, 5), DELTA) for sigma in (16.0, 8.0))
    trials = trials_of(10)
    both = Search(trials, (cheap, dear)).epsilon(DELTA)
    assert both >= Search(trials, (dear,)).epsilon(DELTA) > Search(trials, (cheap,)).epsilon(DELTA)
    loud = (cheap[0], replace(cheap[1], noise_multiplier=1.0))
    assert Search(trials, (loud,)).epsilon(DELTA) > 2 * Search(trials, (cheap,)).epsilon(DELTA)


@pytest.mark.parametrize("target", rest_long([0.5, 3.0, 8.0], 1))
def test_the_noise_of_a_trial_meets_the_target_of_the_search(target: float) -> None:
    event, trials = TrainingEvent(1.0, 1.0, 4), trials_of(10)

    def search_of(epsilon: float) -> Search:
        noisy = replace(event, noise_multiplier=calibrate_noise(event, DELTA, epsilon))
        return Search(trials, (with_score(noisy, DELTA),))

    cost = search_of(calibrate_search(search_of, DELTA, target)).epsilon(DELTA)
    assert 0.995 * target < cost <= target
