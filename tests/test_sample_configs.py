"""Every shipped configuration trains."""

from pathlib import Path

import pytest

from dpmac_cli.config import resolve
from dpmac_cli.run import Finished, train

CONFIGS = sorted((Path(__file__).parents[1] / "sample_configs").glob("*.yaml"))


def test_there_are_some() -> None:
    assert CONFIGS


@pytest.mark.real_data
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_shipped_config_trains(file: Path, real_data_dir: Path) -> None:
    config = resolve({"device": "cpu", "data_dir": str(real_data_dir)}, file).config
    assert config.dataset in file.stem
    text = file.read_text()
    assert f"dpmac train --config sample_configs/{file.name}" in text
    flags = {"device": "cpu", "data_dir": str(real_data_dir), "steps": "2", "quiet": True}
    *_, last = train(resolve(flags, file).config)
    assert isinstance(last, Finished)
    assert last.report["privacy"]["steps"] == 2
