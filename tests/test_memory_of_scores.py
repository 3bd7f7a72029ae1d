"""Scoring and predicting large records takes the memory of a batch, not that of all of them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpmac_cli import load, train
from dpmac_cli.config.records import Images
from dpmac_cli.models.dataset import Data, Split, scaling_of
from dpmac_cli.training.evaluation import evaluate
from tests.helpers import class_task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the memory")
SIDE, RECORDS = 96, 6000
#: Bytes of the inputs of a network in all of its batches, and how many of them may be kept.
ALL, KEPT = RECORDS * 3 * SIDE**2 * 4, 0.4


def private_memory() -> int:
    """Bytes of memory that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def test_a_score_keeps_no_batch() -> None:
    images = Images(shape=(3, SIDE, SIDE), mean=(0.5,) * 3, std=(0.5,) * 3)
    pixels = torch.randint(0, 256, (RECORDS, *images.shape), dtype=torch.uint8)
    split = Split(pixels, torch.zeros(RECORDS, dtype=torch.long))
    data = Data(split, split, *scaling_of(images, torch.device("cpu")), class_task(2))
    network = nn.Sequential(nn.Flatten(), nn.Linear(images.size, 2))
    before = private_memory()
    found = evaluate(network, data, split)
    assert private_memory() - before < KEPT * ALL
    assert found.samples == RECORDS


def test_predictions_keep_no_batch(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    x = draws.integers(0, 256, (40, SIDE, SIDE, 3), dtype=np.uint8)
    np.savez(tmp_path / "few.npz", x=x, y=np.arange(40) % 2)
    flags: dict[str, Any] = {
        "model": "linear",
        "sigma": 4.0,
        "steps": 1,
        "device": "cpu",
        "classes": "a,b",
    }
    run = train(dataset=str(tmp_path / "few.npz"), out=tmp_path / "run", **flags)
    new = np.tile(x, (RECORDS // len(x), 1, 1, 1))
    before = private_memory()
    found = load(run.folder).predict(new)
    assert private_memory() - before < KEPT * ALL
    assert found.probabilities.shape == (RECORDS, 2)
