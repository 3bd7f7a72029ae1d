"""How a private mean moves theta: theta_t = theta_{t-1} - eta * step.

Each rule moves theta in place, from moments and private mean alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dpmac_cli.dp.mechanism import PrivateMean
from dpmac_cli.dp.moments import Moments

#: theta, eta, private mean and moments.
Rule = Callable[[Tensor, float, PrivateMean, Moments], None]


def sgd(theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
    """Gradient descent along g-tilde_t (Abadi et al. 2016; Pichapati et al. 2019)."""
    del moments
    theta.sub_(private.value, alpha=eta)


@dataclass(frozen=True)
class Adam:
    """m-hat / (sqrt(v-hat) + gamma), line 15 of Algorithm 1.

    Attributes:
        gamma: stability constant >= 0.
    """

    gamma: float

    def __call__(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
        """Move theta, shape (d,)."""
        del private
        _move(theta, eta, moments, moments.v_hat().sqrt_().add_(self.gamma))


@dataclass(frozen=True)
class AdamBC:
    """m-hat / sqrt(max(v-hat - Phi, gamma')), Tang et al. 2023.

    Attributes:
        gamma_prime: gamma' > 0, the floor of the corrected second moment.
        phi: Phi, the noise's share of v-hat when it is a constant; None to subtract what the
            moments tracked, which for a ball is the same constant.
    """

    gamma_prime: float
    phi: float | None

    def __call__(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
        """Move theta, shape (d,)."""
        del private
        phi = moments.noise_hat() if self.phi is None else self.phi
        signal = moments.v_hat().sub_(phi).clamp_(min=self.gamma_prime)
        _move(theta, eta, moments, signal.sqrt_())


def _move(theta: Tensor, eta: float, moments: Moments, denominator: Tensor) -> None:
    """theta - eta m-hat / denominator, in place and without forming m-hat."""
    theta.addcdiv_(moments.m, denominator, value=-eta / moments.m_correction)
