"""Text encoders that are trained further, and those cut before their last block.

If only that block is trained, everything before it runs once on every text.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dpmac_cli.models.encoders import Family
from dpmac_cli.models.features import FrozenFeatures, WithHead
from dpmac_cli.models.text_encoder import (
    TextFeatures,
    pooled,
    texts_alone,
    token_mask,
    token_vectors,
)


def on_texts(texts: TextFeatures, head: nn.Module) -> WithHead:
    """Apply a head to features of texts whose encoder is trained, too."""
    network, family = WithHead(texts, head), texts.family
    blocks = f"frozen.network.{family.blocks}"
    count = len(list(texts.network.get_submodule(family.blocks).children()))
    network.lora_layers = tuple(f"{blocks}.{k}.{n}" for k in range(count) for n in family.lora)
    network.last_block = f"{blocks}.{count - 1}"
    return network


class _Passed(nn.Module):
    """Returns the first argument that contains vectors, instead of a layer before or after.

    Without one, such as for places of tokens, it returns 0.
    """

    #: Kind of a block's attention, by which a network chooses a mask.
    attention_type = ""

    def forward(self, *given: object, **named: object) -> Tensor:
        """Return vectors, shape (texts, tokens, width), or 0."""
        for value in (*given, *named.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                return value
        return torch.zeros(())


def _cut(network: nn.Module, family: Family, *, last: bool) -> nn.Module:
    """Return the last block of a network and what follows, or everything before it.

    Parameters are those of the network. The former takes vectors as embeddings of tokens.
    """
    shared = {id(t): t for t in (*network.parameters(), *network.buffers())}
    part = copy.deepcopy(network, shared)
    names = [f"{family.blocks}.{n}" for n, _ in part.get_submodule(family.blocks).named_children()]
    left_out = [*family.embedded, *names[:-1]] if last else [names[-1], family.norm]
    for name in filter(None, left_out):
        passed = _Passed()
        passed.attention_type = getattr(part.get_submodule(name), "attention_type", "")
        part.set_submodule(name, passed)
    return part


class BeforeLast(nn.Module):
    """Maps the inputs of a record to what its last block takes, followed by its other inputs.

    These are vectors of the tokens of each text, which are 0 for padding, and the mask of its
    tokens: 1, or 0 for padding. They depend on one text alone, like those of :class:`TextFeatures`.
    """

    def __init__(self, texts: TextFeatures) -> None:
        super().__init__()
        self.network, self._inputs = _cut(texts.network, texts.family, last=False), texts.inputs

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
            return torch.where(mask[..., None], token_vectors(self.network, ids, mask), 0)
        texts = texts_alone(self.network, ids)
        return torch.cat([pad(text, (0, 0, 0, count - text.shape[1])) for text in texts])


class LastBlock(nn.Module):
    """Maps features of :class:`BeforeLast` to outputs: the last block, pooling and the head."""

    def __init__(self, texts: TextFeatures, head: nn.Module) -> None:
        super().__init__()
        self.network = _cut(texts.network, texts.family, last=True)
        self.joined = texts.joined
        self.head = head
        self._counts = [count for _, count in texts.inputs.places]
        self._first, self._width = texts.first, len(texts.joined.common)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for features of shape (records, features, 1, 1)."""
        rows = x.flatten(1)
        sizes = [*(count * self._width for count in self._counts), *self._counts]
        *parts, others = torch.split(rows, [*sizes, rows.shape[1] - sum(sizes)], 1)
        vectors, texts = list[Tensor](), len(self._counts)
        for text, stored in zip(parts[:texts], parts[texts:], strict=True):
            mask = token_mask(stored)
            given = text.reshape(len(text), -1, self._width)
            found = self.network(inputs_embeds=given, attention_mask=mask.long())
            vectors.append(pooled(found.last_hidden_state, mask, first=self._first))
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
