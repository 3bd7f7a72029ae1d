"""Running averages of the private mean: lines 12 to 14 of Algorithm 1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpmac_cli.dp.mechanism import PrivateMean


@dataclass
class Moments:
    """Exponential moving averages of g-tilde, started at 0. Post-noise, so public.

    Attributes:
        beta1, beta2: decay rates in [0, 1).
        m: average of g-tilde, shape (d,).
        v: average of g-tilde^2, shape (d,).
        noise: average of the noise variance in g-tilde with v's weights, shape of
            ``PrivateMean.noise_variance``; None unless the rule asks for it.
        step: t, how many private means were taken in.
    """

    beta1: float
    beta2: float
    m: Tensor
    v: Tensor
    noise: Tensor | None
    step: int = 0

    def update(self, private: PrivateMean) -> None:
        """Take in g-tilde_t, in place."""
        self.step += 1
        g = private.value
        self.m.lerp_(g, 1 - self.beta1)  # line 12
        self.v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)  # line 13
        if self.noise is not None:
            self.noise.lerp_(private.noise_variance, 1 - self.beta2)

    def m_hat(self) -> Tensor:
        """Bias-corrected m, line 14, shape (d,); 0 before the first step."""
        return self._corrected(self.m, self.beta1)

    def v_hat(self) -> Tensor:
        """Bias-corrected v, line 14, shape (d,)."""
        return self._corrected(self.v, self.beta2)

    def noise_hat(self) -> Tensor:
        """The share of ``v_hat`` that is the mechanism's noise: phi-hat_t, exactly."""
        assert self.noise is not None, "the rule did not ask for the noise's average"  # noqa: S101
        return self._corrected(self.noise, self.beta2)

    def _corrected(self, average: Tensor, beta: float) -> Tensor:
        if self.step == 0:
            return torch.zeros_like(average)
        return average / (1 - beta**self.step)
