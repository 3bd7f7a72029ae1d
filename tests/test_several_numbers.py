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

from dpmac_cli import predict
from dpmac_cli.release.publish import scores
from dpmac_cli.tasks.regression import Regression, SeveralNumbers
from dpmac_cli.tasks.task import number
from dpmac_cli.training.evaluation import Evaluation
from tests import care
from tests.care import moved_by_units, owners_of, write_table
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


# Targets.


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


# Losses and metrics.


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
