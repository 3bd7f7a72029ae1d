"""Search spaces: what is drawn, what is refused, and what a trial may cost."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from dpmac_cli.accounting.selection import Search, Trials, trials_of
from dpmac_cli.config.data import resolve_data
from dpmac_cli.config.named import file_of
from dpmac_cli.config.resolve import resolve
from dpmac_cli.errors import InputError
from dpmac_cli.studies.search import Dimension, SearchSpace, events_of_trial, plan_search

GIVEN = {"dataset": "digits", "model": "linear", "steps": "3", "sigma": "6", "device": "cpu"}
RATE = Dimension("lr", ("1e-4", "1e-1"), between=True)


def space_of(*dimensions: Dimension, trials: Trials | None = None, **given: str) -> SearchSpace:
    """A space whose trials have a noise that is cheap to price."""
    shared: dict[str, Any] = {**GIVEN, **given, "cover_scores": True}
    plan = resolve(shared).plan
    return SearchSpace(
        given=shared,
        data=resolve_data({"dataset": "digits"}),
        dimensions=dimensions,
        search=Search(trials or trials_of(3), (events_of_trial(plan),)),
        plans=(plan,),
        out=Path("out"),
    )


def settings(space: SearchSpace) -> list[str]:
    return [dimension.text for dimension in space.dimensions]


def drawn(dimension: Dimension, count: int = 2000) -> list[Any]:
    source = random.Random(7)
    return [dimension.draw(source) for _ in range(count)]


def test_numbers_are_log_uniform_and_within_their_range() -> None:
    numbers = np.array(list(map(float, drawn(RATE))))
    assert ((numbers >= 1e-4) & (numbers <= 1e-1)).all()
    assert kstest((np.log(numbers) - np.log(1e-4)) / np.log(1e3), "uniform").pvalue > 1e-3


def test_values_are_equally_likely() -> None:
    found = Counter(drawn(Dimension("clip_norm", ("0.1", "1", "10", "30"))))
    assert len(found) == 4
    assert chisquare(list(found.values())).pvalue > 1e-3


@pytest.mark.privacy
def test_settings_are_drawn_independently_with_replacement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = space_of(Dimension("clip_norm", ("1", "2")), Dimension("beta1", ("0.1", "0.2")))
    monkeypatch.setattr(SearchSpace, "plan_of", lambda _, setting: setting)
    found: Any = [(space.trial(), space.trial()) for _ in range(400)]
    same = sum(one == other for one, other in found)
    assert 60 < same < 140  # a quarter of them
    joint = Counter((d["clip_norm"], d["beta1"]) for pair in found for d in pair)
    assert len(joint) == 4
    assert chisquare(list(joint.values())).pvalue > 1e-4


@pytest.mark.privacy
def test_a_trial_with_another_cost_is_refused() -> None:
    space = space_of(Dimension("lr", ("0.1", "1")))
    assert events_of_trial(space.plan_of({"lr": "1"})) in space.search.candidates
    with pytest.raises(ValueError, match="candidates"):
        space.plan_of({"lr": "1", "batch_size": "9"})


@pytest.mark.privacy
def test_a_trial_without_covered_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="covered"):
        events_of_trial(resolve(GIVEN).plan)


@pytest.mark.privacy
def test_search_and_model_together_meet_the_target() -> None:
    given = {"dataset": "digits", "model": "linear", "epsilon": 0.3, "device": "cpu"}
    space = plan_search({**given, "trials": 4, "lr": "0.01:1", "steps": [3, 12]})
    assert 0.995 * 0.3 < space.epsilon <= 0.3
    assert len(space.search.candidates) == 2
    for setting in ({"lr": "0.3", "steps": "3"}, {"lr": "0.01", "steps": "12"}):
        plan = space.plan_of(setting)
        assert plan.search is not None
        assert Search(space.search.trials, (events_of_trial(plan),)).epsilon(1e-5) <= 0.3
        assert {e.records for e in events_of_trial(plan)} == {"training", "test"}


@pytest.mark.parametrize(
    ("own", "file", "mean"),
    [({}, None, 4), ({"trials": 7}, None, 7), ({}, "trials: 5", 5), ({}, "lr: 0.3", None)],
)
@pytest.mark.usefixtures("uncalibrated")
def test_without_settings_to_draw_the_rate_is_drawn_near_its_default(
    own: dict[str, Any], file: str | None, mean: float | None
) -> None:
    given = {"dataset": "digits", "model": "linear", "epsilon": 3, "device": "cpu"}
    path = None if file is None else written(file)
    if mean is None:
        with pytest.raises(InputError, match="needs a setting to draw"):
            plan_search({**given, **own}, path)
        return
    space = plan_search({**given, **own}, path)
    rate = resolve(given).plan.optimizer.lr
    (only,) = space.dimensions
    assert (only.name, only.between, space.search.trials.mean) == ("lr", True, mean)
    assert list(map(float, only.values)) == pytest.approx([rate / 2, rate * 2], rel=1e-3)


def test_all_faults_are_reported_together() -> None:
    given = {
        **{"dataset": "digits", "sigma": 2, "seed": 3, "clip": "0.1,1", "model": "1:2"},
        **{"epochs": "5:20", "h1": "0:1", "steps": "1,1", "unit": "a", "delta": [0.1, 0.2]},
        **{"trials": "many", "gamma": "x"},
    }
    with pytest.raises(InputError) as failure:
        plan_search(given)
    said = "\n".join(failure.value.errors)
    for part in (
        *("no setting 'clip'", "sigma cannot be set", "seed cannot be set", "--trials"),
        *("--epochs 5:20: it is a whole number", "--h1 0:1: the ends must be above 0"),
        *("--steps 1,1 has a value twice", "--delta 0.1,0.2: a search cannot draw", "--gamma"),
    ):
        assert part in said, said


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("seed: 5", "how many trials"),  # every trial would have the same noise and batches
        ("sigma: 0.3", "calibrated"),
        ("max-epsilon: 1", "calibrated"),
        ("score-every: 1", "last score"),
        ("canaries: 20", "audit"),
    ],
)
def test_what_a_search_decides_cannot_be_set_in_a_file_either(line: str, why: str) -> None:
    file = written(f"{line}\nforce: false\nepsilon: 3\n")
    with pytest.raises(InputError, match=why):
        plan_search({"dataset": "digits", "model": "linear", "lr": "0.1,1"}, file)


@pytest.mark.long
def test_every_value_is_validated_before_anything_is_trained() -> None:
    given = {
        **{"dataset": "digits", "model": "linear", "epochs": "0,2", "batch_size": "99999,3"},
        **{"optimizer": "dp-sgdd,dp-adam", "ema": "0.5:1"},
    }
    with pytest.raises(InputError) as failure:
        plan_search(given)
    said = "\n".join(failure.value.errors)
    for part in ("epochs must be at least 1", "dp-sgdd", "99999", "ema must be"):
        assert part in said


def test_too_many_combinations_are_refused() -> None:
    given = {"epochs": [*range(1, 101)], "batch_size": [*range(101, 201)]}
    with pytest.raises(InputError, match="10,000 combinations"):
        plan_search({"dataset": "digits", **given})


FILE = """\
dataset: digits
model: linear
epsilon: 1
device: cpu
trials: 4
out: found
lr: 1e-2:1
clip-norm: [0.1, 1]
steps: 3,12
"""
TEXTS = ["lr=1e-2:1", "clip-norm=0.1,1", "steps=3,12"]


def written(text: str = FILE) -> Path:
    file = Path("search.yaml")
    file.write_text(text)
    return file


@pytest.mark.usefixtures("uncalibrated")
def test_a_file_and_a_program_ask_for_the_same_search() -> None:
    by_file = plan_search({}, written())
    assert (by_file.search.trials, str(by_file.out)) == (trials_of(4), "found")
    shared = {"dataset": "digits", "model": "linear", "epsilon": 1, "device": "cpu", "trials": 4}
    space = plan_search({**shared, "lr": "1e-2:1", "clip_norm": [0.1, 1], "steps": [3, 12]})
    assert space.search == by_file.search
    assert settings(space) == settings(by_file) == TEXTS


@pytest.mark.usefixtures("uncalibrated")
def test_flags_take_precedence_over_a_file() -> None:
    space = plan_search({"epsilon": 2, "trials": 3, "lr": "0.1,1"}, written())
    assert (space.search.trials, space.given["epsilon"]) == (trials_of(3), 1.0)
    assert settings(space) == ["lr=0.1,1", *TEXTS[1:]]
    assert settings(plan_search({"lr": 0.5}, written())) == TEXTS[1:]


@pytest.mark.usefixtures("uncalibrated")
def test_a_search_by_name_is_its_file() -> None:
    by_name = plan_search({"recipe": "tune-digits", "device": "cpu"})
    assert by_name == plan_search({"device": "cpu"}, file_of("tune-digits"))
    assert by_name.search.trials == trials_of(5)
    mixed = plan_search({"device": "cpu"}, written("recipe: tune-digits\nlr: 0.5\nepochs: [3, 4]"))
    assert settings(mixed) == ["clip-norm=0.1,1,10", "epochs=3,4"]
    assert mixed.plans[0].optimizer.lr == 0.5


@pytest.mark.privacy
def test_a_file_of_a_search_does_not_run_code() -> None:
    Path("net.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(InputError, match="is code"):
        plan_search({}, written("dataset: digits\nmodel: ['net.py:N', linear]\n"))


@pytest.mark.privacy
@pytest.mark.usefixtures("uncalibrated")
def test_a_file_is_read_once() -> None:
    """Trials that are drawn after it was edited would not be like the others."""
    space = plan_search({}, written())
    setting = {"lr": "1", "clip_norm": "1", "steps": "3"}
    plan = space.plan_of(setting)
    written(FILE.replace("linear", "mlp"))
    assert plan == space.plan_of(setting)


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["seed", "canaries"])
def test_a_setting_of_0_is_a_setting(name: str) -> None:
    """With the seed 0, which equals False, all trials would have the same noise and batches."""
    with pytest.raises(InputError, match=f"{name} cannot be set in a search"):
        plan_search({"dataset": "digits", "model": "linear", name: 0, "lr": [0.1, 1]})


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("search: {lr: 1}", "Write the values at the settings"),
        ("most-trials: 9", "4 times their mean"),
        ("score-on: mnist", "Covered scores decide"),
    ],
)
def test_a_setting_that_is_gone_says_what_to_write_instead(line: str, instead: str) -> None:
    with pytest.raises(InputError, match=instead):
        plan_search({"dataset": "digits"}, written(line))
