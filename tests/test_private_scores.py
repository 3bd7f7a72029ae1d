"""Test scores released with noise: sensitivity, noise, privacy cost, and what a run shows."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import dpmac_cli
from dpmac_cli import resume
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent, score_event
from dpmac_cli.accounting.risk import gaussian_mu, trade_off
from dpmac_cli.data.units import units_of
from dpmac_cli.dp.mechanism import GRID
from dpmac_cli.errors import BudgetError, InputError, ModelError
from dpmac_cli.models.dataset import Split
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.release.train import train_plan
from dpmac_cli.runs import checkpoint, prepare
from dpmac_cli.runs import trainer as training
from dpmac_cli.runs.ledger import Ledger, read_ledger
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.session import Update
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.metrics import EvaluationMetric
from dpmac_cli.training.evaluation import Evaluation
from dpmac_cli.training.private_scores import PrivateScore, counts, release_score
from tests.care import assert_noise_of, moved_by_units, owners_of
from tests.digits_runs import (
    SEED,
    digits_config,
    metrics_of,
    run_trainer,
    train_digits,
    train_events,
)
from tests.helpers import class_task
from tests.kinks import at_kinks
from tests.tiers import rest_long

CLASSES = 3
#: It costs less than some scores and more than others.
TRAINING = TrainingEvent(0.05, 3.0, 50)


def outputs(records: int) -> Evaluation:
    """Random outputs, right for about half of the records; one of them is not a number."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (records,), generator=draws)
    logits = torch.randn(records, CLASSES, generator=draws)
    logits[torch.arange(records), labels] += 0.7
    logits[0] = math.nan
    return Evaluation(0.0, logits, labels, class_task(CLASSES))


@pytest.mark.promise("scores")
@pytest.mark.parametrize("grouped", [False, True])
def test_one_unit_moves_the_counts_by_at_most_one(grouped: bool) -> None:
    owners = owners_of(grouped=grouped)
    _, moves = moved_by_units(outputs(len(owners)), owners, grouped=grouped)
    assert max(moves) <= 1
    assert max(moves) > 0.6


@pytest.mark.promise("scores")
def test_the_noise_has_the_promised_distribution() -> None:
    result, sigma, size = outputs(400), 3.0, 400
    noise = Noise(bytes(32), secure=True)
    found = [release_score(result, score_event(sigma), noise.at(step)) for step in range(1, 2001)]
    values = [score.accuracy for score in found]
    assert_noise_of(found, values, result.accuracy, sigma / size)


class AgainstZero(nn.Module):
    """Two logits, of which the second is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros_like(x)], 1)


@pytest.mark.promise("scores")
def test_a_test_record_more_moves_no_other_to_another_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies of a record at a tie, whose last bit must not depend on how many there are.

    MKL rounds the last rows of a narrow product in another way: all but a multiple of four.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, 1)), AgainstZero())
    images = at_kinks(net[1], 42)
    data = dpmac_cli.ArrayData(
        images[:40], np.arange(40) % 2, images[40:], [0, 1], classes=["a", "b"]
    )
    settings: dict[str, Any] = {"sigma": 4, "steps": 1, "batch_size": 8, "device": "cpu"}
    plan = resolve(dataset=data, model="linear", cover_scores=True, **settings).plan
    trainer = run_trainer(plan, model=net)
    trainer.covered = score_event(4.0), Noise(b"k" * 32), LayerDraws(bytes(32))
    monkeypatch.setattr(training, "release_score", lambda result, *_: result)

    def right(image: Any, copies: int) -> int:
        x = torch.from_numpy(image).expand(copies, *trainer.data.tested.images.shape[1:])
        trainer.sums.data = replace(
            trainer.data, test=Split(x, torch.zeros(copies, dtype=torch.long))
        )
        trainer.state.step += 1
        score: Any = trainer.score()
        counted: int = round(score.accuracy * copies)
        return counted

    moves = [abs(right(image, 20) - right(image, 19)) for image in images]
    assert max(moves) <= 1


# The privacy cost.


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of mu-Gaussian DP, by its closed form."""

    def excess(epsilon: float) -> float:
        tail = math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)
        return float(norm.cdf(-epsilon / mu + mu / 2) - tail - delta)

    return float(brentq(excess, 0.0, 100.0))


@pytest.mark.promise("scores")
@pytest.mark.parametrize(("sigma", "count"), [(0.9, 1), (2.0, 5), (30.0, 1)])
def test_scores_cost_what_gaussian_mechanisms_do(sigma: float, count: int) -> None:
    tested = TrainingEvent(1.0, sigma, count, records="test")
    exact = gaussian_epsilon(count**0.5 / sigma, 1e-5)
    assert exact <= total_epsilon((tested,), 1e-5) <= exact * 1.001 + 1e-4
    for accountant in ("pld", "rdp"):
        alone = [total_epsilon((event,), 1e-5, accountant) for event in (TRAINING, tested)]
        assert total_epsilon((TRAINING, tested), 1e-5, accountant) == max(alone)


@pytest.mark.promise("scores")
def test_risk_is_that_of_the_split_with_more_to_lose() -> None:
    alphas = (0.001, 0.01, 0.1)
    for sigma in (3.0, 30.0):
        tested = TrainingEvent(1.0, sigma, 1, records="test")
        both = trade_off((TRAINING, tested), alphas)
        one, other = (trade_off((event,), alphas) for event in (TRAINING, tested))
        assert (both <= np.minimum(one, other) + 1e-12).all()
        worse = max(gaussian_mu((TRAINING,)), gaussian_mu((tested,)))
        assert gaussian_mu((TRAINING, tested)) == pytest.approx(worse, rel=2e-3)


@pytest.mark.promise("scores")
def test_the_score_is_charged_once_the_last_step_may_have_begun(tmp_path: Path) -> None:
    """A run may be killed between its last step and its score, or after that."""
    score, end = score_event(2.0), 10
    for base in range(end + 1):
        part = TrainingEvent(0.1, 3.0, end - base)
        for begun in range(base, end + 1):
            account = Ledger(event=part, base=base, begun=begun, score=score, run=tmp_path)
            account.record()
            assert of_test_records(tmp_path) == [score] * (base < begun == end)
            account.begin(score)
            assert of_test_records(tmp_path) == [score]


def of_test_records(run: Path) -> list[TrainingEvent]:
    """The events on test records in the ledger of a run."""
    found = read_ledger(run)
    assert found is not None
    return [event for event in found.events if event.records == "test"]


@pytest.mark.promise("scores")
def test_the_score_costs_what_training_does() -> None:
    settings: dict[str, Any] = {"recipe": "paper", "batch_size": 1437}  # cheap to price
    plan = resolve(dataset="digits", epsilon=3, cover_scores=True, **settings).plan
    score = plan.score
    assert score is not None
    assert score == TrainingEvent(1.0, score.noise_multiplier, 1, records="test")
    training = total_epsilon((plan.event,), plan.settings.delta)
    assert 0.99 * training <= total_epsilon((score,), plan.settings.delta) <= training


# Runs.

COVERED: dict[str, Any] = {
    **{"cover_scores": True, "sigma": "6", "steps": 36},
    "recipe": "paper",
}


@pytest.mark.promise("scores")
def test_only_the_score_that_is_paid_for_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = []

    def kept(result: Evaluation, *args: Any, **rest: Any) -> PrivateScore:
        exact.append(result.accuracy)
        return release_score(result, *args, **rest)

    monkeypatch.setattr("dpmac_cli.runs.trainer.release_score", kept)
    events, finished = train_events(digits_config(**COVERED))
    shown = [event.result for event in events if isinstance(event, Update) and event.evaluated]
    assert [type(result) for result in shown] == [PrivateScore] * 3
    accuracies = [line["test_accuracy"] for line in metrics_of(finished.folder)]
    assert [value is None for value in accuracies] == [True, True, False]
    assert len(exact) == 1
    report, score = finished.report, digits_config(**COVERED).score
    assert score is not None
    [released_score] = [event for event in report["events"] if event["records"] == "test"]
    assert (released_score["steps"], released_score["noise_multiplier"]) == (
        1,
        score.noise_multiplier,
    )
    assert report["scores"]["accuracy"]["value"] == accuracies[-1] not in exact
    low, high = (report["scores"]["accuracy"][end] for end in ("low", "high"))
    assert low < report["scores"]["interval"][0] < report["scores"]["interval"][1] < high
    released = {"samples", "accuracy", "noise", "interval"}
    assert {"loss", "auroc", "log_loss"} < report["scores"].keys()
    nothing = (None, {"value": None})
    known = {name: value for name, value in report["scores"].items() if value not in nothing}
    assert known.keys() == released
    assert known["accuracy"].keys() == {"value", "low", "high"}
    card = (finished.folder / "model-card.md").read_text()
    assert "| scores of the test records | protected |" in card
    assert "None" not in card
    long = [repr(value).encode() for value in exact if len(repr(value)) > 8]  # none by chance
    for file in finished.folder.iterdir():
        if file.is_file():
            assert not any(value in file.read_bytes() for value in long)


@pytest.mark.promise("scores")
def test_every_run_and_every_score_has_noise_of_its_own() -> None:
    """With the same noise, the difference of two scores would be exact."""
    keys = [make_keys(digits_config(**COVERED).settings.seed).scores for _ in range(2)]
    seeded = make_keys(SEED)
    every = {*keys, seeded.scores, seeded.noise, seeded.layers, seeded.sampler}
    assert len(every) == 6
    trainer = run_trainer(digits_config(**COVERED))
    errors = []
    for end in (12, 24, 36):
        while trainer.state.step < end:
            trainer.step()
        trainer.steps = end
        score: Any = trainer.score()
        errors.append(score.accuracy - trainer.evaluate().accuracy)
    assert len({round(error, 9) for error in errors}) == 3
    with pytest.raises(ValueError, match="step 36 is not after step 36"):
        trainer.score()


@pytest.mark.promise("scores")
def test_a_score_is_saved_before_it_is_shown() -> None:
    """Or a resume would release another one in its place."""
    for event in train_plan(digits_config(**COVERED, out="run")):
        if isinstance(event, Update) and event.evaluated and event.step == 36:
            break
    assert checkpoint.read(Path("run")).step == 36


@pytest.mark.promise("scores")
def test_a_resume_into_another_folder_keeps_the_promise_about_the_test_records() -> None:
    train_digits(out="exact")
    with pytest.raises(InputError, match="--cover-scores cannot change in a resume"):
        resume("exact", {"cover_scores": True, "steps": "6", "out": "longer"})
    train_digits(**COVERED, out="covered")
    finished = resume("covered", {"steps": "40", "out": "longer"})
    tested = [event for event in finished.report["events"] if event["records"] == "test"]
    assert len(tested) == 2
    cost = total_epsilon(tuple(TrainingEvent(**event) for event in tested), 1e-5)
    assert finished.report["epsilon"] >= cost


def cost_of_scores(report: dict[str, Any]) -> float:
    tested = [event for event in report["events"] if event["records"] == "test"]
    return total_epsilon(tuple(TrainingEvent(**event) for event in tested), 1e-5)


@pytest.mark.promise("scores")
@pytest.mark.parametrize("sampler", rest_long(["poisson", "random-allocation"]))
def test_a_budget_that_ends_a_run_pays_for_its_last_score(sampler: str) -> None:
    flags: dict[str, Any] = {
        "sampler": sampler,
        "sigma": 2.0,
        "epochs": 10,
        "batch_size": 64,
        "max_epsilon": 0.5,
    }
    finished = train_digits(cover_scores=True, out="run", **flags)
    privacy = finished.report
    assert finished.state == "budget-spent"
    assert sum(event["records"] == "test" for event in privacy["events"]) == 1
    assert 0.49 < cost_of_scores(finished.report) <= privacy["epsilon"] <= 0.5
    assert metrics_of(finished.folder)[-1]["epsilon"] == privacy["epsilon"]


@pytest.mark.promise("scores")
@pytest.mark.parametrize("more", rest_long([0.5, 3.0]))
def test_the_budget_in_another_folder_pays_for_the_scores_of_the_resumed_run(more: float) -> None:
    flags: dict[str, Any] = {"sigma": 6.0, "epochs": 8, "batch_size": 1437}  # cheap to price
    before = train_digits(cover_scores=True, out="parent", **flags).report
    budget = cost_of_scores(before) + more
    changes = {"epochs": "16", "max_epsilon": f"{budget}", "out": "longer"}
    try:
        report = resume("parent", changes).report
    except BudgetError:
        assert more < 1
    else:
        assert cost_of_scores(report) <= report["epsilon"] <= budget
        assert sum(event["records"] == "test" for event in report["events"]) > 1


class ByDeviation(nn.Module):
    """Divides by the deviation of a batch with a record of one colour, which no trial has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1)
        plain = (rows.amax(1) == rows.amin(1)).any()
        logits: Tensor = self.head(rows / torch.where(plain, rows.std(), 1.0))
        return logits


@pytest.mark.promise("scores")
def test_a_test_record_is_scored_alone() -> None:
    """One test record could change the scores of all others."""
    images = np.random.default_rng(0).integers(0, 256, (42, 8, 8), dtype=np.uint8)
    data = dpmac_cli.ArrayData(
        images[:40], np.arange(40) % 2, images[40:], [0, 1], classes=["a", "b"]
    )
    settings: dict[str, Any] = {"sigma": 4, "steps": 1, "batch_size": 8, "device": "cpu"}
    plan = resolve(dataset=data, model="linear", cover_scores=True, isolate=True, **settings).plan
    trainer = run_trainer(plan, model=ByDeviation())

    def logits(x: Tensor) -> Tensor:
        split = Split(x, torch.zeros(len(x), dtype=torch.long))
        trainer.sums.data = replace(trainer.data, test=split)
        return trainer.evaluate(covered=LayerDraws(bytes(32))).logits

    x = torch.randint(0, 100, (9, *trainer.data.tested.images.shape[1:]), dtype=torch.uint8)
    x[1] = 7
    assert torch.equal(logits(x)[0], logits(torch.cat([x[:1], 2 * x[1:].flip(0)]))[0])


@pytest.mark.promise("scores")
def test_data_without_the_units_of_its_test_records_is_refused() -> None:
    """Each record would count as a unit, so that one unit moves the count by all of its records."""
    y, unit = np.arange(400) % 2, np.arange(400) // 8
    np.savez("visits.npz", x=np.ones((400, 3)), y=y, unit=unit, low=-5, high=5)
    plan = resolve(dataset="visits.npz", cover_scores=True, sigma=4, steps=1, batch_size=5).plan
    data = prepare.load(plan, torch.device("cpu"))
    run_trainer(plan, data=data)
    with pytest.raises(InputError, match="test records or units, but epsilon was computed for"):
        run_trainer(plan, data=replace(data, test=replace(data.tested, units=None)))


@pytest.mark.promise("scores")
def test_epsilon_on_the_way_covers_the_score_once_it_was_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it costs more than the steps."""
    score = digits_config(**COVERED).score
    assert score is not None
    less_noise = score_event(score.noise_multiplier / 1.5)
    monkeypatch.setattr(
        "dpmac_cli.config.plan.calibrate_noise", lambda *_: less_noise.noise_multiplier
    )
    plan = digits_config(**COVERED)
    assert plan.score == less_noise
    events, _ = train_events(plan)
    for event in (event for event in events if isinstance(event, Update)):
        step, delta = event.step, plan.settings.delta
        costs = [plan.event.first(step)] + [less_noise] * (step == plan.event.steps)
        if event.epsilon is not None:
            assert event.epsilon >= max(total_epsilon((cost,), delta) for cost in costs) - 1e-12
    assert all(event.epsilon is not None for event in events[-2:] if isinstance(event, Update))


@pytest.mark.promise("scores")
def test_no_unit_adds_more_than_one_even_by_rounding() -> None:
    units = units_of(np.arange(399) // 3)  # thirds have no exact digits
    result = replace(outputs(399), units=units)
    assert counts(result).max() <= round(1 / GRID)


def own_task(**methods: Any) -> Classification:
    """A task of a program, with methods of its own."""
    kind: Any = type("Own", (Classification,), {"kind": "own", **methods})
    task: Classification = kind(class_task(CLASSES).names)
    return task


@pytest.mark.promise("scores")
@pytest.mark.parametrize(
    "counted",
    [
        lambda _, of: (np.full(len(of.truth), 10**6), 1),
        lambda _, of: (np.full(len(of.truth), -(10**6)), 1),
        lambda _, of: (100 * (of.truth == of.guess) / (of.truth == of.guess).sum().clip(1), 100),
    ],
    ids=["beyond", "below", "mixed"],
)
def test_a_task_of_a_program_moves_the_score_by_one_record_at_a_time(counted: Any) -> None:
    """Whatever it counts, and though it forgets a limit."""
    everything = replace(outputs(40), task=own_task(counted=counted))
    found, part = counts(everything), slice(7, 19)
    few = replace(everything, logits=everything.logits[part], labels=everything.labels[part])
    assert np.array_equal(counts(few), found[part])
    assert found.min() >= 0
    assert found.max() <= round(1 / GRID)


def _refuses(_: object, of: Any, *__: object) -> Any:
    raise ValueError(f"the records {of}")


@pytest.mark.promise("published")
@pytest.mark.parametrize("name", ["compared", "details", "constant", "remark", "counted"])
def test_what_a_task_says_of_a_record_is_not_repeated(name: str) -> None:
    result = replace(outputs(40), task=own_task(**{name: _refuses}))
    with pytest.raises(ModelError, match="ValueError at test_private_scores") as caught:
        _ = result.values(), result.remark("cross-entropy"), counts(result)
    assert "the records" not in str(caught.value)


@pytest.mark.promise("published")
def test_what_a_metric_says_of_a_record_is_not_repeated() -> None:
    metric = EvaluationMetric("own", "own", lambda of: _refuses(None, of))
    result = replace(outputs(40), task=own_task(metrics=(*Classification.metrics, metric)))
    for score in (lambda: result.metric("own"), result.values, lambda: result.intervals(["own"])):
        with pytest.raises(ModelError) as caught:
            score()
        assert "the records" not in str(caught.value)
