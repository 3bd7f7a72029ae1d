"""Made-up samples for validation, and losses of a network's outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batches import Batch, Structure
from dpmac_cli.dp.clipping.per_sample import unwrapped

#: Number of parameters to name; of more, the first and the last are named.
NAMED = 5
#: A loss of the network and a batch: one number per record, shape (records,).
BatchLoss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Trial:
    """Made-up samples for a network that returns logits, or its own losses.

    Attributes:
        inputs: structure of a sample.
        classes: number of classes; None for a network that returns one loss per sample.
    """

    inputs: Structure
    classes: int | None

    @staticmethod
    def of(model: nn.Module, shape: tuple[int, ...], classes: int) -> "Trial":
        """Return the trial of a classifier of tensors, shape (samples, *shape), in its dtype."""
        return Trial(Structure(torch.zeros(1, *shape, dtype=dtype_of(model))), classes)

    def losses(self, outputs: Tensor) -> Tensor:
        """Return a loss per sample with a gradient for every output, also for a single one."""
        return outputs if self.classes is None else (outputs.square() / 2 + outputs).sum(1)

    def samples(self, count: int) -> Batch:
        """Return fixed random samples, numbers in float64."""
        return self.inputs.made_up(count, double=True)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a network's inputs: float64 if all its parameters are, else float32."""
    kinds = {p.dtype for p in model.parameters()}
    return torch.float64 if kinds == {torch.float64} else torch.float32


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a network's parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class Objective(nn.Module):
    """Losses of a network on a batch, as a network that returns them.

    Args:
        network: the network.
        loss: a function of the network and a batch that returns one loss per sample, shape
            (samples,).
    """

    def __init__(self, network: nn.Module, loss: BatchLoss) -> None:
        super().__init__()
        self.network = unwrapped(network)
        self.loss = loss

    def forward(self, batch: Batch) -> Tensor:
        """Return the losses of a batch, shape (samples,)."""
        return self.loss(self.network, batch)


def trained_parts(model: nn.Module) -> str:
    """Return which parameters of a network are trained and which are frozen, as a sentence."""
    said = []
    for what in ("trained", "frozen"):
        some = {
            name.removeprefix("network."): p.numel()
            for name, p in model.named_parameters()
            if p.requires_grad == (what == "trained")
        }
        names = list(some) if len(some) <= NAMED else [*list(some)[:2], "...", *list(some)[-2:]]
        said += [f"{sum(some.values()):,} parameters are {what}: {', '.join(names)}"] * bool(some)
    return f"{'; '.join(said)}."
