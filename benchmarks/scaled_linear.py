"""A linear layer on vectors of norm 1, which are scaled to a mean square of 1 as encoders' are."""

import math

from torch import Tensor, nn


class ScaledLinear(nn.Module):
    """Linear classifier of vectors of norm 1, for ``--model benchmarks/scaled_linear.py``."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        size = math.prod(shape)
        self.scale, self.layer = math.sqrt(size), nn.Linear(size, classes)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for vectors of shape (records, size) or (records, size, 1, 1)."""
        logits: Tensor = self.layer(x.flatten(1) * self.scale)
        return logits
