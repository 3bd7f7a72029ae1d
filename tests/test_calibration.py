"""From a budget to a setting: priced forward, every answer is on the paying side, and just so."""

import math
from dataclasses import replace

import pytest

from dpmac_cli.accounting.accountants import COARSE, SIGMA_MAX, total_epsilon
from dpmac_cli.accounting.calibration import (
    MOST_STEPS,
    affordable_steps,
    calibrate_noise,
    longest_run,
)
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.errors import BudgetError, InputError
from tests.tiers import rest_long

pytestmark = pytest.mark.privacy

DELTA = 1e-5
MNIST_RATE = 256 / 60_000
DIGITS_RATE = 128 / 1437
#: Every sampler with its own accountant, and Poisson with the other one.
PRICED = (*((name, "pld") for name in SAMPLERS), ("poisson", "rdp"))


def digits(sampler: str = "poisson", sigma: float = 0.0, steps: int = 24) -> TrainingEvent:
    """Epochs of 12 steps, two unless told otherwise."""
    return TrainingEvent(DIGITS_RATE, sigma, steps, sampler, 12)


# The noise.


@pytest.mark.parametrize(("sampler", "accountant"), rest_long(PRICED))
@pytest.mark.parametrize("target", rest_long([3.0, 0.3]))
def test_noise_priced_forward_meets_the_target_and_no_less_would(
    sampler: str, accountant: str, target: float
) -> None:
    event = digits(sampler)
    sigma = calibrate_noise(event, DELTA, target, accountant)
    assert sigma == round(sigma, 5), "what is printed is what is used"
    price = total_epsilon((replace(event, noise_multiplier=sigma),), DELTA, accountant)
    assert target * (1 - 1e-3) <= price <= target
    less = replace(event, noise_multiplier=round(sigma - 1e-5, 5))
    assert total_epsilon((less,), DELTA, accountant) > target


@pytest.mark.parametrize(
    ("event", "delta", "target"),
    rest_long(
        [
            (TrainingEvent(DIGITS_RATE, 0, 12), 1e-5, 1.0),
            (TrainingEvent(1.0, 0, 4), 1e-5, 2.0),
            (TrainingEvent(1.0, 0, 1), 1e-6, 40.0),
            (TrainingEvent(MNIST_RATE, 0, 1175), 1e-5, 8.0),
            (TrainingEvent(1.0, 0, 1), 1e-5, 100.0),
        ]
    ),
    ids=str,
)
def test_calibrated_noise_is_the_least_that_meets_the_target(
    event: TrainingEvent, delta: float, target: float
) -> None:
    sigma = calibrate_noise(event, delta, target)
    assert sigma == round(sigma, 5), "what is printed is what is used"
    assert total_epsilon((replace(event, noise_multiplier=sigma),), delta) <= target
    assert total_epsilon((replace(event, noise_multiplier=round(sigma - 1e-5, 5)),), delta) > target


def test_the_noise_of_the_event_that_is_asked_about_does_not_matter() -> None:
    answers = {calibrate_noise(digits(sigma=sigma), DELTA, 3.0, "rdp") for sigma in (0, 1e-9, 50)}
    assert len(answers) == 1


@pytest.mark.parametrize("target", [1e-3, 4e-3])
def test_a_small_target_is_met_where_the_accountant_can(target: float) -> None:
    """Renyi divergences show no epsilon that small, and are only asked for a first guess."""
    event = TrainingEvent(1.0, 0, 1)
    assert total_epsilon((replace(event, noise_multiplier=SIGMA_MAX),), DELTA) < target
    sigma = calibrate_noise(event, DELTA, target)
    assert (
        target * 0.99 <= total_epsilon((replace(event, noise_multiplier=sigma),), DELTA) <= target
    )


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_target_out_of_reach_names_what_can_be_reached_and_the_remedies(accountant: str) -> None:
    event = digits(steps=240)
    with pytest.raises(BudgetError, match="Use a larger epsilon") as failure:
        calibrate_noise(event, DELTA, 1e-6, accountant)
    nearest = total_epsilon((replace(event, noise_multiplier=SIGMA_MAX),), DELTA, accountant)
    assert f"costs {format_epsilon(nearest)}." in str(failure.value)


@pytest.mark.parametrize(
    ("target", "delta"), [(1e7, 1e-5), (1e300, 1e-5), (1.0, 0.9)], ids=["huge", "absurd", "delta"]
)
def test_a_target_that_needs_next_to_no_noise_is_met_or_refused(
    target: float, delta: float
) -> None:
    event = digits(steps=3)
    try:
        sigma = calibrate_noise(event, delta, target)
    except BudgetError:
        return
    assert total_epsilon((replace(event, noise_multiplier=sigma),), delta) <= target


def test_no_noise_is_found_by_an_accountant_that_there_is_not() -> None:
    with pytest.raises(InputError, match="Known: pld, rdp"):
        calibrate_noise(digits(), DELTA, 3.0, "moments")


def test_a_run_of_no_steps_needs_no_noise_to_speak_of() -> None:
    sigma = calibrate_noise(digits(steps=0), DELTA, 1e-9)
    assert 0 < sigma < 0.1


# The length of a run.

DIGITS_RUN = digits(sigma=1.5, steps=240)


@pytest.mark.parametrize("budget", [0.61, 2.0])
def test_affordable_steps_are_as_many_as_the_budget_pays_for(budget: float) -> None:
    steps = affordable_steps(DIGITS_RUN, DELTA, budget)
    assert total_epsilon((replace(DIGITS_RUN, steps=steps),), DELTA) <= budget
    assert total_epsilon((replace(DIGITS_RUN, steps=steps + 1),), DELTA) > budget


def test_affordable_steps_at_the_ends() -> None:
    with pytest.raises(BudgetError, match="allows no further step"):
        affordable_steps(DIGITS_RUN, DELTA, 1e-3)
    assert affordable_steps(replace(DIGITS_RUN, steps=0), DELTA, 1e-3) == 0
    assert affordable_steps(DIGITS_RUN, DELTA, math.inf) == DIGITS_RUN.steps
    assert affordable_steps(DIGITS_RUN, DELTA, 1e3) == DIGITS_RUN.steps


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


def test_a_run_of_one_step_can_be_the_longest() -> None:
    event = TrainingEvent(1.0, 3.0, 1)
    assert longest_run(event, DELTA, total_epsilon((event,), DELTA)) == 1


def test_the_search_for_the_longest_run_ends() -> None:
    assert longest_run(TrainingEvent(1e-4, 100.0, 1), DELTA, 1.0, "rdp") == MOST_STEPS


@pytest.mark.parametrize(("sampler", "accountant"), PRICED)
def test_a_budget_below_the_first_step_names_what_that_costs(sampler: str, accountant: str) -> None:
    event = digits(sampler, 1.0)
    with pytest.raises(BudgetError, match="Even one step at noise multiplier 1 ") as failure:
        longest_run(event, DELTA, 0.01, accountant)
    first = total_epsilon((replace(event, steps=1),), DELTA, accountant)
    assert f"it costs {format_epsilon(first)}." in str(failure.value)


def test_a_target_that_only_the_fine_grid_shows_is_met() -> None:
    """On the coarse grid even the largest noise costs more than the target."""
    event, target = TrainingEvent(0.01, SIGMA_MAX, 1000), 5.76e-6
    assert total_epsilon((event,), DELTA, widest=COARSE) > target
    sigma = calibrate_noise(event, DELTA, target)
    assert total_epsilon((replace(event, noise_multiplier=sigma),), DELTA) <= target
