"""Text encoders that are trained further, and those cut before their last block.

If only that block is trained, everything before it runs once on every text.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dpmac_cli.models.features import FrozenFeatures, WithHead
from dpmac_cli.models.text_encoder import (
    TextFeatures,
    attention_mask,
    pooled,
    texts_alone,
    token_mask,
)

#: Layers of a block that LoRA updates: queries, values and the perceptron.
LORA_LAYERS = ("query", "value", "up", "down")


def on_texts(texts: TextFeatures, head: nn.Module) -> WithHead:
    """Apply a head to features of texts whose encoder is trained, too."""
    network = WithHead(texts, head)
    network.lora_layers = LORA_LAYERS
    network.last_block = f"frozen.network.blocks.{len(texts.network.blocks) - 1}"
    return network


class BeforeLast(nn.Module):
    """Maps the inputs of a record to what its last block takes, followed by its other inputs.

    These are vectors of the tokens of each text, which are 0 for padding, and the mask of its
    tokens: 1, or 0 for padding. They depend on one text alone, like those of :class:`TextFeatures`.
    """

    def __init__(self, texts: TextFeatures) -> None:
        super().__init__()
        self.network, self._inputs = texts.network.before_last(), texts.inputs

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (records, features, 1, 1), of inputs (records, inputs, 1, 1)."""
        rows = x.flatten(1)
        texts = self._inputs.ids(rows)
        vectors = [self._vectors(ids).flatten(1) for ids in texts]
        masks = [token_mask(ids).to(x.dtype) for ids in texts]
        return torch.cat([*vectors, *masks, self._inputs.others(rows)], 1)[:, :, None, None]

    def _vectors(self, ids: Tensor) -> Tensor:
        """Return the vectors of tokens, shape (texts, tokens, width)."""
        mask, count = token_mask(ids), ids.shape[1]
        if ids.is_cuda:
            found: Tensor = self.network(ids, mask)
            return torch.where(mask[..., None], found, 0)
        texts = texts_alone(self.network, ids, mask)
        return torch.cat([pad(text, (0, 0, 0, count - text.shape[1])) for text in texts])


class LastBlock(nn.Module):
    """Maps features of :class:`BeforeLast` to outputs: the last block, pooling and the head."""

    def __init__(self, texts: TextFeatures, head: nn.Module) -> None:
        super().__init__()
        self.block = texts.network.blocks[-1]
        self.joined = texts.joined
        self.head = head
        self._counts = [count for _, count in texts.inputs.places]
        self._first, self._width = texts.network.first, texts.network.words.embedding_dim

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for features of shape (records, features, 1, 1)."""
        rows = x.flatten(1)
        sizes = [*(count * self._width for count in self._counts), *self._counts]
        *parts, others = torch.split(rows, [*sizes, rows.shape[1] - sum(sizes)], 1)
        vectors, texts = list[Tensor](), len(self._counts)
        for text, stored in zip(parts[:texts], parts[texts:], strict=True):
            mask = token_mask(stored)
            tokens = self.block(text.reshape(len(text), -1, self._width), attention_mask(mask))
            vectors.append(pooled(tokens, mask, first=self._first))
        outputs: Tensor = self.head(self.joined(vectors, others))
        return outputs


def cut_before_last(network: WithHead) -> FrozenFeatures:
    """Split a network on texts into a frozen part, and the last block with the head.

    Their parameters are those of the network.
    """
    texts = network.frozen
    assert isinstance(texts, TextFeatures)  # noqa: S101  (only such networks have a last block)
    before, last = BeforeLast(texts), LastBlock(texts, network.head)
    return FrozenFeatures(before, last, torch.float32)
