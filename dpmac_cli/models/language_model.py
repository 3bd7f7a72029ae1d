"""Networks on texts whose encoder is trained, too, and those that predict the next token."""

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
    """Maps the inputs of a record to the mean loss of its text's tokens, each from those before it.

    The first token has no loss. Padding comes last, so no token is predicted from it, and it has no
    loss either.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return losses in nats, shape (records, 1), of inputs (records, inputs)."""
        (ids,) = self.ids(x)
        at_a_time = max(1, LOGITS_AT_A_TIME // (ids.shape[1] * self.encoder.size))
        parts = [ids] if torch.is_grad_enabled() else torch.split(ids, at_a_time)
        return torch.cat([self.losses(part) for part in parts])[:, None]

    def losses(self, ids: Tensor) -> Tensor:
        """Return the mean loss of each text in nats, shape (texts,).

        Args:
            ids: numbers of tokens plus 1, int64, shape (texts, tokens); 0 for padding.
        """
        mask, tokens = ids[:, 1:] > 0, (ids - 1).clamp(0)
        logits: Tensor = self.network(input_ids=tokens).logits[:, :-1]
        losses = cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return (losses * mask).sum(1) / mask.sum(1).clamp(min=1)

    @torch.no_grad()
    def continued(self, x: Tensor, length: int, temperature: float) -> Iterator[list[int]]:
        """Yield the numbers of ``length`` tokens that continue the text of each record.

        Logits are divided by the temperature, and tokens drawn one after the other; with 0 each is
        the most probable one. For the inputs ``x`` see :meth:`forward`.
        """
        draws = torch.Generator(x.device)
        draws.seed()
        (ids,) = self.ids(x)
        longest = self.encoder.config.longest
        for row, mask in zip(ids, token_mask(ids), strict=True):
            tokens = prompt = (row[mask] - 1).clamp(0)
            for _ in range(length):
                logits = self.network(input_ids=tokens[None, -longest:]).logits[0, -1].double()
                odds = (logits / temperature).softmax(0) if temperature else logits == logits.max()
                tokens = torch.cat([tokens, torch.multinomial(odds.double(), 1, generator=draws)])
            yield tokens[len(prompt) :].tolist()


def adapter_of(network: WithHead, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the LoRA updates of a language model by their names in peft, and its configuration.

    Both are empty without updates. ``kind`` is the name of the network that they are added to.
    """
    causal = network.frozen
    layers = {n: of for n, of in causal.named_modules() if isinstance(of, LoraLinear)}
    if not layers or not isinstance(causal, CausalModel):
        return {}, {}
    names = {n: n.removeprefix("network.") for n in layers}
    tensors = {
        f"base_model.model.{names[n]}.lora_{side}.weight": stored(part.weight)
        for n, layer in layers.items()
        for side, part in (("A", layer.down), ("B", layer.up))
    }
    (rank, alpha), *_ = ((of.down.out_features, of.scale) for of in layers.values())
    family = causal.encoder.config.family
    return tensors, {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": kind},
        **{"r": rank, "lora_alpha": alpha * rank, "lora_dropout": 0.0, "bias": "none"},
        **{"target_modules": list(family.lora), "inference_mode": True},
        "fan_in_fan_out": bool(family.transposed),
    }


def on_texts(texts: OnTexts, head: nn.Module) -> WithHead:
    """Apply a head to features of texts whose encoder is trained, too."""
    network, family = WithHead(texts, head), texts.encoder.config.family
    inner = [family.causal] if isinstance(texts, CausalModel) else []
    path = ".".join(("network", *inner, family.blocks))
    count = len(list(texts.get_submodule(path).children()))
    network.lora_layers = tuple(
        f"frozen.{path}.{k}.{name}" for k in range(count) for name in family.lora
    )
    return network
