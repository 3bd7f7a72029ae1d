"""Fixed features and public weights: what is frozen, what is trained, and what is published."""

import errno
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.dataset import Split
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models.build import build_model
from dpmac_cli.models.feature_cache import _run_of, featured
from dpmac_cli.models.features import FrozenFeatures, cut_before_head, head_of, with_features
from dpmac_cli.models.registry import (
    FEATURES,
    BuiltIn,
    Scattered,
    Trained,
    parse_model,
)
from dpmac_cli.models.scattering import Scattering
from dpmac_cli.models.validation import check_model
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.release import run
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import RunEvent
from dpmac_cli.release.scoring import score
from dpmac_cli.runs.prepare import prepare
from dpmac_cli.runs.session import Started
from dpmac_cli.storage.progress import Computing, outcome, until
from dpmac_cli.studies.grid import address
from tests.digits_runs import (
    digits_config,
    dpmac,
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


def test_the_catalogue_says_what_scattering_gives() -> None:
    shape = (3, 16, 8)
    for kind in FEATURES:
        found = with_features(nn.Identity(), shape, kind).features(torch.zeros(2, *shape))
        assert tuple(found.shape[1:]) == Scattered(kind).shape_of(shape)
        assert all(Scattered(kind).fault(facts.shape) is None for facts in DATASETS.values())


@pytest.mark.parametrize("model", ["linear", "mlp-small", "cnn"])
def test_networks_take_features_of_images(model: str) -> None:
    facts = DATASETS["mnist"]
    network = build_model(BuiltIn(model), facts.signature, seed=0, features=Scattered("scatter"))
    x = torch.randn(3, *facts.shape)
    assert network(x).shape == (3, 10)
    assert isinstance(network, FrozenFeatures)
    features = network.features(x)
    assert (features.shape, features.dtype) == ((3, 81, 7, 7), torch.float16)
    assert torch.equal(network.head(features.float()), network(x))
    normed = nn.GroupNorm(27, 81, affine=False)(Scattering(28, 28)(x))
    torch.testing.assert_close(features.float(), normed, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
def test_scattering_is_averaged_over_mirror_images_in_opponent_colours(channels: int) -> None:
    x = torch.randn(3, channels, 16, 8)
    parts = with_features(nn.Identity(), (channels, 16, 8), "scatter-mirror")
    assert torch.equal(parts.features(x), parts.features(x.flip(3)))
    plain = with_features(nn.Identity(), (channels, 16, 8))
    red, green, blue = x.unbind(1) if channels == 3 else (x[:, 0],) * 3
    colours = [(red + green + blue) / 3**0.5, (red - blue) / 2**0.5]
    colours.append((red - 2 * green + blue) / 6**0.5)
    given = torch.stack(colours, 1) if channels == 3 else x
    mean = (plain.frozen(given) + plain.frozen(given.flip(3))) / 2
    torch.testing.assert_close(parts.features(x).float(), mean, rtol=1e-3, atol=1e-3)


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


@pytest.mark.privacy
def test_batch_norm_without_public_weights_is_refused(net: str) -> None:
    assert "is a BatchNorm2d" in refused("--model", net, code=4)


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


@pytest.mark.privacy
def test_report_and_card_say_what_was_public(net: str, public: Path) -> None:
    scattered, fine = train_digits(**SCATTER), train_digits(**tuned(net, public))
    for finished in (scattered, fine):
        part = finished.report["model"]["public_part"]
        card = (finished.folder / "model-card.md").read_text()
        assert part["statement"] in card
        assert f"{part['trained_parameters']:,} of them trained" in card
        assert (
            load_model(finished.folder, None, CPU, factory=net if finished is fine else None).facts[
                "model"
            ]["public_part"]
            == part
        )
    assert "depend on that image alone" in scattered.report["model"]["public_part"]["statement"]
    part = fine.report["model"]["public_part"]
    assert (
        "treated as public. Neither they nor the data that they were trained on are covered"
        in (part["statement"])
    )
    assert "The trained part is the last linear layer" in part["statement"]
    assert part["trained_parameters"] == 1290
    assert fine.report["model"]["parameters"] == 1290 + 80 + 16
    assert len(part["sha256"]) == 64
    assert "public_part" not in train_digits().report["model"]


@pytest.mark.privacy
@pytest.mark.parametrize("what", rest_long(["scatter", "head", "all"]))
def test_the_price_is_that_of_any_other_run(what: str, net: str, public: Path) -> None:
    flags: dict[str, Any] = SCATTER if what == "scatter" else tuned(net, public, train=what)
    if what == "all":
        flags["fix_norm"] = True
        fixed = build_model(parse_model(net), DIGITS.signature, seed=1, fix_norm=True)
        save(public, fixed.state_dict())
    priced = train_digits(**flags).report["privacy"]
    plain = train_digits().report["privacy"]
    assert {k: priced[k] for k in ("epsilon", "events", "adjacency")} == {
        k: plain[k] for k in ("epsilon", "events", "adjacency")
    }


@pytest.mark.parametrize("what", rest_long(["scatter", "head"]))
def test_a_run_that_stopped_goes_on_with_its_features(what: str, net: str, public: Path) -> None:
    flags = SCATTER if what == "scatter" else tuned(net, public)
    half = interrupted(digits_config(**flags, steps=6, seed=3), 4)
    *events, last = run.resume(half, {"model": net} if what == "head" else {})
    assert isinstance(last, Finished)
    assert not computed(events)
    assert last.report["privacy"]["steps"] == 6


@pytest.mark.privacy
@pytest.mark.usefixtures("cache")
def test_a_run_goes_on_only_with_the_weights_that_it_began_with(net: str, public: Path) -> None:
    half = interrupted(digits_config(**tuned(net, public), steps=6), 3)
    save(public, {**public_weights(net), "1.running_mean": torch.ones(8)})
    with pytest.raises(InputError, match="is not the one that the run started with"):
        list(run.resume(half, {"model": net}))


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
def test_the_card_loads_a_network_of_ones_own_on_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_linear.py").write_text(
        "from math import prod\nfrom torch import nn\n"
        "def make(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    finished = train_digits(**SCATTER, model=f"{tmp_path / 'own_linear.py'}:make", epochs=2)
    monkeypatch.chdir(finished.folder)
    names: dict[str, Any] = {}
    exec(Path("model-card.md").read_text().split("```python\n")[1].split("```")[0], names)
    test = load_data("digits", Path(), CPU).test
    right = names["classify"](test.images) == test.labels
    assert right.float().mean().item() == pytest.approx(finished.report["test"]["accuracy"])


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


@pytest.mark.long
def test_a_model_of_dpmacs_serves_as_public_weights(tmp_path: Path) -> None:
    x = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8)
    np.savez(tmp_path / "other.npz", x=x.numpy(), y=np.arange(60) % 3)
    other: dict[str, Any] = {
        "dataset": str(tmp_path / "other.npz"),
        "batch_size": "20",
        "model": "wrn-16-4",
    }
    first = train_digits(**other, physical_batch="20", steps=1)
    file = first.folder / "model.safetensors"
    flags = ("train", "--dataset", "digits", "--model", "wrn-16-4", "--train", "head")
    more = ("--steps", "2", "--sigma", "6", "--out", "tuned", "--pretrained")
    refused = dpmac(*flags, *more, str(file))
    assert refused.exit_code == 2
    assert "save the weights without their origin" in " ".join(refused.output.split())
    save(Path("public.safetensors"), weights(first.folder))
    result = dpmac(*flags, *more, "public.safetensors")
    assert result.exit_code == 0, result.output
    assert "has no matching layer '11'. It starts from scratch" in result.output
    before, after = weights(first.folder), weights(Path("tuned"))
    assert all(torch.equal(before[k], after[k]) for k in before if not k.startswith("11."))


def test_all_of_a_network_starts_from_the_weights_in_the_file(tmp_path: Path) -> None:
    start = build_model(BuiltIn("mlp-small"), DIGITS.signature, seed=9).state_dict()
    file = save(tmp_path / "start.safetensors", {k: t.half() for k, t in start.items()})
    config = digits_config(model="mlp-small", pretrained=str(file))
    assert config.network.trained.part == "all"
    task = outcome(prepare(config, CPU, make_keys(config.settings.seed)))
    assert task.trained is task.model
    assert task.notes == ()
    for name, tensor in task.model.state_dict().items():
        assert torch.equal(tensor, start[name].half().float())
    assert train_events(config)[1].report["model"]["public_part"]["train"] == "all"


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


def test_features_are_computed_once(cache: Path) -> None:
    first, one = train_events(digits_config(**SCATTER, seed=1))
    again, other = train_events(digits_config(**SCATTER, seed=1))
    assert (computed(first), computed(again)) == (True, False)
    assert same_weights(one.folder, other.folder)
    assert kept(cache)


@pytest.mark.long
def test_the_person_who_waits_is_told(cache: Path) -> None:
    args = ("train", "--dataset", "digits", "--features", "scatter", "--steps", "1", "--sigma", "6")
    said = f"computing features of 1,797 records, once: kept in {cache}"
    assert dpmac(*args).output.count(said) == 1
    assert said not in dpmac(*args).output
    shutil.rmtree(cache)
    assert "computing" not in dpmac(*args, "--quiet").output


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


@pytest.mark.parametrize("place", ["full disk", "a file"])
def test_without_a_place_to_keep_them_the_run_says_what_to_do(
    place: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if place == "full disk":
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        cache.parent.write_text("")
    said = refused("--features", "scatter", "--model", "linear")
    assert f"GB) cannot be stored in {cache} (" in said
    assert ("No space left on device" in said) == (place == "full disk")
    assert "or set DPMAC_CACHE_DIR to another folder" in said
    assert not list(cache.parent.glob("**/*.rows"))
    assert not list(cache.parent.glob("**/*.begun"))


@pytest.mark.privacy
def test_a_folder_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_digits(**SCATTER)
    kept(cache)
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(InputError, match="the folder belongs to another user"):
        train_events(digits_config(**SCATTER))


def test_who_waits_says_so_and_computes_nothing(cache: Path) -> None:
    parts = with_features(nn.Identity(), DIGITS.shape)
    data = load_data("digits", Path(), CPU)
    first = featured(parts, data, {}, cache)
    assert next(first) == Computing(0, 1797, cache)
    second = featured(parts, data, {}, cache)
    assert next(second).elsewhere
    assert of(first)[1] == of(second)[1]
    again = until(lambda: True, featured(parts, data, {}, cache))
    kept(cache).unlink()
    with pytest.raises(KeyboardInterrupt):
        of(again)
    assert not list(cache.glob("*.rows"))


@pytest.mark.long
def test_a_comparison_shares_them(cache: Path) -> None:
    args = ("compare", "--dataset", "digits", "--features", "scatter", "--optimizers")
    rest = ("dp-adam,dp-sgd", "--seeds", "2", "--steps", "2", "--sigma", "6", "--jobs", "2")
    result = dpmac(*args, *rest, "--device", "cpu", "--out", "study")
    assert result.exit_code == 0, result.output
    assert kept(cache)
    assert (
        "4 of them found finished"
        in dpmac(*args, *rest, "--device", "cpu", "--out", "study").output
    )


@pytest.mark.privacy
def test_a_study_tells_files_of_weights_apart_by_their_contents(public: Path, net: str) -> None:
    config = digits_config(**tuned(net, public))
    before = address(config, 0)
    save(public, {**public_weights(net), "0.bias": torch.ones(8)})
    assert address(config, 0) != before


def test_runs_without_any_of_it_keep_their_names() -> None:
    config = resolve({"dataset": "digits", "sigma": 6}).plan
    settings = {"features", "backbone", "backbone-size", "pretrained", "train"}
    assert not settings & config.recorded.keys()


# What is refused


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--features", "scater"), "Did you mean scatter or scatter-mirror? Known: "),
        (("--train", "head"), "add --pretrained or --backbone"),
        (("--pretrained", "gone.safetensors"), "no such file: gone.safetensors"),
    ],
)
def test_settings_that_cannot_be_are_refused(args: tuple[str, ...], said: str) -> None:
    assert said in refused(*args)


def test_every_fault_is_said_at_once() -> None:
    text = refused("--features", "scatter", "--lora-rank", "0", "--pretrained", "gone", "--lr", "x")
    assert text.count("error:") == 3
    assert "--features and --pretrained contradict each other" in text


@pytest.mark.parametrize("what", ["size", "table"])
def test_features_are_of_images_of_the_right_size(what: str, tmp_path: Path) -> None:
    file = tmp_path / "own.npz"
    x = np.zeros((40, 10, 12, 3), np.uint8) if what == "size" else np.zeros((40, 5))
    np.savez(file, x=x, y=np.arange(40) % 2)
    more = () if what == "size" else ("--feature-range", "0,1")
    text = refused("--dataset", str(file), "--features", "scatter", *more)
    said = "multiples of 4, but their shape is (3, 10, 12)"
    assert (said if what == "size" else "contains numbers") in text


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


@pytest.mark.parametrize("side", ["network", "file"])
def test_batch_norm_on_one_side_alone_is_pointed_out(side: str, net: str, public: Path) -> None:
    if side == "network":
        without = {k: t for k, t in public_weights(net).items() if k[2:] in ("weight", "bias")}
        save(public, without)
    switch = ["--fix-norm"] if side == "file" else []
    text = refused(*flags_of(tuned(net, public)), *switch, code=4)
    assert "--fix-norm removes it from the network" in text


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


@pytest.mark.parametrize("part", ["all of it", "the bias", "nothing"])
def test_the_head_may_be_missing(part: str, net: str, public: Path) -> None:
    tensors = public_weights(net) | {"5.weight": torch.ones(10, 128), "5.bias": torch.ones(10)}
    for name in {"all of it": ("5.weight", "5.bias"), "the bias": ("5.bias",)}.get(part, ()):
        del tensors[name]
    save(public, tensors)
    config = digits_config(**tuned(net, public))
    task = outcome(prepare(config, CPU, make_keys(config.settings.seed)))
    fresh = not bool((task.model.state_dict()["5.weight"] == 1).all())
    assert fresh == (part != "nothing")
    assert len(task.notes) == int(fresh)


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


def test_looking_for_the_head_leaves_no_trace(net: str) -> None:
    network = build_model(
        parse_model(net), DIGITS.signature, seed=0, trained=Trained("head")
    ).train()
    before = {k: t.clone() for k, t in network.state_dict().items()}
    assert head_of(network, DIGITS.shape) == "5"
    assert network.training
    assert all(torch.equal(t, before[k]) for k, t in network.state_dict().items())


@pytest.mark.privacy
def test_weights_that_were_trained_on_the_same_records_are_not_public() -> None:
    first = train_digits(no_dp=True)
    file = str(first.folder / "model.safetensors")
    text = refused("--model", "mlp-small", "--pretrained", file)
    assert "was trained on digits by dpmac, so its weights are not public" in text
    train_digits(model="mlp-small", pretrained=file, no_dp=True)  # which claims nothing


@pytest.mark.privacy
def test_a_checkpoint_is_no_public_file() -> None:
    first = train_digits()
    (file, *_) = (first.folder / "checkpoint").glob("*.safetensors")
    assert "is a private checkpoint" in refused("--pretrained", str(file))


def test_a_header_that_lies_about_features_is_refused(tmp_path: Path) -> None:
    from tests.test_release import edited  # noqa: PLC0415

    first = train_digits(**SCATTER)
    for change, kind, said in (
        ({"features": "wavelets"}, ModelError, "needs features 'wavelets'"),
        ({"backbone_size": "many"}, InputError, r"backbone_size: Input should be a valid int"),
    ):
        file = tmp_path / "lying.safetensors"
        edited(lambda _, f, c=change: f["model"]["public_part"].update(c))(first.folder, file)  # type: ignore[misc]
        with pytest.raises(kind, match=said):
            load_model(file, None, CPU)
