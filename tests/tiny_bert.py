"""A small BERT encoder with random weights, as Hugging Face writes one, and texts for it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dpmac_cli.data.writing import how_written
from dpmac_cli.models.encoders import read_encoder

WORDS = ("pain", "chest", "cough", "fever", "no", "since", "days", "mild", "severe", "the", "and")
VOCABULARY = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
    *WORDS,
    *map(chr, range(33, 127)),
    *(f"##{chr(code)}" for code in range(97, 123)),
)
WIDTH, LAYERS = 16, 2
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Random weights by the names of Hugging Face."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(VOCABULARY), WIDTH),
        "embeddings.position_embeddings.weight": (CONFIG["max_position_embeddings"], WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
        "pooler.dense.weight": (WIDTH, WIDTH),
        "pooler.dense.bias": (WIDTH,),
    }
    for number in range(LAYERS):
        block = f"encoder.layer.{number}"
        for name, out, into in (
            *((f"attention.self.{part}", WIDTH, WIDTH) for part in ("query", "key", "value")),
            ("attention.output.dense", WIDTH, WIDTH),
            ("intermediate.dense", CONFIG["intermediate_size"], WIDTH),
            ("output.dense", WIDTH, CONFIG["intermediate_size"]),
        ):
            shapes |= {f"{block}.{name}.weight": (out, into), f"{block}.{name}.bias": (out,)}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{block}.{name}.weight": (WIDTH,), f"{block}.{name}.bias": (WIDTH,)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: float("Norm.weight" in name) + (1.0 if "word" in name else 0.2) * values
        for name, values in drawn.items()
    }


def write_encoder(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write an encoder with random weights; ``changes`` replace values of its config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    save_file(weights(seed), folder / "model.safetensors")
    return folder


def text_inputs(named: str, texts: Sequence[str], limit: int) -> Tensor:
    """Return texts as inputs, (texts, limit + 4): tokens, then how each is written."""
    tokenizer = read_encoder(named).tokenizer
    tokens = torch.tensor(tokenizer.tokens(texts, limit)) / tokenizer.scale
    written = torch.tensor([how_written(text) for text in texts])
    return torch.cat([tokens, (written * tokenizer.scale).round() / tokenizer.scale], 1)


def notes(count: int, seed: int = 0) -> list[tuple[str, int]]:
    """Return texts and their classes: only those of class 1 have severe pain."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        drawn = torch.randint(len(WORDS), (6,), generator=generator).tolist()
        kind = int(torch.randint(2, (1,), generator=generator))
        words = [WORDS[k] for k in drawn if WORDS[k] not in ("severe", "mild", "pain")]
        found.append((" ".join([("mild", "severe")[kind], "pain", *words]), kind))
    return found
