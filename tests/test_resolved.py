"""Numbers that the named recipes and sample configurations resolve to, compared with a snapshot.

After a change that is meant: ``python -m tests.test_resolved`` writes the snapshot again.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpmac_cli.config.named import RECIPES, file_of
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.dataset import Split
from dpmac_cli.data.loaders import load_data
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import train
from dpmac_cli.studies.grid import plan as grid

SAMPLES = Path(__file__).parents[1] / "sample_configs"
SNAPSHOT = Path(__file__).with_suffix(".json")
TRAINED = [name for name, recipe in RECIPES.items() if recipe.command == "train"]
STUDIED = [name for name, recipe in RECIPES.items() if recipe.command == "compare"]


def numbers_of(plan: TrainPlan) -> dict[str, Any]:
    """Return everything that decides what a run computes, as JSON values."""
    event, settings = plan.privacy.event, plan.settings
    return {
        "dataset": plan.data.dataset,
        "event": [event.sampling_rate, event.noise_multiplier, event.steps, event.sampler],
        "delta": plan.privacy.delta,
        "batch": plan.privacy.batch_size,
        "optimizer": plan.optimizer.name,
        "hyper": plan.optimizer.model_dump(),
        "recipe": json.loads(json.dumps(asdict(plan.recipe))),
        "model": plan.network.model.name,
        "features": None if plan.network.features is None else str(plan.network.features),
        "trained": str(plan.network.trained),
        "at a time": [settings.physical_batch, plan.gpu_batch],
        "metric": settings.metric,
    }


def of_run(file: Path) -> dict[str, Any]:
    """Return the numbers of a settings file of one run."""
    return numbers_of(resolve({"device": "cpu"}, file).plan)


def of_study(file: Path) -> list[list[Any]]:
    """Return labels, column and deciding numbers of each cell of a study, and its seeds."""
    study, found = grid({"device": "cpu"}, file), list[list[Any]]()
    for run in study.runs[:: len(study.seeds)]:
        event = run.plan.privacy.event
        labels = [list(label) for label in run.labels]
        numbers = [event.sampling_rate, event.noise_multiplier, event.steps]
        rest = [run.plan.optimizer.model_dump(), run.plan.network.model.name]
        found.append([labels, run.column, *numbers, *rest])
    return [[*study.seeds], *found]


def snapshot() -> Iterator[tuple[str, Any]]:
    """Yield the content of the snapshot by name."""
    for name in TRAINED:
        yield name, of_run(file_of(name))
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


#: Studies with a budget in each column, whose noise takes ten seconds to calibrate.
SLOW = ("bench-mnist", "bench-cifar10")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * (n in SLOW)) for n in (*TRAINED, *STUDIED)],
)
def test_a_recipe_resolves_to_the_same_numbers(name: str) -> None:
    kept = json.loads(SNAPSHOT.read_text())[name]
    found = of_run(file_of(name)) if name in TRAINED else of_study(file_of(name))
    same(json.loads(json.dumps(found)), kept)


@pytest.mark.parametrize("name", RECIPES)
def test_a_sample_configuration_is_the_recipe_of_its_name(name: str) -> None:
    assert (SAMPLES / f"{name}.yaml").read_bytes() == file_of(name).read_bytes()
    assert {path.stem for path in SAMPLES.glob("*.yaml")} == {*RECIPES}


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in snapshot())
    SNAPSHOT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.stdout.write(f"{SNAPSHOT}\n")


FILES = sorted((Path(__file__).parents[1] / "sample_configs").glob("*.yaml"))
STUDIES = [file for file in FILES if file.stem.startswith("table")]
SEARCHES = [file for file in FILES if file.stem.startswith("tune")]
CONFIGS = [file for file in FILES if file not in (*STUDIES, *SEARCHES)]


def by_name(file: Path) -> str:
    return file.stem


@pytest.mark.long
@pytest.mark.real_data
@pytest.mark.usefixtures("features_of_one")
@pytest.mark.parametrize("file", CONFIGS, ids=by_name)
def test_a_shipped_config_trains(file: Path, real_data_dir: Path) -> None:
    config = resolve({"device": "cpu", "data_dir": str(real_data_dir)}, file).plan
    assert config.data.dataset in file.stem
    text = file.read_text()
    assert f"dpmac train --recipe {file.stem}" in text
    flags = {"device": "cpu", "data_dir": str(real_data_dir), "steps": "2", "quiet": True}
    flags |= {"batch_size": "16" if config.recipe.augmented else "64"}  # or a step takes minutes
    data = load_data(config.data.dataset, real_data_dir, torch.device("cpu"))
    some = Split(data.test.images[:100], data.test.labels[:100])
    *_, last = train(resolve(flags, file).plan, data=replace(data, test=some))
    assert isinstance(last, Finished)
    assert last.report["privacy"]["steps"] == 2
