"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest
import torch

OPTIMIZER_NAMES = ("dp-sgd", "adaclip", "dp-adam", "dp-adambc", "dp-macadam", "dp-macadambc")
every_optimizer = pytest.mark.parametrize("name", OPTIMIZER_NAMES)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are written under the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Several threads on tiny tensors cost more than they bring, above all on a busy machine."""
    torch.set_num_threads(1)


REAL_FILES = ("MNIST/raw/train-images-idx3-ubyte", "cifar-10-batches-py/data_batch_1")


@pytest.fixture(scope="session")
def real_data_dir() -> Path:
    """Where MNIST and CIFAR-10 lie. On CI their absence is a failure; elsewhere a skip."""
    named = os.environ.get("DPMAC_DATA_DIR")
    folder = Path(named) if named else Path.home() / ".cache" / "dpmac"
    missing = [file for file in REAL_FILES if not (folder / file).exists()]
    if not missing:
        return folder
    reason = f"{' and '.join(missing)} not in {folder}: set DPMAC_DATA_DIR to where they lie"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
