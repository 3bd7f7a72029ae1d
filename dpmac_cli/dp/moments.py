"""Running averages of the private mean: lines 12 to 14 of Algorithm 1."""

from dataclasses import dataclass

from torch import Tensor

from dpmac_cli.dp.mechanism import PrivateMean


@dataclass
class Moments:
    """Exponential moving averages of g-tilde, started at 0. Post-noise, so public.

    Attributes:
        beta1, beta2: decay rates in [0, 1).
        m: average of g-tilde, shape (d,).
        v: average of g-tilde^2, shape (d,).
        noise: average of the noise variance in g-tilde with v's weights, shape (d,); None unless
            the rule asks for it.
        step: t, counted from 1, of the private mean taken in last, or being taken in.
    """

    beta1: float
    beta2: float
    m: Tensor
    v: Tensor
    noise: Tensor | None
    step: int = 0

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
