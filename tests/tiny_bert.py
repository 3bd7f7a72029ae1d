"""Small networks on texts with random weights, as Hugging Face writes them, and texts for them."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from dpmac_cli.config.encoder_folder import read_encoder
from dpmac_cli.config.encoders import TextEncoder
from dpmac_cli.config.records import Texts
from dpmac_cli.config.tokens import TextReader
from dpmac_cli.config.writing import WRITTEN, how_written

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


def tokenizer() -> Any:
    """Return the tokenizer of a BERT with :data:`VOCABULARY`."""
    ids = {word: number for number, word in enumerate(VOCABULARY)}
    found = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer()
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    found.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    found.add_special_tokens(list(VOCABULARY[:4]))
    return found


def tiny_reader(limit: int) -> TextReader:
    """Return how texts are read with it."""
    return TextReader("0" * 64, len(VOCABULARY) + 1, limit, tokenizer())


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of :data:`CONFIG` by name."""
    network = AutoModel.from_config(AutoConfig.for_model(**CONFIG))
    return {name: tuple(p.shape) for name, p in network.named_parameters()}


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Random weights by the names of Hugging Face."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}
    return {
        name: float("Norm.weight" in name) + (1.0 if "word" in name else 0.2) * values
        for name, values in drawn.items()
    }


def write_encoder(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write an encoder with random weights; ``changes`` replace values of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    tokenizer().save(str(folder / "tokenizer.json"))
    save_file(weights(seed), folder / "model.safetensors")
    return folder


#: Sizes of small networks of other families, by the names in their config.json.
SIZES: dict[str, dict[str, Any]] = {
    "bert": CONFIG,
    "roberta": {**CONFIG, "max_position_embeddings": 66, "pad_token_id": 1},
    "distilbert": {"dim": WIDTH, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 32}
    | {"max_position_embeddings": 64},
    "modernbert": {**CONFIG, "num_hidden_layers": 3, "local_attention": 8},
    "gpt2": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64},
    "llama": {**CONFIG, "num_key_value_heads": 2},
    "qwen2": {**CONFIG, "num_key_value_heads": 2},
}


def write_network(folder: Path, family: str, *, causal: bool = False) -> Path:
    """Write a network of a family with random weights, as its authors would.

    Its tokenizer knows bytes, as that of most families. BERT and DistilBERT have their own.
    """
    if family in ("bert", "distilbert"):
        found = tokenizer()
    else:
        found = Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "<pad>", "</s>"],
            show_progress=False,
        )
        found.train_from_iterator([text for text, _ in notes(100)], trainer)
        if family in ("roberta", "modernbert"):
            ends = [("<s>", 0), ("</s>", 2)]
            found.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ends)
    tokens = {f"{kind}_token_id": None for kind in ("bos", "eos", "pad", "cls", "sep")}
    sizes = tokens | SIZES[family] | {"model_type": family, "vocab_size": found.get_vocab_size()}
    torch.manual_seed(0)
    kind: Any = AutoModelForCausalLM if causal else AutoModel
    network = kind.from_config(AutoConfig.for_model(**sizes))
    for parameter in network.parameters():
        nn.init.normal_(parameter, float(parameter.ndim == 1), 0.3)
    network.save_pretrained(folder)
    found.save(str(folder / "tokenizer.json"))
    return folder


def text_inputs(named: str, texts: Sequence[str], limit: int) -> Tensor:
    """Return texts as inputs, (texts, limit + 4): tokens, then how each is written."""
    reader = read_encoder(named).reader(limit)
    tokens = torch.tensor(reader.tokens(texts, limit)).float()
    return torch.cat([tokens, torch.tensor([how_written(text) for text in texts])], 1)


def encoder_at(
    named: str, *places: tuple[int, int], inputs: int = 0, causal: bool = False
) -> TextEncoder:
    """Return an encoder for records with texts at some places, and other numbers."""
    encoder = read_encoder(named)
    size = inputs or sum(places[-1]) + WRITTEN
    kind = Texts(
        shape=(size,),
        low=(-1.0,) * size,
        high=(float(encoder.size),) * size,
        texts=places,
        tokenizer=encoder.config.vocabulary_sha256,
        tokens=encoder.size,
    )
    return encoder.of(kind, causal=causal)


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
