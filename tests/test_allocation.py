"""Random allocation is priced by bounds that other ways of computing them confirm."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import integrate, stats

from dpmac_cli.accounting import allocation
from dpmac_cli.accounting.allocation import allocated_gaussian, likelihood_ratios, small_sums
from dpmac_cli.accounting.events import LEAST_NOISE
from tests.tiers import one_in, rest_long

Floats = NDArray[np.float64]

WIDTH = 1e-3


def lognormal(normal: Floats | float, sigma: float) -> Floats:
    """The likelihood ratio of a step without the record, of a standard normal draw."""
    ratio: Floats = np.exp(np.asarray(normal) / sigma - 0.5 / sigma**2)
    return ratio


def call(strike: Floats | float, sigma: float) -> Floats:
    """E (Z - strike)+ of one step's ratio Z: the formula of Black and Scholes."""
    strike = np.asarray(strike, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        place = -sigma * np.log(strike)
    value = stats.norm.cdf(place + 0.5 / sigma) - strike * stats.norm.cdf(place - 0.5 / sigma)
    return np.where(strike <= 0, 1 - strike, value)


def expected(steps: int, strike: float, sigma: float) -> float:
    """E (Z_1 + ... + Z_t - strike)+ by quadrature over all but one of the steps."""
    if steps == 1:
        return float(call(strike, sigma))

    def inner(normal: float) -> float:
        rest = strike - float(lognormal(normal, sigma))
        return float(stats.norm.pdf(normal)) * expected(steps - 1, rest, sigma)

    kink = sigma * math.log(strike) + 0.5 / sigma if strike > 0 else 0.0
    points = sorted({-9.0, min(9.0, max(-9.0, kink)), 9.0})
    pieces = itertools.pairwise(points)
    parts = (integrate.quad(inner, a, b, epsabs=1e-10, epsrel=1e-8)[0] for a, b in pieces)
    return float(sum(parts))


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("steps", "sigma", "epsilon"),
    rest_long(
        [
            *((2, 1.0, 0.1), (2, 3.0, 1.5), (2, 0.5, 0.1), (2, 1.0, 0.5)),
            *((2, 0.5, 0.5), (2, 0.5, 1.5), (3, 1.0, 0.5), (2, 1.0, 1.5), (2, 3.0, 0.1)),
            (2, 3.0, 0.5),
        ],
        short=2,
    ),
)
def test_delta_of_an_epoch_is_that_of_quadrature(steps: int, sigma: float, epsilon: float) -> None:
    remove, add = likelihood_ratios(steps, sigma).deltas(np.array([epsilon]))
    exact = expected(steps, steps * math.exp(epsilon), sigma) / steps
    # E (1 - e^eps R)+ = e^eps E (R - e^-eps)+ + 1 - e^eps, since R has mean 1.
    call_of = expected(steps, steps * math.exp(-epsilon), sigma) / steps
    other = math.exp(epsilon) * call_of + 1 - math.exp(epsilon)
    assert exact <= remove[0] + 1e-9
    assert other <= add[0] + 1e-9
    if sigma > 0.6:  # else two steps need a finer grid near 0
        assert remove[0] == pytest.approx(exact, rel=1e-3, abs=1e-7)
        assert add[0] == pytest.approx(other, rel=1e-3, abs=1e-7)


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("steps", "sigma", "epsilon"),
    [*itertools.product([2], [0.4, 0.6, 1.0, 3.0], [0.0, 0.5, 1.5, 4.0])],
)
def test_small_sums_are_those_of_quadrature(steps: int, sigma: float, epsilon: float) -> None:
    exact = shortfall(steps, steps * math.exp(-epsilon), sigma) * math.exp(epsilon) / steps
    (bound,) = small_sums(steps, sigma, np.array([epsilon]))
    assert exact <= bound + 1e-12
    assert bound == pytest.approx(exact, rel=2e-3, abs=1e-9)


def shortfall(steps: int, strike: float, sigma: float) -> float:
    """E (strike - Z_1 - ... - Z_t)+ by quadrature over all but one of the steps."""
    if strike <= 0:
        return 0.0
    if steps == 1:  # without the call's cancellation for small strikes
        place = sigma * math.log(strike)
        return float(
            strike * stats.norm.cdf(place + 0.5 / sigma) - stats.norm.cdf(place - 0.5 / sigma)
        )

    def inner(normal: float) -> float:
        rest = strike - float(lognormal(normal, sigma))
        return float(stats.norm.pdf(normal)) * shortfall(steps - 1, rest, sigma)

    end = sigma * math.log(strike) + 0.5 / sigma
    found = integrate.quad(inner, min(-9.0, end - 5), min(end, 9.0), epsabs=0, epsrel=1e-8)
    return float(found[0])


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("steps", "sigma"),
    rest_long(
        [
            *((20, 1.0), (4, 0.6), (2, 0.4)),
            *((2, 0.6), (2, 1.0), (4, 0.4), (4, 1.0), (20, 0.4), (20, 0.6)),
        ],
        short=2,
    ),
)
def test_few_steps_are_amplified(steps: int, sigma: float) -> None:
    """R is at least Z/t of the record's step, so epsilon is at least that of Z less log t."""
    epoch = allocated_gaussian(steps, sigma, WIDTH)
    epsilon, plain = (
        pld.get_epsilon_for_delta(1e-5) for pld in (epoch, allocated_gaussian(1, sigma, WIDTH))
    )
    assert plain - math.log(steps) - 1e-6 < epsilon < plain - 0.7 * math.log(steps)


@pytest.mark.privacy
def test_below_epsilon_0_each_direction_follows_from_the_other() -> None:
    epoch = allocated_gaussian(3, 0.7, WIDTH)
    epsilons = WIDTH * np.array([100.0, 1000.0, 3000.0])
    for one, other in (("_pmf_remove", "_pmf_add"), ("_pmf_add", "_pmf_remove")):
        above = getattr(epoch, one).get_delta_for_epsilon(epsilons)
        below = getattr(epoch, other).get_delta_for_epsilon(-epsilons[::-1])[::-1]
        assert below == pytest.approx(-np.expm1(-epsilons) + np.exp(-epsilons) * above, abs=1e-7)


def losses(steps: int, sigma: float, epochs: int, count: int, seed: int) -> Floats:
    """Simulated privacy losses of a run whose record is in one step of each epoch."""
    draws = np.random.default_rng(seed)
    total = np.zeros(count)
    for _ in range(epochs):
        sums = np.zeros(count)
        for _ in range(steps - 1):
            sums += lognormal(draws.standard_normal(count), sigma)
        sums += lognormal(draws.standard_normal(count) + 1 / sigma, sigma)
        total += np.log(sums / steps)
    return total


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("steps", "sigma", "epochs"),
    rest_long([(2, 0.8, 3), (20, 0.7, 1), (50, 1.0, 3), (7, 2.0, 5), (4, 0.6, 1)]),
)
def test_delta_of_a_run_is_that_of_a_simulation(steps: int, sigma: float, epochs: int) -> None:
    pld = allocated_gaussian(steps, sigma, WIDTH).self_compose(epochs)
    count = 200_000
    for epsilon in (0.2, 0.6, 1.0, 3.0):
        sample = np.maximum(0, -np.expm1(epsilon - losses(steps, sigma, epochs, count, seed=1)))
        error = 5 * sample.std() / math.sqrt(count)
        bound = pld.get_delta_for_epsilon(epsilon)
        assert sample.mean() - error <= bound <= sample.mean() + error + 1e-6


#: Figures of Feldman and Shenfeld's own package, by sigma, steps, epochs: an upper bound each.
PACKAGE = [
    (1.0, 235, 5, 0.748, 0.785),
    (0.7, 235, 5, 2.230, 2.316),
    (0.5, 235, 5, 6.895, 7.479),
    (0.8, 98, 5, 2.267, 2.435),
    (2.54, 7, 20, 2.874, 3.024),
]


@pytest.mark.parametrize(("sigma", "steps", "epochs", "package", "poisson"), rest_long(PACKAGE))
def test_epsilon_is_a_little_below_that_of_the_package(
    sigma: float, steps: int, epochs: int, package: float, poisson: float
) -> None:
    pld = allocated_gaussian(steps, sigma, WIDTH).self_compose(epochs)
    epsilon = pld.get_epsilon_for_delta(1e-5)
    assert 0.97 * package < epsilon < package < poisson


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("steps", "sigma"),
    one_in(4, itertools.product([1, 2, 1000], [0.05, 0.3, LEAST_NOISE, 1.0, 50.0])),
)
def test_an_epoch_costs_at_most_one_mechanism_on_all_records(sigma: float, steps: int) -> None:
    width = WIDTH * max(1.0, 0.1 / sigma**2)
    plain = allocated_gaussian(1, sigma, width)
    epoch = allocated_gaussian(steps, sigma, width)
    for epsilon in (0.0, 0.5, 2.0, 10.0):
        allowed = plain.get_delta_for_epsilon(epsilon) * (1 + 1e-6) + 1e-12
        assert 0 < epoch.get_delta_for_epsilon(epsilon) <= allowed


@pytest.mark.privacy
def test_what_is_beyond_the_grid_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a short grid, too: then much is beyond it, and the bound is worse, not better."""
    epsilons = np.array([0.5, 2.0, 4.0])
    fine = likelihood_ratios(10, 0.7).deltas(epsilons)
    monkeypatch.setattr(allocation, "BEYOND", 1e-3)
    short = likelihood_ratios.__wrapped__(10, 0.7)
    assert 1e-3 < short.lost_given < 2e-3
    for bound, true in zip(short.deltas(epsilons), fine, strict=True):
        assert np.all(bound > 0.999 * true)
        assert bound[-1] > 10 * true[-1]


@pytest.mark.privacy
def test_gradients_that_are_shorter_or_follow_earlier_steps_cost_no_more() -> None:
    """Two steps, whose second gradient is as long as the first step's output says."""
    sigma, count = 0.8, 400_000
    draws = np.random.default_rng(5)
    first, second = draws.standard_normal((2, count))  # under Q, of all but the record
    lengths = np.where(first > 0, 1.0, 0.4)
    one = np.exp(0.9 * first / sigma - 0.5 * (0.9 / sigma) ** 2)
    other = np.exp(lengths * second / sigma - 0.5 * (lengths / sigma) ** 2)
    ratio = (one + other) / 2
    for epsilon in (0.0, 0.3, 1.0):
        remove, add = likelihood_ratios(2, sigma).deltas(np.array([epsilon]))
        for sample, bound in (
            (np.maximum(0, ratio - math.exp(epsilon)), remove[0]),
            (np.maximum(0, 1 - math.exp(epsilon) * ratio), add[0]),
        ):
            assert sample.mean() < bound + 5 * sample.std() / math.sqrt(count)
