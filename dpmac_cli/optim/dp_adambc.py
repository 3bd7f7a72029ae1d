"""DP-AdamBC, and the update of Adam corrected for noise.

The variance of the noise is public, so subtracting it from v-hat has no privacy cost.
"""

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

    Hyperparameters:

    - `clip_norm`: clipping norm $C$, the radius of the ball.
    - `beta1`, `beta2`: decay rates $\beta_1$ and $\beta_2$ of the moments.
    - `gamma_prime`: floor $\gamma'$ of the corrected second moment.
    - `lr`: learning rate $\eta$.
    """

    keeps: ClassVar[str] = "mv"

    lr: Scale = 1e-3
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    gamma_prime: Variance = 1e-8

    def update(
        self, theta: "Tensor", eta: float, private: "PrivateMean", moments: "Moments"
    ) -> None:
        """Take a step of Adam, with v-hat less the variance of the noise, in place.

        Args:
            theta: parameters theta_(t-1), shape (block,), which become theta_t.
            eta: learning rate of this step.
            private: private mean g-tilde_t; Phi is its ``noise_variance``.
            moments: m_(t-1) and v_(t-1), which become those of step t.
        """
        moments.update(private.value, self.beta1, self.beta2)  # lines 12 and 13
        m_hat = moments.m_hat(self.beta1)
        v_hat = moments.v_hat(self.beta2)
        signal = v_hat.sub_(private.noise_variance)
        descend(theta, eta, m_hat, signal, self.gamma_prime)


def descend(
    theta: "Tensor", eta: float, m_hat: "Tensor", signal: "Tensor", gamma_prime: float
) -> None:
    """Subtract eta m-hat / sqrt(max(signal, gamma')) from theta, in place.

    Args:
        theta: parameters, shape (block,), updated.
        eta: learning rate of this step.
        m_hat: bias-corrected first moment, shape (block,).
        signal: second moment without the noise's share, v-hat - Phi, shape (block,). May be
            negative. Consumed: its memory is used for the root.
        gamma_prime: floor gamma' > 0 of ``signal``.

    Example:
        >>> import torch
        >>> theta = torch.zeros(2)
        >>> descend(theta, 1.0, torch.ones(2), torch.tensor([4.0, -1.0]), gamma_prime=0.25)
        >>> theta  # the second coordinate is on the floor
        tensor([-0.5000, -2.0000])
    """
    root = signal.clamp_(min=gamma_prime).sqrt_()
    theta.addcdiv_(m_hat, root, value=-eta)
