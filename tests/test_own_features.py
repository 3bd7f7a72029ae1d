"""Features of programs: one function of one record and one registration, at every door."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpmac_cli import ArrayData, InputError, load, register_features, train
from dpmac_cli.config.networks import FEATURES, OwnFeatures
from dpmac_cli.errors import ModelError
from dpmac_cli.features.frozen import OneByOne
from dpmac_cli.release import scoring
from dpmac_cli.release.model_file import load_model
from dpmac_cli.runs.resolve import resolve

QUICK: dict[str, Any] = {
    **{"features": "pooled", "model": "linear", "sigma": 1, "steps": 3, "device": "cpu"},
    **{"batch_size": 200, "out": "run"},
}
WIDTH = 16


def pooled(image: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(image, 2).flatten()


def registered(name: str) -> OwnFeatures:
    """Return the features that a program registered by a name."""
    features = FEATURES[name]
    assert isinstance(features, OwnFeatures)
    return features


@pytest.fixture(autouse=True)
def _registered(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Features that are registered for one test."""
    monkeypatch.chdir(tmp_path)
    register_features("pooled", WIDTH, "means of squares")(pooled)
    yield
    for name, features in list(FEATURES.items()):
        if isinstance(features, OwnFeatures):
            del FEATURES[name]


def test_a_run_is_scored_and_predicts_with_the_same_function() -> None:
    finished = train(dataset="digits", **QUICK)
    assert load("run").score().accuracy == finished.report["scores"]["accuracy"]["value"]
    assert finished.report["features"]["name"] == "pooled"
    said = finished.report["sentences"]["features"]
    assert "(means of squares), which sees one record at a time" in said
    assert finished.report["network"]["parameters"] == 10 * WIDTH + 10
    images = np.random.RandomState(0).randint(0, 17, (30, 1, 8, 8)).astype(np.uint8)
    together = load("run").predict(images).probabilities
    alone = [load("run").predict(images[row : row + 1]).probabilities[0] for row in range(3)]
    assert np.allclose(np.stack(alone), together[:3], atol=1e-6)


def test_a_program_without_the_function_is_told_to_register_it() -> None:
    train(dataset="digits", **QUICK)
    del FEATURES["pooled"]
    with pytest.raises(ModelError, match=r"needs features .pooled.*register_features"):
        load_model("run")


@pytest.mark.promise("features")
def test_a_function_sees_one_record_at_a_time() -> None:
    seen = list[tuple[int, ...]]()

    @register_features("seen", WIDTH)
    def of_one(image: Tensor) -> Tensor:
        seen.append(tuple(image.shape))
        image += 1  # which changes no record
        return image.flatten()[:WIDTH]

    train(dataset="digits", **QUICK | {"features": "seen"})
    scoring.score(load("run").released)
    assert set(seen) == {(1, 8, 8)}


@pytest.mark.promise("features")
def test_a_function_that_keeps_something_of_records_is_refused() -> None:
    kept = list[Tensor]()

    @register_features("running", 64)
    def centred(image: Tensor) -> Tensor:
        kept.append(image.flatten())
        return image.flatten() - torch.stack(kept).mean(0)

    with pytest.raises(ModelError, match="keeps something of the records that it sees"):
        train(dataset="digits", **QUICK | {"features": "running"})


@pytest.mark.promise("features")
def test_an_object_keeps_nothing_of_a_record() -> None:
    """Its own trial cannot see it: none of the records there has the largest number."""

    class Scaled:
        def __init__(self) -> None:
            self.largest = torch.full((), 0.01)

        def __call__(self, image: Tensor) -> Tensor:
            self.largest = torch.maximum(self.largest, image.abs().max())
            return image.flatten() / self.largest

    register_features("scaled", 64)(Scaled())
    features = OneByOne(registered("scaled"))
    x = torch.rand(5, 1, 8, 8)
    x[0] = 100
    without = features(x[1:])
    assert torch.equal(features(x)[1:], without)


@pytest.mark.promise("features")
def test_the_draws_of_a_function_are_the_same_for_each_record() -> None:
    """So a record more shifts none of them, and predictions have those of training."""

    @register_features("projected", WIDTH)
    def projected(image: Tensor) -> Tensor:
        drawn = torch.randn(WIDTH, 64) + np.random.rand() + random.random()
        return drawn @ image.flatten()

    before = torch.get_rng_state()
    features = OneByOne(registered("projected"))
    x = torch.rand(5, 1, 8, 8)
    torch.set_rng_state(before)
    assert torch.equal(features(x)[2:], features(x[2:]))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.promise("features")
def test_a_function_may_return_one_tensor_again() -> None:
    found = torch.empty(64)

    @register_features("reused", 64)
    def reused(image: Tensor) -> Tensor:
        return found.copy_(image.flatten())

    x = torch.rand(5, 1, 8, 8)
    assert torch.equal(OneByOne(registered("reused"))(x).flatten(1), x.flatten(1))


def test_a_function_that_was_changed_computes_again() -> None:
    """Though it says the same of the first records, which are tried."""
    seen = list[int]()

    @register_features("pooled", WIDTH)
    def counted(image: Tensor) -> Tensor:
        seen.append(1)
        return pooled(image)

    for out in ("run", "again"):
        seen.clear()
        train(dataset="digits", **QUICK | {"out": out})
    assert len(seen) < 1797
    changed = len(seen)

    @register_features("pooled", WIDTH)
    def others(image: Tensor) -> Tensor:
        seen.append(2)
        return pooled(image).clamp(-9, 9)

    train(dataset="digits", **QUICK | {"out": "changed"})
    assert len(seen) - changed > 1797


def test_rows_of_numbers_are_vectors() -> None:
    @register_features("some", 2)
    def first_two(row: Tensor) -> list[float]:
        assert row.shape == (5,)
        return row[:2].tolist()

    x = np.random.RandomState(0).rand(200, 5)
    data = ArrayData(x, (x[:, 0] > 0.5).astype(int), low=0, high=1)
    settings = QUICK | {"features": "some", "batch_size": 50}
    finished = train(dataset=data, **settings)
    assert finished.report["network"]["parameters"] == 2 * 2 + 2
    assert len(load("run").predict(x[:7]).predicted) == 7


def test_another_number_of_features_is_refused() -> None:
    register_features("wrong", WIDTH)(lambda image: image.flatten())
    with pytest.raises(ModelError, match=r"returned a tensor of shape \(64,\).*width=16"):
        train(dataset="digits", **QUICK | {"features": "wrong"})


@pytest.mark.promise("published")
def test_a_failing_function_quotes_no_record() -> None:
    @register_features("failing", WIDTH)
    def failing(image: Tensor) -> Tensor:
        raise ValueError(f"pixels {image.flatten().tolist()}")

    with pytest.raises(ModelError) as caught:
        train(dataset="digits", **QUICK | {"features": "failing"})
    assert "pixels" not in str(caught.value)


@pytest.mark.parametrize(("name", "width"), [("scatter", 3), ("mine", 0), ("mine", 2.5)])
def test_bad_registrations_are_refused(name: str, width: Any) -> None:
    with pytest.raises(InputError):
        register_features(name, width)


def test_texts_have_encoders_instead() -> None:
    data = ArrayData(["one text", "another"] * 20, ["a", "b"] * 20, classes=["a", "b"])
    with pytest.raises(InputError):
        resolve(dataset=data, **QUICK)


def test_help_lists_what_is_registered() -> None:
    code = (
        "import dpmac_cli\n"
        "dpmac_cli.register_features('pooled', 16, 'means of squares')(lambda image: image)\n"
        "import sys; sys.argv = ['dpmac', 'train', '--features', 'poled']\n"
        "from dpmac_cli.__main__ import main\n"
        "main()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "pooled" in ran.stderr
