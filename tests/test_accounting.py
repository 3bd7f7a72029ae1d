"""What a run costs: golden numbers, independent formulas, and the edges."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import NoOpDpEvent
from dp_accounting.pld import pld_privacy_accountant
from numpy.typing import NDArray
from scipy import fft, integrate, stats
from scipy.optimize import brentq
from scipy.stats import norm

from dpmac_cli.accounting import accountants as accounting
from dpmac_cli.accounting import allocation, pricing
from dpmac_cli.accounting.accountants import ACCOUNTANTS, total_epsilon
from dpmac_cli.accounting.allocation import allocated_gaussian, likelihood_ratios, small_sums
from dpmac_cli.accounting.events import LEAST_NOISE, SAMPLERS, TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon, statement
from dpmac_cli.runs.resolve import resolve
from tests.tiers import one_in, pairs_short, rest_long

pytestmark = pytest.mark.promise("price")

DELTA = 1e-5
MNIST_RATE = 256 / 60_000
DIGITS_RATE = 128 / 1437
ONCE_AN_EPOCH = tuple(name for name, sampling in SAMPLERS.items() if sampling.once_an_epoch)
#: Every pair that can be priced.
PRICED = tuple(itertools.product(SAMPLERS, ACCOUNTANTS))

#: (sigma, ours, the paper's): facts.md, section 1.
MNIST_GOLDEN = (
    (1.0, 0.7850, 0.80),
    (0.9, 1.0122, 1.02),
    (0.8, 1.4470, 1.46),
    (0.7, 2.3158, 2.33),
    (0.6, 3.9886, 4.00),
    (0.5, 7.4793, 7.49),
)


def mnist(sampler: str, sigma: float = 1.0, steps: int = 1175) -> TrainingEvent:
    """Epochs of 235 steps, five unless told otherwise."""
    return TrainingEvent(MNIST_RATE, sigma, steps, sampler, 235)


def digits(sampler: str, sigma: float = 1.5, steps: int = 60) -> TrainingEvent:
    """Epochs of 12 steps, five unless told otherwise."""
    return TrainingEvent(DIGITS_RATE, sigma, steps, sampler, 12)


# Golden numbers.


@pytest.mark.parametrize(("sigma", "ours", "paper"), rest_long(MNIST_GOLDEN))
def test_mnist_epsilons_of_the_paper(sigma: float, ours: float, paper: float) -> None:
    config = resolve({"dataset": "mnist", "sigma": sigma}).plan
    assert (config.event.sampling_rate, config.event.steps) == (MNIST_RATE, 1175)
    event = TrainingEvent(config.event.sampling_rate, sigma, config.event.steps)
    assert total_epsilon((event,), config.settings.delta) == pytest.approx(ours, abs=1e-3)
    assert total_epsilon((event,), config.settings.delta) <= paper


@pytest.mark.parametrize(("sampler", "price"), [("poisson", 0.785), ("random-allocation", 0.7314)])
def test_what_the_samplers_cost(sampler: str, price: float) -> None:
    """MNIST, sigma 1, five epochs; by PLD when no accountant is named."""
    event = mnist(sampler)
    assert total_epsilon((event,), DELTA) == pytest.approx(price, abs=1e-3)
    assert total_epsilon((event,), DELTA) == total_epsilon((event,), DELTA, "pld")


@pytest.mark.promise("allocation")
@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (235, 1), (236, 2), (1175, 5)])
def test_by_rdp_random_allocation_costs_a_step_on_all_records_per_epoch(
    steps: int, epochs: int
) -> None:
    """However many batches there are: the accountant claims no amplification."""
    event = TrainingEvent(MNIST_RATE, 2.0, steps, "random-allocation", 235)
    whole = total_epsilon((TrainingEvent(1.0, 2.0, epochs),), DELTA, "rdp")
    assert total_epsilon((event,), DELTA, "rdp") == pytest.approx(whole, rel=1e-9)


# Against other computations.


def test_different_runs_cost_together_what_the_library_accountant_says() -> None:
    events = (
        TrainingEvent(DIGITS_RATE, 1.5, 12),
        TrainingEvent(0.2, 3.0, 5),
        TrainingEvent(1.0, 4.0, 2, "random-allocation", 1),
    )
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=accounting.FINE)
    for event in events:
        accountant.compose(event.dp_event())
    assert total_epsilon(events, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """Of one Gaussian mechanism, exactly (Balle and Wang 2018, theorem 8)."""
    gain = norm.cdf(0.5 / sigma - epsilon * sigma)
    loss = math.exp(epsilon + norm.logcdf(-0.5 / sigma - epsilon * sigma))
    return float(gain - loss)


@pytest.mark.parametrize(
    ("mu", "steps", "delta"),
    pairs_short([0.3, 1.0], [1, 10_000, 90_000], [1e-9, 1e-11, 1e-12, 1e-13, 1e-14, 1e-15, 1e-20]),
)
def test_rounding_never_makes_a_small_delta_look_cheaper(
    mu: float, steps: int, delta: float
) -> None:
    """At 10,000 steps the Fourier transforms alone took more than a delta of 1e-13."""
    event = TrainingEvent(1.0, math.sqrt(steps) / mu, steps)
    for accountant in ACCOUNTANTS:
        epsilon = total_epsilon((event,), delta, accountant)
        assert gaussian_delta(1 / mu, epsilon) <= delta * (1 + 1e-6)
        assert epsilon <= 1.3 * gaussian_epsilon(1 / mu, delta)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_delta_below_the_precision_of_loss_distributions_has_a_cost_by_rdp(sampler: str) -> None:
    event = mnist(sampler, sigma=2.0)
    assert accounting.loss_distribution((event,), accounting.FINE).epsilon(1e-16) == math.inf
    by_rdp = total_epsilon((event,), 1e-16, "rdp")
    assert total_epsilon((event,), 1e-16) == by_rdp < math.inf
    for delta, used in ((1e-16, "rdp"), (DELTA, "pld")):
        assert accounting.used_accountant((event,), delta) == used
        assert pricing.price((event,), delta).accountant == used
        assert any(pricing.accountant_note((event,), delta)) == (used == "rdp")
    # Just above the limit, the smaller of two upper bounds.
    just = 1.01 * accounting.loss_distribution((event,), accounting.FINE).least_delta
    assert total_epsilon((event,), just) <= total_epsilon((event,), just, "rdp")
    assert math.isinf(total_epsilon((replace(event, noise_multiplier=0.0),), 1e-16))


def test_rates_and_noise_at_their_limits_are_priced() -> None:
    """On a grid of 1e-11, masses were rounding errors, and their sum grew beyond float64."""
    event = TrainingEvent(1e-6, 1e4, 10_000_000)
    mu = event.sampling_rate * math.sqrt(event.steps) / event.noise_multiplier
    losses = accounting.loss_distribution((event,), accounting.FINE)
    assert 0.99 * mu * norm.pdf(0) < losses.deltas(0.0) < 1e-5
    assert 0 < total_epsilon((event,), 1e-9) < 0.02


def test_a_divergence_that_rounds_to_nothing_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingEvent, "dp_event", lambda event: NoOpDpEvent())
    assert total_epsilon((TrainingEvent(1e-6, 9e3, 10_000_000),), 1e-12, "rdp") > 0


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """The same, solved for epsilon."""
    return float(brentq(lambda e: gaussian_delta(sigma, e) - delta, 0, 200, xtol=1e-12))


@pytest.mark.parametrize(
    ("sigma", "steps"),
    [(1.0, 1), (2.0, 9), (5.0, 4), (0.5, 1), (0.3, 1), (0.1, 1), (2000.0, 1), (2000.0, 9)],
)
def test_full_batches_cost_what_the_closed_form_says(sigma: float, steps: int) -> None:
    """From an epsilon of 0.0008 to one of 92."""
    exact = gaussian_epsilon(sigma / math.sqrt(steps), DELTA)
    epsilon = total_epsilon((TrainingEvent(1.0, sigma, steps),), DELTA)
    assert exact <= epsilon * (1 + 1e-9)
    assert epsilon <= exact * 1.003 + min(1e-3, 0.02 * exact)


@pytest.mark.parametrize(
    ("rate", "sigma"), rest_long([(DIGITS_RATE, 1.5), (MNIST_RATE, 0.5), (MNIST_RATE, 1.0)])
)
def test_one_sampled_step_costs_what_the_closed_form_says(rate: float, sigma: float) -> None:
    # Removing a record is the dearer direction, and there amplification by sampling is exact.
    exact = math.log1p(rate * math.expm1(gaussian_epsilon(sigma, DELTA / rate)))
    epsilon = total_epsilon((TrainingEvent(rate, sigma, 1),), DELTA)
    assert exact <= epsilon * (1 + 1e-9)
    assert epsilon <= exact * 1.003 + 1e-3


@pytest.mark.promise("allocation")
def test_what_runs_of_other_epochs_cost_is_added_up() -> None:
    """Epochs of one kind are not priced as those of another."""
    long, short = mnist("random-allocation", 2.0), digits("random-allocation", 2.0)
    parts = [total_epsilon((event,), DELTA) for event in (long, short)]
    together = total_epsilon((long, short), DELTA)
    assert parts[1] > 3 * parts[0]
    assert max(parts) < together < sum(parts)
    assert together == pytest.approx(total_epsilon((short, long), DELTA), rel=1e-9)
    halves = (mnist("random-allocation", 2.0, 470), mnist("random-allocation", 2.0, 705))
    assert total_epsilon(halves, DELTA) == total_epsilon((long,), DELTA)


# Against Opacus's accountant of privacy random variables, which shares no code with ours.

#: (sampling rate, noise multiplier) -> steps.
GRID: Mapping[tuple[float, float], tuple[int, ...]] = {
    (0.1, 0.7): (10, 100),
    (0.001, 0.4): (100, 10_000),
    (MNIST_RATE, 0.5): (235, 1175),
    (512 / 50_000, 0.8): (490, 5000),
    (0.5, 0.6): (1, 70),
    (0.5, 8.0): (1, 5000),
}
PRV = [
    (rate, sigma, steps, delta)
    for (rate, sigma), lengths in GRID.items()
    for number, steps in enumerate(lengths)
    for delta in (1e-5, (1e-3, 1e-8)[number % 2])
]


@pytest.mark.filterwarnings("ignore")  # of its imports, and of the order of a divergence
@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), rest_long(PRV))
def test_our_price_lies_within_the_bounds_of_opacus(
    rate: float, sigma: float, steps: int, delta: float
) -> None:
    """Gopi, Lee and Wutschitz 2021 (arXiv 2106.02848): a lower and an upper bound."""
    from opacus.accountants import PRVAccountant  # noqa: PLC0415  (it takes seconds)

    ours = total_epsilon((TrainingEvent(rate, sigma, steps),), delta)
    # Its default, and less where that would be no more than a guess.
    error = max(0.001, min(0.01, 0.05 * ours))
    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, steps)]
    distribution = accountant._get_dprv(eps_error=error, delta_error=delta / 1000)
    low, _, high = distribution.compute_epsilon(delta, delta / 1000, error)
    assert low <= ours <= high
    assert high - low < 3 * error


# Edges.


@pytest.mark.parametrize(("sampler", "accountant"), PRICED)
def test_no_steps_cost_nothing_and_no_noise_costs_everything(sampler: str, accountant: str) -> None:
    for sigma in (0.0, 1.0, 0.001):
        nothing = (TrainingEvent(0.1, sigma, 0, sampler, 10),)
        assert total_epsilon(nothing, DELTA, accountant) == 0
    everything = (TrainingEvent(0.1, 0.0, 1, sampler, 10),)
    assert total_epsilon(everything, DELTA, accountant) == math.inf
    some = TrainingEvent(0.1, 1.0, 20, sampler, 10)
    assert total_epsilon((some, *everything), DELTA, accountant) == math.inf


def test_no_rate_is_priced_below_the_least() -> None:
    assert [TrainingEvent(q, 1.0, 1).rate for q in (1e-9, 1e-6, 1e-3)] == [1e-6, 1e-6, 1e-3]


# Monotone, and composing.


@pytest.mark.parametrize("sampler", ONCE_AN_EPOCH)
def test_an_epoch_begun_costs_what_a_whole_one_does(sampler: str) -> None:
    """A record is in one of its batches, and which one is secret and of no help."""

    def price(steps: int) -> float:
        return total_epsilon((digits(sampler, 6.0, steps),), DELTA)

    assert 0 < price(1) == price(2) == price(12) < price(13) == price(24) < price(25)
    parts = digits(sampler, 6.0, 5), digits(sampler, 6.0, 7)  # each begins an epoch of its own
    assert total_epsilon(parts, DELTA) == price(24)


@pytest.mark.parametrize("steps", [9, 11, 100])
def test_steps_composed_in_blocks_cost_what_they_cost_in_one(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Very many steps are: the rest that fills no block counts too."""
    one = accounting._sampled_gaussian(0.1, 1.0, 1e-3)
    plain = one.self_compose(steps).get_epsilon_for_delta(DELTA)
    monkeypatch.setattr(accounting, "BLOCK", 3)
    blocks = accounting._repeated(one, steps).get_epsilon_for_delta(DELTA)
    assert blocks == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(("sampler", "accountant"), rest_long(PRICED))
def test_two_halves_cost_the_whole(sampler: str, accountant: str) -> None:
    whole, half = digits(sampler, steps=48), digits(sampler, steps=24)
    price = total_epsilon((whole,), DELTA, accountant)
    assert total_epsilon((half, half), DELTA, accountant) == pytest.approx(price, rel=1e-9)
    assert total_epsilon((half,), DELTA, accountant) < price
    # Nearly the same run beside it, so that nothing can be counted together.
    near = replace(half, noise_multiplier=half.noise_multiplier * (1 + 1e-9))
    assert total_epsilon((half, near), DELTA, accountant) == pytest.approx(price, rel=1e-5)


# What people read.


def test_a_price_is_never_shown_smaller_than_it_is() -> None:
    drawn = 10 ** np.random.default_rng(0).uniform(-12, 9, 3000)
    for epsilon in (*drawn, *map(float, range(1, 2000)), *10.0 ** np.arange(-12, 9)):
        assert epsilon * (1 - 1e-9) <= float(format_epsilon(epsilon)) <= epsilon * (1 + 1.1e-3)


def test_statement_says_what_was_promised_and_what_was_not() -> None:
    text = statement(1.23586, DELTA, (TrainingEvent(DIGITS_RATE, 1.5, 12),))
    for part in (
        "(1.236, 1e-05)-differential privacy",
        "add-or-remove-one adjacency",
        "12 Poisson-sampled steps",
        "noise multiplier 1.5",
        "number of training records is public",
        "Test records are not protected",
        "best of several runs costs more",
    ):
        assert part in text
    without, some = TrainingEvent(0.1, 0, 12), TrainingEvent(DIGITS_RATE, 1.5, 12)
    for events in ((without,), (some, without), (without, some)):
        assert statement(math.inf, DELTA, events).startswith("No privacy")


def test_a_delta_below_what_a_run_leaves_out_has_no_guarantee() -> None:
    """As where a run is resumed at a far smaller delta."""
    event = TrainingEvent(DIGITS_RATE, 1.5, 12, overflow=1e-18)
    assert math.isinf(total_epsilon((event,), 1e-20))
    text = statement(math.inf, 1e-20, (event,))
    assert text.startswith("No guarantee at delta 1e-20")
    assert "e^" not in text
    assert "12 Poisson-sampled steps" in text


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


@pytest.mark.promise("allocation")
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


@pytest.mark.promise("allocation")
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


@pytest.mark.promise("allocation")
def test_below_epsilon_0_each_direction_follows_from_the_other() -> None:
    epoch = allocated_gaussian(3, 1.0, WIDTH)
    epsilons = WIDTH * np.array([100.0, 1000.0, 3000.0])
    for one, other in (("_pmf_remove", "_pmf_add"), ("_pmf_add", "_pmf_remove")):
        above = getattr(epoch, one).get_delta_for_epsilon(epsilons)
        below = getattr(epoch, other).get_delta_for_epsilon(-epsilons[::-1])[::-1]
        assert below == pytest.approx(-np.expm1(-epsilons) + np.exp(-epsilons) * above, abs=1e-7)


@pytest.mark.promise("allocation")
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


@pytest.mark.promise("allocation")
def test_no_amplification_is_claimed_below_the_least_noise() -> None:
    at = (0.5, 5.0, 20.0)
    for sigma in (0.39, 0.2):
        found = [allocated_gaussian(t, sigma, 0.01).get_delta_for_epsilon(at) for t in (1, 50)]
        assert list(found[0]) == list(found[1])
    assert LEAST_NOISE == 0.4


@pytest.mark.promise("allocation")
def test_what_rounding_may_take_from_an_epoch_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert small_sums(2, 3.0, np.array([40.0]))[0] >= allocation.ROUNDING
    plain = likelihood_ratios.__wrapped__(10, 1.0)
    transform = fft.irfft
    monkeypatch.setattr(fft, "irfft", lambda *of: transform(*of) * (1 - 1e-6))
    short = likelihood_ratios.__wrapped__(10, 1.0)
    assert plain.lost_with < plain.lost_without + 1e-12 < 1e-9
    assert min(short.lost_with, short.lost_without) > 0.99e-6


@pytest.mark.promise("allocation")
def test_a_sum_beyond_the_transform_is_charged() -> None:
    """The bound is at least the probability of it, without the record and with it."""
    masses, width, t = np.array([0.5, 0.3, 0.15, 0.05]), 0.8, 6
    masses = masses / masses.sum()
    values = width * np.arange(4)
    total, given = np.ones(1), masses * values / (masses @ values)
    for _ in range(t):
        total = np.convolve(total, masses)
    others = np.ones(1)
    for _ in range(t - 1):
        others = np.convolve(others, masses)
    for size in (9, 12, 15):
        beyond = max(total[size:].sum(), np.convolve(others, given)[size:].sum())
        assert 0 < beyond <= allocation._wrapped(masses, width, t, size) <= 1


def sampled_delta(rate: float, sigma: float, epsilon: Floats, *, added: bool = False) -> Floats:
    """Of one Poisson-sampled step at any epsilon, also below 0, if a record is removed or added."""
    if added:
        removed = sampled_delta(rate, sigma, -epsilon)
        return np.asarray(np.exp(epsilon) * removed - np.expm1(epsilon))
    inner = 1 + np.expm1(epsilon) / rate
    of_one = np.log(np.where(inner > 0, inner, 1.0))
    whole = norm.cdf(0.5 / sigma - of_one * sigma)
    whole -= np.exp(of_one + norm.logcdf(-0.5 / sigma - of_one * sigma))
    return np.where(inner > 0, rate * whole, -np.expm1(epsilon))


@pytest.mark.promise("allocation")
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("sigma", "rate", "noise"), [(1.0, 0.1, 0.7), (1.0, 0.05, 0.5)])
def test_removing_is_composed_with_removing_and_adding_with_adding(
    sigma: float, rate: float, noise: float, order: int
) -> None:
    """An epoch of two steps beside a sampled step, by quadrature over the epoch's two draws.

    Each direction with the other one would cost a third less at epsilon 2.
    """
    normal = np.linspace(-9.0, 9.0 + 1 / sigma, 801)
    weights = norm.pdf(normal) * (normal[1] - normal[0])
    ratio = (lognormal(normal, sigma)[:, None] + lognormal(normal, sigma)) / 2
    without, loss = weights[:, None] * weights, np.log(ratio)
    epoch = TrainingEvent(0.5, sigma, 2, "random-allocation", 2)
    events = (epoch, TrainingEvent(rate, noise, 1))[::order]
    losses = accounting.loss_distribution(events, accounting.FINE)
    worst = []
    for epsilon in (0.2, 1.0, 2.0):
        removed = without * ratio * sampled_delta(rate, noise, epsilon - loss)
        added = without * sampled_delta(rate, noise, epsilon + loss, added=True)
        exact = [float(removed.sum()), float(added.sum())]
        found = [losses.computed._pmf_remove, losses.computed._pmf_add]
        at = [float(pmf.get_delta_for_epsilon(epsilon)) for pmf in found]
        assert at == pytest.approx(exact, rel=1e-4)
        assert exact[1] < 0.99 * exact[0]
        worst.append(max(exact))
        assert total_epsilon(events, worst[-1]) == pytest.approx(epsilon, abs=1e-3)
    assert losses.deltas(np.array([0.2, 1.0, 2.0])) == pytest.approx(worst, rel=1e-4)
    assert list(map(losses.deltas, (0.2, 1.0, 2.0))) == pytest.approx(worst, rel=1e-4)


@pytest.mark.promise("allocation")
def test_what_is_beyond_the_grid_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a short grid, too: then much is beyond it, and the bound is worse, not better."""
    epsilons = np.array([0.5, 2.0, 4.0])
    fine = likelihood_ratios(10, 0.7).deltas(epsilons)
    monkeypatch.setattr(allocation, "BEYOND", 1e-3)
    short = likelihood_ratios.__wrapped__(10, 0.7)
    assert 1e-3 < short.lost_with < 2e-3
    for bound, true in zip(short.deltas(epsilons), fine, strict=True):
        assert np.all(bound > 0.999 * true)
        assert bound[-1] > 10 * true[-1]
