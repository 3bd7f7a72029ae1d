"""Recipes: what each chooses, the numbers it resolves to, and its settings file.

``python -m tests.test_recipes`` writes the snapshot of the numbers again.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.cli.app import app
from dpmac_cli.config.class_weights import class_weights, shares_of
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.defaults import completed, physical_batch, recipe_notes
from dpmac_cli.config.named import RECIPES, file_of
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.settings import Settings
from dpmac_cli.errors import as_flags
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import train_plan
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.studies.grid import plan as grid
from dpmac_cli.studies.search import plan_search

SAMPLES = Path(__file__).parents[1] / "sample_configs"
TRAINED = [name for name, recipe in RECIPES.items() if recipe.command == "train"]


def chosen(**flags: Any) -> tuple[Settings, str]:
    """Return all settings of a named dataset, and what the recipe says about them."""
    given, facts = Settings.model_validate(flags), DATASETS[flags.get("dataset", "mnist")]
    return completed(given, facts), as_flags(" ".join(recipe_notes(given, facts)))


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
    assert f"--batch-size {found.batch_size} " in said
    assert f"--lr {found.lr:g}" in said
    assert f"--epochs {found.epochs}" in said
    assert f"--ema {found.ema:g}" in said


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


SNAPSHOT = Path(__file__).with_suffix(".json")
STUDIED = [name for name, recipe in RECIPES.items() if recipe.command == "compare"]


def numbers_of(plan: Plan) -> dict[str, Any]:
    """Return everything that decides what a run computes, as JSON values."""
    event, settings = plan.event, plan.settings
    return {
        "dataset": plan.facts.typed,
        "event": [event.sampling_rate, event.noise_multiplier, event.steps, event.sampler],
        "delta": plan.settings.delta,
        "batch": plan.settings.batch_size,
        "optimizer": plan.optimizer.name,
        "hyper": plan.optimizer.model_dump(),
        "recipe": {
            "schedule": settings.lr_schedule,
            "warmup": settings.warmup_steps,
            "weight_decay": settings.weight_decay,
            "ema": settings.ema or 0.0,
            "views": settings.augmentations or 1,
            "augment": settings.augment or "none",
            "records": plan.records_in_a_step,
            "loss": {
                "name": settings.loss,
                "smoothing": settings.label_smoothing,
                "weights": [*class_weights(settings)],
                "shares": [*shares_of(settings)],
                "weighed": "",
            },
        },
        "model": plan.model.name,
        "features": None if plan.features is None else str(plan.features),
        "trained": str(plan.trained),
        "at a time": [physical_batch(settings, plan.facts, on) for on in ("cpu", "cuda")],
        "metric": settings.metric,
    }


def of_study(file: Path) -> list[list[Any]]:
    """Return labels, column and deciding numbers of each cell of a study, and its seeds."""
    study, found = grid({"device": "cpu"}, file), list[list[Any]]()
    for run in study.runs[:: len(study.seeds)]:
        event = run.plan.event
        labels = [list(label) for label in run.labels]
        numbers = [event.sampling_rate, event.noise_multiplier, event.steps]
        rest = [run.plan.optimizer.model_dump(), run.plan.model.name]
        found.append([labels, run.column, *numbers, *rest])
    return [[*study.seeds], *found]


def snapshot() -> Iterator[tuple[str, Any]]:
    """Yield the content of the snapshot by name."""
    for name in TRAINED:
        yield name, numbers_of(resolve({"device": "cpu"}, file_of(name)).plan)
    for name in STUDIED:
        yield name, of_study(file_of(name))


def same(found: Any, kept: Any) -> None:
    """Compare JSON values; numbers may differ by what versions of libraries round."""
    if isinstance(kept, dict):
        assert found.keys() == kept.keys()
        for name, value in kept.items():
            same(found[name], value)
    elif isinstance(kept, list):
        assert len(found) == len(kept)
        for one, other in zip(found, kept, strict=True):
            same(one, other)
    elif isinstance(kept, float):
        assert found == pytest.approx(kept, rel=1e-6)
    else:
        assert found == kept


#: Recipes that take seconds to price or to calibrate.
SLOW = ("bench-mnist", "bench-cifar10", "mnist", "mnist-dp-sgd", "mnist-epsilon-1", "cifar10")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * (n in SLOW)) for n in (*TRAINED, *STUDIED)],
)
def test_a_recipe_resolves_to_the_same_numbers(name: str) -> None:
    kept = json.loads(SNAPSHOT.read_text())[name]
    if name in STUDIED:
        found: Any = of_study(file_of(name))
    else:
        plan = resolve({"device": "cpu"}, file_of(name)).plan
        found = numbers_of(plan)
        if RECIPES[name].epsilon and not name.startswith("bench"):
            shown = float(RECIPES[name].epsilon)
            cost = total_epsilon(plan.planned, plan.settings.delta)
            assert cost == pytest.approx(shown, rel=2e-3)
    same(json.loads(json.dumps(found)), kept)


@pytest.mark.parametrize("name", RECIPES)
def test_a_sample_configuration_is_the_recipe_of_its_name(name: str) -> None:
    assert (SAMPLES / f"{name}.yaml").read_bytes() == file_of(name).read_bytes()
    assert {path.stem for path in SAMPLES.glob("*.yaml")} == {*RECIPES}


FILES = sorted((Path(__file__).parents[1] / "sample_configs").glob("*.yaml"))
STUDIES = [file for file in FILES if file.stem.startswith("table")]
SEARCHES = [file for file in FILES if file.stem.startswith("tune")]
CONFIGS = [file for file in FILES if file not in (*STUDIES, *SEARCHES)]


def by_name(file: Path) -> str:
    return file.stem


@pytest.mark.long
@pytest.mark.real_data
@pytest.mark.usefixtures("features_of_one", "few_to_score")
@pytest.mark.parametrize("file", CONFIGS, ids=by_name)
def test_a_shipped_config_trains(file: Path, real_data_dir: Path) -> None:
    config = resolve({"device": "cpu", "data_dir": str(real_data_dir)}, file).plan
    assert config.facts.typed in file.stem
    text = file.read_text()
    assert f"dpmac train --recipe {file.stem}" in text
    flags = {"device": "cpu", "data_dir": str(real_data_dir), "steps": "2", "quiet": True}
    flags |= {"batch_size": "2" if config.settings.augment else "64"}  # or a step takes minutes
    *_, last = train_plan(resolve(flags, file).plan)
    assert isinstance(last, Run)
    assert last.report["events"][0]["steps"] == 2


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in snapshot())
    SNAPSHOT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.stdout.write(f"{SNAPSHOT}\n")
