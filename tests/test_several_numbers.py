"""Several numbers to predict: from a table or arrays to a report and covered errors."""

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
from torch import Tensor

from dpmac_cli import ArrayData, from_dataframe, predict
from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.schema import Source
from dpmac_cli.data.table_schema import read_schema
from dpmac_cli.data.user_data import inspect
from dpmac_cli.dp.losses import build_loss
from dpmac_cli.errors import InputError
from dpmac_cli.release import run
from dpmac_cli.release.publish import scores
from dpmac_cli.tasks.known import METRICS, headline_in, task_of
from dpmac_cli.tasks.regression import Regression, SeveralNumbers
from dpmac_cli.tasks.task import number
from dpmac_cli.training.evaluation import Evaluation
from tests import care
from tests.care import moved_by_units, owners_of, source, write_table
from tests.helpers import load
from tests.typed import dpmac

SCHEMA = """
label:
  - {column: cost, range: [0, 10000], transform: log1p}
  - {column: days, range: [0, 40]}
columns:
  age: {range: [0, 100]}
  smoker: {categories: ["no", "yes"]}
drop: [person]
"""
COST, DAYS = Regression(("cost",), 0.0, 10_000.0, "log1p"), Regression(("days",), 0.0, 40.0)
TASK = SeveralNumbers.of([COST, DAYS])


def rows(persons: int = 60) -> list[dict[str, Any]]:
    return care.rows(persons, "cost", "days")


def table(where: Path, records: list[dict[str, Any]]) -> Path:
    return write_table(where, records, SCHEMA)


def evaluated(records: int = 60, seed: int = 0) -> Evaluation:
    draws = torch.Generator().manual_seed(seed)
    targets = 2 * torch.rand(records, 2, generator=draws) - 1
    outputs = targets + 0.7 * torch.randn(records, 2, generator=draws)
    return Evaluation(0.0, outputs, targets, TASK)


# What a person types, and what it prints.


@pytest.mark.long
def test_several_numbers_are_predicted_in_their_own_units(tmp_path: Path) -> None:
    file, folder = table(tmp_path, rows()), tmp_path / "run"
    flags = f"--schema {tmp_path}/care.yaml --unit person --sigma 1 --epochs 4 --seed 0"
    done = dpmac("train", "--dataset", file, *flags.split(), "--out", folder)
    assert done.exit_code == 0, done.output
    (said,) = re.findall(r"\ntest NMAE ([\d.]+) on \d+ samples", done.stdout)
    report = json.loads((folder / "report.json").read_text())
    test = report["test"]
    assert number(test["nmae"]) == said
    assert report["target"] == TASK.facts["target"]
    assert test["nmae_interval"][0] < test["nmae"] < test["nmae_interval"][1]
    assert [part["name"] for part in test["by_target"]] == ["cost", "days"]
    errors = [part["mae"] for part in test["by_target"]]
    assert test["nmae"] == pytest.approx((errors[0] / 10_000 + errors[1] / 40) / 2)
    assert "ranges of the targets" in json.dumps(report["privacy"]["computed_from_records"])
    shown = dpmac("eval", folder).stdout
    assert f"NMAE {said}" in shown
    assert re.search(rf"days +\S* *{number(errors[1])}", shown)
    asked = dpmac("eval", folder, "--json", "--plot", tmp_path / "e.svg").stdout
    assert json.loads(asked)["by_target"] == test["by_target"]
    assert (tmp_path / "e.svg").stat().st_size > 1000
    assert f"NMAE {said}" in dpmac("runs", tmp_path).stdout
    _check_predictions(folder, tmp_path)


def _check_predictions(folder: Path, where: Path) -> None:
    """`predict` writes a column per target, and the code of the card returns the same."""
    new = where / "new.csv"
    new.write_text("age,smoker,id\n30,no,a\n80,yes,b\n")
    done = dpmac("predict", folder, new, "--out", where / "p.csv")
    assert done.exit_code == 0, done.output
    written = list(csv.DictReader((where / "p.csv").read_text().splitlines()))
    assert [*written[0]] == ["row", "id", "predicted", "predicted_cost", "predicted_days"]
    found = predict(folder, new).answers
    names = ("predicted_cost", "predicted_days")
    values = [[float(row[name]) for name in names] for row in written]
    np.testing.assert_allclose(values, found, rtol=1e-5)
    assert [row["predicted"] for row in written] == [
        ";".join(row[name] for name in names) for row in written
    ]
    card = (folder / "model-card.md").read_text()
    assert "| targets | `cost`, `days`, numbers from 0 to 10000 (log1p), 0 to 40 |" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    known: dict[str, Any] = {}
    exec(code.replace("model.safetensors", f"{folder}/model.safetensors"), known)
    inputs = torch.tensor([[30.0, 1, 0, 0], [80.0, 0, 1, 0]]).view(2, 4, 1, 1)
    np.testing.assert_allclose(known["predict"](inputs), found, rtol=1e-3, atol=1e-2)


def test_a_covered_run_shows_its_error_and_nothing_else(tmp_path: Path) -> None:
    file, folder = table(tmp_path, rows()), tmp_path / "run"
    flags = f"--schema {tmp_path}/care.yaml --unit person --sigma 2 --cover-scores --epochs 2"
    done = dpmac("train", "--dataset", file, *flags.split(), "--out", folder)
    assert done.exit_code == 0, done.output
    test = json.loads((folder / "report.json").read_text())["test"]
    assert test["noise"] > 0
    assert test["interval"][0] <= test["nmae"] <= test["interval"][1]
    assert [test[name] for name in ("loss", "nrmse", "r2", "by_target")] == [None] * 4


@pytest.mark.parametrize("draft", ["cost,days", "cost, days"])
def test_a_draft_has_a_range_for_each_target(tmp_path: Path, draft: str) -> None:
    file = table(tmp_path, rows(2))
    text = dpmac("schema", file, "--label", draft, "--drop", "person").stdout
    filled = text.replace(
        "column: cost\n    range: [FILL_IN, FILL_IN]", "column: cost\n    range: [0, 9]"
    )
    filled = re.sub(r"\[FILL_IN, FILL_IN\]", "[0, 99]", filled)
    (tmp_path / "care.yaml").write_text(filled)
    assert [(of.column, of.ends) for of in read_schema(tmp_path / "care.yaml").labels] == [
        ("cost", (0, 9)),
        ("days", (0, 99)),
    ]
    assert "no such column" in dpmac("schema", file, "--label", "cost,night").stderr


def test_a_model_that_has_learned_nothing_of_a_target_is_remarked_on() -> None:
    draws = torch.Generator().manual_seed(0)
    targets = torch.rand(200, 2, generator=draws) * 2 - 1
    outputs = torch.stack([targets[:, 0] + 0.01, torch.ones(200)], 1)
    said = Evaluation(0.0, outputs, targets, TASK).results.remark
    assert said.startswith("the mean absolute error of days is not below that of predicting")
    assert not Evaluation(0.0, targets + 0.1, targets, TASK).results.remark


# Targets.


def test_a_table_a_data_frame_and_arrays_give_the_same_targets(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    records = rows(10)
    table(tmp_path, records)
    frame = from_dataframe(pandas.DataFrame(records), tmp_path / "care.yaml")
    of_frame = Source(frame.path, schema=frame.schema, in_memory=frame)
    targets = [[row["cost"], row["days"]] for row in records]
    declared: dict[str, Any] = {"target_low": [0, 0], "target_high": [10_000, 40]}
    declared |= {"target_transform": ["log1p", "none"], "target_names": ["cost", "days"]}
    x = [[row["age"]] for row in records]
    arrays = ArrayData(x, targets, low=0, high=100, **declared)
    of_arrays = Source(arrays.path, in_memory=arrays)
    assert inspect(of_arrays).facts.task == inspect(source(tmp_path)).facts.task == TASK
    assert task_of(TASK.facts) == TASK
    wanted = TASK.encoded(np.array(targets))
    for some in (source(tmp_path), of_frame, of_arrays):
        (_, train), (_, test) = load(some)
        found = np.concatenate([train, test])
        np.testing.assert_array_equal(np.sort(found, 0), np.sort(wanted, 0))


def test_a_file_of_arrays_declares_its_targets(tmp_path: Path) -> None:
    x, y = np.zeros((50, 2)), np.linspace(0, 99, 100).reshape(50, 2)
    np.savez(tmp_path / "a.npz", x=x, y=y, low=-1, high=1, target_low=0, target_high=[99, 50])
    task = inspect(Source(tmp_path / "a.npz")).facts.task
    assert task == SeveralNumbers.of(
        [Regression(("y1",), 0.0, 99.0), Regression(("y2",), 0.0, 50.0)]
    )


@pytest.mark.privacy
def test_no_target_is_beyond_its_range_and_none_moves_another() -> None:
    values = np.column_stack([np.linspace(0, 10_000, 20), np.linspace(0, 40, 20)])
    wild = np.concatenate([values, [[1e300, -1e300], [-1e300, 1e300]]])
    scaled = TASK.encoded(wild)
    assert scaled[[0, 19]].tolist() == [[-1, -1], [1, 1]]
    assert scaled[20:].tolist() == [[1, -1], [-1, 1]]
    np.testing.assert_array_equal(scaled[:20], TASK.encoded(values))
    outputs = torch.tensor([[1e30, -1e30], [-math.inf, math.inf]])
    assert TASK.answers(outputs).tolist() == [[10_000, 0], [0, 40]]


def refused(where: Path, label: str, **cells: object) -> str:
    records = rows(6)
    records[1] |= cells
    write_table(where, records, re.sub(r"label:\n.*\n.*\n", f"label: {label}\n", SCHEMA))
    with pytest.raises(InputError) as caught:
        inspect(source(where))
    return str(caught.value)


GOOD = "[{column: cost, range: [0, 10000]}, {column: days, range: [0, 40]}]"


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("[{column: cost, range: [0, 10000]}]", "label: .*at least 2 items"),
        ("[{column: cost, range: [0, 1]}, {column: days}]", r"label\.1: needs either the names"),
        ("[{column: cost, range: [9, 1]}, {column: days, range: [0, 1]}]", r"label\.0: .*Swap"),
        ("[{column: cost, range: [0, 1]}, {column: cost, range: [0, 1]}]", "declared 2 times"),
        ("[{column: cost, range: [0, 1]}, days]", r"label\.1: .*valid dictionary"),
        (
            "[{column: cost, range: [0, 1]}, {column: days, classes: [a, b]}]",
            "several columns must be numbers, each with a range, but days has classes",
        ),
        (
            "[{column: cost, range: [0, 1]}, {column: days, range: [0, 9], kind: count}]",
            "but days has kind: count",
        ),
    ],
)
def test_labels_that_cannot_be_meant_are_explained(tmp_path: Path, label: str, said: str) -> None:
    assert re.search(said, refused(tmp_path, label))


def test_records_without_one_of_the_numbers_are_named(tmp_path: Path) -> None:
    assert "Record 2 has no value in days" in refused(tmp_path, GOOD, days="")
    both = refused(tmp_path, GOOD, days="few", cost="NaN")
    assert "Record 2 has no value in cost" in both
    assert "Record 2 has no number in days: 'few'" in both
    strict = GOOD.replace("40]", "40], outside: refuse")
    assert "outside the range of the schema in days: '41'" in refused(tmp_path, strict, days=41)
    assert inspect(source(tmp_path, skip_bad=True)).skipped == ("record 2",)


def test_arrays_that_cannot_be_meant_are_explained() -> None:
    x, y = np.zeros((40, 1)), np.linspace(0, 1, 80).reshape(40, 2)

    def said(y: Any = y, **declared: Any) -> str:
        given = {"target_low": [0, 0], "target_high": [1, 1], **declared}
        with pytest.raises(InputError) as caught:
            resolve(dataset=ArrayData(x, y, low=-1, high=1, **given), batch_size=4)
        return str(caught.value)

    assert "must have 2 numbers per record (one for each of target_low)" in said(y[:, 0])
    assert "for several, declare a range for each" in said(target_low=0, target_high=1)
    assert "must have 3 numbers per record" in said(target_low=[0, 0, 0])
    assert "target_high has 2 values, but there are 3 targets" in said(
        np.zeros((40, 3)), target_low=[0, 0, 0]
    )
    assert "y2: the range of the target is 1 to 0" in said(target_low=[0, 1], target_high=[1, 0])
    assert "not counts" in said(target_kind="count")
    assert "a name of its own" in said(target_names=["a", "a"])
    assert "target_name has 3 values, but there are 2 targets" in said(target_names=["a", "b", "c"])
    bad: list[list[Any]] = y.tolist()
    bad[3] = [0.5, math.nan]
    assert "NaN or infinite in 1 of 40 rows, such as row 3" in said(bad)
    bad[3] = [0.5]
    assert "has targets of shape (1,), not (2,) in 1 of 40 rows" in said(bad)
    bad[3] = ["x", 0.5]
    assert "is not a number in 1 of 40 rows" in said(bad)


def test_settings_that_do_not_fit_are_explained() -> None:
    y = np.linspace(0, 1, 80).reshape(40, 2)
    data = ArrayData(np.zeros((40, 1)), y, low=-1, high=1, target_low=[0, 0], target_high=[1, 1])

    def said(**settings: Any) -> str:
        with pytest.raises(InputError) as caught:
            resolve(dataset=data, batch_size=4, **settings)
        return str(caught.value)

    assert "have several numbers each. Use mse or huber or quantile:Q" in said(loss="poisson")
    assert "have several numbers each. Use nmae, nrmse, r2" in said(metric="mae")
    assert "cannot be released with --cover-scores. Use nmae" in said(
        metric="r2", cover_scores=True
    )


# Losses and metrics.


@pytest.mark.parametrize("name", ["mse", "huber", "quantile:0.9"])
def test_a_loss_is_the_mean_over_the_targets(name: str) -> None:
    draws = torch.Generator().manual_seed(0)
    outputs = torch.randn(7, 3, generator=draws, dtype=torch.float64, requires_grad=True)
    targets = 2 * torch.rand(7, 3, generator=draws, dtype=torch.float64) - 1
    loss = build_loss(name)
    each = [loss(outputs[:, [k]], targets[:, [k]]) for k in range(3)]
    torch.testing.assert_close(loss(outputs, targets), torch.stack(each).mean(0))
    assert torch.autograd.gradcheck(lambda o: loss(o, targets), outputs)


def test_metrics_are_scikit_learns() -> None:
    result = evaluated()
    truth, guess = (
        part.double().numpy() / [10_000, 40]
        for part in (_decoded(result.labels), TASK.answers(result.logits))
    )
    found = result.results.metrics()
    assert found["nmae"] == pytest.approx(sklearn.mean_absolute_error(truth, guess))
    roots = sklearn.root_mean_squared_error(truth, guess, multioutput="raw_values")
    assert found["nrmse"] == pytest.approx(float(np.mean(roots)))
    assert found["r2"] == pytest.approx(sklearn.r2_score(truth, guess), rel=1e-4)
    assert found.keys() == {metric.name for metric in TASK.metrics}
    for name, ends in result.results.intervals(found).items():
        assert ends[0] < found[name] < ends[1]
    assert METRICS["nmae"].better(1.0) > METRICS["nmae"].better(2.0)
    assert headline_in({"test_nmae": 0.1}).name == "nmae"


def _decoded(scaled: Tensor) -> Tensor:
    return torch.cat([COST.decoded(scaled[:, :1]), DAYS.decoded(scaled[:, 1:])], 1)


@pytest.mark.parametrize(("values", "best"), [([3.0, 1.0, 2.0], 1.0), ([1.0, 3.0], 1.0)])
def test_the_best_error_of_a_run_is_its_least(values: list[float], best: float) -> None:
    history = [
        {"test_mae": value, "test_loss": 0.1, "test_samples": 9, "epoch": place}
        for place, value in enumerate(values)
    ]
    found = scores(DAYS, history, {})
    assert (found.best_mae, found.best_epoch) == (best, values.index(best))


# Covered errors.


@pytest.mark.privacy
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("targets", [2, 3, 7])
def test_one_unit_moves_the_covered_error_by_at_most_one(targets: int, grouped: bool) -> None:
    """Among them are one that is wrong in everything, and NaN."""
    owners = owners_of(grouped=grouped)
    task = SeveralNumbers.of(
        [replace(DAYS, names=(f"y{k}",), high=10.0 ** (k - 1)) for k in range(targets)]
    )
    draws = torch.Generator().manual_seed(0)
    truth = 2 * torch.rand(len(owners), targets, generator=draws) - 1
    outputs = truth + torch.randn(len(owners), targets, generator=draws)
    wild = [1e30, -1e30, math.inf, math.nan]
    outputs[1:5] = torch.tensor(wild)[:, None]
    truth[1:5] = torch.tensor([-1.0, 1.0, -1.0, -1.0])[:, None]
    result = Evaluation(0.0, outputs, truth, task)
    whole, moves = moved_by_units(result, owners, grouped=grouped)
    assert max(moves) <= 1
    assert max(moves) > (0.3 if grouped else 0.99)
    assert whole / len(set(owners)) == pytest.approx(_by_unit(result, owners), abs=1e-3)


def _by_unit(result: Evaluation, owners: Any) -> float:
    """The mean over units of the mean over their records and targets of errors per range."""
    errors = result.results.shares.mean(1)  # type: ignore[attr-defined]
    return float(np.mean([errors[owners == unit].mean() for unit in set(owners)]))


def test_a_run_without_noise_learns_all_targets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (600, 2))
    y = np.column_stack([100 * x[:, 0], x[:, 1] - x[:, 0]])
    declared: dict[str, Any] = {"target_low": [-100, -2], "target_high": [100, 2]}
    data = ArrayData(x, y, low=-1, high=1, **declared)
    plan = resolve(dataset=data, no_dp=True, seed=0, epochs=40, out=tmp_path / "run").plan
    test = run.finish(run.train(plan)).report["test"]
    assert min(part["r2"] for part in test["by_target"]) > 0.9
    assert test["r2"] > 0.9
