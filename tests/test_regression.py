"""Numbers to predict: from a table to a report, its metrics, losses and covered errors."""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from torch.nn.functional import huber_loss, l1_loss, mse_loss

from dpmac_cli import ArrayData, load
from dpmac_cli.accounting.events import score_event
from dpmac_cli.data.units import Units, units_of
from dpmac_cli.dp.losses import HUBER, build_loss
from dpmac_cli.errors import InputError
from dpmac_cli.models.dataset import on_device
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.tasks.metrics import number
from dpmac_cli.tasks.regression import Regression, coverage
from dpmac_cli.training.evaluation import Evaluation
from dpmac_cli.training.private_scores import release_score
from tests import care
from tests.care import assert_noise_of, moved_by_units, owners_of, source, write_table
from tests.digits_runs import report_of
from tests.helpers import inspect
from tests.typed import dpmac

SCHEMA = """
label: {column: cost, range: [0, 10000], transform: log1p}
columns:
  age: {range: [0, 100]}
  smoker: {categories: ["no", "yes"]}
drop: [person]
"""


TASK = Regression(("cost",), 0.0, 10_000.0, "log1p")
PLAIN = Regression(("y",), -5.0, 20.0)


def refused(where: Path, label: str, cell: object = 100, **options: Any) -> str:
    """What is said of a schema's label, and of a table whose second record has a target."""
    records = care.rows(10, "cost")
    records[1]["cost"] = cell
    write_table(where, records, re.sub("label: .*", f"label: {label}", SCHEMA))
    with pytest.raises(InputError) as caught:
        inspect(source(where, **options))
    return str(caught.value)


def evaluated(
    task: Regression, records: int = 60, *, units: Units | None = None, seed: int = 0
) -> Evaluation:
    """Random outputs for random targets; one output is not a number."""
    draws, shape = torch.Generator().manual_seed(seed), (records, 1)
    targets = 2 * torch.rand(shape, generator=draws) - 1
    outputs = targets + 0.7 * torch.randn(shape, generator=draws)
    outputs[0] = math.nan
    return Evaluation(0.0, outputs, targets, task, units)


def _page(folder: Path, where: Path) -> str:
    assert dpmac("report", folder, "--html", where / "page.html").exit_code == 0
    return (where / "page.html").read_text()


@pytest.mark.promise("reading")
@pytest.mark.parametrize("task", [TASK, PLAIN])
def test_no_target_is_beyond_its_range_and_none_moves_another(task: Regression) -> None:
    low, high = task.low, task.high
    values = np.linspace(low, high, 20)
    scaled = task.encoded(np.concatenate([values, [1e300, -1e300]]))
    assert scaled[[0, 19, 20, 21], 0].tolist() == [-1, 1, 1, -1]
    np.testing.assert_array_equal(scaled[:20], task.encoded(values))
    outputs = np.array([[1e30], [-math.inf]], np.float32)
    assert task.answers(outputs).tolist() == [[high], [low]]


@pytest.mark.parametrize("found", [PLAIN, TASK], ids=["plain", "log1p"])
def test_scores_are_those_of_numbers_beyond_the_range_that_counts_found(found: Regression) -> None:
    """The network learns the ends of the range, and is scored on the numbers themselves."""
    wide = replace(found, low=found.low - 0.5, high=10 * found.high)
    numbers = np.array([found.low - 0.25, found.low, found.high, 4 * found.high])
    declared = ArrayData(
        np.zeros((4, 1)),
        numbers,
        np.ones((4, 1)),
        numbers,
        low=-1,
        high=1,
        target_low=wide.low,
        target_high=wide.high,
        target_transform=wide.transform,
    )
    data = resolve(dataset=declared, batch_size=4, sigma=4).data
    assert data is not None
    narrowed = on_device(data, torch.device("cpu")).predicting(found)
    assert narrowed.test is not None
    learned = narrowed.train.labels.numpy()[:, 0]
    assert learned.tolist() == pytest.approx([-1, -1, 1, 1], abs=1e-6)
    assert np.abs(learned).max() <= 1
    outputs = np.array([[-2.0], [-1.0], [1.0], [1.0]], np.float32)
    compared = found.compared(outputs, narrowed.test.labels.numpy(), np.arange(4))
    assert compared.truth == pytest.approx(numbers, rel=1e-4, abs=1e-4)
    assert compared.guess == pytest.approx(np.array([found.low] * 2 + [found.high] * 2))


def test_records_that_differ_in_their_target_alone_are_no_copies() -> None:
    x, y = np.zeros((40, 1)), np.arange(40) / 100
    data = ArrayData(x, y, low=-1, high=1, target_low=0, target_high=1)
    found = resolve(dataset=data, batch_size=4, sigma=4).data
    assert found is not None
    assert found.notes.copies == 0


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("{column: cost, range: [9, 3]}", "must be smaller than the second.*Swap them"),
        ("{column: cost, range: [3, 3]}", "3 to 3, but the first number must be smaller"),
        ("{column: cost, range: [-2, 5], transform: log1p}", "needs a range above -1"),
        ("{column: cost, range: [1, 5], kind: count}", "there is no such key"),
        ("{column: cost}", r"classes: \[no, yes\], or for numbers.*range: \[0, 100\]"),
        ("{column: cost, classes: [a, b], range: [0, 1]}", "needs either the names of its classes"),
        ("{column: cost, classes: [a, b], transform: log1p}", "is for columns of type number"),
        ("{column: cost, range: [0, 9], transform: log}", "'none' or 'log1p'"),
        (
            "[{column: cost, range: [0, 9]}, {column: person, range: [0, 9]}]",
            "label: Input should be a mapping",
        ),
    ],
)
def test_a_label_that_cannot_be_meant_is_explained(tmp_path: Path, label: str, said: str) -> None:
    assert re.search(said, refused(tmp_path, label))


def test_arrays_that_cannot_be_meant_are_explained() -> None:
    x, y = np.zeros((40, 1)), np.linspace(0, 1, 40)

    def said(y: Any = y, **declared: Any) -> str:
        with pytest.raises(InputError) as caught:
            resolve(dataset=ArrayData(x, y, low=-1, high=1, **declared), batch_size=4)
        return str(caught.value)

    both = {"target_low": 0, "target_high": 1}
    assert "must be one number each" in said(target_low=0)
    assert "1e+30. Swap them." in said(target_low=1, target_high=0)
    assert "contradict" in said(**both, classes=["a", "b"])
    assert "y must have one number per record, such as y[:, 0]" in said(np.zeros((40, 3)), **both)
    several = {"target_low": [0, 1], "target_high": [1, 2]}
    assert "must be one number each" in said(**several)
    assert "must be one number each" in said(np.zeros((40, 2)), **several)
    assert "For several labels, train one model for each" in said(np.zeros((40, 2), int))
    assert "one number per record" in said(np.zeros((40, 1, 1)), **both)
    assert "y has a target that is NaN or infinite" in said([*y[:3], math.nan, *y[4:]], **both)
    assert "target_low and target_high" in said()


LOSSES: dict[str, Any] = {
    "mse": mse_loss,
    "huber": lambda o, t, **k: huber_loss(o, t, delta=HUBER, **k) / HUBER,
    "quantile:0.9": l1_loss,  # weights after clipping make the quantile of it
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients_are_torchs(name: str) -> None:
    draws = torch.Generator().manual_seed(0)
    outputs = torch.randn(9, 1, generator=draws, dtype=torch.float64, requires_grad=True)
    targets = 2 * torch.rand(9, 1, generator=draws) - 1
    loss = build_loss(name)
    expected = LOSSES[name](outputs, targets.double(), reduction="none")[:, 0]
    torch.testing.assert_close(loss(outputs, targets), expected)
    (found,) = torch.autograd.grad(loss(outputs, targets).sum(), outputs)
    (wanted,) = torch.autograd.grad(expected.sum(), outputs)
    torch.testing.assert_close(found, wanted)
    assert torch.autograd.gradcheck(lambda o: loss(o, targets), outputs)


@pytest.mark.parametrize("task", [TASK, PLAIN])
def test_metrics_are_scikit_learns(task: Regression) -> None:
    result = evaluated(task)
    truth = task.decoded(result.labels.numpy())[1:, 0]
    guess = task.decoded(result.logits.numpy())[1:, 0]
    found = replace(result, logits=result.logits[1:], labels=result.labels[1:]).metrics
    assert found["mae"] == pytest.approx(sklearn.mean_absolute_error(truth, guess))
    assert found["rmse"] == pytest.approx(sklearn.root_mean_squared_error(truth, guess))
    assert found["r2"] == pytest.approx(sklearn.r2_score(truth, guess))
    assert found.keys() == {metric.name for metric in task.metrics}


@pytest.mark.parametrize("task", [TASK, PLAIN])
def test_an_output_that_is_no_number_is_as_wrong_as_possible(task: Regression) -> None:
    result = evaluated(task)
    truth = float(task.decoded(result.labels.numpy())[0, 0])
    lost = replace(result, logits=result.logits[:1], labels=result.labels[:1])
    wanted = max(truth - task.low, task.high - truth)
    assert lost.metric("mae") == pytest.approx(wanted)
    assert result.unanswered == 1


def test_intervals_are_by_unit_and_cover_the_truth() -> None:
    """Ten copies of each record say no more than one."""
    one = evaluated(PLAIN, 80)
    ten = torch.arange(80).repeat_interleave(10)
    many = Evaluation(0.0, one.logits[ten], one.labels[ten], PLAIN, units_of(ten.numpy()))
    ends, grouped = (part.intervals(resamples=200) for part in (one, many))
    for name in ("mae", "rmse", "r2"):
        widths = [found[name][1] - found[name][0] for found in (ends, grouped)]
        assert widths[1] == pytest.approx(widths[0], rel=0.15), name
    true, inside = evaluated(PLAIN, 1_000_000).metric("mae"), 0
    for seed in range(100):
        found = evaluated(PLAIN, 60, seed=seed + 1)
        low, high = found.intervals(["mae"], resamples=50)["mae"]
        inside += low <= true <= high
    assert inside >= 88


@pytest.mark.promise("scores")
@pytest.mark.parametrize("task", [TASK, PLAIN])
@pytest.mark.parametrize("grouped", [False, True])
def test_one_unit_moves_the_covered_error_by_at_most_one(task: Regression, grouped: bool) -> None:
    """Wild outputs and NaN are among them, and one that is wrong in everything."""
    owners = owners_of(grouped=grouped)
    result = evaluated(task, len(owners))
    result.logits[1:6] = torch.tensor([1e30, -1e30, math.inf, -math.inf, math.nan])[:, None]
    result.labels[1:6] = torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0])[:, None]
    whole, moves = moved_by_units(result, owners, grouped=grouped)
    assert 0.5 < max(moves) <= 1
    assert whole / len(set(owners)) == pytest.approx(_by_unit(result, owners), abs=1e-3)


def _by_unit(result: Evaluation, owners: Any) -> float:
    """The mean over units of the mean over their records of errors as shares of the range."""
    assert isinstance(result.task, Regression)
    errors = result.task.shares(result.compared)
    return float(np.mean([errors[owners == unit].mean() for unit in set(owners)]))


@pytest.mark.promise("scores")
def test_the_noise_of_a_covered_error_has_the_promised_distribution() -> None:
    result, sigma, size = evaluated(PLAIN, 400), 3.0, 400
    noise = Noise(bytes(32), secure=True)
    found = [release_score(result, score_event(sigma), noise.at(step)) for step in range(1, 1501)]
    values, deviation = [score.score for score in found], sigma * PLAIN.width / size
    assert_noise_of(found, values, result.metric("mae"), deviation)
    assert all(score.score_interval[0] <= score.interval[0] + 1e-9 for score in found)


@pytest.mark.long
def test_a_number_is_predicted_in_its_own_units(tmp_path: Path) -> None:
    file = write_table(tmp_path, care.rows(60, "cost"), SCHEMA)
    folder = tmp_path / "run"
    flags = f"--schema {tmp_path}/care.yaml --unit person --sigma 1 --epochs 4 --seed 0"
    done = dpmac("train", "--dataset", file, *flags.split(), "--out", folder)
    assert done.exit_code == 0, done.output
    (said,) = re.findall(r"\ntest MAE ([\d.,]+) on \d+ samples", done.stdout)
    report = report_of(folder)
    mae = report["scores"]["mae"]
    assert number(mae["value"]) == said
    assert report["data"]["target"] == TASK.facts["target"]
    assert mae["low"] < mae["value"] < mae["high"]
    assert "range of the target" in json.dumps(report["sentences"]["computed_from_records"])
    assert re.search(rf"MAE +{said}", dpmac("eval", folder).stdout)
    asked = dpmac("eval", folder, "--json").stdout
    assert json.loads(asked)["target"] == report["data"]["target"]
    assert f"MAE {said}" in dpmac("runs", tmp_path).stdout
    _check_predictions(folder, tmp_path)


def _check_predictions(folder: Path, where: Path) -> None:
    """`predict` writes the number, and the code of the card returns the same."""
    new = where / "new.csv"
    new.write_text("age,smoker,id\n30,no,a\n80,yes,b\n")
    done = dpmac("predict", folder, new, "--out", where / "p.csv")
    assert done.exit_code == 0, done.output
    written = list(csv.DictReader((where / "p.csv").read_text().splitlines()))
    assert [*written[0]] == ["row", "id", "predicted"]
    found = load(folder).predict(new).answers
    values = [[float(row["predicted"])] for row in written]
    np.testing.assert_allclose(values, found, rtol=1e-5)
    card = (folder / "model-card.md").read_text()
    assert "| target | `cost`, one number from 0 to 10000 (log1p) |" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    known: dict[str, Any] = {}
    code = code.replace("model.safetensors", f"{folder}/model.safetensors")
    exec(code.replace("new.csv", str(new)), known)
    np.testing.assert_allclose(known["predictions"].answers, found, rtol=1e-6)


def test_a_target_at_the_prediction_counts_as_at_or_below_it() -> None:
    ends = np.array([[-1.0], [1.0], [1.0], [0.0]])
    found = PLAIN.compared(ends, np.array([[-1.0], [1.0], [0.0], [1.0]]), np.arange(4))
    assert coverage(found) == 0.75


@pytest.mark.parametrize("task", [TASK, PLAIN], ids=["log1p", "plain"])
def test_a_model_file_keeps_all_that_is_declared_of_a_target(task: Regression) -> None:
    assert Regression.of_facts(json.loads(json.dumps(task.facts))) == task


@pytest.mark.parametrize("task", [TASK, PLAIN], ids=["log1p", "plain"])
def test_a_constant_prediction_is_the_median_or_the_mean(task: Regression) -> None:
    result = evaluated(task)
    truth, values = result.compared.truth, result.values()
    assert values["constant_mae"] == pytest.approx(np.abs(truth - np.median(truth)).mean())
    assert values["constant_rmse"] == pytest.approx(truth.std())


def test_of_two_errors_the_smaller_is_better() -> None:
    metrics = {of.name: of for of in PLAIN.metrics}
    assert all(metrics[n].better(1) > metrics[n].better(2) for n in ("mae", "rmse"))
    assert metrics["r2"].better(2) > metrics["r2"].better(1)
