"""Recipes: two meanings of noise and budget, the rule of the best one, and files by name."""

import io
import itertools
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.cli.app import app
from dpmac_cli.cli.recipes import print_recipes
from dpmac_cli.config.account import Question, answer, by_target
from dpmac_cli.config.defaults import completed
from dpmac_cli.config.named import RECIPES, file_of
from dpmac_cli.config.recipes import recipe_notes
from dpmac_cli.config.resolve import change, resolve
from dpmac_cli.config.settings import Settings
from dpmac_cli.config.sources import by_flag
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import InputError
from dpmac_cli.studies.grid import plan as grid
from dpmac_cli.studies.search import plan_search
from tests.tiers import one_in

SAMPLES = Path(__file__).parents[1] / "sample_configs"
TRAINED = [name for name, recipe in RECIPES.items() if recipe.command == "train"]


def images(name: str, shape: tuple[int, ...], records: int = 600) -> None:
    """Write images of two classes; what they show does not matter."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (records, *shape), dtype=np.uint8)
    np.savez(name, x=x, y=np.arange(records) % 10, x_test=x[:50], y_test=np.arange(50) % 10)


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
    assert grid({"optimizers": "dp-adam", "seeds": "1,"}, None).column == "epsilon"


@pytest.mark.long
def test_a_budget_of_the_papers_run() -> None:
    plan = resolve(dataset="mnist", epsilon=1, recipe="paper").plan
    privacy = plan.privacy
    assert (privacy.batch_size, privacy.steps) == (256, 1175)
    assert plan.optimizer.name == "dp-macadam"
    assert total_epsilon((privacy.event,), privacy.delta) <= 1


def test_noise_of_the_best_run() -> None:
    best, _ = chosen(epsilon=1)
    assert chosen(sigma=4, recipe="best")[0] == best.replace(sigma=4.0, epsilon=None)


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


@pytest.mark.parametrize(
    "flags", [{"model": "cnn"}, {"augmentations": 2}, {"backbone": "resnet18"}]
)
def test_a_network_that_is_named_takes_the_images(flags: dict[str, Any]) -> None:
    assert chosen(dataset="cifar10", epsilon=2, **flags)[0].features is None


@pytest.mark.parametrize("name", ["mnist", "cifar10", "digits"])
def test_your_own_records_of_the_same_shape_have_the_same_recipe(name: str) -> None:
    """All but delta, which depends on n for your own, and constants of the registry."""
    images("own.npz", DATASETS[name].shape)
    resolved = resolve(dataset="own.npz", sigma=9, recipe="best")
    own, records = resolved.settings, resolved.plan.data.facts.train_size
    given = Settings.model_validate({"dataset": name, "sigma": 9, "recipe": "best"})
    named = completed(given, replace(DATASETS[name], train_size=records))
    for setting in ("features", "optimizer", "batch_size", "epochs", "lr", "ema", "model"):
        assert getattr(own, setting) == getattr(named, setting), setting


def test_large_images_and_odd_sizes_train_a_network() -> None:
    for shape in ((3, 30, 30), (3, 64, 64)):
        images("own.npz", shape, 60)
        plan = resolve(dataset="own.npz", sigma=9).plan
        assert (plan.network.model.name, plan.network.features) == ("cnn", None)


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


@pytest.mark.parametrize(
    ("data", "flags"),
    one_in(
        4,
        itertools.product(
            ["mnist", "own.npz"], [{"epsilon": 2}, {"sigma": 1}, {"epsilon": 2, "recipe": "paper"}]
        ),
    ),
)
def test_a_run_is_resumed_with_its_recipe(flags: dict[str, Any], data: str) -> None:
    images("own.npz", (1, 28, 28))
    plan = resolve({"dataset": data, **flags}).plan
    assert change(by_flag(plan.recorded), {}).plan.recorded == plan.recorded
    lines = (f"{flag}: {value}" for flag, value in by_flag(plan.recorded).items())
    Path("config.yaml").write_text("\n".join(lines))
    assert resolve(file=Path("config.yaml")).plan.recorded == plan.recorded


@pytest.mark.long
@pytest.mark.parametrize("targets", ["1", "1,3,8"])
@pytest.mark.parametrize("more", [{}, {"model": "mlp"}, {"recipe": "paper"}])
def test_account_prices_what_train_runs(targets: str, more: dict[str, str]) -> None:
    questions = by_target(Question.model_validate({"epsilon": targets, "dataset": "mnist", **more}))
    rows = [row for one in questions for row in answer(one.completed())]
    for target, row in zip(map(float, targets.split(",")), rows, strict=True):
        plan = resolve({"dataset": "mnist", "epsilon": target, **more}).plan
        assert row.events == (plan.privacy.event,)
        assert row.batch_size == plan.privacy.batch_size
    assert bool(questions[0].notes) is (more.get("recipe") != "paper")


def test_account_of_noise_is_of_the_paper() -> None:
    priced = Question.model_validate({"sigma": "1"}).completed()
    assert (priced.batch_size, priced.epochs) == (256, (5,))
    longest = Question.model_validate({"sigma": "1", "epsilon": "2"}).completed()
    assert (longest.batch_size, longest.solve) == (256, "steps")


def test_a_comparison_says_its_recipe_and_has_one() -> None:
    study = grid({"dataset": "mnist", "epsilon": "1,3", "optimizers": "all", "seeds": "1,"}, None)
    assert study.notes[0].startswith("recipe best: ")
    assert (
        len({(run.plan.privacy.batch_size, run.plan.network.features) for run in study.runs}) == 1
    )
    with pytest.raises(InputError, match="compared within one recipe"):
        grid({"recipe": "paper,best"}, None)


def test_the_samples_are_the_recipes() -> None:
    names = sorted(file.stem for file in SAMPLES.glob("*.yaml"))
    assert names == sorted(RECIPES)
    for name in names:
        assert file_of(name).read_bytes() == (SAMPLES / f"{name}.yaml").read_bytes()


@pytest.mark.parametrize("name", one_in(4, TRAINED))
def test_a_recipe_by_name_is_its_file(name: str) -> None:
    noise = {"sigma": 1} if name.startswith("bench") else {}
    by_file = resolve({"pretrained": None, **noise}, SAMPLES / f"{name}.yaml").plan
    assert resolve({"recipe": name, **noise}).plan.recorded == by_file.recorded
    if RECIPES[name].epsilon and not noise:
        shown, privacy = float(RECIPES[name].epsilon), by_file.privacy
        assert total_epsilon((privacy.event,), privacy.delta) == pytest.approx(shown, rel=2e-3)


@pytest.mark.usefixtures("uncalibrated")
def test_flags_and_files_take_precedence_over_a_recipe() -> None:
    plan = resolve(recipe="mnist-scatter", epochs=3, sigma=2).plan
    privacy = plan.privacy
    assert (privacy.steps, privacy.sigma, privacy.batch_size) == (36, 2, 5000)
    Path("mine.yaml").write_text("recipe: mnist-scatter\nlr: 0.5\n")
    plan = resolve({"epochs": 4}, Path("mine.yaml")).plan
    assert (plan.optimizer.lr, plan.privacy.steps) == (0.5, 48)
    assert plan.recorded["recipe"] == "best"


def test_a_study_by_name() -> None:
    by_name = grid({"recipe": "table1-quick", "seeds": "1,"}, None)
    by_file = grid({"seeds": "1,"}, SAMPLES / "table1-quick.yaml")
    assert [run.folder for run in by_name.runs] == [run.folder for run in by_file.runs]
    with pytest.raises(InputError, match="dpmac compare --recipe table1-quick"):
        resolve(recipe="table1-quick")


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


@pytest.mark.parametrize("width", [80, 200])
def test_commands_of_recipes_can_be_copied_from_a_terminal(width: int) -> None:
    shown = io.StringIO()
    print_recipes(Console(file=shown, force_terminal=True, color_system=None, width=width))
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    for name, recipe in RECIPES.items():
        assert any(line.endswith(recipe.line(name)) for line in lines)
        (row,) = (line for line in lines if line.split()[:1] == [name])
        assert recipe.line(name) not in row
