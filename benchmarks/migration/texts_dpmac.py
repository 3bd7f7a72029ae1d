"""A classifier of texts in dpmac: batches are dicts, the network takes keyword arguments."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpmac_cli import Poisson, PrivateStep


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of each text."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def run(net: nn.Module, texts: Any, steps: int) -> float:
    """Train; return epsilon."""
    step = PrivateStep(
        net,
        loss,
        sampling=Poisson(n=len(texts), batch_size=64),
        optimizer="dp-sgd",
        lr=0.5,
        sigma=1.0,
        clip_norm=1.0,
        steps=steps,
        delta=1e-5,
    )
    for batch in step.loader(texts):
        step(batch)
    return step.epsilon
