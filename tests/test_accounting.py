"""What a run costs: golden numbers, independent formulas, and the edges."""

import math
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from dpmac_cli import accounting
from dpmac_cli.accounting import (
    TrainingEvent,
    affordable_steps,
    calibrate_noise,
    epsilon_schedule,
    format_epsilon,
    statement,
)
from dpmac_cli.config import resolve
from dpmac_cli.errors import BudgetError

pytestmark = pytest.mark.privacy

DELTA = 1e-5
MNIST_RATE = 256 / 60_000
DIGITS_RATE = 128 / 1437

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


@pytest.mark.parametrize(("sigma", "ours", "paper"), MNIST_GOLDEN)
def test_mnist_epsilons_of_the_paper(sigma: float, ours: float, paper: float) -> None:
    config = resolve({"dataset": "mnist", "sigma": sigma}).config
    assert (config.sampling_rate, config.total_steps) == (MNIST_RATE, 1175)
    event = TrainingEvent(config.sampling_rate, sigma, config.total_steps)
    assert event.epsilon(config.delta) == pytest.approx(ours, abs=1e-3)
    assert event.epsilon(config.delta) <= paper


@pytest.mark.parametrize(("sigma", "ours", "paper"), CIFAR_GOLDEN)
def test_cifar_epsilons_of_the_paper(sigma: float, ours: float, paper: float) -> None:
    epsilon = TrainingEvent(512 / 50_000, sigma, 490).epsilon(DELTA)
    assert epsilon == pytest.approx(ours, abs=1e-3)
    assert epsilon <= paper


@pytest.mark.parametrize(
    "event",
    [
        TrainingEvent(MNIST_RATE, 1.0, 1175),
        TrainingEvent(DIGITS_RATE, 1.5, 12),
        TrainingEvent(1.0, 3.0, 5),
    ],
)
def test_price_equals_the_library_accountant_on_the_event(event: TrainingEvent) -> None:
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=accounting.FINE)
    accountant.compose(event.dp_event())
    assert event.epsilon(DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """The exact price of one Gaussian mechanism (Balle and Wang 2018, theorem 8)."""

    def excess(epsilon: float) -> float:
        gain = norm.cdf(0.5 / sigma - epsilon * sigma)
        loss = math.exp(epsilon + norm.logcdf(-0.5 / sigma - epsilon * sigma))
        return float(gain - loss - delta)

    return float(brentq(excess, 0, 200, xtol=1e-12))


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (2.0, 9), (5.0, 4), (0.5, 1), (0.3, 1)])
def test_full_batches_cost_what_the_closed_form_says(sigma: float, steps: int) -> None:
    exact = gaussian_epsilon(sigma / math.sqrt(steps), DELTA)
    epsilon = TrainingEvent(1.0, sigma, steps).epsilon(DELTA)
    assert exact <= epsilon * (1 + 1e-9)
    assert epsilon <= exact * 1.003 + 1e-3


@pytest.mark.parametrize(
    ("rate", "sigma"), [(MNIST_RATE, 0.5), (MNIST_RATE, 1.0), (DIGITS_RATE, 1.5)]
)
def test_one_sampled_step_costs_what_the_closed_form_says(rate: float, sigma: float) -> None:
    # Removing a record is the dearer direction, and there amplification by sampling is exact.
    exact = math.log1p(rate * math.expm1(gaussian_epsilon(sigma, DELTA / rate)))
    epsilon = TrainingEvent(rate, sigma, 1).epsilon(DELTA)
    assert exact <= epsilon * (1 + 1e-9)
    assert epsilon <= exact * 1.003 + 1e-3


def test_no_steps_cost_nothing_and_no_noise_costs_everything() -> None:
    assert TrainingEvent(0.1, 1.0, 0).epsilon(DELTA) == 0
    assert TrainingEvent(0.1, 0.0, 0).epsilon(DELTA) == 0
    assert TrainingEvent(0.1, 0.0, 1).epsilon(DELTA) == math.inf


@given(
    rate=st.floats(0.01, 0.1),
    sigma=st.floats(1, 3),
    steps=st.integers(1, 20),
    delta=st.floats(1e-8, 1e-3),
)
@settings(max_examples=4, deadline=None, database=None)
def test_price_rises_with_rate_and_steps_and_falls_with_noise_and_delta(
    rate: float, sigma: float, steps: int, delta: float
) -> None:
    price = TrainingEvent(rate, sigma, steps).epsilon(delta)
    assert TrainingEvent(rate * 1.2, sigma, steps).epsilon(delta) > price
    assert TrainingEvent(rate, sigma, steps + 1).epsilon(delta) > price
    assert TrainingEvent(rate, sigma * 1.2, steps).epsilon(delta) < price
    assert TrainingEvent(rate, sigma, steps).epsilon(delta * 2) < price


@pytest.mark.parametrize(
    ("rate", "steps", "delta", "target"),
    [
        (DIGITS_RATE, 12, 1e-5, 1.0),
        (1.0, 4, 1e-5, 2.0),
        (1.0, 1, 1e-6, 40.0),
    ],
)
def test_calibrated_noise_is_the_least_that_meets_the_target(
    rate: float, steps: int, delta: float, target: float
) -> None:
    sigma = calibrate_noise(rate, steps, delta, target)
    assert sigma == round(sigma, 5), "what is printed is what is used"
    assert TrainingEvent(rate, sigma, steps).epsilon(delta) <= target
    assert TrainingEvent(rate, sigma - 1e-5, steps).epsilon(delta) > target


def test_a_target_out_of_reach_is_a_budget_error_with_the_remedies() -> None:
    with pytest.raises(BudgetError, match="Ask for a larger epsilon"):
        calibrate_noise(DIGITS_RATE, 240, DELTA, 1e-6)


@pytest.mark.parametrize(
    ("target", "delta"), [(1e7, 1e-5), (1e300, 1e-5), (1.0, 0.9)], ids=["huge", "absurd", "delta"]
)
def test_a_target_that_needs_next_to_no_noise_is_met_or_refused(
    target: float, delta: float
) -> None:
    try:
        sigma = calibrate_noise(DIGITS_RATE, 3, delta, target)
    except BudgetError:
        return
    assert TrainingEvent(DIGITS_RATE, sigma, 3).epsilon(delta) <= target


DIGITS_RUN = TrainingEvent(DIGITS_RATE, 1.5, 240)


@pytest.mark.parametrize("budget", [0.61, 2.0])
def test_affordable_steps_are_as_many_as_the_budget_pays_for(budget: float) -> None:
    steps = affordable_steps(DIGITS_RUN, DELTA, budget)
    assert TrainingEvent(DIGITS_RATE, 1.5, steps).epsilon(DELTA) <= budget
    assert TrainingEvent(DIGITS_RATE, 1.5, steps + 1).epsilon(DELTA) > budget


def test_affordable_steps_at_the_ends() -> None:
    assert affordable_steps(DIGITS_RUN, DELTA, 1e-3) == 0
    assert affordable_steps(DIGITS_RUN, DELTA, 1e3) == DIGITS_RUN.steps


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
    steps, prices = zip(*schedule.points, strict=True)
    assert list(steps) == sorted(set(steps))
    assert list(prices) == sorted(prices)
    assert schedule.points[-1] == (event.steps, event.epsilon(DELTA))
    assert len(steps) <= 100
    for step in np.random.default_rng(0).integers(1, event.steps, size=4, endpoint=True):
        exact = TrainingEvent(event.sampling_rate, event.noise_multiplier, int(step))
        assert schedule.at(int(step)) >= exact.epsilon(DELTA)
        assert schedule.at(int(step)) == next(p for s, p in schedule.points if s >= step)


def test_schedule_starts_at_nothing_and_refuses_to_guess_beyond_its_end() -> None:
    schedule = epsilon_schedule(TrainingEvent(DIGITS_RATE, 1.5, 12), DELTA, 12)
    assert schedule.at(0) == 0
    with pytest.raises(ValueError, match="ends at step 12, asked for 13"):
        schedule.at(13)


def test_schedule_of_a_run_without_noise_or_without_steps() -> None:
    without_noise = epsilon_schedule(TrainingEvent(0.1, 0.0, 30), DELTA, 10)
    assert (without_noise.at(1), without_noise.at(30)) == (math.inf, math.inf)
    assert epsilon_schedule(TrainingEvent(0.1, 1.0, 0), DELTA, 10).points == ((0, 0.0),)


def test_mnist_schedule_costs_little_time_and_falls_on_epochs() -> None:
    accounting._one_step.cache_clear()
    began = time.process_time()
    schedule = epsilon_schedule(TrainingEvent(MNIST_RATE, 0.5, 1175), DELTA, 235)
    assert time.process_time() - began <= 3
    assert {235, 470, 705, 940, 1175} <= {step for step, _ in schedule.points}
    # At an epoch's end the figure shown is the epoch's own, but for the coarser grid.
    exact = TrainingEvent(MNIST_RATE, 0.5, 235).epsilon(DELTA)
    assert exact <= schedule.at(235) <= exact * 1.003


@given(st.floats(1e-12, 1e9))
@settings(max_examples=300, database=None)
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


def test_pricing_and_settings_load_no_torch() -> None:
    code = (
        "import sys, dpmac_cli.accounting, dpmac_cli.config, dpmac_cli.folder\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_event_prices_itself_at_the_right_sensitivity() -> None:
    event: Any = TrainingEvent(0.25, 1.5, 7).dp_event()
    assert event.count == 7
    assert event.event.sampling_probability == 0.25
    assert event.event.event.noise_multiplier == 1.5
