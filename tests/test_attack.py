"""The attack on a recipe: what it measures, where its figures are, and what is left of its runs."""

import json
import math
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import safetensors
import safetensors.numpy
from scipy.stats import norm

from dpmac_cli import train
from dpmac_cli.accounting.risk import percent
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.errors import InputError
from dpmac_cli.release import attack, membership
from dpmac_cli.release.attack import Recipe
from dpmac_cli.release.report import read_report
from dpmac_cli.runs import folder
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.regression import Regression
from tests.typed import dpmac

RUNS = 4


def table(records: int, *, columns: int = 12, units: bool = False) -> pd.DataFrame:
    """A table of few records with noisy labels, which a network overfits: like german."""
    rng = np.random.default_rng(5)
    x = rng.uniform(0, 1, (records, columns))
    signal = (x[:, :3].sum(1) - 1.5) * 2
    frame = pd.DataFrame({f"x{n}": x[:, n] for n in range(columns)})
    frame["y"] = np.where(signal + rng.logistic(size=records) > 0, "good", "bad")
    if units:
        frame["person"] = np.arange(records) // 3
    return frame


def schema(columns: int = 12, *, open_columns: bool = False) -> dict[str, Any]:
    """The schema of such a table."""
    one: dict[str, Any] = {"type": "number"} if open_columns else {"range": [0, 1]}
    return {
        "label": {"column": "y", "classes": ["bad", "good"]},
        "columns": {f"x{n}": one for n in range(columns)},
    }


def trained(out: Path, frame: pd.DataFrame, of: dict[str, Any], **settings: Any) -> Path:
    """Train on a table in a file; return the folder of the run."""
    data, declared = out.with_suffix(".csv"), out.with_suffix(".yaml")
    frame.to_csv(data, index=False)
    declared.write_text(json.dumps(of))
    given = {"dataset": str(data), "schema": declared, "device": "cpu", "out": out, **settings}
    return train(**given).folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a small table."""
    where = tmp_path_factory.mktemp("attack") / "run"
    return trained(where, table(300), schema(), sigma=3, epochs=3, model="mlp-small")


def numbers_in(value: Any) -> Iterator[float]:
    """Yield all numbers of a value of JSON that are not whole."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            if name != "false_positive_rate":
                yield from numbers_in(part)
    elif isinstance(value, float) and value != round(value, 2):
        yield value


# Where the figures are.


@pytest.mark.promise("attack")
def test_no_figure_of_an_attack_is_anywhere_but_in_its_file(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.parent.rglob("*") if path.is_file()}
    shown = dpmac("eval", run, "--attack", "--runs", "8")
    assert shown.exit_code == 0, shown.output
    kept = attack.folder_of(run) / attack.FIGURES
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert run not in kept.parents  # so it is not published with the run's folder
    contents = json.loads(kept.read_text())
    bounds = contents.pop("bounds")
    figures = {f"{number:.6g}" for number in numbers_in(contents)}
    assert len(figures) > 5
    after = {path: path.read_bytes() for path in run.parent.rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {kept, kept.parent / folder.LOCK}
    assert {path: after[path] for path in before} == before
    for text in (shown.stdout, shown.stderr, *(str(log) for log in before.values())):
        assert not [figure for figure in figures if figure.rstrip("0") in text]
    assert percent(bounds[0]["true_positive_rate"]) in shown.stdout  # which may be published


@pytest.mark.promise("said")
def test_the_bounds_that_are_printed_are_of_all_that_the_run_released(tmp_path: Path) -> None:
    counted = {"calibration": "histogram"}  # which the attack leaves out
    run = trained(tmp_path / "run", table(200), schema(), sigma=3, epochs=1, **counted)
    report = read_report(run)
    assert len(report.events) > len(report.training)
    assert report.risk is not None
    shown = dpmac("eval", run, "--attack", "--runs", "4")
    assert f"at most {percent(report.risk.stated)} of members found" in shown.stdout


@pytest.mark.promise("attack")
def test_json_has_the_verdict_and_no_figure(run: Path) -> None:
    shown = dpmac("eval", run, "--attack", "--runs", str(RUNS), "--json")
    assert shown.exit_code == 0, shown.output
    assert {*json.loads(shown.stdout)} == {"run", "attack", "bounds", "holds"}


@pytest.mark.promise("attack")
def test_an_attack_that_was_stopped_continues_and_leaves_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow_run, started, where = Recipe.shadow_run, list[bool](), attack.folder_of(run)

    def counted(recipe: Recipe, noisy: bool) -> Any:
        if len(started) == 3:
            raise KeyboardInterrupt
        started.append(noisy)
        return shadow_run(recipe, noisy)

    monkeypatch.setattr(Recipe, "shadow_run", counted)
    (where / attack.FIGURES).unlink(missing_ok=True)
    with pytest.raises(KeyboardInterrupt):
        attack.attack(partial(Recipe, run), RUNS)
    left = sorted(where.glob(attack.LEFT))
    assert len(left) == 3
    for file in left:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        with safetensors.safe_open(file, "numpy") as opened:
            assert {*opened.keys()} == {"coins", "phi"}  # and no weights
    left[0].write_bytes(b"damaged")
    started[:] = []
    with pytest.raises(KeyboardInterrupt):
        attack.attack(partial(Recipe, run), RUNS)
    assert started == [True, True, False]  # the damaged one, and those that were missing
    monkeypatch.setattr(Recipe, "shadow_run", shadow_run)
    attack.attack(partial(Recipe, run), RUNS)
    assert {path.name for path in where.iterdir()} == {attack.FIGURES, folder.LOCK}
    assert json.loads((where / attack.FIGURES).read_text())["runs"] == RUNS


@pytest.mark.promise("attack")
def test_runs_of_an_attack_on_another_model_are_not_used(tmp_path: Path) -> None:
    one = {"coins": np.ones(3, np.bool_), "phi": np.zeros(3)}
    files = [
        attack._file(tmp_path, "0" * 64, (True, 1)),
        attack._file(tmp_path, "1" * 64, (True, 1)),
    ]
    safetensors.numpy.save_file(one, files[0])
    read = attack._read(files[0])
    assert read is not None
    assert read.coins.all()
    assert attack._read(files[1]) is None
    assert {*tmp_path.glob(attack.LEFT)} == {files[0]}  # which are deleted at the end


# What is trained.


@pytest.mark.promise("attack")
def test_shadow_runs_have_the_noise_the_rate_and_the_steps_of_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer: Any = vars(attack)["make_trainer"]
    events = list[Any]()

    def noted(plan: Any, *args: Any) -> Any:
        events.append(plan.event)
        return make_trainer(plan, *args)

    monkeypatch.setattr(attack, "make_trainer", noted)
    recipe = Recipe(run)
    [event] = recipe.report.events
    assert recipe.noisy.event == event
    assert recipe.noisy.model == recipe.plain.model
    assert not recipe.plain.private
    assert recipe.members.sum() == recipe.report.data.train_size
    assert len(recipe.members) == 300
    one, other = (recipe.shadow_run(noisy=True) for _ in range(2))
    assert one.phi.shape == one.coins.shape == (300,)
    assert 90 < one.coins.sum() < 210
    assert (one.coins != other.coins).any()
    assert events == [event, event]


@pytest.mark.promise("attack")
def test_shadows_and_targets_have_no_run_in_common() -> None:
    shadows, targets = membership.halves([*range(7)])
    assert not {*shadows} & {*targets}
    assert [*shadows, *targets] == [*range(7)]


KINDS: dict[str, Callable[[Path], Path]] = {
    "open columns": lambda out: trained(
        out, table(600, columns=2), schema(2, open_columns=True), sigma=3, epochs=1
    ),
    "units": lambda out: trained(
        out,
        table(300, units=True),
        schema(),
        sigma=3,
        epochs=1,
        unit="person",
    ),
    "numbers": lambda out: trained(
        out,
        table(200, columns=3).assign(y=lambda of: of["x0"] + of["x1"]),
        {**schema(3), "label": {"column": "y", "range": [0, 2]}},
        sigma=3,
        epochs=1,
    ),
    "digits": lambda out: train(dataset="digits", sigma=6, steps=5, device="cpu", out=out).folder,
}


@pytest.mark.parametrize("kind", KINDS)
def test_records_of_every_kind_can_be_attacked(kind: str, tmp_path: Path) -> None:
    where = KINDS[kind](tmp_path / "run")
    found = json.loads(attack.attack(partial(Recipe, where), RUNS).path.read_text())
    units = {"units": 100}
    assert found["units"] == units.get(kind, found["units"])
    for name in ("private", "no_dp"):
        assert 0.3 < found[name]["rmia"]["auc"] < 0.9
        assert 0.3 < found[name]["lira"]["auc"] < 0.9


def test_runs_without_a_guarantee_of_their_own_are_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = {"dataset": "digits", "steps": 2, "device": "cpu"}
    plain = train(**given, no_dp=True, out=tmp_path / "plain").folder
    with pytest.raises(InputError, match="has no guarantee"):
        attack.attack(partial(Recipe, plain), RUNS)
    audited = train(**given, sigma=6, canaries=20, out=tmp_path / "audit").folder
    with pytest.raises(InputError, match="is an audit run"):
        attack.attack(partial(Recipe, audited), RUNS)
    refused = dpmac("eval", plain, "--runs", "8")
    assert refused.exit_code == 2
    assert "--runs is for --attack" in refused.stderr


# What it measures.


def gaussian_runs(effect: float, runs: int = 40, records: int = 500) -> tuple[Any, Any]:
    """Confidences that are higher by an effect where a record was in, and the coins."""
    rng = np.random.default_rng(0)
    coins = rng.random((runs, records)) < 0.5
    hardness = rng.normal(size=records)
    return hardness + rng.normal(size=coins.shape) + effect * coins, coins


@pytest.mark.parametrize("name", ["rmia", "lira"])
@pytest.mark.parametrize(("effect", "low", "high"), [(0.0, 0.48, 0.52), (1.0, 0.6, 0.78)])
def test_the_attacks_tell_who_was_in(name: str, effect: float, low: float, high: float) -> None:
    phi, coins = gaussian_runs(effect)
    owners = np.arange(phi.shape[1])
    scores = membership.scored(Classification(("a", "b")), phi[20:], phi[:20], coins[:20], owners)[
        name
    ]
    found = membership.figures(scores, coins[20:])
    assert low < found["auc"] < high
    assert found["auc"] <= norm.cdf(effect / math.sqrt(2)) + 0.01  # of the best attack


def test_a_rate_is_shown_where_ten_false_alarms_are_expected() -> None:
    phi, coins = gaussian_runs(1.0)
    rates = membership.figures(phi, coins)["rates"]
    assert rates[0]["true_positive_rate"] is not None
    assert rates[1]["true_positive_rate"] is None  # a thousandth of 5,000 is 5
    assert 0.005 < rates[0]["measured_false_positive_rate"] < 0.02
    low, high = rates[0]["interval"]
    assert low < rates[0]["true_positive_rate"] < high


def test_confidences_are_log_odds_and_squared_errors() -> None:
    outputs = np.array([[1.0, 3.0, 0.0], [2.0, 2.0, 2.0]])
    found = membership.confidences(Classification(("a", "b", "c")), outputs, np.array([1, 0]))
    shares = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    true = shares[[0, 1], [1, 0]]
    assert found == pytest.approx(np.log(true / (1 - true)))
    of = Regression(("y",), 0.0, 1.0)
    numbers = membership.confidences(of, np.array([[0.5], [1.0]]), np.array([[0.0], [1.0]]))
    assert numbers == pytest.approx([-0.25, 0])


def test_the_score_of_a_unit_is_the_sum_of_its_records() -> None:
    scores = membership.by_unit(np.array([[1.0, 2.0, 4.0]]), np.array([0, 1, 0]))
    assert scores.tolist() == [[5.0, 2.0]]


@pytest.fixture
def without_plain_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train no run without privacy, on which neither the bounds nor the verdict depend."""
    shadow_run = Recipe.shadow_run

    def noisy_alone(recipe: Recipe, noisy: bool) -> attack.ShadowRun:
        if noisy:
            return shadow_run(recipe, noisy)
        records = len(recipe.members)
        coins = np.arange(records) % 2 == 0
        return attack.ShadowRun(coins, np.zeros(records))

    monkeypatch.setattr(Recipe, "shadow_run", noisy_alone)


def attacked(out: Path, epsilon: float) -> tuple[attack.Attacked, dict[str, Any]]:
    """Attack a recipe of 8 epochs on 1,000 records; return the result and its figures."""
    where = trained(out, table(1000), schema(), epsilon=epsilon, model="mlp-small", epochs=8)
    result = attack.attack(partial(Recipe, where), 20)
    return result, json.loads(result.path.read_text())


def assert_below_bounds(result: attack.Attacked, figures: dict[str, Any]) -> None:
    """The attack does not contradict the guarantee, and finds no more members than it allows."""
    assert result.holds
    for rate, bound in zip(figures["private"]["rmia"]["rates"], figures["bounds"], strict=True):
        if rate["true_positive_rate"] is not None:
            assert rate["interval"][0] <= bound["true_positive_rate"]


@pytest.mark.long
@pytest.mark.promise("attack")
def test_a_recipe_with_its_noise_is_below_its_bound_and_one_without_is_found(
    tmp_path: Path,
) -> None:
    result, figures = attacked(tmp_path / "run", 1)
    assert_below_bounds(result, figures)
    assert figures["no_dp"]["rmia"]["auc"] > 0.65
    assert figures["private"]["rmia"]["auc"] < 0.57


@pytest.mark.long
@pytest.mark.promise("attack")
@pytest.mark.usefixtures("without_plain_runs")
def test_a_recipe_with_little_noise_is_below_its_bound(tmp_path: Path) -> None:
    assert_below_bounds(*attacked(tmp_path / "run", 8))


class Weak:
    """A tenth of the noise that it is handed on as."""

    def __init__(self, noise: Any) -> None:
        self._noise = noise

    def standard_normal(self, like: Any) -> Any:
        """A thousandth of a draw."""
        return self._noise.standard_normal(like) / 1000


@pytest.mark.long
@pytest.mark.promise("attack")
@pytest.mark.usefixtures("without_plain_runs")
def test_guesses_reject_a_build_that_adds_next_to_no_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the noise is for the audit: real records do not show it surely."""
    where = trained(tmp_path / "run", table(1000), schema(), epsilon=1, model="mlp-small")
    release: Any = GaussianMechanism.release
    monkeypatch.setattr(
        GaussianMechanism,
        "release",
        lambda self, clipped, region, noise: release(self, clipped, region, Weak(noise)),
    )
    shown = dpmac("eval", where, "--attack")
    assert shown.exit_code == 4
    assert "contradicts the claim" in shown.stdout


@pytest.mark.promise("attack")
def test_guesses_that_contradict_the_guarantee_are_said(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the outputs told who was in: nearly all guesses are right."""
    rng = np.random.default_rng(0)

    def told(recipe: Recipe, noisy: bool) -> attack.ShadowRun:
        coins = rng.random(300) < 0.5
        return attack.ShadowRun(coins, 5.0 * coins + recipe.owners / 1000)

    monkeypatch.setattr(Recipe, "shadow_run", told)
    shown = dpmac("eval", run, "--attack", "--runs", "8")
    assert shown.exit_code == 4
    contents = json.loads((attack.folder_of(run) / attack.FIGURES).read_text())
    assert not contents["holds"]
    assert contents["right"] > 85


@pytest.mark.long
def test_processes_train_the_same_recipe(run: Path) -> None:
    assert attack.attack(partial(Recipe, run), RUNS, jobs=2).holds
