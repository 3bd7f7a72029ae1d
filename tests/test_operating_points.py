"""Operating points of two classes: what they decide, what is said of them, and their cost: none."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import expit

import dpmac_cli
from dpmac_cli.errors import InputError
from dpmac_cli.release.sentences import operating_point
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.tasks.bins import cumulative
from dpmac_cli.tasks.calibration import Calibration, cells
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.operating_point import (
    ENDS,
    OperatingPoint,
    interval_of_share,
    share_of_last,
)
from tests.digits_runs import refused, report_of
from tests.typed import dpmac

NAMES = ("well", "ill")


def patients(records: int, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Four numbers of each patient, from 0 to 1; one in seven is ill."""
    draws = np.random.default_rng(seed)
    x = draws.random((records, 4)).astype(np.float32)
    return x, (draws.random(records) < expit(5 * x[:, 0] - 3 * x[:, 1] - 3.5)).astype(np.int64)


def clinic(records: int) -> dpmac_cli.ArrayData:
    test = patients(3000, 1)
    return dpmac_cli.ArrayData(*patients(records), *test, classes=NAMES, low=0, high=1)


def train(
    out: str, records: int = 3000, epsilon: float | None = 3.0, **settings: Any
) -> dict[str, Any]:
    """The report of a run on patients."""
    given = {"epsilon": epsilon, "seed": 0, "out": out, "model": "linear", **settings}
    return dpmac_cli.train(dataset=clinic(records), **given).report


def calibration(records: int = 4000, noise: float = 5.0) -> Calibration:
    """A calibration of a network that is right about its probabilities."""
    draws = np.random.default_rng(0)
    odds = draws.normal(size=records) * 2 - 1
    labels = (draws.random(records) < expit(odds)).astype(np.int64)
    of = cells(np.stack([0 * odds, odds], 1), labels)
    counts = np.bincount(of, minlength=20).reshape(-1, 2)
    pairs = counts + noise * draws.normal(size=counts.shape)
    return Calibration(1.0, 0.0, tuple((float(n), float(p)) for n, p in pairs), noise)


# From the outside.


@pytest.mark.parametrize("epsilon", [3.0, 8.0])
def test_a_sensitivity_that_is_asked_for_is_reached_on_test_records(epsilon: float) -> None:
    report = train("run", 8000, epsilon, threshold="sensitivity=0.9")
    assert 0.85 <= report["scores"]["sensitivity"][1] <= 0.95
    known = Calibration(**_numbers(report["network"]["calibration"]))
    at = OperatingPoint(**report["network"]["operating_point"])
    sensitivity, specificity = at.rates(known)
    assert sensitivity == pytest.approx(0.9, abs=0.01)
    assert specificity == pytest.approx(report["scores"]["specificity"][1], abs=0.05)
    assert share_of_last(known) == pytest.approx(patients(8000)[1].mean(), abs=0.02)
    statement = operating_point(at, known, NAMES, epsilon)
    assert report["sentences"]["operating_point"].startswith(statement[:60])


def test_no_share_of_records_is_above_one() -> None:
    """Sums of counts in another order may be larger in their last bit."""
    drawn = np.random.default_rng(0)
    for _ in range(300):
        _, shares = cumulative(drawn.random(len(ENDS) - 1) + 1e-9, ENDS)
        assert shares.min() >= 0
        assert shares.max() <= 1


def test_a_balanced_point_finds_the_rare_class_and_costs_nothing() -> None:
    """Where the network as trained says one class to nearly all."""
    plain, balanced = train("plain"), train("balanced", threshold="balanced")
    assert plain["events"] == balanced["events"]
    assert plain["network"]["calibration"] == balanced["network"]["calibration"]
    assert (
        balanced["scores"]["balanced_accuracy"]["value"]
        > plain["scores"]["balanced_accuracy"]["value"] + 0.1
    )
    assert balanced["scores"]["auroc"]["value"] == plain["scores"]["auroc"]["value"]
    assert plain["network"]["operating_point"]["asked"] == "most-likely"
    assert plain["network"]["operating_point"]["log_odds"] == 0


def test_evaluation_prediction_and_card_decide_at_the_stored_point() -> None:
    report = train("run", threshold="balanced")
    point = report["network"]["operating_point"]
    x = patients(400, 2)[0]
    found = dpmac_cli.load("run").predict(x)
    odds = found.outputs[:, 1].astype(float) - found.outputs[:, 0]
    assert list(found.predicted) == [NAMES[int(odd > point["log_odds"])] for odd in odds]
    at = OperatingPoint(point["asked"], point["log_odds"])
    least = at.probability(Calibration(**_numbers(report["network"]["calibration"])))
    assert list(found.predicted) == [NAMES[int(p > least)] for p in found.probabilities[:, 1]]
    scored = dpmac_cli.load("run").score(clinic(3000))
    assert scored.confusion.tolist() == [list(row) for row in report["scores"]["confusion"]]
    card = Path("run/model-card.md").read_text()
    assert "| operating point | It says ill above a probability of" in card
    scope: dict[str, Any] = {}
    code = card.split("```python\n")[1].split("```")[0]
    exec(code.replace('"model.safetensors"', '"run/model.safetensors"'), scope)
    rows = torch.from_numpy(x)
    assert [NAMES[k] for k in scope["predict"](rows).tolist()] == list(found.predicted)


def _numbers(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name != "statement"}


def test_a_prediction_has_another_point_where_it_is_asked_for(tmp_path: Path) -> None:
    train("run")
    x = patients(400, 2)[0]
    np.savez(tmp_path / "new.npz", x=x)
    shares = {}
    for asked in ("", "most-likely", "balanced", "sensitivity=0.95", "0.9"):
        flags = ["--threshold", asked] if asked else []
        result = dpmac("predict", "run", "new.npz", "--out", "new.csv", "--force", *flags)
        assert result.exit_code == 0, result.output
        rows = Path("new.csv").read_text().splitlines()[1:]
        shares[asked] = sum(row.split(",")[1] == "ill" for row in rows) / len(rows)
    assert shares["most-likely"] == shares[""]
    assert shares["0.9"] < shares[""] < shares["balanced"] < shares["sensitivity=0.95"]
    probabilities = dpmac_cli.load("run").predict(x, threshold=0.5)
    assert list(probabilities.predicted) == [
        NAMES[int(p > 0.5)] for p in probabilities.answers[:, 1]
    ]
    with pytest.raises(InputError, match=r"threshold.*does not fit"):
        dpmac_cli.load("run").predict(x, threshold="most")


def test_what_is_said_at_the_end_names_the_point_and_offers_a_balanced_one() -> None:
    x, y = patients(3000)
    np.savez("clinic.npz", x=x, y=y, classes=list(NAMES), low=0, high=1)
    flags = ("--dataset", "clinic.npz", "--epsilon", "1", "--seed", "0", "--model", "linear")
    asked = dpmac("train", *flags, "--threshold", "balanced", "--out", "balanced")
    assert asked.exit_code == 0, asked.output
    assert "(--threshold balanced). By the noisy histogram" in " ".join(asked.stdout.split())
    assert "test sensitivity" in asked.stdout
    shown = dpmac("eval", "balanced")
    assert "(--threshold balanced). By the noisy histogram" in " ".join(shown.stdout.split())
    rare = y * (np.arange(len(y)) % 3 == 0)
    np.savez("clinic.npz", x=x, y=rare, classes=list(NAMES), low=0, high=1)
    plain = dpmac("train", *flags, "--out", "plain")
    assert "--threshold balanced" in " ".join(plain.output.split())


@pytest.mark.promise("scores")
def test_under_covered_scores_rates_are_those_of_the_histogram_alone() -> None:
    report = train("run", cover_scores=True, threshold="balanced")
    assert report["scores"]["sensitivity"] is None
    point = report["network"]["operating_point"]
    known = Calibration(**_numbers(report["network"]["calibration"]))
    at = OperatingPoint(point["asked"], point["log_odds"])
    said = report["sentences"]["operating_point"]
    assert f"its sensitivity is {at.rates(known)[0]:.1%}" in said
    assert f"and its specificity {at.rates(known)[1]:.1%}" in said
    low, high = interval_of_share(known)
    assert "; about " in said
    assert f"of the records are well ({1 - high:.1%} to {1 - low:.1%}, because of the" in said


def test_the_interval_of_a_share_holds_the_share_of_the_records() -> None:
    """As often as it says: for few and many records, even and rare classes."""
    draws = np.random.default_rng(0)
    for first, last, noise in ((50, 50, 8.0), (950, 50, 20.0), (20, 0, 5.0)):
        share = last / (first + last)
        holds = 0
        for _ in range(400):
            counts = noise * draws.normal(size=(10, 2))
            counts[0] += first, last
            pairs = tuple((float(n), float(p)) for n, p in counts)
            low, high = interval_of_share(Calibration(1.0, 0.0, pairs, noise))
            holds += low - 1e-9 <= share <= high + 1e-9
        assert holds >= 370  # 20 of 400 may miss, by chance up to 30


# What is refused.


def test_points_that_cannot_be_are_refused() -> None:
    assert "--threshold balanced is for two classes, but digits has 10" in refused(
        "--threshold", "balanced"
    )
    with pytest.raises(InputError, match="follows from a noisy histogram"):
        resolve(dataset=clinic(200), sigma=1.0, threshold="balanced")
    for text in ("0", "1", "1.5", "sensitivity=1", "sensitivity", "best"):
        with pytest.raises(InputError, match="threshold"):
            resolve(dataset=clinic(200), epsilon=1.0, threshold=text)


def test_a_probability_needs_no_histogram() -> None:
    report = train("run", sigma=3.0, epsilon=None, threshold="0.3")
    assert report["network"]["calibration"] is None
    point = report["network"]["operating_point"]
    assert point["log_odds"] == pytest.approx(math.log(0.3 / 0.7))
    assert "sensitivity" not in report["sentences"]["operating_point"]
    found = dpmac_cli.load("run").predict(patients(300, 2)[0])
    assert list(found.predicted) == [NAMES[int(p > 0.3)] for p in found.answers[:, 1]]
    with pytest.raises(InputError, match="balanced needs a calibration"):
        dpmac_cli.load("run").predict(patients(300, 2)[0], threshold="balanced")


# What follows from counts.


def test_points_are_those_of_the_distribution_of_the_records() -> None:
    known, many = calibration(), calibration(400_000, 1e-3)
    for found in (known, many):
        at = OperatingPoint.of("sensitivity=0.8", found)
        assert at.rates(found)[0] == pytest.approx(0.8, abs=1e-6)
        balanced = OperatingPoint.of("balanced", found)
        others = [OperatingPoint("0.5", odds).rates(found) for odds in np.linspace(-3, 3, 61)]
        assert sum(balanced.rates(found)) > max(map(sum, others)) - 0.03
        assert OperatingPoint.of("0.2", found).probability(found) == pytest.approx(0.2)
    # By the exact distribution: positives are normal with the odds tilted by their probability.
    low, high = OperatingPoint.of("sensitivity=0.8", known).interval(known)
    assert low < 0.8 < high
    low, high = OperatingPoint.of("sensitivity=0.8", many).interval(many)
    assert high - low < 0.001


def test_few_records_of_a_class_are_remarked_on() -> None:
    for records, few in ((300, True), (100_000, False)):
        found = calibration(records)
        at = OperatingPoint.of("sensitivity=0.9", found)
        said = operating_point(at, found, NAMES, 1.0)
        assert ("There are few records of ill" in said) == few


@pytest.mark.parametrize("value", [0.0, -50.0])
def test_empty_counts_give_finite_points(value: float) -> None:
    empty = Calibration(1.0, 0.0, ((value, value),) * 10, 26.0)
    for asked in ("most-likely", "balanced", "sensitivity=0.9", "0.3"):
        at = OperatingPoint.of(asked, empty)
        assert math.isfinite(at.log_odds)
        assert all(map(math.isfinite, (*at.rates(empty), share_of_last(empty))))
        assert "nan" not in operating_point(at, empty, NAMES, 1.0)


def test_infinite_outputs_and_ties_are_decided_like_the_largest_output() -> None:
    outputs = np.array([[0.0, math.inf], [math.inf, 0.0], [1.0, 1.0], [math.inf, math.inf]])
    task = Classification(NAMES)
    same = Classification(NAMES, operating_point=OperatingPoint("most-likely", 0.0))
    assert same.chosen(outputs).tolist() == task.chosen(outputs).tolist() == [1, 0, 0, 0]
    assert json.loads(json.dumps(same.facts)) == json.loads(json.dumps(task.facts))
    assert same == task


def test_a_report_has_the_point(tmp_path: Path) -> None:
    train("run", threshold="balanced")
    assert report_of("run")["network"]["operating_point"]["asked"] == "balanced"
    assert report_of("run")["settings"]["threshold"] == "balanced"
