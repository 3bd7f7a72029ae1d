"""Fixed features and public weights: what is frozen, what is trained, and what is published."""

import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from dpmac_cli.data.dataset import Split
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models.build import build_model
from dpmac_cli.models.feature_cache import _run_of, featured
from dpmac_cli.models.features import cut_before_head, head_of, with_features
from dpmac_cli.models.registry import (
    FEATURES,
    Trained,
    parse_model,
)
from dpmac_cli.models.validation import check_model
from dpmac_cli.release import run
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import RunEvent
from dpmac_cli.release.scoring import score
from dpmac_cli.runs.session import Started
from dpmac_cli.storage.progress import Computing
from tests.digits_runs import (
    digits_config,
    of,
    refused,
    same_weights,
    train_digits,
    train_events,
    weights,
)
from tests.tiers import rest_long

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("cache")
DIGITS = DATASETS["digits"]
SCATTER: dict[str, Any] = {"features": "scatter", "optimizer": "dp-adam"}
MIRRORED: dict[str, Any] = {**SCATTER, "features": "scatter-mirror"}
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
    return save(tmp_path / "public.safetensors", public_weights(net))


def public_weights(net: str) -> dict[str, Tensor]:
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


def tuned(net: str, public: Path, **flags: Any) -> dict[str, Any]:
    return {"model": net, "pretrained": str(public), "train": "head", "lr": "0.02", **flags}


def computed(events: list[RunEvent]) -> bool:
    return any(isinstance(event, Computing) for event in events)


def kept(cache: Path) -> Path:
    """The one file of features."""
    (file,) = cache.glob("*.rows")
    return file


def interrupted(config: Any, steps: int) -> Path:
    """A run that was asked to stop after some steps."""
    events: list[RunEvent] = []
    asked = iter(range(10_000))

    def stop() -> bool:
        """Count from the first step: batches of features ask as well."""
        return any(isinstance(event, Started) for event in events) and next(asked) >= steps

    for event in run.train(config, stop):
        events.append(event)
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.state == "interrupted"
    return last.folder


# What features are


@pytest.mark.privacy
def test_the_features_of_a_record_depend_on_that_record_alone(net: str) -> None:
    data = load_data("digits", Path(), CPU)
    x = data.standardised(data.train.images[:20])
    tuned_part = cut_before_head(
        build_model(parse_model(net), DIGITS.signature, seed=0, trained=Trained("head")),
        DIGITS.shape,
    )
    scattered = [with_features(nn.Identity(), DIGITS.shape, kind) for kind in FEATURES]
    for parts in (*scattered, tuned_part):
        together = parts.features(x)
        others = x.flip(0).mul(-50)
        for row in (0, 7):
            changed = others.clone()
            changed[row] = x[row]
            torch.testing.assert_close(parts.features(changed)[row], together[row])
            torch.testing.assert_close(parts.features(x[row : row + 1])[0], together[row])


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) / 2


@pytest.mark.privacy
def test_a_frozen_part_of_ones_own_sees_one_record_at_a_time() -> None:
    still = nn.BatchNorm2d(1, track_running_stats=False)  # takes the batch's own, always
    for layer in (Mixes(), still):
        model = nn.Sequential(layer, nn.Flatten(), nn.Linear(64, 10))
        with pytest.raises(ModelError, match="for a batch than for one sample at a time"):
            check_model(model, DIGITS.shape, 10, frozen=True)
        check_model(model, DIGITS.shape, 10, frozen=True, isolated=True)
        parts, data = cut_before_head(model, DIGITS.shape), load_data("digits", Path(), CPU)
        parts.own = True
        run, manner = _run_of(parts, data)
        x = torch.randn(5, *DIGITS.shape)
        with torch.no_grad(), manner.running():
            others = torch.cat([x[:1], 100 * x[1:].flip(0)])
            assert torch.equal(run(x)[0], run(others)[0])
            torch.testing.assert_close(run(x)[0], parts.features(x[:1])[0])


# Runs


@pytest.mark.long
def test_a_run_on_features_trains_and_is_scored_from_its_folder_alone(cache: Path) -> None:
    events, finished = train_events(digits_config(**SCATTER, epochs=6, lr="0.02"))
    assert computed(events)
    report = finished.report
    assert report["model"]["name"] == "linear"
    assert report["test"]["accuracy"] > 0.6
    shutil.rmtree(cache)
    for path in (finished.folder, finished.folder / "model.safetensors"):
        assert score(path, None, None, "cpu").result.accuracy == report["test"]["accuracy"]
    assert set(weights(finished.folder)) == {"head.1.weight", "head.1.bias"}
    assert not cache.exists()


@pytest.mark.parametrize("what", rest_long(["scatter", "head"]))
def test_a_run_that_stopped_goes_on_with_its_features(what: str, net: str, public: Path) -> None:
    flags = SCATTER if what == "scatter" else tuned(net, public)
    half = interrupted(digits_config(**flags, steps=6, seed=3), 4)
    *events, last = run.resume(half, {"model": net} if what == "head" else {})
    assert isinstance(last, Finished)
    assert not computed(events)
    assert last.report["privacy"]["steps"] == 6


@pytest.mark.parametrize(
    "change",
    [
        {"features": "scatter"},
        {"pretrained": "other.safetensors"},
        {"train": "head"},
        {"backbone": "efficientnet-lite0"},
        {"backbone_size": "64"},
    ],
)
def test_what_is_frozen_cannot_change_in_a_run(change: dict[str, str]) -> None:
    first = train_digits()
    with pytest.raises(InputError, match="cannot change in a fork"):
        list(run.fork(first.folder, {**change, "steps": "9"}))


@pytest.mark.long
def test_only_the_last_layer_changes(net: str, public: Path) -> None:
    finished = train_digits(**tuned(net, public), epochs=3, no_dp=True)
    before, after = public_weights(net), weights(finished.folder)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert name.startswith("5.") or torch.equal(tensor, before[name]), name
    assert finished.report["test"]["accuracy"] > 0.5
    public.unlink()
    scored = score(finished.folder, None, None, "cpu", net)
    assert scored.result.accuracy == finished.report["test"]["accuracy"]


# The cache


@pytest.mark.privacy
def test_the_cache_is_its_owners_alone(cache: Path) -> None:
    before = os.umask(0)
    try:
        train_digits(**SCATTER)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in cache.iterdir()} == {0o600}
    cache.chmod(0o755)
    train_digits(**MIRRORED)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.long
def test_whatever_defines_the_features_names_them(net: str, public: Path, cache: Path) -> None:
    plans: list[dict[str, Any]] = [
        {"features": "scatter"},
        {"backbone": "efficientnet-lite0", "backbone_size": "32"},
        tuned(net, public),
        tuned(net.replace(":Net", ":Other"), public),
        tuned(net, save(public.with_name("b"), public_weights(net) | {"0.bias": torch.ones(8)})),
    ]
    for count, plan in enumerate(plans, start=1):
        assert computed(train_events(digits_config(**plan))[0])
        assert len(list(cache.glob("*.rows"))) == count


def test_other_records_have_other_features(cache: Path) -> None:
    parts = with_features(nn.Identity(), DIGITS.shape)
    data = load_data("digits", Path(), CPU)
    images = data.train.images.clone()
    images[-1, 0, 0, 0] ^= 1
    changed = replace(data, train=Split(images, data.train.labels))
    other = replace(data, gain=data.gain * 2)
    found = [of(featured(parts, given, {}, cache)) for given in (data, changed, other)]
    assert len({sha256 for _, sha256 in found}) == 3
    assert len(list(cache.glob("*.rows"))) == 3


@pytest.mark.parametrize("damage", rest_long(["other", "flipped", "cut", "empty"]))
def test_a_damaged_file_is_computed_anew(damage: str, cache: Path) -> None:
    one = train_digits(**SCATTER, seed=1)
    file = kept(cache)
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    if damage == "other":  # whole, but of something else
        train_digits(**MIRRORED)
        (other,) = set(cache.glob("*.rows")) - {file}
        file.write_bytes(other.read_bytes())
    else:
        ruins = {"flipped": content, "cut": content[:5000], "empty": bytearray()}
        file.write_bytes(ruins[damage])
    events, other_run = train_events(digits_config(**SCATTER, seed=1))
    assert computed(events)
    assert same_weights(one.folder, other_run.folder)
    assert not computed(train_events(digits_config(**SCATTER))[0])


# What is refused


@pytest.mark.privacy
@pytest.mark.parametrize("content", [b"PK\x03\x04", b"", b"\x80\x02}q\x00.", b"\xff" * 64])
def test_what_is_no_safetensors_is_refused_and_never_run(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    file.write_bytes(content)
    assert "is not a valid safetensors file" in refused("--pretrained", str(file))


def test_what_does_not_fit_is_listed(net: str, public: Path) -> None:
    tensors = public_weights(net)
    del tensors["0.bias"]
    tensors["1.weight"] = torch.zeros(9)
    tensors["1.bias"] = torch.full((8,), torch.nan)
    tensors |= {f"more.{i}": torch.zeros(1) for i in range(9)}
    save(public, tensors)
    text = refused(*flags_of(tuned(net, public)), code=4)
    for said in (
        "0.bias: missing from the file",
        "1.weight: (9,) in the file, expected (8,)",
        "1.bias: contains NaN or infinity",
        "more.0: not in the network",
        "; and 4 more.",
    ):
        assert said in text


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


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


@pytest.mark.privacy
def test_weights_that_were_trained_on_the_same_records_are_not_public() -> None:
    first = train_digits(no_dp=True)
    file = str(first.folder / "model.safetensors")
    text = refused("--model", "mlp-small", "--pretrained", file)
    assert "was trained on digits by dpmac, so its weights are not public" in text
    train_digits(model="mlp-small", pretrained=file, no_dp=True)  # which claims nothing
