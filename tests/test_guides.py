"""The commands of docs/fine-tuning.md, typed as they stand there, on small images and few steps."""

import hashlib
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision.models import get_model

from dpmac_cli.models import backbones
from dpmac_cli.models.registry import BACKBONES
from tests.digits_runs import dpmac
from tests.test_fine_tuning import NETWORKS, network

GUIDE = (Path(__file__).parents[1] / "docs" / "fine-tuning.md").read_text()
#: Its indented lines, continued ones joined.
COMMANDS = [
    line.strip()
    for line in re.sub(r" \\\n +", " ", GUIDE).splitlines()
    if line.startswith("    dpmac ")
]
#: Makes runs short: the same command otherwise.
SHORT = ("--steps", "2", "--batch-size", "8", "--device", "cpu")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the guide's commands name: images, networks, and weights in the place of public ones."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(("cat", "dog")):
        for part, count in (("train", 12), ("test", 4)):
            folder = Path("photos", part, name)
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 128 + 100 * label, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    Path("net.py").write_text(f"{NETWORKS}\n\nNet = ResNet\n")
    Path("runs/other-1").mkdir(parents=True)
    tensors = network("ResNet", (3, 8, 8)).state_dict()
    save_file(tensors, "runs/other-1/model.safetensors")
    save_file(network("ViT", (3, 8, 8)).state_dict(), "model.safetensors")
    torch.manual_seed(0)
    tensors = get_model("resnet50").state_dict()
    save_file(tensors, "resnet50.safetensors")
    weights = Path("hub", "checkpoints", "resnet50-11ad3fa6.pth")
    weights.parent.mkdir(parents=True)
    torch.save(tensors, weights)
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    row = replace(BACKBONES["resnet50"], sha256=sha256)
    monkeypatch.setitem(cast(dict[str, Any], BACKBONES), "resnet50", row)
    monkeypatch.setattr(backbones, "get_dir", lambda: "hub")
    return Path()


@pytest.mark.long
@pytest.mark.usefixtures("place")
def test_every_command_works_as_it_stands() -> None:
    assert len(COMMANDS) == 7
    for command in COMMANDS:
        _, *args = shlex.split(command, comments=True)
        if args[0] == "train":
            size = ("--backbone-size", "32") if "--backbone" in args else ("--image-size", "8")
            args = [*args, *SHORT, *size]
        result = dpmac(*args)
        assert result.exit_code == 0, f"{command}\n{result.output}"
