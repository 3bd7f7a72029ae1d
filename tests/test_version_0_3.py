"""Runs that version 0.3 wrote are still read, scored, priced and listed.

The folder has a run of classes (digits, seeded), of a number (a table with units and covered
scores), and the result of a search.
"""

import csv
import json
from pathlib import Path

import pytest

from dpmac_cli import load_model, predict, score
from tests.digits_runs import report_of
from tests.typed import dpmac

RUNS = Path(__file__).parent / "version_0_3"
NAMES = ("classes", "number", "search")
NEW = "age,smoker,id\n30,no,a\n80,yes,b\n"


@pytest.fixture(params=NAMES)
def run(request: pytest.FixtureRequest) -> Path:
    return RUNS / str(request.param)


@pytest.mark.promise("price")
def test_epsilon_of_a_report_is_recomputed(run: Path) -> None:
    privacy = report_of(run)["privacy"]
    shown = dpmac("account", run, "--json")
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.stdout)["rows"]
    assert rows[0]["epsilon"] == pytest.approx(privacy["epsilon"], rel=1e-9)


def test_a_model_is_loaded_with_its_facts(run: Path) -> None:
    loaded = load_model(run)
    assert loaded.facts["privacy"] == report_of(run)["privacy"]
    assert not loaded.model.training


@pytest.mark.parametrize("name", ["classes", "search"])
def test_a_classifier_has_the_scores_of_its_report(name: str) -> None:
    scored = score(RUNS / name, device="cpu")
    assert scored.covered == (name == "search")
    if not scored.covered:
        test = report_of(RUNS / name)["test"]
        assert scored.result.values()["accuracy"] == test["accuracy"]
        assert scored.result.loss == pytest.approx(test["loss"], rel=1e-5)


def test_a_number_is_predicted_as_version_0_3_did(tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text(NEW)
    predict(RUNS / "number", tmp_path / "new.csv", device="cpu").write(tmp_path / "p.csv")
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [row["id"] for row in rows] == ["a", "b"]
    predicted = [float(row["predicted"]) for row in rows]
    assert predicted == pytest.approx((439.8664, 171.5408), rel=1e-4)


def test_cards_are_written(run: Path) -> None:
    card = dpmac("card", run, "--contact", "dpo@clinic.example")
    assert "| contact | dpo@clinic.example |" in card.stdout
