"""What dpmac account answers: questions, refusals, and answers that are on the paying side."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from dpmac_cli.accounting import pricing
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.accounting.pricing import Row
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.account import Question, account_notes, answer
from dpmac_cli.errors import BudgetError, InputError
from tests.tiers import rest_long

DELTA = 1e-5


def ask(line: str) -> Question:
    """The completed question of a line, such as ``--sigma 1 --delta 0.1``."""
    words = line.replace("--", "").split()
    given = {
        name.replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    return Question.model_validate(given).completed()


#: 40 records, and noise that is cheap to price.
SMALL = ask("--dataset-size 40 --batch-size 8 --sigma 6 --epochs 2")


def changed(question: Question, **changes: Any) -> Question:
    """The question with other flags."""
    return question.model_copy(update=changes)


def only(question: Question) -> Row:
    (row,) = answer(question)
    return row


# Questions


class Refused(NamedTuple):
    """Flags that make no question, and a part of each of the errors, in their order."""

    line: str
    said: Sequence[str]


MISSING_SIGMA = "--sigma (to compute epsilon) or --epsilon"
REFUSED = [
    # Nothing to go by
    Refused("", [MISSING_SIGMA]),
    Refused("--epochs 5", [MISSING_SIGMA]),
    Refused(
        "--sigma 1 --dataset-size 9", ["Add --batch-size, and --epochs or --steps: without them"]
    ),
    Refused("--sigma 1 --dataset-size 9 --steps 1", ["Add --batch-size: "]),
    Refused("--sigma 1 --dataset-size 9 --batch-size 1", ["Add --epochs or --steps: without it"]),
    Refused("--dataset-size 9 --steps 1", [MISSING_SIGMA]),
    Refused("--sigma 1 --epsilon 1 --dataset-size 9", ["Add --batch-size: "]),
    # Nothing left open
    Refused(
        "--sigma 1 --epsilon 1 --epochs 1",
        ["--sigma, --epsilon and --epochs together"],
    ),
    Refused("--sigma 1 --epsilon 1 --steps 1", ["--sigma, --epsilon and --steps together"]),
    # One against the other
    Refused("--sigma 1 --epochs 1 --steps 1", ["--epochs and --steps contradict"]),
    Refused("--sigma 1 --dataset mnist --dataset-size 9", ["--dataset and --dataset-size"]),
    Refused(
        "--sigma 1 --dataset digits --batch-size 1438",
        ["--batch-size (1438) must not be above the size of the dataset, 1437"],
    ),
    Refused(
        "--sigma 1 --dataset-size 9 --batch-size 10 --steps 1",
        ["must not be above the size of the dataset"],
    ),
    # Numbers
    Refused("--sigma ten", ["--sigma: 'ten' is not a number"]),
    Refused("--sigma 1,,2", ["--sigma: '' is not a number"]),
    Refused("--sigma nan", ["--sigma: 'nan' is not a number"]),
    Refused("--sigma 1,inf", ["--sigma: 'inf' is not a number"]),
    Refused("--sigma -1", ["--sigma must be at least 0"]),
    Refused("--sigma 0.009", ["0 for no noise, or at least 0.01"]),
    Refused("--sigma 1e5", ["--sigma must be at least 0 and at most 10000"]),
    Refused("--sigma 1 --epochs 2.5", ["--epochs: '2.5' is not a whole number"]),
    Refused("--sigma 1 --steps -1", ["--steps must be at least 0"]),
    Refused(f"--sigma 1 --steps {'9' * 400}", ["--steps"]),
    Refused(f"--sigma 1 --steps {'9' * 5000}", ["--steps"]),
    Refused("--sigma 1 --delta 0", ["--delta must be above 0 and below 1"]),
    Refused("--sigma 1 --delta 1", ["--delta must be above 0 and below 1"]),
    Refused("--sigma 1 --delta 1e-5,1e-6", ["--delta: '1e-5,1e-6' is not a number"]),
    Refused("--sigma 1 --batch-size 0", ["--batch-size must be at least 1"]),
    Refused("--sigma 1 --dataset-size 1e9 --batch-size 1 --steps 1", ["--dataset-size: '1e9'"]),
    Refused("--epsilon 0", ["--epsilon must be above 0"]),
    Refused("--epsilon inf", ["--epsilon: 'inf' is not a number"]),
    # Names
    Refused("--sigma 1 --dataset mnits", ["Did you mean mnist"]),
    Refused("--sigma 1 --sampler possion", ["Did you mean poisson"]),
    Refused("--sigma 1 --accountant rpd", ["Did you mean rdp"]),
    # All at once
    Refused(
        "--sigma -1,x --epochs 1.5 --steps 2 --delta 7 --sampler none --accountant none",
        [
            "--sigma must be",
            "--sigma: 'x'",
            "--epochs: '1.5'",
            "--delta must be",
            "there is no sampler",
            "there is no accountant",
            "--epochs and --steps",
        ],
    ),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.line[:70] or "nothing")
def test_every_fault_of_a_question_is_named_at_once(refused: Refused) -> None:
    with pytest.raises(InputError) as caught:
        ask(refused.line)
    assert len(caught.value.errors) == len(refused.said)
    for part in refused.said:
        assert [part in error for error in caught.value.errors].count(True) == 1, part


def test_a_data_set_fills_in_what_is_not_given() -> None:
    whole = "--dataset-size 60000 --batch-size 256 --sigma 1 --epochs 5"
    assert ask("--sigma 1") == ask(whole)
    digits = ask("--dataset digits --recipe paper --epsilon 2,3 --batch-size 9")
    assert (digits.dataset_size, digits.batch_size, digits.epochs) == (1437, 9, (20,))
    assert (digits.solve, digits.epsilon, digits.sigma) == ("sigma", (2.0, 3.0), None)


def test_what_is_left_open_is_what_is_asked_for() -> None:
    unseen = "--dataset-size 9 --sigma 1 --epsilon 1"
    assert ask(f"{unseen} --batch-size 3").solve == "steps"
    assert ask("--epsilon 1").solve == "sigma"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_is_priced_by_both_accountants(sampler: str) -> None:
    line = f"--sigma 1 --sampler {sampler}"
    assert only(ask(line)).accountant == "pld"
    rows = answer(ask(f"{line} --accountant all"))
    assert [row.accountant for row in rows] == ["pld", "rdp"]


@pytest.mark.parametrize(("delta", "said"), [(0.025, 1), (0.0249, 0), (1e-9, 0)])
def test_a_delta_of_one_record_or_more_is_noted(delta: float, said: int) -> None:
    notes = list(account_notes(list(answer(changed(SMALL, delta=delta)))))
    assert len(notes) == said
    assert all("1/n = 0.025" in note and "whole record" in note for note in notes)


# Prices


def test_a_row_holds_the_price_and_all_it_depends_on() -> None:
    row = only(SMALL)
    event = TrainingEvent(0.2, 6.0, 10, "poisson", 5)
    assert row.events == (event,)
    assert row.epsilon == total_epsilon((event,), DELTA) > 0
    assert (row.delta, row.noise_multiplier, row.sampling_rate) == (DELTA, 6.0, 0.2)
    assert (row.steps, row.epochs, row.compositions) == (10, 2.0, 10)
    assert (row.dataset_size, row.batch_size) == (40, 8)
    assert (row.sampler, row.accountant, row.adjacency) == ("poisson", "pld", "add-or-remove-one")
    assert "10 Poisson-sampled steps at rate 0.2 with noise multiplier 6" in row.statement


def test_a_grid_is_every_combination_in_the_order_given() -> None:
    rows = list(answer(changed(SMALL, sigma=(8.0, 6.0), epochs=None, steps=(3, 5))))
    assert [(row.noise_multiplier, row.steps) for row in rows] == [(8, 3), (8, 5), (6, 3), (6, 5)]
    assert [row.epsilon for row in rows] == [total_epsilon((row.events[0],), DELTA) for row in rows]


@pytest.mark.parametrize(("sampler", "compositions"), [("poisson", 7), ("random-allocation", 2)])
def test_each_sampler_has_its_count(sampler: str, compositions: int) -> None:
    row = only(changed(SMALL, sampler=sampler, epochs=None, steps=(7,)))
    assert (row.sampler, row.adjacency) == (sampler, "add-or-remove-one")
    assert row.compositions == compositions
    assert "under add-or-remove-one adjacency" in row.statement


def test_an_epoch_of_random_allocation_costs_less_than_a_mechanism_on_all_records() -> None:
    once = total_epsilon((TrainingEvent(1.0, 6.0, 1),), DELTA)
    row = only(changed(SMALL, sampler="random-allocation", epochs=(1,)))
    assert 0 < row.epsilon < once / 2


def test_no_noise_and_no_steps() -> None:
    without_noise = only(changed(SMALL, sigma=(0.0,)))
    assert without_noise.epsilon == math.inf
    assert without_noise.statement == "No privacy: no noise was added."
    without_steps = only(changed(SMALL, epochs=(0,)))
    assert (without_steps.epsilon, without_steps.compositions) == (0, 0)


def test_a_batch_of_all_records() -> None:
    row = only(changed(SMALL, batch_size=40))
    assert row.events == (TrainingEvent(1.0, 6.0, 2, "poisson", 1),)
    assert row.epsilon == total_epsilon((row.events[0],), DELTA)


# The other way round


SOLVED: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("sigma", {"sigma": None}),
    ("steps", {"epochs": None}),
]
METHODS = [("poisson", "pld"), ("poisson", "rdp"), ("random-allocation", "rdp")]


@pytest.mark.privacy
@pytest.mark.parametrize(("sampler", "accountant"), rest_long(METHODS))
@pytest.mark.parametrize(("solve", "open_"), SOLVED, ids=[name for name, _ in SOLVED])
def test_an_answer_is_within_the_target_and_the_next_is_not(
    solve: str, open_: Mapping[str, Any], sampler: str, accountant: str
) -> None:
    target = 1.2
    question = changed(
        SMALL, sampler=sampler, accountant=accountant, epsilon=(target,), solve=solve, **open_
    )
    row = only(question)
    (event,) = row.events

    def price(**change: Any) -> float:
        return total_epsilon((replace(event, **change),), row.delta, accountant)

    assert row.solved == solve
    assert row.epsilon <= target
    assert price() <= target
    if solve == "sigma":
        assert price(noise_multiplier=event.noise_multiplier - 1e-5) > target
    else:
        assert price(steps=event.steps + 1) > target


@pytest.mark.parametrize(("sigma", "budget"), [(6.0, 0.7), (100.0, 0.1)])
def test_the_longest_run_is_found_without_pricing_far_longer_ones(
    sigma: float, budget: float
) -> None:
    question = changed(SMALL, sigma=(sigma,), epochs=None, epsilon=(budget,), solve="steps")
    began = time.process_time()
    only(question)
    assert time.process_time() - began <= 5


def test_no_step_needs_no_noise() -> None:
    question = changed(SMALL, sigma=None, epochs=None, steps=(0,), epsilon=(1.0,), solve="sigma")
    try:
        row = only(question)
    except (BudgetError, InputError):
        return
    assert row.epsilon == 0


OUT_OF_REACH: Sequence[tuple[str, float, Mapping[str, Any]]] = [
    ("sigma", 1e-6, {"sigma": None}),
    ("steps", 1e-3, {"epochs": None}),
]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("solve", "target", "open_"), OUT_OF_REACH, ids=[solve for solve, _, _ in OUT_OF_REACH]
)
def test_a_target_out_of_reach_comes_with_the_nearest_figure(
    solve: str, target: float, open_: Mapping[str, Any], accountant: str
) -> None:
    question = changed(SMALL, epsilon=(target,), solve=solve, accountant=accountant, **open_)
    nearest = {
        "sigma": changed(SMALL, sigma=(1e4,)),
        "steps": changed(SMALL, epochs=None, steps=(1,)),
        "batch-size": changed(SMALL, batch_size=1),
    }[solve]
    cost = only(changed(nearest, accountant=accountant)).epsilon
    assert cost > target
    with pytest.raises(BudgetError) as caught:
        only(question)
    assert format_epsilon(cost) in str(caught.value)


def test_branches_that_differ_share_what_they_share() -> None:
    first = TrainingEvent(0.2, 6.0, 10, "poisson", 5)
    row = pricing.price((first, replace(first, noise_multiplier=8.0, steps=5)), DELTA)
    assert (row.noise_multiplier, row.sampling_rate, row.steps) == (None, 0.2, 15)
    assert row.epochs == 3
    assert row.epsilon > total_epsilon((first,), DELTA)
