"""Where training on texts begins."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpmac_cli import ArrayData, resolve
from dpmac_cli.models.class_names import NAME_SCALE
from dpmac_cli.models.encoders import read_encoder
from dpmac_cli.models.text_encoder import TextFeatures, encoder_weights
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.runs.prepare import PreparedRun, prepare
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
