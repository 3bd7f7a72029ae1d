"""The privacy cost of the best of a random number of trials: oracles, quadrature and simulation."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import rdp_privacy_accountant
from numpy.typing import NDArray
from scipy.stats import beta, chisquare, norm

from dpmac_cli.accounting import calibration
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import calibrate_noise, calibrate_search
from dpmac_cli.accounting.events import Scores, TrainingEvent
from dpmac_cli.accounting.risk import assess_risk, trade_off
from dpmac_cli.accounting.selection import LONGEST, Search, Trials, trials_of
from dpmac_cli.errors import BudgetError, InputError
from tests.tiers import rest_long

pytestmark = pytest.mark.privacy

Floats = NDArray[np.float64]
DELTA, RECORDS = 1e-5, 50_000
#: Batch, epochs, epsilon of one trial by Renyi divergences, mean number of trials; what all of
#: them cost if each is charged, and the search, by the same accountant.
KNOWN = [
    (512, 5, 1.0, 10, 3.08, 1.76),
    (512, 5, 1.0, 30, 5.67, 1.96),
    (512, 5, 3.0, 10, 7.62, 4.80),
    (512, 5, 3.0, 30, 13.98, 5.38),
    (4167, 20, 1.0, 10, 3.51, 1.76),
    (4167, 20, 1.0, 30, 6.58, 1.94),
]


def trained(batch: int, epochs: int, epsilon: float) -> TrainingEvent:
    """Training on CIFAR-10 that costs epsilon by Renyi divergences."""
    per_epoch = math.ceil(RECORDS / batch)
    event = TrainingEvent(batch / RECORDS, 1.0, epochs * per_epoch, "poisson", per_epoch)
    return replace(event, noise_multiplier=calibrate_noise(event, DELTA, epsilon, "rdp"))


@pytest.mark.parametrize(
    ("batch", "epochs", "epsilon", "mean", "composed", "selected"), rest_long(KNOWN, 1)
)
def test_a_search_costs_what_is_known_and_less(
    batch: int, epochs: int, epsilon: float, mean: int, composed: float, selected: float
) -> None:
    event = trained(batch, epochs, epsilon)
    whole = replace(event, steps=mean * event.steps)
    assert total_epsilon((whole,), DELTA, "rdp") == pytest.approx(composed, abs=0.006)
    known = rdp_privacy_accountant.RdpAccountant()
    known.compose(RepeatAndSelectDpEvent(event.dp_event(), mean, 0.0))
    assert known.get_epsilon(DELTA) == pytest.approx(selected, abs=0.006)
    assert Search(trials_of(mean), ((event,),)).epsilon(DELTA) < 0.9 * known.get_epsilon(DELTA)


@pytest.mark.parametrize("mean", [2, 3.5, 20, 1000])
@pytest.mark.parametrize("share", [1.2, LONGEST, 30])
def test_the_number_of_trials_has_its_mean_and_slope(mean: float, share: float) -> None:
    trials = Trials(mean, math.ceil(share * mean))
    shares, counts = trials.probabilities, np.arange(1, math.ceil(share * mean) + 1)
    assert shares.sum() == pytest.approx(1)
    assert shares @ counts == pytest.approx(mean)
    q = np.linspace(0, 1, 7)
    by_hand = [(shares * counts * each ** (counts - 1.0)).sum() for each in q]
    assert trials.slope(q) == pytest.approx(by_hand)


def test_a_limit_that_is_never_reached_is_that_of_papernot_and_steinke() -> None:
    """Their logarithmic distribution has no limit, and a slope in closed form."""
    q, trials = np.linspace(0, 1, 11), Trials(5, 3000)
    rate = -math.expm1(trials.log_weight)  # gamma = 1 - w
    exact = (1 - rate) / (-math.log(rate) * (rate + (1 - rate) * (1 - q)))
    assert trials.slope(q) == pytest.approx(exact, rel=1e-6)


def test_the_number_of_trials_is_drawn_from_its_distribution() -> None:
    trials = Trials(3, 6)
    found = Counter(trials.draw() for _ in range(4000))
    assert set(found) <= set(range(1, 7))
    seen = [found[k] for k in range(1, 7)]
    assert chisquare(seen, 4000 * trials.probabilities).pvalue > 1e-4


def test_the_number_of_trials_is_random() -> None:
    for trials in (Trials(2, 3), Trials(50, 200)):
        assert len({trials.draw() for _ in range(200)}) > 2


@pytest.mark.parametrize(("mean", "most"), [(1.5, 4), (2000, 3000), (4, 4), (4, 3)])
def test_impossible_numbers_of_trials_are_refused(mean: float, most: int) -> None:
    with pytest.raises(InputError):
        Trials(mean, most)


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


def winners(
    trials: Trials, sigmas: Floats, mean: float, count: int, rng: np.random.Generator
) -> tuple[Floats, NDArray[np.int64]]:
    """Run whole searches: each draws K, then K times a setting and its score, and keeps the best.

    Returns the scores of the winners, and the numbers of their settings.
    """
    numbers = rng.choice(len(trials.probabilities), count, p=trials.probabilities) + 1
    scores, settings = [], []
    for k, times in zip(*np.unique(numbers, return_counts=True), strict=True):
        drawn = rng.integers(0, len(sigmas), (times, k))
        found = rng.normal(mean, sigmas[drawn])
        best = found.argmax(1)[:, None]
        scores.append(np.take_along_axis(found, best, 1)[:, 0])
        settings.append(np.take_along_axis(drawn, best, 1)[:, 0])
    return np.concatenate(scores), np.concatenate(settings)


@pytest.mark.parametrize(("mean", "most"), rest_long([(3, 12), (2, 8), (10, 40), (30, 120)], 1))
def test_no_simulated_search_loses_more_than_is_claimed(mean: float, most: int) -> None:
    trials, sigmas, count = Trials(mean, most), np.array([1.5, 4.0]), 1_000_000
    delta = 1e-4
    search = Search(trials, tuple((TrainingEvent(1.0, float(s), 1),) for s in sigmas))
    claim, rng = search.epsilon(delta), np.random.default_rng(0)
    runs = [winners(trials, sigmas, shift, count, rng) for shift in (0.0, 1.0)]
    places = np.quantile(runs[0][0], [0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999])
    confidence = 1e-4 / (len(places) * 8)  # of all events together
    largest = 0.0
    for one, other in (runs, runs[::-1]):
        for place in places:
            for setting in (0, 1):
                for sign in (1, -1):
                    seen, there = (
                        ((sign * (score - place) > 0) & (chosen == setting)).sum()
                        for score, chosen in (one, other)
                    )
                    low = beta.ppf(confidence, seen, count - seen + 1) if seen else 0.0
                    high = beta.isf(confidence, there + 1, count - there)
                    largest = max(largest, math.log(max(low - delta, 1e-12) / high))
    assert largest <= claim
    assert largest > 0.2 * claim  # searches were told apart


def test_every_candidate_and_every_score_is_charged() -> None:
    cheap, dear = (with_score(TrainingEvent(0.1, sigma, 50), DELTA) for sigma in (8.0, 2.0))
    trials = trials_of(10)
    both = Search(trials, (cheap, dear)).epsilon(DELTA)
    assert both >= Search(trials, (dear,)).epsilon(DELTA) > Search(trials, (cheap,)).epsilon(DELTA)
    loud = (cheap[0], replace(cheap[1], noise_multiplier=0.5))
    assert Search(trials, (loud,)).epsilon(DELTA) > 2 * Search(trials, (cheap,)).epsilon(DELTA)


def test_training_and_scores_do_not_add_up() -> None:
    event = TrainingEvent(0.1, 1.0, 50)
    one, both = Search(trials_of(5), ((event,),)), Search(trials_of(5), (with_score(event, DELTA),))
    assert one.epsilon(DELTA) <= both.epsilon(DELTA) < 1.2 * one.epsilon(DELTA)


@pytest.mark.parametrize("target", rest_long([0.5, 3.0, 8.0], 1))
def test_the_noise_of_a_trial_meets_the_target_of_the_search(target: float) -> None:
    event, trials = TrainingEvent(0.05, 1.0, 100), trials_of(10)

    def search_of(epsilon: float) -> Search:
        noisy = replace(event, noise_multiplier=calibrate_noise(event, DELTA, epsilon))
        return Search(trials, (with_score(noisy, DELTA),))

    cost = search_of(calibrate_search(search_of, DELTA, target)).epsilon(DELTA)
    assert 0.995 * target < cost <= target


def test_a_target_out_of_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "TRIES", 3)
    dear = Search(trials_of(10), ((TrainingEvent(1.0, 1.0, 1),),))
    with pytest.raises(BudgetError, match="fewer trials"):
        calibrate_search(lambda _: dear, DELTA, 0.1)


def test_attacks_on_a_search_are_bounded_by_the_search() -> None:
    event = TrainingEvent(1.0, 2.0, 1)
    search, alphas = Search(trials_of(10), ((event,),)), np.array([1e-3, 0.01, 0.1, 0.5])
    # The most powerful test on the highest of K normal numbers: it is above a threshold.
    trials = search.trials
    rates = np.cumsum(trials.probabilities[::-1])[::-1]
    assert rates[0] == pytest.approx(1)
    grid = np.linspace(-10, 10, 20_001)
    counts = np.arange(1, len(trials.probabilities) + 1)
    for alpha, least in zip(alphas, trade_off(search, alphas), strict=True):
        below = np.array([(trials.probabilities * q**counts).sum() for q in norm.cdf(grid / 2)])
        place = grid[np.searchsorted(below, 1 - alpha)]
        missed = (trials.probabilities * norm.cdf((place - 1) / 2) ** counts).sum()
        assert least <= missed
    risk = assess_risk(search, 1000)
    assert risk.stated > assess_risk((event,), 1000).stated
    assert dict(risk.epsilons)[1e-5] == search.epsilon(1e-5)
    assert math.isfinite(risk.mu)


def test_a_search_without_noise_has_no_privacy() -> None:
    search = Search(trials_of(3), ((TrainingEvent(1.0, 0.0, 1),),))
    assert math.isinf(search.epsilon(DELTA))
    assert search.noiseless
