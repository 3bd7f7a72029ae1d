"""Networks on texts of every family: against transformers, and trained for two steps."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import normalize

from dpmac_cli import ArrayData, resolve, score
from dpmac_cli.models.encoders import FAMILIES, read_encoder
from dpmac_cli.models.features import LoraLinear, WithHead, freeze
from dpmac_cli.models.registry import Trained
from dpmac_cli.models.text_encoder import TextFeatures, encoder_weights
from dpmac_cli.models.text_parts import on_texts
from dpmac_cli.release.run import finish, train
from tests.test_text_training import by_autograd, per_sample
from tests.test_tokens import TEXTS
from tests.tiers import one_in
from tests.tiny_bert import WIDTH, notes, text_inputs, write_network

LIMIT = 24
PARTS = ("lora", "last", "norm", "all")


def network(family: str, part: str) -> WithHead:
    """A network on texts in float64, whose LoRA updates are not 0."""
    torch.manual_seed(0)
    encoder = read_encoder(str(write_network(Path("encoder"), family))).of(((0, LIMIT),))
    features = TextFeatures(encoder, trained=True)
    assert list(encoder_weights(encoder).adopted_by(features, None)) == []
    whole = on_texts(features, nn.Sequential(nn.Flatten(), nn.Linear(WIDTH + 4, 3)))
    freeze(whole, Trained(part, rank=3), (LIMIT + 4, 1, 1))
    for layer in whole.modules():
        if isinstance(layer, LoraLinear):
            nn.init.normal_(layer.up.weight, std=0.3)
    return whole.double()


def records() -> Tensor:
    return text_inputs("encoder", TEXTS, LIMIT).double()[:, :, None, None]


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(family: str) -> None:
    files = read_encoder(str(write_network(Path("encoder"), family)))
    assert files.config.longest == 64
    network, reader = TextFeatures(files.of(((0, LIMIT),))), files.reader(LIMIT)
    assert list(encoder_weights(files.of(((0, LIMIT),))).adopted_by(network, None)) == []
    oracle = transformers.AutoModel.from_pretrained("encoder").eval()
    for text in TEXTS:
        (row,) = reader.tokens([text], LIMIT)
        ids = torch.tensor([[number - 1 for number in row if number] or [0]])
        with torch.no_grad():
            expected = normalize(oracle(input_ids=ids).last_hidden_state[0].mean(0), dim=0)
        found = network.alone(torch.tensor([row]))[0]
        assert (found - expected).abs().max() <= 1e-6


@pytest.mark.privacy
@pytest.mark.parametrize(("family", "part"), one_in(5, itertools.product(FAMILIES, PARTS)))
def test_gradients_are_those_of_autograd(family: str, part: str) -> None:
    """Whatever the text, and with padding as without it."""
    model, x, y = network(family, part), records(), torch.arange(len(TEXTS)) % 3
    expected = by_autograd(model, x, y)
    assert expected.norm(dim=1).min() > 0.01
    assert torch.allclose(per_sample(model, x, y), expected, atol=1e-10)
    with torch.no_grad():
        alone = model.double()(x)
    assert torch.allclose(model(x), alone, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "part"), one_in(6, itertools.product(FAMILIES, ("head", *PARTS)))
)
def test_a_folder_of_every_family_trains_two_steps(family: str, part: str) -> None:
    write_network(Path("encoder"), family)
    rows = notes(40)
    data: Any = ArrayData([text for text, _ in rows], [kind for _, kind in rows])
    given = {"backbone": "./encoder", "sigma": 4.0, "batch_size": 10, "device": "cpu", "steps": 2}
    given |= {"dataset": data, "tokens": 16, "train": part, "out": Path("run")}
    report = finish(train(resolve(given).plan)).report
    assert report["privacy"]["steps"] == 2
    assert score("run", data).result.accuracy == report["test"]["accuracy"]
