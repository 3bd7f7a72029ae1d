"""What dpmac account answers: questions, refusals, and answers that are on the paying side."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from dpmac_cli.accounting import pricing
from dpmac_cli.accounting.accountants import repeat_and_select, total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.pricing import Row
from dpmac_cli.accounting.samplers import SAMPLERS
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config import question
from dpmac_cli.config.question import Question, answer, ask
from dpmac_cli.errors import BudgetError, InputError

DELTA = 1e-5
#: 40 records, and noise that is cheap to price.
SMALL = Question(dataset_size=40, batch_size=8, sigmas=(6.0,), lengths=(("epochs", 2),))


def typed(line: str) -> Mapping[str, str]:
    """``--sigma 1 --delta 0.1`` as flags by name."""
    words = line.split()
    return {
        name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }


def only(question: Question) -> Row:
    (row,) = answer(question)
    return row


# Questions


class Refused(NamedTuple):
    """Flags that make no question, and a part of each of the errors, in their order."""

    line: str
    said: Sequence[str]


MISSING_SIGMA = "--sigma (to price it) or --epsilon"
REFUSED = [
    # Nothing to go by
    Refused("", [MISSING_SIGMA]),
    Refused("--epochs 5", [MISSING_SIGMA]),
    Refused("--solve sigma", ["Add --epsilon: without it there is no answer."]),
    Refused("--solve steps", ["Add --sigma, and --epsilon: without them there is no answer."]),
    Refused("--solve delta --sigma 1", ["Add --epsilon: without it there is no answer."]),
    Refused("--solve batch-size --epsilon 1", ["Add --sigma: without it"]),
    Refused(
        "--sigma 1 --dataset-size 9", ["Add --batch-size, and --epochs or --steps: without them"]
    ),
    Refused("--sigma 1 --dataset-size 9 --steps 1", ["Add --batch-size: "]),
    Refused("--sigma 1 --dataset-size 9 --batch-size 1", ["Add --epochs or --steps: without it"]),
    Refused("--dataset-size 9 --steps 1", [MISSING_SIGMA]),
    Refused("--sigma 1 --epsilon 1 --dataset-size 9", ["Add --batch-size: "]),
    Refused(
        "--solve batch-size --sigma 1 --epsilon 1 --dataset-size 9",
        ["Add --epochs or --steps: without it"],
    ),
    # Nothing left open
    Refused("--sigma 1 --epsilon 1 --epochs 1", ["--sigma, --epsilon and --epochs together"]),
    Refused("--sigma 1 --epsilon 1 --steps 1", ["--sigma, --epsilon and --steps together"]),
    Refused("--solve sigma --sigma 1 --epsilon 1", ["--sigma leaves nothing open"]),
    Refused("--solve steps --sigma 1 --epsilon 1 --epochs 1", ["--epochs leaves nothing open"]),
    Refused("--solve delta --sigma 1 --epsilon 1 --delta 0.1", ["--delta leaves nothing open"]),
    Refused(
        "--solve batch-size --sigma 1 --epsilon 1 --batch-size 9", ["--batch-size leaves nothing"]
    ),
    # One against the other
    Refused("--sigma 1 --epochs 1 --steps 1", ["--epochs and --steps contradict"]),
    Refused("--sigma 1 --dataset mnist --dataset-size 9", ["--dataset and --dataset-size"]),
    Refused("--sigma 1 --sampler fixed-size --accountant pld", ["cannot price fixed-size"]),
    Refused(
        "--sigma 1 --dataset digits --batch-size 1438",
        ["--batch-size (1438) must not be above the data set's size, 1437"],
    ),
    Refused(
        "--sigma 1 --dataset-size 9 --batch-size 10 --steps 1", ["must not be above the data set's"]
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
    Refused("--sigma 1 --runs 1", ["--runs must be at least 2"]),
    Refused("--epsilon 0", ["--epsilon must be above 0"]),
    Refused("--epsilon inf", ["--epsilon: 'inf' is not a number"]),
    # Names
    Refused("--sigma 1 --dataset mnits", ["Did you mean mnist"]),
    Refused("--sigma 1 --sampler possion", ["Did you mean poisson"]),
    Refused("--sigma 1 --accountant rpd", ["Did you mean rdp"]),
    Refused("--sigma 1 --solve stesp", ["Did you mean steps"]),
    # Too many
    Refused(f"--sigma {','.join(['1'] * 40)} --steps {','.join(['1'] * 40)}", ["1,600 prices"]),
    # All at once
    Refused(
        "--sigma -1,x --epochs 1.5 --steps 2 --delta 7 --sampler none --accountant none --runs 0",
        [
            "--sigma must be",
            "--sigma: 'x'",
            "--epochs: '1.5'",
            "--delta must be",
            "--runs must be",
            "there is no sampler",
            "there is no accountant",
            "--epochs and --steps",
        ],
    ),
    Refused(
        "--dataset-size 9 --dataset mnist --solve batch-size --batch-size 1 --delta 2",
        [
            "--delta must be",
            "--dataset and --dataset-size",
            "--batch-size leaves nothing open",
            "Add --sigma, and --epsilon: without them there is no answer.",
        ],
    ),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.line[:70] or "nothing")
def test_every_fault_of_a_question_is_named_at_once(refused: Refused) -> None:
    with pytest.raises(InputError) as caught:
        ask(typed(refused.line))
    assert len(caught.value.errors) == len(refused.said)
    for part in refused.said:
        assert [part in error for error in caught.value.errors].count(True) == 1, part


def test_a_data_set_fills_in_what_is_not_given() -> None:
    assert ask(typed("--sigma 1")) == Question(
        dataset_size=60_000,
        batch_size=256,
        sigmas=(1.0,),
        lengths=(("epochs", 5),),
        epsilons=(),
        delta=DELTA,
        solve=None,
        sampler="poisson",
        accountants=("pld",),
        runs=1,
    )
    digits = ask(typed("--dataset digits --epsilon 2,3 --batch-size 9"))
    assert (digits.dataset_size, digits.batch_size, digits.lengths) == (1437, 9, (("epochs", 20),))
    assert (digits.solve, digits.epsilons, digits.sigmas) == ("sigma", (2.0, 3.0), ())


def test_what_is_left_open_is_what_is_asked_for() -> None:
    unseen = "--dataset-size 9 --sigma 1 --epsilon 1"
    assert ask(typed(f"{unseen} --batch-size 3")).solve == "steps"
    assert ask(typed("--solve sigma --epsilon 1")).solve == "sigma"
    assert ask(typed("--solve delta --sigma 1 --epsilon 1")).delta == 0
    batch = ask(typed(f"{unseen} --solve batch-size --steps 1,2 --accountant all"))
    assert (batch.batch_size, batch.lengths) == (0, (("steps", 1), ("steps", 2)))
    assert batch.accountants == ("pld", "rdp")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_brings_the_accountant_that_can_price_it(sampler: str) -> None:
    offered = SAMPLERS[sampler].accountants
    line = f"--sigma 1 --sampler {sampler}"
    assert ask(typed(line)).accountants == offered[:1]
    assert ask(typed(f"{line} --accountant all")).accountants == offered


@pytest.mark.parametrize(("delta", "said"), [(0.025, 1), (0.0249, 0), (1e-9, 0)])
def test_a_delta_of_one_record_or_more_is_noted(delta: float, said: int) -> None:
    notes = list(question.notes(list(question.answer(replace(SMALL, delta=delta)))))
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
    assert (row.dataset_size, row.batch_size, row.runs, row.selection) == (40, 8, 1, "none")
    assert (row.sampler, row.accountant, row.adjacency) == ("poisson", "pld", "add-or-remove-one")
    assert "10 Poisson-sampled steps at rate 0.2 with noise multiplier 6" in row.statement


def test_a_grid_is_every_combination_in_the_order_given() -> None:
    rows = list(answer(replace(SMALL, sigmas=(8.0, 6.0), lengths=(("steps", 3), ("epochs", 1)))))
    assert [(row.noise_multiplier, row.steps) for row in rows] == [(8, 3), (8, 5), (6, 3), (6, 5)]
    assert [row.epsilon for row in rows] == [total_epsilon((row.events[0],), DELTA) for row in rows]


@pytest.mark.parametrize(
    ("sampler", "adjacency", "compositions"),
    [
        ("poisson", "add-or-remove-one", 7),
        ("balls-in-bins", "add-or-remove-one", 2),
        ("shuffle", "zero-out", 2),
        ("fixed-size", "replace-one", 7),
    ],
)
def test_each_sampler_has_its_adjacency_and_count(
    sampler: str, adjacency: str, compositions: int
) -> None:
    question = replace(SMALL, sampler=sampler, lengths=(("steps", 7),))
    row = only(replace(question, accountants=SAMPLERS[sampler].accountants[:1]))
    assert (row.sampler, row.adjacency, row.compositions) == (sampler, adjacency, compositions)
    assert f"under {adjacency} adjacency" in row.statement


def test_an_epoch_in_bins_or_by_shuffling_is_one_gaussian() -> None:
    once = total_epsilon((TrainingEvent(1.0, 6.0, 1),), DELTA)
    for sampler in ("balls-in-bins", "shuffle"):
        row = only(replace(SMALL, sampler=sampler, lengths=(("epochs", 1),)))
        assert row.epsilon == pytest.approx(once, rel=1e-9)


def test_no_noise_and_no_steps() -> None:
    without_noise = only(replace(SMALL, sigmas=(0.0,)))
    assert without_noise.epsilon == math.inf
    assert without_noise.statement == "No privacy: no noise was added."
    without_steps = only(replace(SMALL, lengths=(("epochs", 0),)))
    assert (without_steps.epsilon, without_steps.compositions) == (0, 0)


def test_a_batch_of_all_records() -> None:
    row = only(replace(SMALL, batch_size=40))
    assert row.events == (TrainingEvent(1.0, 6.0, 2, "poisson", 1),)
    assert row.epsilon == total_epsilon((row.events[0],), DELTA)


# The bill for several runs


@pytest.mark.privacy
def test_the_best_of_several_runs_costs_more_and_both_ways_are_told() -> None:
    single, composed, selected = answer(replace(SMALL, runs=4))
    assert single == only(SMALL)
    assert composed.epsilon == total_epsilon((replace(single.events[0], steps=40),), DELTA)
    assert (composed.steps, composed.epochs, composed.compositions) == (40, 8.0, 40)
    assert selected.epsilon == repeat_and_select(single.events, DELTA, 4)
    assert (selected.accountant, composed.accountant) == ("rdp", "pld")
    assert [row.selection for row in (single, composed, selected)] == [
        "none",
        "composition",
        "repeat-and-select",
    ]
    assert min(composed.epsilon, selected.epsilon) > single.epsilon
    for row in (composed, selected):
        assert row.runs == 4
        assert "best of" in row.statement
        assert "add-or-remove-one adjacency" in row.statement
    assert "random number" in selected.statement


def test_the_bill_of_runs_without_noise_promises_nothing() -> None:
    for row in answer(replace(SMALL, sigmas=(0.0,), runs=2)):
        assert row.epsilon == math.inf
        assert "differentially private" not in row.statement


# The other way round


SOLVED: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("sigma", {"sigmas": ()}),
    ("steps", {"lengths": ()}),
    ("batch-size", {"batch_size": 0}),
    ("delta", {"delta": 0.0}),
]
METHODS = [("poisson", "pld"), ("poisson", "rdp"), ("balls-in-bins", "pld"), ("shuffle", "rdp")]


@pytest.mark.long
@pytest.mark.privacy
@pytest.mark.parametrize(("sampler", "accountant"), METHODS)
@pytest.mark.parametrize(("solve", "open_"), SOLVED, ids=[name for name, _ in SOLVED])
def test_an_answer_is_within_the_target_and_the_next_is_not(
    solve: str, open_: Mapping[str, Any], sampler: str, accountant: str
) -> None:
    # At 1.2 the delta would be 1e-15, where rounding is all that it consists of.
    target = 0.5 if solve == "delta" else 1.2
    question = replace(
        SMALL, sampler=sampler, accountants=(accountant,), epsilons=(target,), solve=solve, **open_
    )
    row = only(question)
    (event,) = row.events

    def price(delta: float = row.delta, **change: Any) -> float:
        return total_epsilon((replace(event, **change),), delta, accountant)

    assert row.solved == solve
    assert row.epsilon <= target
    assert price() <= target
    if solve == "sigma":
        assert price(noise_multiplier=event.noise_multiplier - 1e-5) > target
    elif solve == "steps":
        assert price(steps=event.steps + 1) > target
    elif solve == "delta":
        assert price(delta=row.delta * 0.999) > target
    else:
        assert row.batch_size is not None
        assert row.sampling_rate == row.batch_size / 40
        assert event.steps == 2 * event.steps_per_epoch == 2 * math.ceil(40 / row.batch_size)


@pytest.mark.privacy
@pytest.mark.parametrize("length", [("epochs", 3), ("steps", 12)])
@pytest.mark.parametrize("sampler", ["poisson", "shuffle"])
def test_the_largest_batch_is_the_largest_of_all(sampler: str, length: tuple[str, int]) -> None:
    question = replace(
        SMALL, dataset_size=12, sampler=sampler, accountants=("rdp",), lengths=(length,)
    )
    prices = {batch: only(replace(question, batch_size=batch)).epsilon for batch in range(1, 13)}
    open_ = replace(question, batch_size=0, solve="batch-size")
    for target in sorted(prices.values()):
        row = only(replace(open_, epsilons=(target,)))
        assert row.batch_size == max(batch for batch, cost in prices.items() if cost <= target)


@pytest.mark.parametrize(("sigma", "budget"), [(6.0, 0.7), (100.0, 0.1)])
def test_the_longest_run_is_found_without_pricing_far_longer_ones(
    sigma: float, budget: float
) -> None:
    question = replace(SMALL, sigmas=(sigma,), lengths=(), epsilons=(budget,), solve="steps")
    began = time.process_time()
    only(question)
    assert time.process_time() - began <= 5


def test_no_step_needs_no_noise() -> None:
    question = replace(SMALL, sigmas=(), lengths=(("steps", 0),), epsilons=(1.0,), solve="sigma")
    try:
        row = only(question)
    except (BudgetError, InputError):
        return
    assert row.epsilon == 0


#: A batch of 1, noise of 1 and few steps: the largest privacy losses are too rare to be counted.
RARE = replace(SMALL, dataset_size=200, batch_size=1, sigmas=(1.0,), lengths=(("steps", 5),))


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("question", "target"),
    [(SMALL, 0.01), (SMALL, 0.1), (SMALL, 1.0), (RARE, 0.1), (RARE, 3.0)],
    ids=["least", "small", "usual", "likely", "rare"],
)
def test_a_solved_delta_serves_forward(question: Question, target: float) -> None:
    row = only(replace(question, delta=0.0, epsilons=(target,), solve="delta"))
    assert only(replace(question, delta=row.delta)).epsilon <= target


@pytest.mark.privacy
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_noise_never_promises_a_delta_of_nothing(accountant: str) -> None:
    # Gaussian noise is (epsilon, 0)-private for no epsilon, however unlikely the rest is.
    question = replace(SMALL, accountants=(accountant,), delta=0.0, epsilons=(100.0,))
    assert only(replace(question, solve="delta")).delta > 0


@pytest.mark.long
@pytest.mark.privacy
def test_steps_of_fixed_size_batches_are_as_many_as_the_budget_pays_for() -> None:
    question = replace(SMALL, sampler="fixed-size", accountants=("rdp",), lengths=())
    (event,) = only(replace(question, epsilons=(2.0,), solve="steps")).events
    assert (
        total_epsilon((event,), DELTA)
        <= 2.0
        < total_epsilon((replace(event, steps=event.steps + 1),), DELTA)
    )


OUT_OF_REACH: Sequence[tuple[str, float, Mapping[str, Any]]] = [
    ("sigma", 1e-6, {"sigmas": ()}),
    ("steps", 1e-3, {"lengths": ()}),
    ("batch-size", 1e-3, {"batch_size": 0}),
]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("solve", "target", "open_"), OUT_OF_REACH, ids=[solve for solve, _, _ in OUT_OF_REACH]
)
def test_a_target_out_of_reach_comes_with_the_nearest_figure(
    solve: str, target: float, open_: Mapping[str, Any], accountant: str
) -> None:
    question = replace(SMALL, epsilons=(target,), solve=solve, accountants=(accountant,), **open_)
    nearest = {
        "sigma": replace(SMALL, sigmas=(1e4,)),
        "steps": replace(SMALL, lengths=(("steps", 1),)),
        "batch-size": replace(SMALL, batch_size=1),
    }[solve]
    cost = only(replace(nearest, accountants=(accountant,))).epsilon
    assert cost > target
    with pytest.raises(BudgetError) as caught:
        only(question)
    assert format_epsilon(cost) in str(caught.value)


# Curves


def test_the_curve_by_steps_rises_to_the_price() -> None:
    row = only(replace(SMALL, lengths=(("steps", 30),)))
    steps, prices = zip(*pricing.epsilon_by_steps(row), strict=True)
    assert (steps[0], steps[-1]) == (1, 30)
    assert list(steps) == sorted(steps)
    assert list(prices) == sorted(prices)
    assert prices[0] == total_epsilon((replace(row.events[0], steps=1),), DELTA)
    assert prices[-1] == row.epsilon


def test_the_curve_by_delta_falls_through_the_price() -> None:
    row = only(SMALL)
    curve = dict(pricing.epsilon_by_delta(row, [1e-7, DELTA, 1e-3]))
    assert curve[1e-7] > curve[DELTA] == row.epsilon > curve[1e-3]


def test_branches_that_differ_share_what_they_share() -> None:
    first = TrainingEvent(0.2, 6.0, 10, "poisson", 5)
    row = pricing.price((first, replace(first, noise_multiplier=8.0, steps=5)), DELTA)
    assert (row.noise_multiplier, row.sampling_rate, row.steps) == (None, 0.2, 15)
    assert row.epochs == 3
    assert row.epsilon > total_epsilon((first,), DELTA)
