"""DP-AdamBC, and the update of Adam corrected for noise."""

from typing import TYPE_CHECKING, ClassVar

from dpmac_cli.optim.optimizer import Decay, InBall, Scale, Variance, register_optimizer

if TYPE_CHECKING:
    from torch import Tensor

    from dpmac_cli.dp.mechanism import PrivateMean
    from dpmac_cli.dp.moments import Moments


@register_optimizer("dp-adambc", paper=True)
class DPAdamBC(InBall, frozen=True):
    r"""Fixed clipping norm, Adam corrected for noise bias.

    Tang et al. 2023 ([arXiv 2312.14334](https://arxiv.org/abs/2312.14334)). The geometry is a ball
    of radius $C$. The noise adds $\Phi = (\sigma C/B)^2$ to every coordinate of $\hat v_t$, which
    the update subtracts:

    $$\theta_t = \theta_{t-1} - \eta \frac{\hat m_t}{\sqrt{\max(\hat v_t - \Phi,\ \gamma')}}.$$

    $\gamma'$ is the floor of a variance. If a coordinate has only noise, its step is
    $\eta \hat m_t/\sqrt{\gamma'}$, so tune $\gamma'$ and $\eta$ together. The default of 1e-8 with
    a rate of 0.001 is equivalent to a rate of 10 for momentum.
    """

    keeps: ClassVar[str] = "mv"

    lr: Scale = 1e-3
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    gamma_prime: Variance = 1e-8

    def update(
        self, theta: "Tensor", eta: float, private: "PrivateMean", moments: "Moments"
    ) -> None:
        """Take a step of Adam, with v-hat less the variance of the noise."""
        moments.update(private.value, self.beta1, self.beta2)
        signal = moments.v_hat(self.beta2).sub_(private.noise_variance)
        descend(theta, eta, moments.m_hat(self.beta1), signal, self.gamma_prime)


def descend(
    theta: "Tensor", eta: float, m_hat: "Tensor", signal: "Tensor", gamma_prime: float
) -> None:
    """Subtract eta m-hat / sqrt(max(signal, gamma')), in place. ``signal`` is consumed."""
    theta.addcdiv_(m_hat, signal.clamp_(min=gamma_prime).sqrt_(), value=-eta)
