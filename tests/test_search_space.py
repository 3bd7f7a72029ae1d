"""Search spaces: what is drawn, what is refused, and what a trial may cost."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from dpmac_cli.accounting.selection import Search, Trials, trials_of
from dpmac_cli.config.data import resolve_data
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.search_space import (
    Dimension,
    SearchSpace,
    _dimension,
    events_of_trial,
    plan_search,
)
from dpmac_cli.errors import InputError

GIVEN = {"dataset": "digits", "model": "linear", "steps": "3", "sigma": "6", "device": "cpu"}


def dimension(text: str) -> Dimension:
    errors: list[str] = []
    found = _dimension(text, errors)
    assert found is not None, errors
    return found


def space_of(*texts: str, trials: Trials | None = None, **given: str) -> SearchSpace:
    """A space whose trials have a noise that is cheap to price."""
    shared = {**GIVEN, **given}
    plan = resolve(shared, cover_scores=True).plan
    return SearchSpace(
        given=shared,  # type: ignore[arg-type]
        file=None,
        data=resolve_data({"dataset": "digits"}),
        dimensions=tuple(map(dimension, texts)),
        search=Search(trials or trials_of(3), (events_of_trial(plan),)),
        plans=(plan,),
        target=3.0,
    )


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
    space = plan_search(given, None, ["lr=0.01..1:log", "steps=3,12"], trials_of(4))  # type: ignore[arg-type]
    assert 0.995 * 0.3 < space.epsilon <= 0.3
    assert len(space.search.candidates) == 2
    for setting in ({"lr": "0.3", "steps": "3"}, {"lr": "0.01", "steps": "12"}):
        plan = space.plan_of(setting, stop_early=False)  # type: ignore[arg-type]
        assert plan.search is not None
        assert Search(space.search.trials, (events_of_trial(plan),)).epsilon(1e-5) <= 0.3
        assert {e.records for e in events_of_trial(plan)} == {"training", "test"}


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
        plan_search(given, None, texts, trials_of(20), ["an earlier fault."])  # type: ignore[arg-type]
    assert len(failure.value.errors) == 10
    for name in ("sigma", "seed", "an earlier fault", "clip-norm", "twice", "contradict"):
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
        plan_search({"dataset": "digits", "model": "linear"}, file, ["lr=0.1,1"], trials_of(2))
    [error] = failure.value.errors
    assert error.startswith(f"{line.partition(':')[0]} in ")


@pytest.mark.long
def test_every_value_is_validated_before_anything_is_trained() -> None:
    given = {"dataset": "digits", "model": "linear"}
    texts = ["epochs=0,2", "batch-size=99999,3", "optimizer=dp-sgdd,dp-adam", "ema=0.5..1"]
    with pytest.raises(InputError) as failure:
        plan_search(given, None, texts, trials_of(20))  # type: ignore[arg-type]
    said = "\n".join(failure.value.errors)
    for part in ("epochs must be at least 1", "dp-sgdd", "99999", "ema must be"):
        assert part in said


def test_too_many_combinations_are_refused() -> None:
    texts = ["epochs=1..100", "batch-size=101..200"]
    with pytest.raises(InputError, match="10,000 combinations"):
        plan_search({"dataset": "digits"}, None, texts, trials_of(20))
