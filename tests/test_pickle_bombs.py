"""No file that one may be handed makes dpmac run code: every door, with a bomb before it."""

import gzip
import io
import os
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torchvision import datasets
from typer.testing import CliRunner

import dpmac_cli
from dpmac_cli.cli.app import app
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.errors import InputError
from dpmac_cli.release.train import resume_folder
from tests.digits_runs import train_digits
from tests.helpers import load_data

CPU = torch.device("cpu")


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self._mark),)


def plain(bomb: Bomb) -> bytes:
    return pickle.dumps({"data": bomb, "labels": [bomb], "fine_labels": [bomb]})


def torchs(bomb: Bomb) -> bytes:
    file = io.BytesIO()
    torch.save({"theta": bomb}, file)
    return file.getvalue()


def old_torchs(bomb: Bomb) -> bytes:
    file = io.BytesIO()
    torch.save({"theta": bomb}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def numpys(bomb: Bomb) -> bytes:
    file = io.BytesIO()
    np.savez(file, theta=np.array([bomb], dtype=object))
    return file.getvalue()


def numpys_alone(bomb: Bomb) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([bomb], dtype=object), allow_pickle=True)
    return file.getvalue()


BOMBS: Mapping[str, Callable[[Bomb], bytes]] = {
    "pickle": plain,
    "pt": torchs,
    "old pt": old_torchs,
    "npz": numpys,
    "npy": numpys_alone,
}


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """What a bomb leaves behind, and at the end of each test must not have."""
    mark = tmp_path / "exploded"
    yield mark
    assert not mark.exists()


@pytest.fixture(params=list(BOMBS))
def bomb(request: pytest.FixtureRequest, mark: Path) -> bytes:
    return BOMBS[request.param](Bomb(mark))


def explode(name: str, content: bytes) -> None:
    """Read a bomb as nobody should."""
    file = io.BytesIO(content)
    if name == "pickle":
        pickle.load(file)
    elif name.endswith("pt"):
        torch.load(file, weights_only=False)
    else:
        loaded = np.load(file, allow_pickle=True)
        loaded["theta"] if name == "npz" else None


@pytest.mark.parametrize("name", BOMBS)
def test_the_bombs_are_live(mark: Path, name: str) -> None:
    explode(name, BOMBS[name](Bomb(mark)))
    assert mark.exists()
    mark.rmdir()


@pytest.mark.promise("code")
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.npz"])
def test_a_model_file(tmp_path: Path, bomb: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(bomb)
    result = CliRunner().invoke(app, ["eval", str(tmp_path / name)])
    assert result.exit_code == 2
    assert f"{name} is not a valid safetensors file" in result.stderr.replace("\n", " ")


CIFARS = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}


@pytest.mark.promise("code")
@pytest.mark.parametrize("name", CIFARS)
def test_the_pickles_of_cifar_are_read_only_if_they_are_the_published_ones(
    tmp_path: Path, mark: Path, name: str
) -> None:
    kind = CIFARS[name]
    where = tmp_path / kind.base_folder
    where.mkdir()
    for file, _ in (*kind.train_list, *kind.test_list, (kind.meta["filename"], None)):
        (where / file).write_bytes(plain(Bomb(mark)))
    with pytest.raises(InputError, match="a file is damaged, or of another kind"):
        load_data(name, tmp_path, CPU)


@pytest.mark.promise("code")
def test_raw_files_and_old_caches_of_mnist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bomb: bytes
) -> None:
    """And of its kin, which the same reader reads."""
    raw, processed = (tmp_path / "MNIST" / part for part in ("raw", "processed"))
    for where in (raw, processed):
        where.mkdir(parents=True)
    for archive, _ in datasets.MNIST.resources:
        (raw / Path(archive).stem).write_bytes(bomb)
        (raw / archive).write_bytes(gzip.compress(bomb))
    for file in ("training.pt", "test.pt"):
        (processed / file).write_bytes(bomb)
    calls = forbid_unpickling(monkeypatch)
    with pytest.raises(InputError, match="a file is damaged, or of another kind"):
        load_data("mnist", tmp_path, CPU)
    assert calls == []


@pytest.mark.promise("code")
def test_a_file_is_no_data_set(bomb: bytes) -> None:
    Path("data.npz").write_bytes(bomb)
    result = CliRunner().invoke(app, ["train", "--dataset", "data.npz"])
    assert result.exit_code == 2
    assert not set(DATASETS) & {"data.npz"}


def forbid_unpickling(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have whatever unpickles fail. The attempts: a failure may be taken for a damaged file's."""
    calls: list[str] = []

    def forbid(module: ModuleType, name: str) -> None:
        def fail(*args: object, **kwargs: object) -> NoReturn:
            calls.append(f"{module.__name__}.{name}")
            raise AssertionError(f"{calls[-1]} was called")

        monkeypatch.setattr(module, name, fail)

    for name in ("load", "loads", "Unpickler"):
        forbid(pickle, name)
    forbid(torch, "load")
    forbid(np, "load")
    return calls


@pytest.mark.promise("code")
def test_nothing_is_unpickled_from_the_first_step_to_the_last_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train_digits(steps=1)  # whatever a first use of a library loads is its own affair
    calls = forbid_unpickling(monkeypatch)
    where = train_digits(out="run").folder
    for _ in resume_folder(where, {"steps": "5", "out": "longer"}):
        pass
    for args in (
        ["eval", "run"],
        ["account", "run"],
        ["train", "--resume", "run", "--out", "new", "--steps", "7"],
    ):
        result = CliRunner().invoke(app, args)
        assert (result.exit_code, result.exception) == (0, None), result.output
    assert calls == []


# No pickle is written or loaded: what ruff's banned imports leave open in the command line.

PACKAGE = Path(dpmac_cli.__file__).parent
CONFIG = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
#: Names that the package may not use anywhere. The others are free in dpmac_cli/cli.
PICKLES = [
    name
    for name, rule in CONFIG["flake8-tidy-imports"]["banned-api"].items()
    if "pickle" in rule["msg"]
]


def banned(folder: Path) -> list[str]:
    """What ruff finds of the pickles, where no file is excepted."""
    entries = ", ".join(f'"{name}" = {{msg = "x"}}' for name in PICKLES)
    rule = f"lint.flake8-tidy-imports.banned-api = {{{entries}}}"
    options = "-m ruff check --isolated --no-cache --output-format concise"
    command = [sys.executable, *options.split()]
    done = subprocess.run(
        [*command, "--select", "TID251", "--ignore-noqa", "--config", rule, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if "TID251" in line]


@pytest.mark.promise("code")
def test_no_pickle_is_written_or_loaded() -> None:
    assert len(PICKLES) > 10
    (public,) = banned(PACKAGE)  # tensors alone: tests/test_features.py
    assert "dpmac_cli/models/weights.py" in public
    assert "torch.load" in public
    assert "weights_only=True" in (PACKAGE / "models" / "weights.py").read_text()
