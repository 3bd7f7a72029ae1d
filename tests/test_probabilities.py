"""Calibration by a noisy histogram: what is printed and published, what it costs, what it reads."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import norm
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import dpmac_cli
from dpmac_cli import resume, train
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import noise_of_share
from dpmac_cli.accounting.events import TrainingEvent, histogram_event
from dpmac_cli.config import planning
from dpmac_cli.config.plan import SHARE, Plan, histograms_of
from dpmac_cli.config.settings import Settings
from dpmac_cli.data.cache import WHOLE, Rows, kept_file
from dpmac_cli.data.units import units_of
from dpmac_cli.dp.histogram import NoisyHistogram
from dpmac_cli.errors import InputError
from dpmac_cli.models.dataset import Split
from dpmac_cli.randomness.keystream import STREAMS, make_keys
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.release.train import finish, resume_folder, train_plan
from dpmac_cli.runs import checkpoint
from dpmac_cli.runs import trainer as training
from dpmac_cli.runs.ledger import read_ledger
from dpmac_cli.runs.prepare import prepare
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.trainer import Trainer, make_trainer
from dpmac_cli.tasks.calibration import SIGNED_MIDDLES, Calibration, cells, fitted
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.training.calibration import drawn_from
from tests.digits_runs import SEED, digits_config, report_of, run_trainer, train_digits
from tests.kinks import at_kinks
from tests.typed import dpmac

#: A run that is cheap to price, with its target.
SHORT: dict[str, Any] = {"epsilon": 1.0, "steps": 12, "batch_size": 1437, "model": "linear"}
NAMES = ("well", "ill")


def patients(records: int, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Four numbers of each patient, from 0 to 1, of which two tell a little of who is ill."""
    draws = np.random.default_rng(seed)
    x = draws.random((records, 4)).astype(np.float32)
    return x, (draws.random(records) < 0.3 + 0.25 * (x[:, 0] > x[:, 1])).astype(np.int64)


def clinic(records: int = 3000, **more: Any) -> dpmac_cli.ArrayData:
    """Records of patients, and as many to test on."""
    return dpmac_cli.ArrayData(
        *patients(records), *patients(records, 1), classes=NAMES, low=0, high=1, **more
    )


def write_table(where: Path) -> None:
    """Write patients as a table with its schema."""
    x, y = patients(3000)
    rows = (",".join(map(str, [*row, NAMES[label]])) for row, label in zip(x, y, strict=True))
    (where / "patients.csv").write_text("\n".join(["a,b,c,d,state", *rows]) + "\n")
    columns = "".join(f"  {name}: {{range: [0, 1]}}\n" for name in "abcd")
    label = "label: {column: state, classes: [well, ill]}\n"
    (where / "patients.yaml").write_text(f"{label}columns:\n{columns}")


def plan_of(**settings: Any) -> Plan:
    return resolve(dataset=clinic(), device="cpu", **settings).plan


# From the outside.


def test_a_table_is_calibrated_by_one_command(tmp_path: Path) -> None:
    """It says so before, and its log loss falls, where no decision changes."""
    write_table(tmp_path)
    found = {}
    for kind in ("histogram", "none"):
        flags = ["--schema", "patients.yaml", "--seed", "0", "--out", kind, "--calibration", kind]
        flags += ["--model", "mlp-small"]  # its clip norm is too small for its probabilities
        result = dpmac("train", "--dataset", "patients.csv", "--epsilon", "1", *flags)
        assert result.exit_code == 0, result.output
        assert ("calibrated after the last step" in result.stdout) == (kind == "histogram")
        found[kind] = report_of(kind)
    calibrated, plain = found["histogram"], found["none"]
    assert plain["network"]["calibration"] is None
    # The training is the same but for the noise of its 98%.
    assert calibrated["scores"]["log_loss"]["value"] < plain["scores"]["log_loss"]["value"] - 0.02
    assert calibrated["scores"]["log_loss"]["value"] < calibrated["scores"]["log_loss"]["constant"]
    assert (
        calibrated["scores"]["calibration_error"]["value"]
        < plain["scores"]["calibration_error"]["value"] / 2
    )
    assert calibrated["epsilon"] <= 1
    assert "1 histogram with noise multiplier" in calibrated["sentences"]["guarantee"]
    # Evaluation, prediction and the card's code use the same numbers.
    shown = json.loads(dpmac("eval", "histogram", "--json").stdout)
    assert shown["log_loss"] == pytest.approx(calibrated["scores"]["log_loss"]["value"], rel=1e-6)
    assert dpmac("account", "histogram").exit_code == 0


def test_predictions_have_calibrated_probabilities_and_the_decisions_of_the_network() -> None:
    finished = train(dataset=clinic(), epsilon=1.0, seed=0, out="run")
    found = finished.report["network"]["calibration"]
    assert found["slope"] != 1
    predictions = dpmac_cli.load("run").predict(patients(500, 2)[0])
    outputs = predictions.outputs
    odds = found["slope"] * (outputs[:, 1] - outputs[:, 0]) + found["intercept"]
    assert predictions.probabilities[:, 1] == pytest.approx(expit(odds), abs=1e-6)
    assert list(predictions.predicted) == [NAMES[k] for k in outputs.argmax(1)]
    assert {*predictions.predicted} == {*NAMES}


def test_the_code_of_a_card_computes_the_same_probabilities() -> None:
    train(dataset=clinic(), epsilon=1.0, seed=0, out="run", model="linear")
    card = Path("run/model-card.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code.replace('"model.safetensors"', '"run/model.safetensors"'), scope)
    x = patients(50, 2)[0]
    rows = torch.from_numpy(x)
    predictions = dpmac_cli.load("run").predict(x)
    assert scope["probabilities"](rows).numpy() == pytest.approx(predictions.answers, abs=1e-5)
    assert scope["predict"](rows).tolist() == predictions.outputs.argmax(1).tolist()
    assert "| histogram of the training records | 1 | every unit | 1 |" in card


def test_card_and_page_show_reliability_by_the_noisy_histogram() -> None:
    finished = train(dataset=clinic(), epsilon=1.0, seed=0, out="run")
    found = finished.report["network"]["calibration"]
    card = Path("run/model-card.md").read_text()
    [table] = re.findall(r"## Reliability of probabilities\n(.*?)\n## ", card, re.DOTALL)
    assert "Probabilities are those of `ill`." in table
    rows = [line.split(" | ") for line in table.splitlines() if "% to " in line]
    fit = Calibration(found["slope"], found["intercept"], tuple(found["counts"]), found["noise"])
    assert len(rows) == len(fit.reliability()) > 1
    for row, bin_ in zip(rows, fit.reliability(), strict=True):
        shown = [float(value.strip("|% ")) / 100 for value in row[:3]]
        assert shown == pytest.approx([*bin_[:3]], abs=6e-5)
        assert bin_.low <= bin_.share <= bin_.high
    page = dpmac("report", "run")
    assert page.exit_code == 0, page.output
    written = Path("report.html").read_text()
    assert 'aria-label="Reliability of probabilities"' in written
    plain: dict[str, Any] = {"epsilon": 1.0, "calibration": "none", "out": "plain"}
    train(dataset=clinic(200), **plain)
    assert "Reliability" not in Path("plain/model-card.md").read_text()


def test_reliability_is_the_share_of_each_bin_with_its_noise() -> None:
    right = noisy(1.0, 0.0, 4000, 5.0)
    bins = Calibration.fitted(right, 5.0, 4000).reliability()
    assert len(bins) >= 8
    covered = [of.low <= of.trained <= of.high for of in bins]
    assert np.mean(covered) > 0.7
    assert all(of.trained == pytest.approx(of.calibrated, abs=0.05) for of in bins)
    silent = Calibration(1.0, 0.0, ((1.0, 2.0),) * 10, 26.0)
    assert silent.reliability() == []


# When.


@pytest.mark.parametrize(
    "settings",
    [
        {"sigma": 6.0},
        {"epsilon": 1.0, "recipe": "paper"},
        {"no_dp": True},
        {"epsilon": 1.0, "canaries": 100},
        {"epsilon": 1.0, "calibration": "none"},
    ],
)
def test_nothing_is_counted_that_was_not_asked_for(settings: dict[str, Any]) -> None:
    plan = digits_config(**{**SHORT, "epsilon": None, **settings})
    assert plan.histogram is None
    assert plan.planned == (plan.event,)
    wanted = 1 if settings.get("epsilon") else None
    cost = total_epsilon((plan.event,), 1e-5) if plan.private else None
    assert wanted is None or 0.99 < (cost or 0.0) <= wanted


def test_programs_and_their_steps_are_not_calibrated() -> None:
    data = clinic(200)
    settings: dict[str, Any] = {"epsilon": 1.0, "steps": 2, "batch_size": 200}
    private = dpmac_cli.make_private(nn.Linear(4, 2), data, **settings)
    assert private.plan.histogram is None
    with pytest.raises(InputError, match="calibration is for dpmac train"):
        dpmac_cli.make_private(nn.Linear(4, 2), data, calibration="histogram", **settings)


def test_a_task_of_a_program_is_left_alone() -> None:
    class Own(Classification):
        """Classes of a program."""

    class Numbers(Regression):
        """Numbers of a program."""

    assert Classification(NAMES).calibrates
    assert Regression(("y",), 0, 1).calibrates
    assert not Own(NAMES).calibrates
    assert not Numbers(("y",), 0, 1).calibrates
    plan = plan_of(epsilon=1.0)
    facts = replace(plan.facts, task=Own(NAMES))
    asked = Settings.model_validate({"epsilon": 1.0})
    assert planning.plan(asked, facts).histogram is None
    with pytest.raises(InputError, match="is for classes and numbers"):
        planning.plan(Settings.model_validate({"epsilon": 1.0, "calibration": "histogram"}), facts)


# What it costs.


@pytest.mark.promise("histogram")
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0, 8.0])
def test_the_histogram_has_its_share_of_the_budget(epsilon: float) -> None:
    """By the closed form of Gaussian differential privacy, 1 / sigma^2 is 2% of mu^2."""
    sigma = noise_of_share(epsilon, 1e-5, SHARE)
    mu = 1 / (sigma * math.sqrt(SHARE))
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-2)
    assert delta <= 1e-5


@pytest.mark.promise("histogram")
def test_steps_and_histogram_compose_as_the_closed_form_says() -> None:
    """Full batches: mu^2 = T / s^2 + 1 / sigma^2."""
    steps, histogram = TrainingEvent(1.0, 30.0, 80), histogram_event(26.0)
    mu = math.sqrt(80 / 30.0**2 + 1 / 26.0**2)
    epsilon = total_epsilon((steps, histogram), 1e-5)
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=2e-2)
    assert total_epsilon((steps,), 1e-5) < epsilon


@pytest.mark.promise("histogram")
@pytest.mark.parametrize(("noise", "counted"), [(4.0, 1.0), (1.0, 0.3)])
def test_steps_and_histogram_leak_what_they_are_said_to_by_monte_carlo(
    noise: float, counted: float
) -> None:
    """Losses of pairs of outputs, drawn: delta at the epsilon that is claimed."""
    rate, sigma, count = 0.2, 1.5, 12
    events = (TrainingEvent(rate, sigma, count), histogram_event(noise, counted))
    epsilon = total_epsilon(events, 1e-2)
    draws = np.random.default_rng(0)
    inside = draws.random((400_000, count)) < rate
    x = draws.normal(size=inside.shape) * sigma + inside
    loss = np.log(1 - rate + rate * np.exp((2 * x - 1) / (2 * sigma**2))).sum(1)
    y = draws.normal(size=len(loss)) * noise + (draws.random(len(loss)) < counted)
    loss += np.log(1 - counted + counted * np.exp((2 * y - 1) / (2 * noise**2)))
    delta = float(np.maximum(0, 1 - np.exp(epsilon - loss)).mean())
    assert delta == pytest.approx(1e-2, rel=0.1)


@pytest.mark.promise("histogram")
def test_a_sample_of_many_records_is_counted_and_charged_as_one() -> None:
    """After few steps: a twentieth of the records that they draw, or 100 times the noise."""
    noise = noise_of_share(8.0, 1e-5, SHARE)

    def rate_of(steps: int, batch: int, records: int) -> float:
        event = TrainingEvent(batch / records, 1.0, steps)
        _, [histogram] = histograms_of(8.0, 1e-5, event, ((), (SHARE,)), records)
        return histogram.sampling_rate

    assert rate_of(20, 1024, 50_000) == pytest.approx(20 * 1024 / 20 / 50_000)
    assert rate_of(1, 16, 50_000) == pytest.approx(100 * noise / 50_000)
    assert rate_of(20, 500, 500) == rate_of(2, 10, 400) == 1
    settings: dict[str, Any] = {"epsilon": 8.0, "steps": 3, "batch_size": 64, "model": "linear"}
    report = train(dataset=clinic(), seed=0, out="run", **settings).report
    steps, histogram = (TrainingEvent(**event) for event in report["events"])
    assert histogram == histogram_event(noise, 100 * noise / 3000)
    assert report["epsilon"] == total_epsilon((steps, histogram), 1e-5)
    assert report["epsilon"] <= 8
    # The counts are those of all records, as far as the sample tells.
    assert np.array(report["network"]["calibration"]["counts"]).sum() == pytest.approx(
        3000, abs=800
    )
    assert report["network"]["calibration"]["noise"] == pytest.approx(
        noise / histogram.sampling_rate
    )
    rate = f"{histogram.sampling_rate:.4g}"
    assert f"1 histogram at rate {rate} with noise multiplier" in report["sentences"]["guarantee"]
    card = Path("run/model-card.md").read_text()
    row = f"| histogram of the training records | 1 | poisson | {histogram.sampling_rate:.6g} |"
    assert row in card
    assert "a random sample" in report["sentences"]["calibration"]


@pytest.mark.promise("histogram")
def test_a_target_pays_for_steps_and_histogram_together() -> None:
    plan = digits_config(**SHORT)
    assert plan.histogram == histogram_event(noise_of_share(1.0, 1e-5, SHARE))
    assert 0.999 < total_epsilon(plan.planned, 1e-5) <= 1
    report = train_digits(**SHORT, out="run").report
    events = tuple(TrainingEvent(**event) for event in report["events"])
    assert events == plan.planned
    assert report["epsilon"] == total_epsilon(events, 1e-5)


@pytest.mark.parametrize("asked", [{"epsilon": 1.0}, {"sigma": 6.0, "calibration": "histogram"}])
def test_the_cost_is_known_beforehand(asked: dict[str, Any]) -> None:
    flags = [f"--{name}={value}" for name, value in asked.items()]
    result = dpmac("account", "--dataset", "digits", "--epochs", "2", "--json", *flags)
    [row] = json.loads(result.stdout)["rows"]
    plan = digits_config(epochs=2, **asked)
    assert plan.histogram is not None
    assert row["epsilon"] == total_epsilon(plan.planned, 1e-5)
    assert row["noise_multiplier"] == plan.event.noise_multiplier
    shown = dpmac("account", "--dataset", "digits", "--epochs", "2", *flags).stdout
    assert f"1, with noise multiplier {plan.histogram.noise_multiplier:.10g}" in shown


@pytest.mark.promise("histogram")
def test_a_given_noise_pays_for_a_histogram_in_addition() -> None:
    plan = digits_config(sigma=6.0, calibration="histogram", steps=12)
    assert plan.event == digits_config(sigma=6.0, steps=12).event
    assert plan.histogram is not None
    assert total_epsilon(plan.planned, 1e-5) > total_epsilon((plan.event,), 1e-5)
    short = resolve(
        dataset="digits", sigma=6.0, calibration="histogram", steps=40, max_epsilon=0.4
    ).plan
    report = finish(train_plan(short)).report
    assert report["epsilon"] <= 0.4
    assert [event["histogram"] for event in report["events"]] == [False, True]


# When it is charged, and how often.


class Killed(BaseException):
    """The process is killed."""


def kill_at(name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a run where a function of its trainer's module is called."""

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(training, name, killed)
        with pytest.raises(Killed):
            finish(train_plan(plan))


def histograms(folder: str) -> int:
    """The number of histograms in the ledger of a run."""
    account = read_ledger(Path(folder))
    assert account is not None
    return sum(event.histogram for event in account.events)


@pytest.mark.promise("histogram")
def test_the_histogram_is_charged_before_training_records_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kill in between pays for it. Nothing is left of the budget for another one."""
    kill_at("training_histogram", digits_config(**SHORT, out="run"), monkeypatch)
    assert histograms("run") == 1
    events = [*resume_folder("run")]
    assert any("is not calibrated" in note for note in events[0].notes)  # type: ignore[union-attr]
    report = events[-1].report  # type: ignore[union-attr]
    assert report["network"]["calibration"] is None
    assert report["epsilon"] <= 1
    assert sum(event["histogram"] for event in report["events"]) == 1
    assert report["scores"]["accuracy"]["value"] is not None


@pytest.mark.promise("histogram")
def test_a_run_without_a_target_pays_for_both_after_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SHORT | {"epsilon": None, "sigma": 6.0, "calibration": "histogram", "out": "run"}
    kill_at("training_histogram", digits_config(**settings), monkeypatch)
    report = resume("run").report
    assert report["network"]["calibration"] is not None
    assert sum(event["histogram"] for event in report["events"]) == 2


@pytest.mark.promise("histogram")
def test_a_stored_histogram_is_not_paid_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a second one shown: the kill comes after it was stored, before the first score."""
    kill_at("evaluate", digits_config(**SHORT | {"steps": 1}, out="run"), monkeypatch)
    kept = checkpoint.read(Path("run")).record.histogram
    assert kept is not None
    assert histograms("run") == 1
    report = resume("run").report
    assert histograms("run") == 1
    assert sorted(event["histogram"] for event in report["events"]) == [False, True]
    assert np.array(report["network"]["calibration"]["counts"]).ravel().tolist() == list(
        kept.counts
    )
    assert report["epsilon"] <= 1
    assert report["scores"]["log_loss"]["value"] is not None


@pytest.mark.promise("histogram")
def test_the_noise_of_a_histogram_is_not_that_of_anything_else() -> None:
    """With the same noise, the difference of a histogram and a step would be exact."""
    plan = digits_config(**SHORT, seed=SEED)
    keys = make_keys(SEED)
    account = Account(event=plan.event, histogram=plan.histogram)
    task = prepare(plan, torch.device("cpu"), keys)
    trainer = make_trainer(plan, task, keys, account)
    assert trainer.counted is not None
    mine, like = trainer.counted[1].at(1), torch.empty(4, dtype=torch.float64)
    found = mine.standard_normal(like)
    assert [name for name in STREAMS if getattr(keys, name) == trainer.counted[2]] == ["counted"]
    for name in STREAMS:
        other = Noise(getattr(keys, name), secure=True).at(1).standard_normal(like)
        assert torch.equal(found, other) == (name == "counts"), name


@pytest.mark.promise("histogram")
def test_more_epochs_are_counted_and_charged_again() -> None:
    first = train_digits(**SHORT, out="run").report
    more = resume("run", {"steps": "14", "out": "longer"}).report
    assert sum(event["histogram"] for event in more["events"]) == 2
    assert more["network"]["calibration"]["counts"] != first["network"]["calibration"]["counts"]
    assert more["epsilon"] > first["epsilon"]


def test_an_interrupted_run_is_calibrated_at_its_end_alone() -> None:
    asked = iter(range(100))
    stopped = finish(train_plan(digits_config(**SHORT, out="run"), lambda: next(asked) >= 5))
    assert stopped.state == "interrupted"
    assert stopped.report["network"]["calibration"] is None
    assert histograms("run") == 0
    finished = resume("run")
    assert finished.report["network"]["calibration"] is not None
    assert finished.report["epsilon"] <= 1


# What it reads.


def counted(
    trainer: Trainer, sigma: float = 0.01, rate: float = 1.0, key: bytes = bytes(32)
) -> NDArray[np.float64]:
    """The counts of a trainer with hardly any noise."""
    layers = LayerDraws(bytes(32))
    trainer.counted = histogram_event(sigma, rate), Noise(bytes(32), secure=True), key, layers
    trainer.histogram, trainer.steps = None, trainer.state.step
    assert [trainer.calibrate(), trainer.calibrate()] == [True, False]
    found: NoisyHistogram = vars(trainer)["histogram"]
    return found.counts[0]


def lose(split: Split) -> Split:
    """The same number of records, whose pixels are others."""
    return replace(split, images=255 - split.images, labels=0 * split.labels)


@pytest.mark.promise("histogram")
def test_training_records_are_counted_and_test_records_never() -> None:
    trainer = run_trainer(digits_config(sigma=6.0, steps=3, model="linear"))
    for _ in range(3):
        trainer.step()
    data = trainer.data
    with trainer.published() as model:
        outputs = model(data.standardised(data.train.images)).detach().numpy()
    of = cells(outputs, data.train.labels.numpy())
    exact = np.bincount(of[of >= 0], minlength=10)
    assert counted(trainer) == pytest.approx(exact, abs=0.1)
    trainer.sums.data = replace(data, test=lose(data.tested))
    assert counted(trainer) == pytest.approx(exact, abs=0.1)
    trainer.sums.data = replace(data, train=lose(data.train))
    assert abs(counted(trainer) - exact).max() > 1


class AgainstZero(nn.Module):
    """Two logits, of which the second is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros_like(x)], 1)


@pytest.mark.promise("histogram")
def test_a_training_record_more_moves_no_other_to_another_cell() -> None:
    """Copies of a record at an edge, whose last bit must not depend on how many there are."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, 1)), AgainstZero())
    images = at_kinks(net[1], 42)
    data = dpmac_cli.ArrayData(
        images[:40], np.arange(40) % 2, images[40:], [0, 1], classes=["a", "b"]
    )
    settings: dict[str, Any] = {"sigma": 4, "steps": 1, "batch_size": 8, "device": "cpu"}
    trainer = run_trainer(resolve(dataset=data, model="linear", **settings).plan, model=net)

    def found(image: Any, copies: int) -> NDArray[np.float64]:
        x = torch.from_numpy(image).expand(copies, *trainer.data.train.images.shape[1:])
        of = Split(x, torch.zeros(copies, dtype=torch.long))
        trainer.sums.data = replace(trainer.data, train=of)
        return counted(trainer).round()

    moves = [abs(found(image, 20) - found(image, 19)).sum() for image in images]
    assert max(moves) <= 1


@pytest.mark.promise("histogram")
def test_each_record_is_drawn_for_a_histogram_independently_and_in_secret() -> None:
    rate, records = 0.3, 40
    event = histogram_event(1.0, rate)
    split = Split(torch.arange(records)[:, None], torch.arange(records))
    drawn = np.zeros((600, records))
    for place in range(len(drawn)):
        found = drawn_from(split, event, place.to_bytes(32, "little"))
        assert torch.equal(found.images[:, 0], found.labels)
        drawn[place, found.labels.numpy()] = 1
    assert abs(drawn.mean(0) - rate).max() < 5 * math.sqrt(rate * (1 - rate) / len(drawn))
    assert drawn.sum(1).var() == pytest.approx(records * rate * (1 - rate), rel=0.25)
    assert abs(np.corrcoef(drawn.T) - np.eye(records)).max() < 0.2
    trainer = run_trainer(digits_config(sigma=6.0, steps=3, model="linear"))
    one, other, again = (counted(trainer, 0.001, 0.5, bytes([k]) * 32) for k in (1, 2, 1))
    assert one == pytest.approx(again, abs=0.1)
    assert abs(one - other).max() > 1
    assert 2 * (one / 2).round() == pytest.approx(one, abs=0.1), "half as many, each for two"


def test_records_of_a_file_are_drawn_like_those_in_memory(tmp_path: Path) -> None:
    numbers = np.arange(80, dtype=np.float32).reshape(40, 2)
    layout = tmp_path / f"rows{WHOLE}", 40, (2,), numbers.dtype
    file = kept_file(*layout, lambda: iter([(numbers, {})]))
    labels, order = torch.arange(40), np.random.default_rng(0).permutation(40)
    far = Split(torch.empty(40, 2, device="meta"), labels, file=Rows(file, order))
    near = Split(torch.from_numpy(numbers[order]), labels)
    event = histogram_event(1.0, 0.4)
    found = [drawn_from(split, event, bytes(32)) for split in (far, near)]
    (x, y), (other, same) = (split.at(slice(3, 9)) for split in found)
    assert torch.equal(x, other)
    assert torch.equal(y, same)


@pytest.mark.promise("histogram")
def test_a_person_is_drawn_for_a_histogram_with_all_records_or_none() -> None:
    names = np.random.default_rng(0).permutation(np.repeat(np.arange(30), np.arange(1, 31)))
    labels = torch.from_numpy(names)
    split = Split(labels[:, None], labels, units=units_of(names))
    sizes, event = [], histogram_event(1.0, 0.4)
    for place in range(200):
        found = drawn_from(split, event, place.to_bytes(32, "little"))
        kept = found.labels.numpy()
        assert sorted(kept) == sorted(names[np.isin(names, kept)])
        assert found.units is not None
        assert [*np.bincount(found.units.owners)] == [int(name) + 1 for name in np.unique(kept)]
        sizes.append(found.size)
    assert np.mean(sizes) == pytest.approx(12, abs=1)


@pytest.mark.promise("histogram")
def test_a_person_with_a_thousand_records_counts_once() -> None:
    x, y = patients(3000)
    persons = np.append(np.zeros(1000, int), np.arange(1, 2001))
    data = dpmac_cli.ArrayData(
        x,
        y,
        *patients(50, 1),
        classes=NAMES,
        low=0,
        high=1,
        unit=persons,
        unit_test=np.arange(50) + 5000,
    )
    plan = resolve(dataset=data, epsilon=1.0, seed=0, out="run", steps=12, batch_size=2001).plan
    assert plan.facts.train_size == 2001
    trainer = run_trainer(plan)
    assert counted(trainer).sum() == pytest.approx(2001, abs=0.2)
    found = finish(train_plan(plan)).report
    assert "in which each counts at most once" in found["sentences"]["calibration"]


# What follows from it.


def noisy(
    slope: float,
    intercept: float,
    records: int,
    noise: float,
    seed: int = 0,
    size: float = 3,
) -> NDArray[np.float64]:
    """Noisy counts of a network whose probabilities need this slope and intercept."""
    draws = np.random.default_rng(seed)
    odds = draws.normal(size=records) * size
    labels = draws.random(records) < expit(slope * odds + intercept)
    outputs = np.stack([0 * odds, odds], 1)
    of = cells(outputs, labels.astype(np.int64))
    counts = np.bincount(of, minlength=20).reshape(-1, 2)
    return counts + noise * draws.normal(size=counts.shape)


@pytest.mark.parametrize(("slope", "intercept"), [(0.3, 0.0), (0.5, 0.6), (1.6, -0.4)])
def test_slope_and_intercept_are_found(slope: float, intercept: float) -> None:
    found = fitted(noisy(slope, intercept, 20_000, 26.0), 26.0, 20_000, signed=True)
    assert found[0] == pytest.approx(slope, rel=0.25)
    assert found[1] == pytest.approx(intercept, abs=0.15)


def log_loss(fit: tuple[float, float], truth: tuple[float, float], size: float = 3) -> float:
    """Expected log loss of a slope and an intercept where others are right."""
    odds = np.random.default_rng(1).normal(size=4000) * size
    shares, z = expit(truth[0] * odds + truth[1]), fit[0] * odds + fit[1]
    return float((shares * np.logaddexp(0, -z) + (1 - shares) * np.logaddexp(0, z)).mean())


def fits_of(
    truth: tuple[float, float], records: int, noise: float, draws: int, size: float = 3
) -> list[tuple[float, float]]:
    """Slopes and intercepts that follow from draws of records and noise."""
    counts = [noisy(*truth, records, noise, seed, size) for seed in range(draws)]
    return [fitted(found, noise, records, signed=True) for found in counts]


@pytest.mark.parametrize(("records", "noise"), [(500, 50.0), (800, 26.0), (200, 50.0)])
def test_a_gain_that_the_noise_hides_changes_next_to_nothing(records: int, noise: float) -> None:
    """Networks that are calibrated as trained: the log loss rises by at most 0.005 on average."""
    right = 1.0, 0.0
    fits = fits_of(right, records, noise, 60)
    assert np.mean([fit == right for fit in fits]) > 0.5
    harm = np.array([log_loss(fit, right) for fit in fits]) - log_loss(right, right)
    assert harm.mean() <= 0.005
    assert np.mean(harm > 0.02) <= 0.02


def test_many_records_show_that_a_network_is_calibrated() -> None:
    fits = fits_of((1.0, 0.0), 50_000, 26.0, 20)
    assert all(abs(math.log(slope)) < 0.25 for slope, _ in fits)


@pytest.mark.parametrize(
    ("truth", "records", "size"),
    [((0.08, -0.8), 5000, 8), ((0.3, 0.0), 1000, 4), ((0.3, -1.0), 1000, 5)],
)
def test_networks_that_are_far_too_sure_end_below_the_loss_of_a_constant(
    truth: tuple[float, float], records: int, size: float
) -> None:
    """At epsilon 1, above it before."""
    losses = [log_loss(fit, truth, size) for fit in fits_of(truth, records, 26.4, 40, size)]
    share = expit(truth[0] * np.random.default_rng(1).normal(size=4000) * size + truth[1]).mean()
    constant = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert log_loss((1.0, 0.0), truth, size) > constant + 0.1
    assert np.mean(losses) < constant


def test_a_network_with_few_records_of_a_class_is_left_as_it_is() -> None:
    """Counts of a run on 1,592 requests for a loan, of which 196 were refused, at epsilon 1.

    In many draws of the noise the network looks worse than the shares of the classes. It is better.
    """
    seen = [[2, 2], [44, 35], [96, 454], [54, 905]]
    counts = np.array([*[[0, 0]] * 4, *seen, *[[0, 0]] * 2], float)
    middles = np.array(SIGNED_MIDDLES)

    def loss(fit: tuple[float, float]) -> float:
        odds = fit[0] * middles + fit[1]
        of_labels = np.stack([np.logaddexp(0, odds), np.logaddexp(0, -odds)], 1)
        return float((counts * of_labels).sum() / counts.sum())

    draws = np.random.default_rng(0)
    noises = 26.4 * draws.normal(size=(150, *counts.shape))
    fits = [fitted(counts + noise, 26.4, 1592, signed=True) for noise in noises]
    rises = np.array([loss(fit) for fit in fits]) - loss((1.0, 0.0))
    assert rises.mean() <= 0.005
    assert np.mean(rises > 0.02) <= 0.01


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kind", ["one class", "nothing", "negative"])
def test_odd_counts_give_finite_numbers(kind: str, classes: int) -> None:
    counts = np.zeros((10 if classes == 2 else 5, 2))
    if kind == "one class":
        counts[:, 1] = 1000.0
    if kind == "negative":
        counts -= 100.0
    found = Calibration.fitted(counts, 26.0, 1000)
    assert 0 < found.slope < math.inf
    assert math.isfinite(found.intercept)


def test_cells_of_records_that_are_hard_to_place() -> None:
    """NaN is in no cell, infinities are in the last ones, and a tie has one place."""
    outputs = np.array([[0, math.nan], [0, math.inf], [math.inf, 0], [0, 0], [0, 1.0], [0, -1.0]])
    labels = np.ones(6, np.int64)
    assert cells(outputs, labels).tolist() == [-1, 19, 1, 11, 13, 9]
    three = np.array([[0, 5, 3.0], [0, 5, 3.0], [0, 5, 3.0], [math.inf] * 3, [math.nan, 0, 0]])
    assert cells(three, np.array([1, 2, 0, 2, 0])).tolist() == [5, 4, -1, 1, -1]


@pytest.mark.parametrize("records", [20, 100])
def test_few_records_and_a_class_that_nobody_has_end_in_a_model(records: int) -> None:
    x, _ = patients(records)
    y = np.zeros(records, int)
    data = dpmac_cli.ArrayData(x, y, x, y, classes=NAMES, low=0, high=1)
    report = train(dataset=data, epsilon=1.0, out="run").report
    assert report["network"]["calibration"]["slope"] > 0
    assert math.isfinite(report["scores"]["log_loss"]["value"])


class Lost(nn.Module):
    """NaN for records whose first row has a bright pixel, which no trial has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1)
        bright = rows[:, :8].amax(1, keepdim=True) == 1.0
        found: Tensor = torch.where(bright, math.nan, self.head(rows))
        return found


def test_outputs_that_are_not_numbers_are_left_out() -> None:
    trainer = run_trainer(digits_config(sigma=6.0, steps=1), model=Lost())
    counts = counted(trainer)
    assert np.isfinite(counts).all()
    assert 100 < counts.sum() < 1000


def test_counts_that_no_line_fits_are_believed_themselves() -> None:
    """Counts of a run on a table of two dimensions: a line of slope 1 is the nearest to them."""
    below = [[31, 31], [586, 259], [997, 83], [386, 30], [257, 137]]
    above = [[163, 262], [21, 283], [4, 552], [9, 221], [0, 24]]
    slope, _ = fitted(np.array([*below, *above], float), 26.4, 4240, signed=True)
    assert 0.3 < slope < 0.6
