"""Intervals of predicted numbers: their coverage, where they are shown, and what they read."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dpmac_cli
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.errors import InputError
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.tasks.bins import at_least_0
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.residuals import EDGES, ENDS, Residuals, cells
from tests.typed import dpmac

Floats = NDArray[np.floating[Any]]


def normal(x: Floats, draws: np.random.Generator) -> Floats:
    return 2 * x[:, 0] + 0.5 * draws.standard_normal(len(x))


def skewed(x: Floats, draws: np.random.Generator) -> Floats:
    return x[:, 0] + draws.gamma(2, 0.4, len(x))


def flat(x: Floats, draws: np.random.Generator) -> Floats:
    return x[:, 0] + draws.uniform(-1.2, 1.2, len(x))


def heavy(x: Floats, draws: np.random.Generator) -> Floats:
    return x[:, 1] + 0.2 * draws.standard_t(2.5, len(x))


def uneven(x: Floats, draws: np.random.Generator) -> Floats:
    return x[:, 0] + 2 * x[:, 1] * draws.standard_normal(len(x))


def peaked(x: Floats, draws: np.random.Generator) -> Floats:
    """Two narrow peaks, of which no record says in which it is."""
    return np.asarray(
        x[:, 0] + draws.choice([-1.5, 1.5], len(x)) + 0.1 * draws.standard_normal(len(x))
    )


def sharp(x: Floats, draws: np.random.Generator) -> Floats:
    """A sharp edge below, and a tail above."""
    return 2 * x[:, 0] + draws.exponential(0.7, len(x))


TABLES = (normal, skewed, flat, heavy, uneven, peaked, sharp)


def table(of: Any, records: int = 5000) -> dpmac_cli.ArrayData:
    """Records with numbers to predict, in a declared range."""
    splits = []
    for seed in (0, 1):
        draws = np.random.default_rng(seed)
        x = draws.random((records, 4)).astype(np.float32)
        splits += [x, of(x, draws)]
    return dpmac_cli.ArrayData(*splits, low=0, high=1, target_low=-4, target_high=6)


def train(of: Any, **settings: Any) -> dict[str, Any]:
    given = {"epsilon": 3.0, "seed": 0, "out": "run", "model": "linear", **settings}
    return dpmac_cli.train(dataset=table(of), **given).report


@pytest.mark.parametrize("of", TABLES)
def test_intervals_have_the_share_of_test_targets_that_they_promise(of: Any) -> None:
    report = train(of)
    # Bins are coarse at an edge: its interval has up to five points too many.
    within = 0.05 if of is sharp else 0.03
    assert report["scores"]["interval_coverage"] == pytest.approx(0.9, abs=within)
    events = report["events"]
    assert [event["histogram"] for event in events] == [False, True]
    assert report["epsilon"] <= 3
    assert report["network"]["calibration"] is None


def test_predictions_evaluation_and_card_have_them(tmp_path: Path) -> None:
    report = train(normal)
    draws = np.random.default_rng(2)
    x = draws.random((2000, 4)).astype(np.float32)
    truth = normal(x, draws)
    np.savez(tmp_path / "new.npz", x=x)
    for flags, level in (((), 0.9), (("--level", "0.5"), 0.5)):
        result = dpmac("predict", "run", "new.npz", "--out", "new.csv", "--force", *flags)
        assert result.exit_code == 0, result.output
        header, *lines = Path("new.csv").read_text().splitlines()
        assert header == "row,predicted,low,high"
        rows = np.array([line.split(",")[1:] for line in lines], float)
        assert (rows[:, 1] < rows[:, 0]).all()
        assert (rows[:, 0] < rows[:, 2]).all()
        inside = (rows[:, 1] <= truth) & (truth <= rows[:, 2])
        assert inside.mean() == pytest.approx(level, abs=0.04)
    with pytest.raises(InputError, match="level"):
        dpmac_cli.load("run").predict(x, level=1.5)
    shown = dpmac_cli.load("run").score(table(normal)).details()
    assert shown["interval_coverage"] == report["scores"]["interval_coverage"]
    card = Path("run/model-card.md").read_text()
    assert "| intervals of 90% |" in card
    assert "one histogram of the residuals of the training records" in card


def test_a_given_noise_has_no_intervals_unless_they_are_asked_for() -> None:
    plan = resolve(dataset=table(normal, 200), sigma=3.0, epochs=2).plan
    assert plan.histogram is None
    asked = resolve(dataset=table(normal, 200), sigma=3.0, epochs=2, calibration="histogram").plan
    assert asked.event == plan.event
    assert total_epsilon(asked.planned, 1e-5) > total_epsilon(plan.planned, 1e-5)
    report = train(normal, epsilon=None, sigma=6.0, epochs=2)
    assert report["network"]["residuals"] is None
    assert report["scores"]["interval_coverage"] is None
    found = dpmac_cli.load("run").predict(np.zeros((3, 4), np.float32))
    assert [*found.task.columns(found.outputs)] == ["predicted"]
    with pytest.raises(InputError, match="has none"):
        dpmac_cli.load("run").predict(np.zeros((3, 4), np.float32), level=0.5)


@pytest.mark.promise("scores")
def test_covered_scores_have_no_exact_coverage() -> None:
    report = train(normal, cover_scores=True)
    assert report["scores"]["interval_coverage"] is None
    assert report["network"]["residuals"] is not None


def test_cells_of_targets_and_outputs_of_any_kind() -> None:
    """Outputs beyond the range are cut to it; NaN is in no cell."""
    outputs = np.array([[0.0], [1e30], [-math.inf], [math.nan], [0.5], [0.48], [1.5]])
    targets = np.array([[0.0], [-1.0], [1.0], [0.0], [0.5], [0.5], [1.0]])
    middle, last = len(EDGES) // 2 + 1, len(EDGES)
    assert cells(outputs, targets).tolist() == [middle, 0, last, -1, middle, middle + 1, middle]
    assert len(ENDS) == len(EDGES) + 2


@pytest.mark.parametrize("value", [0.0, -40.0, 1e6])
def test_odd_counts_give_finite_intervals(value: float) -> None:
    low, high = Residuals((value,) * (len(EDGES) + 1), 26.0).interval()
    assert -2 <= low < high <= 2


def test_counts_are_projected_to_the_nearest_of_the_same_sum() -> None:
    draws = np.random.default_rng(0)
    for _ in range(20):
        counts = draws.normal(size=25) * 30 + 10
        found = at_least_0(counts)
        assert found.min() >= 0
        assert found.sum() == pytest.approx(max(counts.sum(), 1))
        others = draws.dirichlet(np.ones(25), 200) * found.sum()
        assert np.square(found - counts).sum() <= np.square(others - counts).sum(1).min()


def test_intervals_stay_in_the_range_of_the_target() -> None:
    task = Regression(("cost",), 0, 1000, "log1p").calibrated(
        np.full(len(EDGES) + 1, 5.0), 1.0, 125
    )
    low, high = task.between(np.array([[-3.0], [0.0], [3.0]]))
    assert low.min() >= 0
    assert high.max() <= 1000
    assert (low < high).all()
