"""Means, spreads, and which differences are real."""

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.release import run
from dpmac_cli.release.report import events_of
from dpmac_cli.studies import results as compare
from dpmac_cli.studies.grid import plan
from dpmac_cli.studies.results import (
    Cell,
    collect,
    holm,
    paired_p_value,
    standing_of,
)
from dpmac_cli.tasks.known import METRICS
from tests.digits_runs import after


def cell(*accuracies: float, name: str = "a", **changes: Any) -> Cell:
    values: dict[str, Any] = {
        "labels": (("optimizer", name),),
        "column": 1.0,
        "sigma": 1.0,
        "epsilon": 2.0,
        "values": dict(enumerate(accuracies)),
        "seconds": 1.0,
        "failures": {},
    }
    return Cell(**{**values, **changes})


def test_the_test_is_paired_over_common_seeds() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(0.9, 0.01, 6), rng.normal(0.89, 0.01, 6)
    expected = stats.ttest_rel(one, other).pvalue
    assert paired_p_value(dict(enumerate(one)), dict(enumerate(other))) == pytest.approx(expected)
    # A seed that only one of them has does not count, in whatever order they come.
    extra = dict(reversed([*enumerate(one), (9, 0.1)]))
    assert paired_p_value(extra, dict(enumerate(other))) == pytest.approx(expected)


def holm_by_definition(p_values: Sequence[float], level: float) -> list[bool]:
    """Reject i if its adjusted p-value, a running maximum, is at most the level."""
    order = np.argsort(p_values, kind="stable")
    count = len(p_values)
    adjusted = np.maximum.accumulate([(count - k) * p_values[i] for k, i in enumerate(order)])
    rejected = [False] * count
    for k, i in enumerate(order):
        rejected[i] = bool(adjusted[k] <= level)
    return rejected


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert holm([]) == []
    for p_values in itertools.product([0.001, 0.012, 0.02, 0.04, 0.2], repeat=3):
        assert holm(p_values) == holm_by_definition(p_values, 0.05)


def test_the_best_is_best_only_where_all_others_are_worse() -> None:
    good, same = cell(0.90, 0.91, 0.92), cell(0.901, 0.909, 0.921)
    bad = cell(0.80, 0.811, 0.82)
    assert standing_of([bad, good], METRICS["accuracy"]) == ["", "best"]
    assert standing_of([good, bad, same], METRICS["accuracy"]) == ["tied", "", "tied"]


@pytest.mark.privacy
@pytest.mark.parametrize("changed", [{"sigma": "2"}, {"steps": "6"}, {"lr": "0.1"}])
def test_a_run_that_its_fork_has_replaced_is_charged_as_the_fork(
    changed: dict[str, str], tmp_path: Path
) -> None:
    flags = {"dataset": "digits", "optimizers": "dp-sgd", "sigma": "6", "steps": "4", "seeds": "2"}
    study = plan({**flags, "device": "cpu"}, None, tmp_path)
    for one in study.runs:
        list(run.train(one.plan, after(3)))
    fork, replaced = tmp_path / "fork", study.runs[0].folder
    list(run.fork(replaced, {**changed, "out": fork}))
    shutil.rmtree(replaced)
    fork.rename(replaced)
    list(run.resume(study.runs[1].folder))
    done = [event for one in study.runs for event in events_of(one.folder)]
    assert collect(study, {}).epsilon == pytest.approx(total_epsilon(tuple(done), 1e-5), rel=1e-9)
    assert sum(event.steps for event in done) == 4 + int(changed.get("steps", 4))


@pytest.mark.privacy
def test_a_run_that_went_on_with_new_keys_is_priced_as_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill and on another machine, say: the same settings, and more steps in all."""
    flags = {"dataset": "digits", "optimizers": "dp-sgd", "sigma": "6", "steps": "8", "seeds": "1"}
    study = plan({**flags, "device": "cpu"}, None, tmp_path)
    list(run.train(study.runs[0].plan))
    twice = (study.runs[0].plan.privacy.event,) * 2
    monkeypatch.setattr(compare, "events_of", lambda _, **__: twice)
    found = collect(study, {})
    spent = total_epsilon(twice, 1e-5)
    assert spent > total_epsilon(twice[:1], 1e-5)
    assert found.cells[0].epsilon == spent
    assert found.epsilon == spent


@pytest.mark.privacy
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_study_costs_what_all_of_its_runs_cost(sampler: str, tmp_path: Path) -> None:
    """Each run deals anew: of 13 steps, an epoch being 12, every one pays for two epochs begun."""
    flags = {"dataset": "digits", "optimizers": "dp-sgd", "sampler": sampler}
    study = plan({**flags, "sigma": "6,8", "steps": "13", "seeds": "3"}, None, tmp_path)
    steps = 3 * 24 if SAMPLERS[sampler].once_an_epoch else 3 * 13
    events = tuple(TrainingEvent(128 / 1437, sigma, steps, sampler, 12) for sigma in (6.0, 8.0))
    assert collect(study, {}).epsilon == pytest.approx(total_epsilon(events, 1e-5), rel=1e-9)
