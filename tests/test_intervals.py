"""Intervals of metrics: exact where records are independent, by unit, and never of width zero."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch.nn.functional import one_hot

from dpmac_cli.data.units import Units, units_of
from dpmac_cli.tasks.intervals import clopper_pearson, widened
from dpmac_cli.tasks.metrics import all_metrics, intervals
from dpmac_cli.training import private_scores
from dpmac_cli.training.evaluation import Evaluation
from tests.helpers import answers_of
from tests.helpers import class_task as as_task

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import intervals as simulation


def evaluated(
    right: int, wrong: int, *, classes: int = 2, units: Units | None = None
) -> Evaluation:
    labels = torch.arange(right + wrong) % classes
    answers = torch.where(torch.arange(right + wrong) < right, labels, (labels + 1) % classes)
    return Evaluation(0.0, 3.0 * one_hot(answers, classes), labels, as_task(classes), units)


@pytest.mark.parametrize(("right", "wrong"), [(65, 0), (60, 5), (1, 1), (0, 7), (990, 10)])
def test_independent_records_have_the_exact_interval(right: int, wrong: int) -> None:
    wanted = binomtest(right, right + wrong).proportion_ci()
    answers = answers_of(evaluated(right, wrong))
    found = intervals(answers, all_metrics(answers), 100)["accuracy"]
    assert found == pytest.approx((wanted.low, wanted.high), abs=1e-9)
    assert found[0] < found[1]


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("persons", [None, 13, 1])
def test_no_interval_has_width_zero(classes: int, persons: int | None) -> None:
    """Not even of 65 of 65 right: what was never seen may still happen."""
    units = None if persons is None else units_of(np.arange(65) % persons)
    answers = answers_of(evaluated(65, 0, classes=classes, units=units))
    values = all_metrics(answers)
    for name, (low, high) in intervals(answers, values, 100).items():
        assert low <= values[name] <= high, name
        assert high - low > 0.04, name


def test_records_of_one_person_are_not_independent() -> None:
    """Ten copies of each record say no more than one."""
    owners = np.repeat(np.arange(60), 10)
    right = np.repeat(np.arange(60) < 45, 10)
    labels = torch.from_numpy(owners % 2)
    logits = one_hot(torch.where(torch.from_numpy(right), labels, 1 - labels), 2).float()
    both = [
        answers_of(Evaluation(0.0, logits, labels, as_task(2), units))
        for units in (None, units_of(owners))
    ]
    alone, grouped = (intervals(one, all_metrics(one), 300) for one in both)
    single = clopper_pearson(0.75, 60)
    assert grouped["accuracy"] == pytest.approx(single, abs=0.02)
    for name in ("accuracy", "balanced-accuracy", "f1"):
        widths = [ends[name][1] - ends[name][0] for ends in (grouped, alone)]
        assert widths[0] > 2.5 * widths[1], name


@pytest.mark.parametrize(
    ("units", "share", "icc"),
    [(20, 0.99, None), (50, 0.95, None), (20, 0.9, 0.7), (50, 0.97, 0.7), (200, 0.99, 0.3)],
)
def test_intervals_cover_the_populations_accuracy(
    units: int, share: float, icc: float | None
) -> None:
    """With normal intervals between units, 0.907 in the fourth case, and 0.82 in the first."""
    assert simulation.accuracy(1000, units, share, icc) >= 0.94


def test_intervals_cover_other_metrics_by_unit() -> None:
    for coverage in simulation.others(150, 50, 0.3, 1.0).values():
        assert coverage >= 0.92


def test_noise_widens_an_interval_and_never_narrows_it() -> None:
    exact = clopper_pearson(0.9, 100)
    assert widened(0.9, exact, 0.0) == pytest.approx(exact)
    low, high = widened(0.9, exact, 0.1)
    assert 0.9 - low == pytest.approx(np.hypot(0.9 - exact[0], 0.196), rel=1e-3)
    assert (low, high) < (exact[0], 1.01)
    assert high > exact[1]


@pytest.mark.parametrize("sigma", [2.0, 15.0])
def test_the_balanced_accuracy_without_noise_is_in_its_interval(sigma: float) -> None:
    right, wrong = np.array([30.0, 5.0, 90.0]), np.array([10.0, 15.0, 10.0])
    true, draws, inside = (right / (right + wrong)).mean(), np.random.default_rng(3), 0
    for _ in range(300):
        noisy = np.stack([right, wrong]) + draws.normal(0, sigma, (2, 3))
        rates = np.clip(noisy[0] / np.maximum(noisy.sum(0), 1), 0, 1)
        low, high = private_scores._around(noisy, sigma, float(rates.mean()))
        assert low < high
        inside += low <= true <= high
    assert inside / 300 >= 0.93


def test_no_interval_is_narrow_beside_a_wide_one_of_the_accuracy() -> None:
    """Of 13 persons, of which one has most of the wrong answers."""
    owners = np.repeat(np.arange(13), 14)
    labels = torch.arange(len(owners)) % 2
    wrong = torch.from_numpy((owners == 4) & (np.arange(len(owners)) % 14 < 10))
    logits = 3.0 * one_hot(torch.where(wrong, 1 - labels, labels), 2)
    answers = answers_of(Evaluation(0.0, logits, labels, as_task(2), units_of(owners)))
    found = intervals(answers, all_metrics(answers), 300)
    low, high = found["accuracy"]
    least, most = found["balanced-accuracy"]
    assert most - least >= 0.99 * (high - low) > 0.1
