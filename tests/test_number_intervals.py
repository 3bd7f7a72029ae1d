"""Intervals of predicted numbers: their coverage, where they are shown, and what they read."""

import math
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dpmac_cli
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.errors import InputError
from dpmac_cli.release.card import run_page
from dpmac_cli.release.plots import predicted_numbers
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.tasks.bins import at_least_0
from dpmac_cli.tasks.metrics import Compared
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
    for name in ("by_bin", "interval_coverage", "interval_coverage_by_bin"):
        assert report["scores"][name] is None
    page = run_page(Path("run"))
    assert "Targets minus predictions by the noisy histogram" in page
    assert "by true and predicted number" not in page
    assert report["network"]["residuals"] is not None


@pytest.mark.parametrize("transform", ["none", "log1p"])
def test_test_records_are_counted_by_true_and_predicted_number(transform: Any) -> None:
    """Beside a loop over the records, on both sides of every end of a bin."""
    task = Regression(("y",), 0.0, 30.0, transform, residuals=Residuals((0.0,) * 26, 1.0))
    ends = task.bin_ends
    assert (ends[0], len(ends)) == (0.0, 11)
    assert ends[-1] == pytest.approx(30.0)
    truth = np.array([end + off for end in ends for off in (-0.001, 0.001)]).clip(0, 30)
    guess = np.random.default_rng(0).permutation(truth)
    nothing = np.zeros((len(truth), 0), np.float32)
    details = task.details(Compared(truth, guess, np.arange(len(truth)), nothing))
    counts = np.zeros((10, 10), int)
    covered = defaultdict[int, list[bool]](list)
    low, high = task.between(task.encoded(guess))
    for number, (true, predicted) in enumerate(zip(truth, guess, strict=True)):
        row, column = (min(9, bisect_right(ends, value) - 1) for value in (true, predicted))
        counts[row, column] += 1
        covered[column].append(bool(low[number, 0] <= true <= high[number, 0]))
    assert details["by_bin"] == counts.tolist()
    shares = [mean(covered[bin]) if bin in covered else None for bin in range(10)]
    assert details["interval_coverage_by_bin"] == pytest.approx(shares)


def test_the_page_shows_predicted_beside_true_numbers() -> None:
    """As counts of the report, each of which is in the picture, and their coverage."""
    report = train(normal)
    scores = report["scores"]
    assert sum(map(sum, scores["by_bin"])) == scores["samples"]
    sizes = [sum(column) for column in zip(*scores["by_bin"], strict=True)]
    shares = scores["interval_coverage_by_bin"]
    assert [share is None for share in shares] == [size == 0 for size in sizes]
    inside = sum(share * size for share, size in zip(shares, sizes, strict=True) if size)
    assert inside / sum(sizes) == pytest.approx(scores["interval_coverage"])
    page = run_page(Path("run"))
    title = "Test records by true and predicted number"
    assert f"<h2>{title}, and the share of the targets in their intervals</h2>" in page
    assert page.index(title) < page.index("Test MAE and epsilon") < page.index("Guarantee</h2>")
    figure = predicted_numbers(scores["by_bin"], shares, range(11))
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert shown == [f"{count:,}" if count else "" for row in scores["by_bin"] for count in row]
    assert len(figure.axes[1].containers) == sum(share is not None for share in shares)
    train(normal, epsilon=None, sigma=6.0, epochs=1, out="other")
    assert f"<h2>{title}</h2>" in run_page(Path("other"))


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
