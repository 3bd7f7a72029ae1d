"""Text encoders that are trained further: their gradients, sensitivity, caches and models."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from dpmac_cli import ArrayData, from_dataframe, load_model, predict, resolve, score
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.data.schema import InMemoryData
from dpmac_cli.data.writing import WRITTEN
from dpmac_cli.dp.clipping.batch_invariance import fill_rows
from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.layers import flatten_parameters
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.errors import DpmacError
from dpmac_cli.models.encoders import FAMILIES, read_encoder
from dpmac_cli.models.features import LoraLinear, WithHead, freeze
from dpmac_cli.models.registry import PARTS, Trained
from dpmac_cli.models.text_encoder import TextFeatures, encoder_weights
from dpmac_cli.models.text_parts import cut_before_last, on_texts
from dpmac_cli.release.run import finish, train
from dpmac_cli.runs.trainer import Trainer, make_trainer
from dpmac_cli.storage.cache import RowFile
from dpmac_cli.storage.paths import cache_folder
from dpmac_cli.studies.search import plan_search
from tests.helpers import trained_names
from tests.test_text_encoder import token_calls
from tests.test_tokens import TEXTS
from tests.tiers import pairs_short, rest_long
from tests.tiny_bert import LAYERS, WIDTH, notes, text_inputs, write_encoder

LIMIT = 24
TRAINED = ("lora", "last", "norm", "all")
SHORT: dict[str, Any] = {
    **{"backbone": "./encoder", "sigma": 4.0, "batch_size": 10, "device": "cpu", "steps": 4},
    "out": Path("run"),
}


@pytest.fixture(autouse=True)
def encoder() -> Path:
    return write_encoder(Path("encoder"))


def plan(data: InMemoryData | str, **more: Any) -> TrainPlan:
    return resolve({**SHORT, "dataset": data, **more}).plan


def some_notes(count: int = 80, seed: int = 0) -> ArrayData:
    rows = notes(count, seed)
    return ArrayData([text for text, _ in rows], [kind for _, kind in rows])


def network(part: str, limit: int = LIMIT, *, texts: int = 1) -> WithHead:
    """A network on texts and two numbers in float64, whose LoRA updates are not 0."""
    torch.manual_seed(0)
    inner = tuple((1 + number * (limit + WRITTEN), limit) for number in range(texts))
    encoder = read_encoder("encoder").of(inner)
    features = TextFeatures(encoder, trained=True)
    list(encoder_weights(encoder).adopted_by(features, None))
    features.joined.common.copy_(normalize(torch.randn(WIDTH), dim=0))
    width = texts * (WIDTH + WRITTEN) + 2
    whole = on_texts(features, nn.Sequential(nn.Flatten(), nn.Linear(width, 3)))
    freeze(whole, Trained(part, rank=3), (2 + texts * (limit + WRITTEN), 1, 1))
    for layer in whole.modules():
        if isinstance(layer, LoraLinear):
            nn.init.normal_(layer.up.weight, std=0.3)
    return whole.double()


def records(limit: int = LIMIT, *, texts: int = 1) -> Tensor:
    """Records of one or several of :data:`TEXTS` and two numbers, in float64."""
    ids = text_inputs("encoder", TEXTS, limit).double()
    others = torch.linspace(-1, 1, 2 * len(TEXTS)).double().view(-1, 2)
    parts = [ids.roll(number, 0) for number in range(texts)]
    return torch.cat([others[:, :1], *parts, others[:, 1:]], 1)[:, :, None, None]


@pytest.mark.privacy
def test_only_the_chosen_part_is_trained() -> None:
    whole = network("all")
    every = trained_names(whole)
    assert every == {name for name, _ in whole.named_parameters()}
    head = {"head.1.weight", "head.1.bias"}
    last = f"frozen.network.encoder.layer.{LAYERS - 1}."
    expected = {
        "all": every,
        "norm": head | {name for name in every if "Norm" in name},
        "last": head | {name for name in every if name.startswith(last)},
        "lora": head
        | {
            f"frozen.network.encoder.layer.{block}.{layer}.{side}.weight"
            for block in range(LAYERS)
            for layer in FAMILIES["bert"].lora
            for side in ("down", "up")
        },
    }
    for part in TRAINED:
        assert trained_names(network(part)) == expected[part]


def per_sample(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Per-sample gradients by the engine, (samples, d). Flattens the parameters."""
    alone = PerSample(model, Structure(x[:1]))
    assert alone.vmapped, alone.notes
    layers = alone.layers
    flatten_parameters(layers)
    found = ClippedChunkSum(alone).gradients(x, y, ball=True)
    rows = torch.empty(len(x), layers[-1].stop, dtype=x.dtype)
    for number, row in enumerate(rows):
        chosen = torch.zeros(len(x), dtype=x.dtype)
        chosen[number] = 1
        for layer, form in found:
            form.weighted_sum(chosen, None, row[layer.start : layer.stop])
    return rows


def by_autograd(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The same by autograd, of each sample alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for row in range(len(x)):
        loss = cross_entropy(model(x[row : row + 1]), y[row : row + 1])
        parts = torch.autograd.grad(loss, parameters, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


@pytest.mark.privacy
@pytest.mark.parametrize("part", TRAINED)
def test_padding_has_no_gradient(part: str) -> None:
    """A larger limit changes none but for rounding, and what padding contains does not matter."""
    few = [row for row, text in enumerate(TEXTS) if len(text) < 10]
    y = torch.arange(len(few)) % 3
    expected = by_autograd(network(part), records()[few], y)
    longer = by_autograd(network(part, 60), records(60)[few], y)
    assert torch.allclose(longer, expected, atol=1e-12)
    spoilt = network(part)
    with torch.no_grad():
        spoilt.frozen.get_parameter("network.embeddings.word_embeddings.weight")[0] = 1e3
    found = by_autograd(spoilt, records()[few], y)
    assert torch.allclose(found, expected, atol=1e-12)


def frame_of_texts(copies: int = 2) -> InMemoryData:
    """Every text of :data:`TEXTS`, empty ones too, with a number, and three texts per unit."""
    texts = list(TEXTS) * copies
    count = len(texts)
    frame = pd.DataFrame(
        {
            "note": texts,
            "age": np.arange(count) % 90,
            "kind": ["ab"[row % 2] for row in range(count)],
            "patient": np.arange(count) // 3,
        }
    )
    schema = {
        "label": {"column": "kind", "classes": ["a", "b"]},
        "columns": {"note": {"text": LIMIT, "missing": "input"}, "age": {"range": [0, 90]}},
        "drop": ["patient"],
    }
    return from_dataframe(frame, schema)


def file_of_notes() -> str:
    """The same notes in a file, which a run can be resumed and scored with."""
    rows = notes(80)
    np.savez("notes.npz", x=np.array([text for text, _ in rows]), y=[kind for _, kind in rows])
    return "notes.npz"


def trainer_of(part: str, **more: Any) -> Trainer:
    """A trainer whose parameters, LoRA updates among them, are not 0."""
    trainer = make_trainer(plan(frame_of_texts(), train=part, seed=3, **more))
    generator = torch.Generator().manual_seed(0)
    drawn = 0.1 * torch.randn(trainer.state.theta.shape, generator=generator)
    trainer.state.theta.add_(drawn)
    return trainer


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("part", "optimizer", "unit"),
    pairs_short(TRAINED, ["dp-adam", "dp-macadam"], [None, "patient"]),
)
def test_one_text_or_unit_moves_a_sum_by_at_most_one(
    part: str, optimizer: str, unit: str | None
) -> None:
    """By brute force: without each text, or each unit of several texts, in turn."""
    more = {"unit": unit, "records_per_unit": 2, "batch_size": 4} if unit else {}
    trainer = trainer_of(part, optimizer=optimizer, clip_norm=0.5, **more)
    everyone = np.arange(trainer.data.train.size)
    scale = trainer.state.region.scale

    def sum_of(drawn: Any) -> Tensor:
        return trainer._clip_and_sum(drawn).double().clone()

    whole = sum_of(everyone)
    moves = [float(((whole - sum_of(np.delete(everyone, row))) / scale).norm()) for row in everyone]
    assert max(moves) <= 1
    assert max(moves) > 0.9


@pytest.mark.privacy
@pytest.mark.parametrize("part", TRAINED)
def test_no_record_rounds_another(part: str) -> None:
    """In the way in which the network runs, bit for bit, whatever the others and the places."""
    trainer = trainer_of(part)
    sums, data = trainer.sums, trainer.data
    x, y = data.standardised(data.train.at(slice(None))[0]), data.train.labels
    outputs: list[Tensor] = []
    orders = [torch.arange(len(x)), torch.randperm(len(x)), torch.arange(20)]
    with sums.manner.running():
        for order in orders:
            found = torch.empty(len(x)).fill_(torch.nan)
            for rows in torch.split(order, sums.chunk):
                filled = fill_rows(rows, sums.manner.rows(len(rows), sums.chunk))
                found[rows] = sums.per_sample(x[filled], y[filled])[0][: len(rows)]
            outputs.append(found)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0][:20], outputs[2][:20])


def trained(data: InMemoryData | str | None = None, **more: Any) -> dict[str, Any]:
    return dict(finish(train(plan(data or some_notes(), tokens=16, **more))).report)


@pytest.mark.parametrize("part", rest_long(["last", "lora", "norm", "all"]))
def test_a_trained_encoder_is_published_and_predicts(part: str) -> None:
    trained(file_of_notes(), out=Path("head"))
    report = trained("notes.npz", train=part)
    public = report["model"]["public_part"]
    assert public["train"] == part
    assert (PARTS[part] in public["statement"]) == (part != "all")
    assert ("trained further" in public["statement"]) == (part == "all")
    before, found = (load_file(f"{name}/model.safetensors") for name in ("head", "run"))
    assert before.keys() == found.keys()
    moved = {name for name in before if not torch.equal(before[name], found[name])}
    inner = {name.removeprefix("frozen.network.") for name in moved if "head" not in name}
    assert inner
    assert all("Norm" in name for name in inner) or part != "norm"
    assert all(name.startswith(f"encoder.layer.{LAYERS - 1}.") for name in inner) or part != "last"
    count = load_model("run").model
    assert public["trained_parameters"] <= sum(p.numel() for p in count.parameters())
    Path("encoder").rename("elsewhere")  # the model has what it needs
    assert score("run").result.accuracy == report["test"]["accuracy"]
    texts = [text for text, _ in notes(3, seed=4)]
    together = predict("run", texts).probabilities
    alone = [predict("run", [text]).probabilities[0] for text in texts]
    assert np.array_equal(together, np.stack(alone))


@pytest.mark.privacy
def test_the_last_block_sees_what_it_sees_in_the_whole_network() -> None:
    model, x, y = network("last", texts=2), records(texts=2), torch.arange(len(TEXTS)) % 3
    parts = cut_before_last(model)
    expected = by_autograd(model, x, y)
    features = parts.features(x).double()  # stored in float32
    assert torch.allclose(parts.head(features), model(x), atol=1e-5)
    assert torch.allclose(by_autograd(parts.head, features, y), expected, atol=1e-4)


@pytest.mark.privacy
def test_vectors_before_the_last_block_depend_on_one_text_alone_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = token_calls(monkeypatch)
    parts, x = cut_before_last(network("last").float()), records().float()
    together = parts.features(x)
    for row in range(len(TEXTS)):
        assert torch.equal(parts.features(x[row : row + 1])[0], together[row])
    longer = cut_before_last(network("last", 60).float()).features(records(60).float())
    for row, text in enumerate(TEXTS):
        if len(text) < 10:
            kept = together[row, : LIMIT * WIDTH, 0, 0]
            assert torch.equal(longer[row, : LIMIT * WIDTH, 0, 0], kept)
            assert not longer[row, LIMIT * WIDTH : 60 * WIDTH].any()
    assert all(len(ids) == 1 and ids.all() and mask is None for ids, mask in calls)


@pytest.mark.privacy
def test_the_cache_is_told_apart_by_every_weight_before_the_last_block() -> None:
    """Otherwise a run would read the vectors of another encoder."""
    model = network("last")
    inner = model.frozen.get_submodule("network")
    held = {id(p) for p in inner.parameters()}
    last = {id(p) for p in inner.get_submodule(f"encoder.layer.{LAYERS - 1}").parameters()}
    parts = cut_before_last(model)
    found = parts.public_weights().values()
    assert {id(p) for p in found if isinstance(p, nn.Parameter)} == held - last
    assert {id(p) for p in parts.head.parameters()} == last | {
        id(p) for p in model.head.parameters()
    }


@pytest.mark.privacy
@pytest.mark.usefixtures("cache")
def test_the_cache_contains_no_tokens() -> None:
    """A text could be read from their numbers as it is."""
    trained(train="last")
    (file,) = cache_folder().glob("*.rows")
    found = np.array(RowFile(file).values)[:, :, 0, 0]
    assert found.shape == (80, 16 * WIDTH + 16 + WRITTEN)
    assert set(np.unique(found[:, 16 * WIDTH : 16 * WIDTH + 16])) == {0.0, 1.0}


@pytest.mark.usefixtures("uncalibrated")
def test_a_search_does_not_mix_encoders_with_other_vocabularies() -> None:
    """Records are read once, with the tokens of one vocabulary."""
    write_encoder(Path("other"), seed=1)
    given: dict[str, Any] = {**SHORT, "sigma": None, "dataset": some_notes(), "tokens": 16}
    drawn: dict[str, Any] = {"backbone": ["./encoder", "./other"], "trials": 2, "epsilon": 9}
    del given["backbone"], given["out"]
    space = plan_search({**given, **drawn})
    assert len(space.dimensions) == 1
    tokenizer = Path("other/tokenizer.json")
    tokenizer.write_text(tokenizer.read_text().replace("pain", "ache"))
    with pytest.raises(DpmacError, match=r"--backbone \./other has another tokenizer"):
        plan_search({**given, **drawn})
