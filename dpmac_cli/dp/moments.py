"""Moments of the private mean: lines 12 to 14 of Algorithm 1."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Moments:
    """Exponential moving averages of g-tilde, started at 0. Post-noise, so public."""

    m: Tensor  # average of g-tilde, (d,); (0,) for an optimizer without it
    v: Tensor  # average of g-tilde^2, (d,), or (0,)
    step: int = 0  # step t, from 1, of the last private mean

    @staticmethod
    def before(theta: Tensor, keeps: str) -> "Moments":
        """Return the moments before step 1; ``keeps`` names those that are kept."""
        m, v = (theta.new_zeros(theta.shape if name in keeps else 0) for name in "mv")
        return Moments(m, v)

    def update(self, g: Tensor, beta1: float, beta2: float) -> None:
        """Update the averages with g-tilde_t, in place; the decay rates are in [0, 1)."""
        self.m.lerp_(g, 1 - beta1)  # line 12
        self.v.mul_(beta2).addcmul_(g, g, value=1 - beta2)  # line 13

    def m_hat(self, beta1: float, out: Tensor | None = None) -> Tensor:
        """Return bias-corrected m, line 14, shape (d,)."""
        return torch.div(self.m, 1 - beta1**self.step, out=out)

    def v_hat(self, beta2: float) -> Tensor:
        """Return bias-corrected v, line 14, shape (d,)."""
        return self.v / (1 - beta2**self.step)
