"""Moments of the private mean, and the update rules that use them: lines 12 to 15.

Each rule updates the moments that it uses with the private mean and updates theta, all in place.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from dpmac_cli.dp.mechanism import PrivateMean

_fused_adam: Callable[..., None] = partial(
    adam, fused=True, amsgrad=False, weight_decay=0.0, maximize=False
)


@dataclass
class Moments:
    """Exponential moving averages of g-tilde, started at 0. Post-noise, so public."""

    beta1: float  # decay rates in [0, 1)
    beta2: float
    m: Tensor  # average of g-tilde, (d,)
    v: Tensor  # average of g-tilde^2, (d,)
    tracks_noise: bool  # True if v is the average of g-tilde^2 less the variance of its noise
    step: int = 0  # step t, from 1, of the last private mean

    def update(self, private: PrivateMean) -> None:
        """Update the averages with g-tilde_t, in place."""
        g = private.value
        self.m.lerp_(g, 1 - self.beta1)  # line 12
        self.v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)  # line 13
        if self.tracks_noise:
            share = (1 - self.beta2) * private.noise_ratio**2
            self.v.addcmul_(private.scale, private.scale, value=-share)

    def m_hat(self, out: Tensor | None = None) -> Tensor:
        """Return bias-corrected m, line 14, shape (d,)."""
        return torch.div(self.m, 1 - self.beta1**self.step, out=out)

    def v_hat(self) -> Tensor:
        """Return bias-corrected v, line 14, shape (d,)."""
        return self.v / (1 - self.beta2**self.step)


#: theta, eta, private mean and moments.
Rule = Callable[[Tensor, float, PrivateMean, Moments], None]


def sgd(theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
    """Gradient descent along g-tilde_t (Abadi et al. 2016; Pichapati et al. 2019)."""
    theta.sub_(private.value, alpha=eta)


@dataclass(frozen=True)
class Adam:
    """Adam: theta - eta m-hat / (sqrt(v-hat) + gamma), line 15 of Algorithm 1."""

    gamma: float  # stability constant >= 0

    def __call__(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
        """Update theta, shape (d,), with torch's fused kernel: one pass over the vectors."""
        before = torch.full((), moments.step - 1.0, device=theta.device)  # torch increments it
        g, m, v = private.value, moments.m, moments.v
        vectors: list[list[Tensor]] = [[theta], [g], [m], [v], [], [before]]
        rates = {"beta1": moments.beta1, "beta2": moments.beta2}
        _fused_adam(*vectors, **rates, lr=eta, eps=self.gamma)


@dataclass(frozen=True)
class AdamBC:
    """AdamBC: m-hat / sqrt(max(v-hat - Phi, gamma')), Tang et al. 2023.

    Phi is the noise's share of v-hat: 0 if the moments are less it; the constant variance for a
    ball; or, as in the paper, the variance of the noise before it is scaled by b.
    """

    gamma_prime: float  # gamma' > 0, lower bound of the corrected second moment

    def __call__(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
        """Update theta, shape (d,)."""
        moments.update(private)
        phi: Tensor | float = private.noise_ratio**2
        if moments.tracks_noise:
            phi = 0.0
        elif private.scale.ndim == 0:
            phi = private.noise_variance
        signal = moments.v_hat().sub_(phi).clamp_(min=self.gamma_prime)
        theta.addcdiv_(moments.m_hat(), signal.sqrt_(), value=-eta)


#: Rules by their names in the table.
RULES: Mapping[str, Any] = {"sgd": sgd, "adam": Adam, "adam_bc": AdamBC}
