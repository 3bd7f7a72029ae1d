"""Networks on texts whose encoder is trained, too, and those that predict the next token.

A record of a language model is one text, and its loss one number, so that clipping bounds what a
text does, whatever its length.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpmac_cli.features.frozen import WithHead
from dpmac_cli.features.texts import OnTexts, token_mask
from dpmac_cli.models.trained_part import LoraLinear
from dpmac_cli.models.weights import stored

#: Numbers among the logits of texts that are processed at a time if no gradient is needed.
LOGITS_AT_A_TIME = 1 << 25


class CausalModel(OnTexts):
    """Language model as a network whose output is its loss: the mean over a text's tokens.

    The loss of a token is its cross-entropy, predicted from those before it.

    The first token has no loss. Padding comes last, so no token is predicted from it, and it has no
    loss either.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean loss of each record's text in nats, shape (records, 1).

        Without gradients, few texts are processed at a time, because logits of all tokens are
        large.

        Args:
            x: inputs, float32, shape (records, inputs): numbers of tokens plus 1, 0 for padding.
        """
        (ids,) = self.ids(x)
        at_a_time = max(1, LOGITS_AT_A_TIME // (ids.shape[1] * self.encoder.size))
        parts = [ids] if torch.is_grad_enabled() else torch.split(ids, at_a_time)
        return torch.cat([self.losses(part) for part in parts])[:, None]

    def losses(self, ids: Tensor) -> Tensor:
        """Return the mean loss of each text's tokens in nats, shape (texts,).

        A text of fewer than two tokens has the loss 0.

        Args:
            ids: numbers of tokens plus 1, int64, shape (texts, tokens); 0 for padding, which comes
                last.
        """
        mask = ids[:, 1:] > 0  # (texts, tokens - 1)
        tokens = (ids - 1).clamp(0)
        logits: Tensor = self.network(input_ids=tokens).logits[:, :-1]  # (texts, tokens - 1, size)
        losses = cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return (losses * mask).sum(1) / mask.sum(1).clamp(min=1)

    @torch.no_grad()
    def continued(self, x: Tensor, length: int, temperature: float) -> Iterator[list[int]]:
        """Yield, for each record, the numbers of the tokens that continue its text.

        Tokens are drawn one after the other, from a generator with a random seed, so another call
        yields others. A model sees as many of the last tokens as it can.

        Args:
            x: inputs of records, see :meth:`forward`.
            length: number of tokens to draw.
            temperature: divisor of the logits; with 0 each token is the most probable one.

        Yields:
            ``length`` numbers of tokens, without those of the text itself.
        """
        draws = torch.Generator(x.device)
        draws.seed()
        (ids,) = self.ids(x)
        longest = self.encoder.config.longest
        for row, mask in zip(ids, token_mask(ids), strict=True):
            tokens = prompt = (row[mask] - 1).clamp(0)
            for _ in range(length):
                outputs = self.network(input_ids=tokens[None, -longest:])
                logits = outputs.logits[0, -1].double()
                if temperature:
                    odds = (logits / temperature).softmax(0)
                else:
                    odds = (logits == logits.max()).double()
                drawn = torch.multinomial(odds, 1, generator=draws)
                tokens = torch.cat([tokens, drawn])
            yield tokens[len(prompt) :].tolist()


def adapter_of(network: WithHead, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the LoRA updates of a language model in the form of an adapter of the package peft.

    Args:
        network: network of :func:`on_texts`.
        kind: name of the network that the updates are added to, for peft's
            ``base_model_name_or_path``.

    Returns:
        Tensors by their names in peft's adapter_model.safetensors, and the values of its
        adapter_config.json. Both are empty without updates.
    """
    causal = network.frozen
    if not isinstance(causal, CausalModel):
        return {}, {}
    tensors = dict[str, Tensor]()
    rank, scale = 0, 0.0
    for name, layer in causal.named_modules():
        if not isinstance(layer, LoraLinear):
            continue
        path = f"base_model.model.{name.removeprefix('network.')}"
        tensors[f"{path}.lora_A.weight"] = stored(layer.down.weight)
        tensors[f"{path}.lora_B.weight"] = stored(layer.up.weight)
        rank, scale = layer.down.out_features, layer.scale  # the same in all layers
    if not tensors:
        return {}, {}
    family = causal.encoder.config.family
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": kind,
        "r": rank,
        "lora_alpha": scale * rank,  # peft divides it by the rank
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(family.lora),
        "inference_mode": True,
        "fan_in_fan_out": bool(family.transposed),
    }
    return tensors, config


def on_texts(texts: OnTexts, head: nn.Module) -> WithHead:
    """Return a network on texts that is a head on an encoder, which is trained, too.

    Its ``lora_layers`` name the layers that LoRA may update: those of the encoder's family, in
    every block.

    Args:
        texts: features of texts, or the losses of a language model.
        head: network on them.
    """
    network, family = WithHead(texts, head), texts.encoder.config.family
    path = f"network.{family.blocks}"
    if isinstance(texts, CausalModel):
        path = f"network.{family.causal}.{family.blocks}"
    blocks = len(list(texts.get_submodule(path).children()))
    layers = list[str]()
    for block in range(blocks):
        layers += [f"frozen.{path}.{block}.{name}" for name in family.lora]
    network.lora_layers = tuple(layers)
    return network
