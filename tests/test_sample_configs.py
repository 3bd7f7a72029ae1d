"""Every shipped configuration trains, and every shipped study begins."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.dataset import Split
from dpmac_cli.data.loaders import load_data
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import train
from dpmac_cli.studies.grid import plan
from dpmac_cli.studies.search import plan_search

FILES = sorted((Path(__file__).parents[1] / "sample_configs").glob("*.yaml"))
STUDIES = [file for file in FILES if file.stem.startswith("table")]
SEARCHES = [file for file in FILES if file.stem.startswith("tune")]
CONFIGS = [file for file in FILES if file not in (*STUDIES, *SEARCHES)]


def by_name(file: Path) -> str:
    return file.stem


def test_there_are_some() -> None:
    assert CONFIGS
    assert STUDIES
    assert SEARCHES


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


@pytest.mark.parametrize(
    ("name", "runs"), [("table1-mnist", 180), ("table2-cifar10", 150), ("table1-quick", 12)]
)
def test_a_shipped_study_is_what_it_says(name: str, runs: int) -> None:
    [file] = [file for file in STUDIES if file.stem == name]
    assert f"dpmac compare --recipe {file.stem}" in file.read_text()
    study = plan({}, file, Path("runs"))
    assert len(study.runs) == runs
    assert {run.plan.data.dataset for run in study.runs} == {
        "mnist" if name.startswith("table1") else "cifar10"
    }


@pytest.mark.long
@pytest.mark.parametrize("file", SEARCHES, ids=by_name)
def test_a_shipped_search_is_within_its_epsilon(file: Path) -> None:
    assert f"dpmac tune --recipe {file.stem}" in file.read_text()
    assert 0.99 * 3 < plan_search({"device": "cpu"}, file).epsilon <= 3


@pytest.mark.long
@pytest.mark.real_data
@pytest.mark.parametrize("file", STUDIES, ids=by_name)
def test_the_first_run_of_a_shipped_study_trains(file: Path, real_data_dir: Path) -> None:
    flags = {"device": "cpu", "data_dir": str(real_data_dir), "steps": "2"}
    first = plan(flags, file, Path("runs")).runs[0]
    *_, last = train(first.plan)
    assert isinstance(last, Finished)
    assert last.folder == first.folder
