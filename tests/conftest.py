"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest
import torch

OPTIMIZER_NAMES = ("dp-sgd", "adaclip", "dp-adam", "dp-adambc", "dp-macadam", "dp-macadambc")


@pytest.fixture(autouse=True)
def _no_network_and_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are written under the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Several threads on tiny tensors cost more than they bring, above all on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data_dir() -> Path:
    """Where MNIST lies. On CI its absence is a failure; elsewhere the test is skipped."""
    named = os.environ.get("DPMAC_DATA_DIR")
    folder = Path(named) if named else Path.home() / ".cache" / "dpmac"
    if (folder / "MNIST" / "raw" / "train-images-idx3-ubyte").exists():
        return folder
    reason = f"MNIST is not in {folder}: set DPMAC_DATA_DIR to a folder that holds it"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
