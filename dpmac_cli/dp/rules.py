"""Moments of the private mean, and update rules that move theta by them: lines 12 to 15.

Each rule takes the private mean into the moments it uses and moves theta, all in place.
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
    m: Tensor  # of g-tilde, (d,)
    v: Tensor  # of g-tilde^2, (d,)
    noise: Tensor | None  # of its noise's variance, as v; None unless the rule asks for it
    step: int = 0  # t, from 1, of the private mean taken in last, or being taken in

    def update(self, private: PrivateMean) -> None:
        """Take in g-tilde_t, in place."""
        g = private.value
        self.m.lerp_(g, 1 - self.beta1)  # line 12
        self.v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)  # line 13
        if self.noise is not None:
            self.noise.lerp_(private.noise_variance, 1 - self.beta2)

    def m_hat(self) -> Tensor:
        """Bias-corrected m, line 14, shape (d,)."""
        return self.m / (1 - self.beta1**self.step)

    def v_hat(self) -> Tensor:
        """Bias-corrected v, line 14, shape (d,)."""
        return self.v / (1 - self.beta2**self.step)

    def noise_hat(self) -> Tensor:
        """The share of ``v_hat`` that is the mechanism's noise: phi-hat_t, exactly."""
        assert self.noise is not None, "the rule did not ask for the noise's average"  # noqa: S101
        return self.noise / (1 - self.beta2**self.step)


#: theta, eta, private mean and moments.
Rule = Callable[[Tensor, float, PrivateMean, Moments], None]


def sgd(theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
    """Gradient descent along g-tilde_t (Abadi et al. 2016; Pichapati et al. 2019)."""
    theta.sub_(private.value, alpha=eta)


@dataclass(frozen=True)
class Adam:
    """theta - eta m-hat / (sqrt(v-hat) + gamma), line 15 of Algorithm 1."""

    gamma: float  # stability constant >= 0

    def __call__(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
        """Move theta, shape (d,), by torch's fused kernel: one pass over the vectors."""
        before = torch.full((), moments.step - 1.0, device=theta.device)  # torch counts on
        g, m, v = private.value, moments.m, moments.v
        vectors: list[list[Tensor]] = [[theta], [g], [m], [v], [], [before]]
        rates = {"beta1": moments.beta1, "beta2": moments.beta2}
        _fused_adam(*vectors, **rates, lr=eta, eps=self.gamma)


@dataclass(frozen=True)
class AdamBC:
    """m-hat / sqrt(max(v-hat - Phi, gamma')), Tang et al. 2023.

    Phi is the noise's share of v-hat: what the moments tracked; or its variance for a ball, which
    is a constant; or, as in the paper, the variance of the noise before it is scaled by b.
    """

    gamma_prime: float  # gamma' > 0, the floor of the corrected second moment

    def __call__(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
        """Move theta, shape (d,)."""
        moments.update(private)
        phi: Tensor | float = private.noise_ratio**2
        if moments.noise is not None:
            phi = moments.noise_hat()
        elif private.scale.ndim == 0:
            phi = private.noise_variance
        signal = moments.v_hat().sub_(phi).clamp_(min=self.gamma_prime)
        theta.addcdiv_(moments.m_hat(), signal.sqrt_(), value=-eta)


#: Rules by their names in the table.
RULES: Mapping[str, Any] = {"sgd": sgd, "adam": Adam, "adam_bc": AdamBC}
