"""Search spaces: what is drawn, what is refused, and what a trial may cost."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from dpmac_cli.accounting.selection import Search, Trials, trials_of
from dpmac_cli.config.data import resolve_data
from dpmac_cli.config.dimensions import Dimension, _dimension
from dpmac_cli.config.named import file_of
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.search_file import drawn_texts, read_search
from dpmac_cli.config.search_flags import SearchFlags
from dpmac_cli.config.search_space import SearchSpace, ask_search, events_of_trial
from dpmac_cli.config.sources import SettingValue
from dpmac_cli.errors import InputError

GIVEN = {"dataset": "digits", "model": "linear", "steps": "3", "sigma": "6", "device": "cpu"}


def dimension(text: str) -> Dimension:
    errors: list[str] = []
    found = _dimension(SettingValue(text, "--search"), errors)
    assert found is not None, errors
    return found


def space_of(*texts: str, trials: Trials | None = None, **given: str) -> SearchSpace:
    """A space whose trials have a noise that is cheap to price."""
    shared: dict[str, Any] = {**GIVEN, **given}
    shared["cover_scores"] = True
    plan = resolve(shared).plan
    return SearchSpace(
        given=shared,
        file={},
        data=resolve_data({"dataset": "digits"}),
        judge=None,
        dimensions=tuple(map(dimension, texts)),
        search=Search(trials or trials_of(3), (events_of_trial(plan),)),
        plans=(plan,),
    )


def asked(
    given: dict[str, Any], own: dict[str, Any], drawn: Any, file: Path | None
) -> tuple[SearchFlags, SearchSpace]:
    """A search on the private records."""
    flags, space = ask_search(given, own, drawn, file)
    assert isinstance(space, SearchSpace)
    return flags, space


def drawn(text: str, count: int = 2000) -> list[str]:
    source = random.Random(7)
    return [dimension(text).draw(source) for _ in range(count)]


def test_numbers_are_uniform_or_log_uniform_and_within_their_range() -> None:
    for text, scale in (("lr=1e-4..1e-1:log", np.log), ("gamma=0..0.5", np.asarray)):
        numbers = np.array(list(map(float, drawn(text))))
        low, high = (1e-4, 1e-1) if "log" in text else (0.0, 0.5)
        assert ((low <= numbers) & (numbers <= high)).all()
        ends = scale([low, high])
        assert kstest((scale(numbers) - ends[0]) / (ends[1] - ends[0]), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("text", ["epochs=2..5", "clip-norm=0.1,1,10,30"])
def test_values_are_equally_likely(text: str) -> None:
    found = Counter(drawn(text))
    assert len(found) == 4
    assert chisquare(list(found.values())).pvalue > 1e-3


@pytest.mark.privacy
def test_settings_are_drawn_independently_with_replacement() -> None:
    space = space_of("clip-norm=1,2", "beta1=0.1,0.2")
    pairs = [(space.draw(), space.draw()) for _ in range(400)]
    same = sum(one == other for one, other in pairs)
    assert 60 < same < 140  # a quarter of them
    joint = Counter((d["clip_norm"], d["beta1"]) for pair in pairs for d in pair)
    assert len(joint) == 4
    assert chisquare(list(joint.values())).pvalue > 1e-4


@pytest.mark.privacy
def test_a_trial_with_another_cost_is_refused() -> None:
    space = space_of("lr=0.1,1")
    assert events_of_trial(space.plan_of({"lr": "1"}, stop_early=False)) in space.search.candidates
    with pytest.raises(ValueError, match="candidates"):
        space.plan_of({"lr": "1", "batch_size": "9"}, stop_early=False)


@pytest.mark.privacy
def test_a_trial_without_covered_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="covered"):
        events_of_trial(resolve(GIVEN).plan)


@pytest.mark.privacy
def test_search_and_model_together_meet_the_target() -> None:
    given = {"dataset": "digits", "model": "linear", "epsilon": 0.3, "device": "cpu"}
    _, space = asked(given, {"trials": 4}, ["lr=0.01..1:log", "steps=3,12"], None)
    assert 0.995 * 0.3 < space.epsilon <= 0.3
    assert len(space.search.candidates) == 2
    for setting in ({"lr": "0.3", "steps": "3"}, {"lr": "0.01", "steps": "12"}):
        plan = space.plan_of(setting, stop_early=False)
        assert plan.search is not None
        assert Search(space.search.trials, (events_of_trial(plan),)).epsilon(1e-5) <= 0.3
        assert {e.records for e in events_of_trial(plan)} == {"training", "test"}


@pytest.mark.parametrize(
    ("own", "file", "mean"),
    [({}, None, 4), ({"trials": 7}, None, 7), ({}, "trials: 5", 5), ({}, "lr: 0.3", None)],
)
def test_without_settings_to_draw_the_rate_is_drawn_near_its_default(
    own: dict[str, Any], file: str | None, mean: float | None
) -> None:
    given = {"dataset": "digits", "model": "linear", "epsilon": 3, "device": "cpu"}
    if file is not None:
        Path("search.yaml").write_text(file)
    path = None if file is None else Path("search.yaml")
    if mean is None:
        with pytest.raises(InputError, match="at least one --search NAME=VALUES, or no --lr"):
            asked(given, own, [], path)
        return
    flags, space = asked(given, own, [], path)
    rate = resolve(given).plan.optimizer.hyper.lr
    (only,) = space.dimensions
    assert (only.name, only.log, flags.trials) == ("lr", True, mean)
    assert (only.low, only.high) == pytest.approx((rate / 2, rate * 2), rel=1e-3)


def test_faults_of_a_search_without_settings_to_draw_are_reported_together() -> None:
    with pytest.raises(InputError) as raised:
        ask_search({"dataset": "digitz", "epsilon": -1}, {}, [], None)
    assert len(raised.value.errors) >= 2
    assert not any("--search" in each for each in raised.value.errors)


def test_all_faults_are_reported_together() -> None:
    given = {"dataset": "digits", "sigma": 2, "lr": 1, "seed": 3}
    texts = [
        "lr=1..2",
        "clip=0.1,1",
        "epochs=5..2",
        "model=1..2",
        "h1=0..1:log",
        "foo",
        "steps=1,1",
    ]
    with pytest.raises(InputError) as failure:
        asked(given, {"trials": "many"}, texts, None)
    assert len(failure.value.errors) == 10
    for name in ("sigma", "seed", "trials", "clip-norm", "twice", "contradict"):
        assert any(name in error for error in failure.value.errors)


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
def test_what_a_search_decides_cannot_be_set_in_a_file_either(
    line: str, why: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"{line}\nforce: false\nepsilon: 3\n")
    with pytest.raises(InputError, match=why) as failure:
        asked({"dataset": "digits", "model": "linear"}, {}, ["lr=0.1,1"], file)
    [error] = failure.value.errors
    assert error.startswith(f"{line.partition(':')[0]} in ")


@pytest.mark.long
def test_every_value_is_validated_before_anything_is_trained() -> None:
    given = {"dataset": "digits", "model": "linear"}
    texts = ["epochs=0,2", "batch-size=99999,3", "optimizer=dp-sgdd,dp-adam", "ema=0.5..1"]
    with pytest.raises(InputError) as failure:
        asked(given, {}, texts, None)
    said = "\n".join(failure.value.errors)
    for part in ("epochs must be at least 1", "dp-sgdd", "99999", "ema must be"):
        assert part in said


def test_too_many_combinations_are_refused() -> None:
    texts = ["epochs=1..100", "batch-size=101..200"]
    with pytest.raises(InputError, match="10,000 combinations"):
        asked({"dataset": "digits"}, {}, texts, None)


FILE = """\
dataset: digits
model: linear
epsilon: 1
device: cpu
trials: 4
most-trials: 9
out: found
search:
  lr: {low: 1e-2, high: 1, scale: log}
  clip-norm: [0.1, 1]
  steps: 3,12
"""
TEXTS = ("lr=1e-2..1:log", "clip-norm=0.1,1", "steps=3,12")


def written(text: str = FILE) -> Path:
    file = Path("search.yaml")
    file.write_text(text)
    return file


@pytest.mark.usefixtures("uncalibrated")
def test_a_file_a_program_and_flags_ask_for_the_same_search() -> None:
    flags, by_file = asked({}, {}, (), written())
    assert (flags.trials, flags.most_trials, str(flags.out)) == (4, 9, "found")
    shared = {"dataset": "digits", "model": "linear", "epsilon": 1, "device": "cpu"}
    own = {"trials": 4, "most_trials": 9}
    mapping = {
        "lr": {"low": "1e-2", "high": 1, "scale": "log"},
        "clip_norm": [0.1, 1],
        "steps": "3,12",
    }
    for drawn in (TEXTS, mapping):
        _, space = asked(shared, own, drawn, None)
        assert space.search == by_file.search
        assert [d.text for d in space.dimensions] == [*TEXTS]
        assert replace(space, given={}, file={}, dimensions=()) == replace(
            by_file, given={}, file={}, dimensions=()
        )
    assert [d.text for d in by_file.dimensions] == [*TEXTS]


@pytest.mark.usefixtures("uncalibrated")
def test_flags_take_precedence_over_a_file_of_a_search() -> None:
    given = {"epsilon": 2, "model": "linear"}
    flags, space = asked(given, {"trials": 3}, ["lr=0.1,1"], written())
    assert (flags.trials, space.search.trials, space.given["epsilon"]) == (3, Trials(3, 9), 1.0)
    assert [d.text for d in space.dimensions] == ["clip-norm=0.1,1", "steps=3,12", "lr=0.1,1"]
    _, space = asked({"lr": 0.5}, {}, (), written())
    assert [d.text for d in space.dimensions] == [*TEXTS[1:]]


@pytest.mark.usefixtures("uncalibrated")
def test_a_search_by_name_is_its_file() -> None:
    _, by_name = asked({"recipe": "tune-digits", "device": "cpu"}, {}, (), None)
    flags, by_file = asked({"device": "cpu"}, {}, (), file_of("tune-digits"))
    assert by_name == by_file
    assert (flags.trials, by_file.search.trials.most) == (5, 15)
    file = written("recipe: tune-digits\nlr: 0.5\nsearch: {epochs: [3, 4]}\n")
    _, mixed = asked({"device": "cpu"}, {}, ["clip-norm=1,2"], file)
    assert [d.text for d in mixed.dimensions] == ["epochs=3,4", "clip-norm=1,2"]
    assert mixed.plans[0].optimizer.hyper.lr == 0.5


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"low": 1}, "needs high"),
        ({"low": 1, "high": 2, "step": 1}, "not step"),
        ({"low": "a", "high": 2}, "low must be a number"),
        ({"low": 1, "high": 2, "scale": "lgo"}, "Did you mean log"),
        ([], "at least one value"),
        (["1,2"], "none with a comma"),
        (True, "must be a range like"),
        ([[1, 2]], "must be a range like"),
        (None, "must be a range like"),
    ],
)
def test_what_is_neither_a_range_nor_a_list_is_refused(value: Any, why: str) -> None:
    errors: list[str] = []
    assert drawn_texts({"lr": value}, "--search", errors) == ()
    assert any(why in error for error in errors)


def test_all_faults_of_a_file_are_reported_together() -> None:
    text = """\
dataset: digits
trials: 1
epsilon: much
lr: 0.5
search:
  lr: [0.1, 1]
  clip-norm: [0.1, 1]
  ema: {low: 1}
  clip_norm: [1, 2]
  epocs: 5,10
"""
    with pytest.raises(InputError) as failure:
        asked({}, {}, (), written(text))
    said = "\n".join(failure.value.errors)
    assert "Traceback" not in said
    for part in (
        *("trials in search.yaml", "needs high", "given twice, again in line 9", "epocs"),
        *("lr in search.yaml and search in search.yaml: lr contradict", "epsilon in search.yaml"),
    ):
        assert part in said


@pytest.mark.parametrize(
    "text", ["search: 5", "search: [lr]", "search: &a [*a]", "search: {lr: &a [*a]}", "search:"]
)
def test_a_file_without_a_line_for_each_setting_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="search in search"):
        asked({}, {}, (), written(f"dataset: digits\n{text}\n"))


@pytest.mark.privacy
def test_a_file_of_a_search_does_not_run_code() -> None:
    Path("net.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(InputError, match="refers to code"):
        asked({}, {}, (), written("dataset: digits\nsearch: {model: ['net.py:N', linear]}\n"))


@pytest.mark.privacy
@pytest.mark.usefixtures("uncalibrated")
def test_a_file_is_read_once() -> None:
    """Trials that are drawn after it was edited would not be like the others."""
    _, space = asked({}, {}, (), written())
    plan = space.plan_of({"lr": "1", "clip_norm": "1", "steps": "3"}, stop_early=False)
    written(FILE.replace("linear", "mlp"))
    again = space.plan_of({"lr": "1", "clip_norm": "1", "steps": "3"}, stop_early=False)
    assert plan == again


def test_a_file_of_a_search_is_not_one_of_a_run() -> None:
    with pytest.raises(InputError) as failure:
        resolve({}, written(f"{FILE}score-on: mnist\n"))
    others = [error for error in failure.value.errors if "use dpmac tune" in error]
    assert [error.partition(" ")[0] for error in others] == [
        *("trials", "most-trials", "search", "score-on"),
    ]
    assert read_search(None, None, []).settings == {}


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["seed", "canaries"])
def test_a_setting_of_0_is_a_setting(name: str) -> None:
    """With the seed 0, which equals False, all trials would have the same noise and batches."""
    with pytest.raises(InputError, match=f"{name} cannot be set in a search"):
        asked({"dataset": "digits", "model": "linear", name: 0}, {}, ["lr=0.1,1"], None)
