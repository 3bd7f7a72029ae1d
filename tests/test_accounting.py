"""What a run costs: golden numbers, independent formulas, and the edges."""

import itertools
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, NoOpDpEvent
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import norm

from dpmac_cli.accounting import accountants as accounting
from dpmac_cli.accounting import pricing
from dpmac_cli.accounting.accountants import ACCOUNTANTS, total_epsilon
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent, merged
from dpmac_cli.accounting.pricing import EpsilonSchedule, epsilon_schedule
from dpmac_cli.accounting.statements import format_epsilon, statement
from dpmac_cli.config.resolve import resolve
from dpmac_cli.errors import InputError
from tests.tiers import pairs_short, rest_long

pytestmark = pytest.mark.privacy

DELTA = 1e-5
MNIST_RATE = 256 / 60_000
DIGITS_RATE = 128 / 1437
ONCE_AN_EPOCH = tuple(name for name, sampling in SAMPLERS.items() if sampling.once_an_epoch)
#: Every pair that can be priced.
PRICED = tuple(itertools.product(SAMPLERS, ACCOUNTANTS))

#: (sigma, ours, the paper's): facts.md, section 1.
MNIST_GOLDEN = (
    (0.5, 7.4793, 7.49),
    (0.6, 3.9886, 4.00),
    (0.7, 2.3158, 2.33),
    (0.8, 1.4470, 1.46),
    (0.9, 1.0122, 1.02),
    (1.0, 0.7850, 0.80),
)
CIFAR_GOLDEN = (
    (0.5, 10.3867, 10.40),
    (0.6, 5.8679, 5.88),
    (0.8, 2.4353, 2.45),
    (1.1, 1.1002, 1.11),
    (1.5, 0.6517, 0.66),
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
    assert (config.privacy.event.sampling_rate, config.privacy.steps) == (MNIST_RATE, 1175)
    event = TrainingEvent(config.privacy.event.sampling_rate, sigma, config.privacy.steps)
    assert total_epsilon((event,), config.privacy.delta) == pytest.approx(ours, abs=1e-3)
    assert total_epsilon((event,), config.privacy.delta) <= paper


@pytest.mark.parametrize(("sigma", "ours", "paper"), rest_long(CIFAR_GOLDEN))
def test_cifar_epsilons_of_the_paper(sigma: float, ours: float, paper: float) -> None:
    epsilon = total_epsilon((TrainingEvent(512 / 50_000, sigma, 490),), DELTA)
    assert epsilon == pytest.approx(ours, abs=1e-3)
    assert epsilon <= paper


@pytest.mark.parametrize(("sampler", "price"), [("poisson", 0.785), ("random-allocation", 0.7314)])
def test_what_the_samplers_cost(sampler: str, price: float) -> None:
    """MNIST, sigma 1, five epochs; by PLD when no accountant is named."""
    event = mnist(sampler)
    assert total_epsilon((event,), DELTA) == pytest.approx(price, abs=1e-3)
    assert total_epsilon((event,), DELTA) == total_epsilon((event,), DELTA, "pld")


@pytest.mark.privacy
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (235, 1), (236, 2), (1175, 5)])
def test_cyclic_batches_cost_a_step_on_all_records_per_epoch(
    steps: int, epochs: int, accountant: str
) -> None:
    """However many batches there are: which one a record is in stays the same."""
    cyclic = TrainingEvent(MNIST_RATE, 2.0, steps, "cyclic", 235)
    whole = total_epsilon((TrainingEvent(1.0, 2.0, epochs),), DELTA, accountant)
    assert total_epsilon((cyclic,), DELTA, accountant) == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rdp_supports_the_events_of_every_sampler(sampler: str) -> None:
    assert rdp_privacy_accountant.RdpAccountant().supports(digits(sampler).dp_event())


# Against other computations.


@pytest.mark.parametrize(
    "event",
    [
        TrainingEvent(MNIST_RATE, 1.0, 1175),
        TrainingEvent(DIGITS_RATE, 1.5, 12),
        TrainingEvent(1.0, 3.0, 5),
        TrainingEvent(1.0, 1.5, 5, "random-allocation", 1),
    ],
    ids=["mnist", "digits", "all", "epochs-of-one-step"],
)
def test_price_equals_the_library_accountant_on_the_event(event: TrainingEvent) -> None:
    accountant = pld_privacy_accountant.PLDAccountant(
        NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=accounting.FINE
    )
    accountant.compose(event.dp_event())
    assert total_epsilon((event,), DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


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
    ("rate", "sigma"), [(MNIST_RATE, 0.5), (MNIST_RATE, 1.0), (DIGITS_RATE, 1.5)]
)
def test_one_sampled_step_costs_what_the_closed_form_says(rate: float, sigma: float) -> None:
    # Removing a record is the dearer direction, and there amplification by sampling is exact.
    exact = math.log1p(rate * math.expm1(gaussian_epsilon(sigma, DELTA / rate)))
    epsilon = total_epsilon((TrainingEvent(rate, sigma, 1),), DELTA)
    assert exact <= epsilon * (1 + 1e-9)
    assert epsilon <= exact * 1.003 + 1e-3


@pytest.mark.privacy
@pytest.mark.parametrize("sampler", ONCE_AN_EPOCH)
@pytest.mark.parametrize(
    ("sigma", "steps"), rest_long([(4.0, 13), (1.5, 1), (1.5, 60), (0.7, 12)], short=2)
)
def test_an_epoch_begun_costs_a_whole_one_whatever_the_rate(
    sampler: str, sigma: float, steps: int
) -> None:
    epochs = -(-steps // 12)
    on_all = gaussian_epsilon(sigma / math.sqrt(epochs), DELTA)
    whole = total_epsilon((TrainingEvent(1 / 12, sigma, epochs * 12, sampler, 12),), DELTA)
    if SAMPLERS[sampler].amplified:
        assert 0 < whole < 0.97 * on_all
    else:
        assert on_all * (1 - 1e-9) <= whole <= on_all * 1.003 + 1e-3
    for rate in (DIGITS_RATE, 1 / 12):
        epsilon = total_epsilon((TrainingEvent(rate, sigma, steps, sampler, 12),), DELTA)
        assert epsilon == whole
    one = total_epsilon((TrainingEvent(1.0, sigma, epochs, sampler, 1),), DELTA)
    assert on_all <= one * (1 + 1e-9)
    assert one <= on_all * 1.003 + 1e-3


@pytest.mark.privacy
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


#: No order above it is the best one in the tests below.
MOST_ORDER = 40


def converted(orders: Sequence[float], rdp: Sequence[float], delta: float) -> float:
    """Epsilon of Renyi divergences (Canonne et al. 2020, proposition 12)."""
    a = np.asarray(orders)
    return float(np.min(np.asarray(rdp) + np.log1p(-1 / a) - np.log(delta * a) / (a - 1)))


def log_mean(sigma: float, log_of: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> float:
    """log E exp f(l) under N(0, sigma^2), by quadrature; l the log ratio of N(1, .) to N(0, .)."""
    x = np.linspace(-15 * sigma, MOST_ORDER + 15 * sigma, 40_001)
    inside = log_of((2 * x - 1) / (2 * sigma**2)) + norm.logpdf(x, 0, sigma)
    return float(logsumexp(inside) + math.log(x[1] - x[0]))


def poisson_rdp(rate: float, sigma: float, order: float) -> float:
    """Of one step, from the definition of Renyi divergence."""

    def log_of(ratio: NDArray[np.float64]) -> NDArray[np.float64]:
        return order * np.logaddexp(math.log1p(-rate), math.log(rate) + ratio)

    return log_mean(sigma, log_of) / (order - 1)


@pytest.mark.parametrize("event", [mnist("poisson"), digits("poisson"), mnist("poisson", 0.5)])
def test_rdp_costs_what_its_definition_says(event: TrainingEvent) -> None:
    rate, sigma = event.sampling_rate, event.noise_multiplier
    orders = [*(1 + tenths / 10 for tenths in range(1, 100)), *range(11, MOST_ORDER + 1)]
    rdp = [event.steps * poisson_rdp(rate, sigma, order) for order in orders]
    theirs = converted(orders, rdp, DELTA)
    # The library leaves out fractional orders whose series does not converge.
    assert theirs * (1 - 1e-9) <= total_epsilon((event,), DELTA, "rdp") <= theirs * 1.002


@pytest.mark.parametrize(
    "event",
    [
        mnist("poisson"),
        mnist("poisson", 0.4, 100),
        mnist("random-allocation"),
        TrainingEvent(0.5, 3.0, 40),
        TrainingEvent(1.0, 0.3, 2),
    ],
    ids=str,
)
def test_rdp_is_never_below_pld(event: TrainingEvent) -> None:
    assert (
        0
        < total_epsilon((event,), DELTA, "pld")
        <= total_epsilon((event,), DELTA, "rdp")
        < math.inf
    )


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


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("sigma", [0.001, 1e5])
def test_noise_that_cannot_be_priced_is_refused(sampler: str, sigma: float) -> None:
    events = (TrainingEvent(0.1, sigma, 1, sampler, 10),)
    with pytest.raises(InputError, match=r"is not supported.*at least 0\.01 and at most 10000"):
        total_epsilon(events, DELTA)


@pytest.mark.parametrize(("sampler", "accountant"), PRICED)
@pytest.mark.parametrize("sigma", [0.01, 0.1, 100.0, 1e4])
def test_all_noise_that_may_be_chosen_is_priced(
    sampler: str, accountant: str, sigma: float
) -> None:
    event = TrainingEvent(0.1, sigma, 20, sampler, 10)
    assert 0 < total_epsilon((event,), DELTA, accountant) < math.inf


@pytest.mark.parametrize(("sampler", "accountant"), PRICED)
def test_a_smaller_delta_costs_more_down_to_the_smallest_there_is(
    sampler: str, accountant: str
) -> None:
    event = TrainingEvent(0.1, 1.5, 20, sampler, 10)
    deltas = (0.9, 0.1, 1e-5, 1e-10, 1e-30, 1e-100, 1e-300, 5e-324)
    prices = [total_epsilon((event,), delta, accountant) for delta in deltas]
    assert all(low <= high for low, high in pairwise(prices))
    assert prices[2] < prices[3] < prices[4]
    if accountant == "rdp":
        assert prices[-1] < math.inf
    shown = statement(prices[-1], deltas[-1], (event,))
    assert "(infinite" not in shown
    assert "nan" not in shown


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_a_run_that_is_certain_to_show_all_has_a_price(accountant: str) -> None:
    """The loss is far above what the delta lets through, and above where its masses overflow."""
    event = TrainingEvent(0.1, 0.05, 500)
    assert 5000 < total_epsilon((event,), DELTA, accountant) < math.inf


@pytest.mark.parametrize(
    "event",
    [
        TrainingEvent(1e-7, 100.0, 1),
        TrainingEvent(1e-9, 3.0, 100),
        TrainingEvent(1e-9, 1e4, 1),
    ],
    ids=str,
)
def test_rdp_of_next_to_nothing_has_an_epsilon(event: TrainingEvent) -> None:
    assert 0 <= total_epsilon((event,), DELTA, "rdp") < 0.01


@pytest.mark.long
@pytest.mark.parametrize(("sampler", "accountant"), PRICED)
def test_the_smallest_rates_are_priced_as_larger_ones(sampler: str, accountant: str) -> None:
    """Not as smaller: below, the library's arithmetic gives nothing, or too little."""
    smallest = TrainingEvent(1e-9, 0.7, 1000, sampler, 1000)
    larger = replace(smallest, sampling_rate=1e-5)
    for delta in (1e-6, 1e-9):
        price = total_epsilon((smallest,), delta, accountant)
        assert 0 <= price <= total_epsilon((larger,), delta, accountant)
    assert total_epsilon((smallest,), 1e-9, accountant) > 0


def test_no_rate_is_priced_below_the_least() -> None:
    assert [TrainingEvent(q, 1.0, 1).rate for q in (1e-9, 1e-6, 1e-3)] == [1e-6, 1e-6, 1e-3]


def test_who_deals_by_epochs_is_not_amplified() -> None:
    assert set(ONCE_AN_EPOCH) == {"random-allocation", "cyclic"}
    assert {TrainingEvent(0.1, 1.0, 1, sampler).rate for sampler in ONCE_AN_EPOCH} == {1.0}


# Accountants.


def test_no_such_accountant() -> None:
    with pytest.raises(InputError, match="no accountant 'moments'"):
        total_epsilon((mnist("poisson"),), DELTA, "moments")


def test_an_accountant_is_called_by_its_name_and_version() -> None:
    for name, text in ACCOUNTANTS.items():
        assert text.startswith(name)
        assert "dp-accounting 0." in text


# Monotone, and composing.


@given(
    rate=st.floats(0.01, 0.1),
    sigma=st.floats(1, 3),
    steps=st.integers(1, 20),
    delta=st.floats(1e-8, 1e-3),
)
@settings(max_examples=4, deadline=None, database=None)
@pytest.mark.parametrize(("sampler", "accountant"), rest_long(PRICED))
def test_price_rises_with_rate_and_steps_and_falls_with_noise_and_delta(
    sampler: str, accountant: str, rate: float, sigma: float, steps: int, delta: float
) -> None:
    event = TrainingEvent(rate, sigma, steps, sampler)
    price = total_epsilon((event,), delta, accountant)
    assert total_epsilon((replace(event, steps=steps + 1),), delta, accountant) > price
    assert total_epsilon((replace(event, noise_multiplier=sigma * 1.2),), delta, accountant) < price
    assert total_epsilon((event,), delta * 2, accountant) < price
    dearer = total_epsilon((replace(event, sampling_rate=rate * 1.2),), delta, accountant)
    assert dearer == price if event.sampling.once_an_epoch else dearer > price


@pytest.mark.parametrize(
    "event",
    [
        TrainingEvent(DIGITS_RATE, 6.0, 3),
        TrainingEvent(1.0, 2.0, 5),
        TrainingEvent(0.01, 0.3, 40),
        TrainingEvent(1.0, 0.02, 3),
        TrainingEvent(DIGITS_RATE, 1.5, 24, "random-allocation", 12),
    ],
    ids=str,
)
def test_deltas_at_many_epsilons_are_those_of_the_library(event: TrainingEvent) -> None:
    losses = accounting.loss_distribution(merged((event,)), accounting.FINE)
    epsilons = np.append(0.0, np.geomspace(1e-6, 700, 2000))
    expected = losses.computed.get_delta_for_epsilon(epsilons) + losses.rounding
    np.testing.assert_allclose(losses.deltas(epsilons), expected, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("sampler", ONCE_AN_EPOCH)
def test_an_epoch_begun_costs_what_a_whole_one_does(sampler: str) -> None:
    """A record is in one of its batches, and which one is secret and of no help."""

    def price(steps: int) -> float:
        return total_epsilon((digits(sampler, steps=steps),), DELTA)

    assert 0 < price(1) == price(2) == price(12) < price(13) == price(24) < price(25)


@pytest.mark.parametrize("sampler", ONCE_AN_EPOCH)
def test_every_branch_pays_for_the_epochs_that_it_began(sampler: str) -> None:
    """It deals anew, so a record may be in both halves: two half epochs are two."""
    half = digits(sampler, steps=6)
    two = total_epsilon((digits(sampler, steps=24),), DELTA)
    assert half.compositions == 1
    assert total_epsilon((half, half), DELTA) == two > total_epsilon((half,), DELTA)
    # And so where a branch has other batches, of which an epoch takes a different number.
    other = TrainingEvent(0.5, 1.5, 1, sampler, 2)
    alone = total_epsilon((other,), DELTA)
    assert total_epsilon((half, other), DELTA) > max(alone, total_epsilon((half,), DELTA))


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


def seconds_alone(price: Callable[[], object]) -> float:
    """Seconds of computing, with nothing kept from before."""
    kept = (
        accounting._sampled_gaussian,
        accounting._part,
        accounting.loss_distribution,
        accounting._priced,
    )
    for function in kept:
        function.cache_clear()
    began = time.process_time()
    price()
    return time.process_time() - began


def times_as_long(price: Callable[[], object], other: Callable[[], object]) -> float:
    """How many times as long one takes as the other: the least of three, as machines are noisy."""
    return min(seconds_alone(price) / seconds_alone(other) for _ in range(3))


@pytest.mark.long
def test_a_branch_with_much_noise_does_not_make_one_with_little_a_matter_of_minutes() -> None:
    """A grid fine enough for the losses of the one has no end for those of the other."""
    loud, quiet = mnist("poisson", 100.0), mnist("poisson", 0.5)
    assert (
        times_as_long(
            lambda: total_epsilon((loud, quiet), DELTA), lambda: total_epsilon((quiet,), DELTA)
        )
        <= 6
    )
    price = total_epsilon((loud, quiet), DELTA)
    assert total_epsilon((quiet,), DELTA) <= price <= total_epsilon((quiet,), DELTA) * 1.003


# The schedule of a run.

DIGITS_RUN = TrainingEvent(DIGITS_RATE, 1.5, 240)


def assert_upper_bound(
    schedule: EpsilonSchedule, event: TrainingEvent, price: Callable[[TrainingEvent], float]
) -> None:
    """Of the price at every step, reaching it at the end."""
    steps, prices = zip(*schedule.points, strict=True)
    assert list(steps) == sorted(set(steps))
    assert list(prices) == sorted(prices)
    assert schedule.points[-1] == (event.steps, price(event))
    assert len(steps) <= 100
    for step in np.random.default_rng(0).integers(1, event.steps, size=4, endpoint=True).tolist():
        assert schedule.at(step) >= price(replace(event, steps=step)) * (1 - 1e-12)
        assert schedule.at(step) == next(p for s, p in schedule.points if s >= step)


@pytest.mark.parametrize(
    ("event", "epoch"),
    [
        (DIGITS_RUN, 12),
        (TrainingEvent(DIGITS_RATE, 1.5, 13), 12),
        (TrainingEvent(DIGITS_RATE, 1.5, 1), 12),
        (TrainingEvent(DIGITS_RATE, 0.3, 30), 12),
        (TrainingEvent(DIGITS_RATE, 20.0, 5000), 12),
    ],
    ids=["run", "ragged", "one-step", "little-noise", "long"],
)
def test_schedule_is_an_increasing_upper_bound_with_an_exact_end(
    event: TrainingEvent, epoch: int
) -> None:
    schedule = epsilon_schedule(event, DELTA, epoch)
    assert_upper_bound(schedule, event, lambda part: total_epsilon((part,), DELTA))


@pytest.mark.parametrize(
    ("steps", "sampler", "accountant"),
    rest_long((steps, *priced) for steps in (24, 27, 5) for priced in PRICED),
)
def test_every_sampler_has_such_a_schedule(sampler: str, accountant: str, steps: int) -> None:
    event = digits(sampler, steps=steps)
    schedule = epsilon_schedule(event, DELTA, 12, accountant=accountant)
    assert_upper_bound(schedule, event, lambda part: total_epsilon((part,), DELTA, accountant))


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("sampler", ONCE_AN_EPOCH)
@pytest.mark.parametrize("steps", rest_long([63, 5, 60, 300 * 12], short=2))
def test_where_epochs_are_paid_for_the_schedule_steps_at_their_ends(
    sampler: str, accountant: str, steps: int
) -> None:
    event = digits(sampler, 6.0, steps)
    schedule = epsilon_schedule(event, DELTA, 12, accountant=accountant)
    *before, _ = schedule.points
    assert all(step % 12 == 0 for step, _ in before)
    assert schedule.at(1) >= total_epsilon((digits(sampler, 6.0, 1),), DELTA, accountant) * (
        1 - 1e-12
    )
    for step, price in before[:3]:
        exact = total_epsilon((replace(event, steps=step),), DELTA, accountant)
        assert exact * (1 - 1e-12) <= price <= exact * 1.003 + 1e-3


@pytest.mark.parametrize(("sampler", "accountant"), rest_long(PRICED))
def test_a_branchs_schedule_starts_from_what_was_spent_before(
    sampler: str, accountant: str
) -> None:
    earlier = (digits(sampler, 3.0, 6), digits(sampler, 2.0, 20))
    event = digits(sampler, steps=8)
    schedule = epsilon_schedule(event, DELTA, 12, earlier, accountant)

    def price(part: TrainingEvent) -> float:
        return total_epsilon((*earlier, part), DELTA, accountant)

    assert_upper_bound(schedule, event, price)
    assert schedule.at(1) > total_epsilon(earlier, DELTA, accountant)


def test_schedule_starts_at_nothing_and_refuses_to_guess_beyond_its_end() -> None:
    schedule = epsilon_schedule(TrainingEvent(DIGITS_RATE, 1.5, 12), DELTA, 12)
    assert schedule.at(0) == 0
    with pytest.raises(ValueError, match="ends at step 12, asked for 13"):
        schedule.at(13)


def test_schedule_of_a_run_without_noise_or_without_steps() -> None:
    without_noise = epsilon_schedule(TrainingEvent(0.1, 0.0, 30), DELTA, 10)
    assert (without_noise.at(1), without_noise.at(30)) == (math.inf, math.inf)
    assert epsilon_schedule(TrainingEvent(0.1, 1.0, 0), DELTA, 10).points == ((0, 0.0),)


@pytest.mark.long
def test_mnist_schedule_costs_little_time_and_falls_on_epochs() -> None:
    event = TrainingEvent(MNIST_RATE, 0.5, 1175)
    assert (
        times_as_long(
            lambda: epsilon_schedule(event, DELTA, 235), lambda: total_epsilon((event,), DELTA)
        )
        <= 3
    )
    schedule = epsilon_schedule(event, DELTA, 235)
    assert {235, 470, 705, 940, 1175} <= {step for step, _ in schedule.points}
    # At an epoch's end the figure shown is the epoch's own, but for the coarser grid.
    exact = total_epsilon((TrainingEvent(MNIST_RATE, 0.5, 235),), DELTA)
    assert exact <= schedule.at(235) <= exact * 1.003


# What people read.


@given(st.floats(1e-12, 1e9))
@settings(max_examples=300, deadline=None, database=None)
def test_a_price_is_never_shown_smaller_than_it_is(epsilon: float) -> None:
    assert epsilon * (1 - 1e-9) <= float(format_epsilon(epsilon)) <= epsilon * (1 + 1.1e-3)


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [(0.0, "0"), (math.inf, "infinite"), (1.0, "1"), (7.47931, "7.48"), (9.99951, "10")],
)
def test_prices_as_people_read_them(epsilon: float, shown: str) -> None:
    assert format_epsilon(epsilon) == shown


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
    assert statement(math.inf, DELTA, (TrainingEvent(0.1, 0, 12),)).startswith("No privacy")


@pytest.mark.parametrize(
    ("sampler", "parts"),
    [
        ("poisson", ("Poisson-sampled", "at rate 0.08907")),
        (
            "random-allocation",
            ("randomly allocated", "(each training record in one of every 12)"),
        ),
    ],
)
def test_statement_names_the_sampler(sampler: str, parts: tuple[str, str]) -> None:
    done, how = parts
    text = statement(2.0, DELTA, (digits(sampler, steps=1), digits(sampler, 3.0, 20)))
    assert text.startswith("Adding or removing any one")
    assert "under add-or-remove-one adjacency" in text
    assert f"1 {done} step {how} with noise multiplier 1.5" in text
    assert f"20 {done} steps {how} with noise multiplier 3" in text


def test_pricing_and_settings_load_no_torch() -> None:
    code = (
        "import sys, dpmac_cli.accounting.calibration, dpmac_cli.config.resolve\n"
        "import dpmac_cli.runs.folder\n"
        "assert not {'torch', 'dp_accounting', 'scipy'} & set(sys.modules)\n"
        "event = dpmac_cli.accounting.events.TrainingEvent(0.1, 1.0, 1, 'random-allocation')\n"
        "dpmac_cli.accounting.accountants.total_epsilon((event,), 1e-5)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_event_prices_itself_at_the_right_sensitivity() -> None:
    event: Any = TrainingEvent(0.25, 1.5, 7).dp_event()
    assert event.count == 7
    assert event.event.sampling_probability == 0.25
    assert event.event.event.noise_multiplier == 1.5


@pytest.mark.parametrize("sampler", ONCE_AN_EPOCH)
def test_an_event_of_epochs_is_one_of_gaussians(sampler: str) -> None:
    event: Any = digits(sampler, steps=25).dp_event()
    assert event.count == 3
    assert event.event.noise_multiplier == 1.5
