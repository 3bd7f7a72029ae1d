"""The privacy cost of the best of a random number of trials: oracles, quadrature and simulation."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare, norm

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import calibrate_noise, calibrate_search
from dpmac_cli.accounting.events import Scores, TrainingEvent
from dpmac_cli.accounting.selection import Search, Trials, trials_of
from tests.tiers import rest_long

pytestmark = pytest.mark.privacy

DELTA = 1e-5


def test_the_number_of_trials_is_drawn_from_its_distribution() -> None:
    trials = Trials(3, 6)
    found = Counter(trials.draw() for _ in range(4000))
    assert set(found) <= set(range(1, 7))
    seen = [found[k] for k in range(1, 7)]
    assert chisquare(seen, 4000 * trials.probabilities).pvalue > 1e-4


def exact_delta(trials: Trials, sigma: float, epsilon: float, *, high: bool, added: bool) -> float:
    """Delta of the best of K normal numbers, with mean 1 or 0, by quadrature.

    Args:
        high: whether the highest wins, or the lowest. added: whether the mean is 1 in A or in A'.
    """
    y = np.linspace(-12 * sigma, 12 * sigma + 1, 100_001)
    means = (1.0, 0.0) if added else (0.0, 1.0)
    one, other = (
        norm.pdf(y, mean, sigma) * trials.slope((norm.cdf if high else norm.sf)(y, mean, sigma))
        for mean in means
    )
    assert np.trapezoid(one, y) == pytest.approx(1, abs=1e-6)
    return float(np.trapezoid(np.maximum(one - math.exp(epsilon) * other, 0), y))


@pytest.mark.parametrize("sigma", rest_long([2.0, 0.7, 8.0], 1))
@pytest.mark.parametrize(
    ("mean", "most"), rest_long([(10, 40), (10, 400), (2, 8), (100, 150)], short=2)
)
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
    scores = Scores(0.0, max(1, event.steps)).event(event.steps, event.steps)
    sigma = calibrate_noise(scores, delta, total_epsilon((event,), delta))
    return event, replace(scores, noise_multiplier=sigma)


def test_every_candidate_and_every_score_is_charged() -> None:
    cheap, dear = (with_score(TrainingEvent(0.1, sigma, 50), DELTA) for sigma in (8.0, 2.0))
    trials = trials_of(10)
    both = Search(trials, (cheap, dear)).epsilon(DELTA)
    assert both >= Search(trials, (dear,)).epsilon(DELTA) > Search(trials, (cheap,)).epsilon(DELTA)
    loud = (cheap[0], replace(cheap[1], noise_multiplier=0.5))
    assert Search(trials, (loud,)).epsilon(DELTA) > 2 * Search(trials, (cheap,)).epsilon(DELTA)


@pytest.mark.parametrize("target", rest_long([0.5, 3.0, 8.0], 1))
def test_the_noise_of_a_trial_meets_the_target_of_the_search(target: float) -> None:
    event, trials = TrainingEvent(0.05, 1.0, 100), trials_of(10)

    def search_of(epsilon: float) -> Search:
        noisy = replace(event, noise_multiplier=calibrate_noise(event, DELTA, epsilon))
        return Search(trials, (with_score(noisy, DELTA),))

    cost = search_of(calibrate_search(search_of, DELTA, target)).epsilon(DELTA)
    assert 0.995 * target < cost <= target
