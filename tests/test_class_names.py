"""Where training on texts begins."""

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from dpmac_cli import ArrayData, from_dataframe, resolve
from dpmac_cli.data.writing import WRITTEN
from dpmac_cli.errors import InputError
from dpmac_cli.models import class_names
from dpmac_cli.models.class_names import NAME_SCALE, signal_of_class
from dpmac_cli.models.encoders import read_encoder
from dpmac_cli.models.text_encoder import TextFeatures, encoder_weights
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.runs.prepare import AT_NAMES, PreparedRun, prepare
from dpmac_cli.storage.progress import outcome
from tests.tiny_bert import WIDTH, notes, text_inputs, write_encoder

CLASSES = ("chest_pain", "mild-fever", "cough")
SHORT: dict[str, Any] = {
    **{"backbone": "./encoder", "sigma": 4.0, "batch_size": 10, "device": "cpu", "steps": 4},
    "tokens": 16,
}


@pytest.fixture(autouse=True)
def encoder() -> Path:
    return write_encoder(Path("encoder"))


def prepared(data: Any, seed: int = 0, **more: Any) -> PreparedRun:
    plan = resolve({**SHORT, "dataset": data, **more}).plan
    return outcome(prepare(plan, torch.device("cpu"), make_keys(seed)))


def records(count: int = 60) -> ArrayData:
    texts = [text for text, _ in notes(count)]
    return ArrayData(texts, [row % 3 for row in range(count)], classes=CLASSES)


def vectors(texts: tuple[str, ...]) -> Tensor:
    """The encoder's vectors of texts, of norm 1."""
    encoder = read_encoder("encoder").of(((0, 16),))
    features = TextFeatures(encoder)
    list(encoder_weights(encoder).adopted_by(features, None))
    found: Tensor = features(text_inputs("encoder", texts, 16)[:, :, None, None])
    rows: Tensor = found[:, :WIDTH, 0, 0] / WIDTH**0.5
    return rows


def head_of(found: PreparedRun) -> nn.Linear:
    (layer,) = (
        part for part in found.model.get_submodule("head").modules() if type(part) is nn.Linear
    )
    return layer


@pytest.mark.parametrize("part", ["head", "lora", "last"])
def test_a_head_begins_at_the_vectors_of_the_names(part: str) -> None:
    expected = vectors(("chest pain", "mild fever", "cough"))
    head = head_of(prepared(records(), train=part))
    own = NAME_SCALE * (expected - expected.mean(0))
    assert torch.allclose(head.weight[:, :WIDTH], own, atol=1e-6)
    assert not head.weight[:, WIDTH:].any()
    assert not head.bias.any()
    assert own.norm(dim=1).min() > 0.1


def test_what_all_names_have_in_common_is_removed_from_every_text() -> None:
    common = vectors(("chest pain", "mild fever", "cough")).mean(0)
    found = prepared(records())
    rows = found.data.train.at(slice(None))[0].flatten(1)[:, :WIDTH]
    texts = found.model.get_submodule("frozen")
    assert isinstance(texts, TextFeatures)
    assert torch.allclose(texts.joined.common, common / common.norm(), atol=1e-6)
    assert (rows @ texts.joined.common).abs().max() < 1e-4
    assert rows.norm(dim=1).min() > 0.5


@pytest.mark.privacy
def test_where_a_head_begins_depends_on_no_record_and_no_key() -> None:
    one, two = prepared(records()), prepared(records(40), seed=1)
    assert torch.equal(head_of(one).weight, head_of(two).weight)
    assert all(map(torch.equal, one.model.buffers(), two.model.buffers()))


def test_several_texts_share_the_names() -> None:
    rows = notes(40)
    kinds = [CLASSES[row % 3] for row in range(40)]
    frame = pd.DataFrame({"note": [text for text, _ in rows], "kind": kinds, "age": range(40)})
    frame["plan"] = frame["note"].str[::-1]
    columns = {"note": {"text": 16}, "age": {"range": [0, 90]}, "plan": {"text": 12}}
    schema = {"label": {"column": "kind", "classes": list(CLASSES)}, "columns": columns}
    head = head_of(prepared(from_dataframe(frame, schema), tokens=None))
    expected = vectors(("chest pain", "mild fever", "cough"))
    own = NAME_SCALE / 2 * (expected - expected.mean(0))
    assert head.in_features == 2 * (WIDTH + WRITTEN) + 1
    assert torch.allclose(head.weight[:, : 2 * WIDTH], own.repeat(1, 2), atol=1e-6)
    assert not head.weight[:, 2 * WIDTH :].any()


def test_a_head_for_numbers_begins_at_zero() -> None:
    frame = pd.DataFrame({"note": [text for text, _ in notes(40)], "days": range(40)})
    schema = {"label": {"column": "days", "range": [0, 40]}, "columns": {"note": {"text": 16}}}
    found = prepared(from_dataframe(frame, schema), tokens=None)
    assert not head_of(found).weight.any()
    texts = found.model.get_submodule("frozen")
    assert isinstance(texts, TextFeatures)
    assert not texts.joined.common.any()


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"sigma": 0.01}, False), ({"no_dp": True, "sigma": None}, False), ({}, True)],
)
def test_with_little_noise_a_head_begins_at_zero(settings: dict[str, Any], named: bool) -> None:
    found = prepared(records(), **settings)
    assert bool(head_of(found).weight.any()) == named
    assert (AT_NAMES in found.notes) == named


def test_the_signal_of_a_class_is_what_adds_up_over_its_noise() -> None:
    """B / classes from the records of a class in each of T sums, noise sigma sqrt(T) in all."""
    assert signal_of_class(100, 400, 5, 10) == pytest.approx(400 * (100 / 10) / (5 * 400**0.5))
    assert signal_of_class(100, 400, 0, 10) == math.inf


def test_an_encoder_without_finite_vectors_of_names_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    infinite = torch.full((3, WIDTH), torch.inf)
    monkeypatch.setattr(class_names, "class_vectors", lambda *_: infinite)
    with pytest.raises(InputError, match="vectors of the names of classes are not finite"):
        prepared(records())


def test_a_network_with_hidden_layers_begins_as_it_does_elsewhere() -> None:
    found = prepared(records(), model="mlp-small")
    first, *_ = (
        part for part in found.model.get_submodule("head").modules() if type(part) is nn.Linear
    )
    assert first.weight.std() > 0.01
    assert first.weight.shape[1] == WIDTH + WRITTEN
