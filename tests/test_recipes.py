"""Recipes: two meanings of noise and budget, the rule of the best one, and files by name."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.cli.app import app
from dpmac_cli.config.account import Question, answer
from dpmac_cli.config.best import recipe_notes
from dpmac_cli.config.defaults import completed
from dpmac_cli.config.named import RECIPES
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.settings import Settings
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.studies.grid import plan as grid
from dpmac_cli.studies.search import plan_search
from tests.tiers import one_in

SAMPLES = Path(__file__).parents[1] / "sample_configs"
TRAINED = [name for name, recipe in RECIPES.items() if recipe.command == "train"]


def chosen(**flags: Any) -> tuple[Settings, str]:
    """Return all settings of a named dataset, and what the recipe says about them."""
    given, facts = Settings.model_validate(flags), DATASETS[flags.get("dataset", "mnist")]
    return completed(given, facts), " ".join(recipe_notes(given, facts))


@pytest.mark.parametrize("name", DATASETS)
def test_noise_means_the_run_of_the_paper(name: str) -> None:
    found, said = chosen(dataset=name, sigma=1)
    defaults = DATASETS[name].defaults
    assert (found.recipe, found.optimizer, found.ema) == ("paper", "dp-macadam", None)
    assert (found.batch_size, found.epochs) == (defaults.batch_size, defaults.epochs)
    assert (found.model, found.features, said) == (defaults.model, None, "")


@pytest.mark.parametrize("name", DATASETS)
def test_a_budget_means_the_best_run_for_it(name: str) -> None:
    found, said = chosen(dataset=name, epsilon=2)
    assert (found.recipe, found.optimizer, found.model) == ("best", "dp-adam", "linear")
    assert found.features is not None
    assert f"batch {found.batch_size:,} (n / " in said
    assert f"learning rate {found.lr:g}" in said
    assert f"{found.epochs} epochs" in said
    assert f"EMA {found.ema:g}" in said


def test_epsilon_3_is_the_default() -> None:
    assert chosen()[0].epsilon == 3
    assert chosen(max_epsilon=2)[0].epsilon == 2
    assert chosen(max_epsilon=9)[0].epsilon == 3
    assert chosen() == chosen(epsilon=3)
    assert chosen(no_dp=True)[0].epsilon is None
    assert grid({"optimizers": "dp-adam", "seeds": "1"}, None).column == "epsilon"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 77),
        ("epochs", 3),
        ("lr", 0.5),
        ("ema", 0.5),
        ("optimizer", "dp-macadam"),
        ("model", "mlp"),
        ("features", "scatter-mirror"),
    ],
)
def test_what_is_typed_is_taken(name: str, value: Any) -> None:
    found, said = chosen(epsilon=2, **{name: value})
    assert getattr(found, name) == value
    assert str(value) not in said or name == "optimizer"


def test_the_rule_knows_only_public_facts() -> None:
    """Other records of the same number and shape have the same settings."""
    found = []
    for seed in (0, 1):
        x = np.random.default_rng(seed).normal(size=(500, 6)) * (1 + 9 * seed)
        low, high = np.full(6, -99.0), np.full(6, 99.0)
        labels, tested = np.arange(500) % 2, np.arange(90) % 2
        np.savez("t.npz", x=x, y=labels, x_test=x[:90], y_test=tested, low=low, high=high)
        found.append(dict(resolve(dataset="t.npz", sigma=9).plan.recorded))
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize("targets", ["1", "1,3,8"])
@pytest.mark.parametrize("more", [{}, {"model": "mlp"}, {"recipe": "paper"}])
def test_account_prices_what_train_runs(targets: str, more: dict[str, str]) -> None:
    asked = Question.model_validate({"epsilon": targets, "dataset": "mnist", **more})
    rows, notes, _ = answer(asked)
    for target, row in zip(map(float, targets.split(",")), rows, strict=True):
        plan = resolve({"dataset": "mnist", "epsilon": target, **more}).plan
        assert row.events == (plan.privacy.event,)
        assert row.batch_size == plan.privacy.batch_size
    assert bool(notes) is (more.get("recipe") != "paper")


@pytest.mark.parametrize("name", one_in(4, TRAINED))
def test_a_recipe_by_name_is_its_file(name: str) -> None:
    noise = {"sigma": 1} if name.startswith("bench") else {}
    by_file = resolve({"pretrained": None, **noise}, SAMPLES / f"{name}.yaml").plan
    assert resolve({"recipe": name, **noise}).plan.recorded == by_file.recorded
    if RECIPES[name].epsilon and not noise:
        shown, privacy = float(RECIPES[name].epsilon), by_file.privacy
        assert total_epsilon((privacy.event,), privacy.delta) == pytest.approx(shown, rel=2e-3)


@pytest.mark.usefixtures("uncalibrated")
def test_the_list_names_every_recipe_and_its_command() -> None:
    text = CliRunner().invoke(app, ["recipes"]).stdout
    for name, recipe in RECIPES.items():
        assert recipe.line(name) in text
        flags = shlex.split(recipe.line(name))[2:]
        given = {k[2:].replace("-", "_"): v for k, v in zip(flags[::2], flags[1::2], strict=True)}
        if recipe.command == "train":
            resolve(given)
        elif recipe.command == "tune":
            plan_search(given)
        else:
            grid(given, None)
