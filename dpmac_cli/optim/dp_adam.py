"""DP-Adam, and the update of Adam.

The update is lines 12 to 15 of Algorithm 1. DP-MacAdam shares it, and differs in the region to
which gradients are clipped.
"""

from typing import TYPE_CHECKING, ClassVar

from dpmac_cli.libraries import torch
from dpmac_cli.optim.optimizer import Decay, InBall, Scale, Stability, register_optimizer

if TYPE_CHECKING:
    from torch import Tensor

    from dpmac_cli.dp.mechanism import PrivateMean
    from dpmac_cli.dp.moments import Moments


@register_optimizer("dp-adam", lr_on={"digits": 0.005}, paper=True)
class DPAdam(InBall, frozen=True):
    r"""Fixed clipping norm, Adam.

    The geometry is a ball of radius $C$. The update is that of Adam on the private mean, lines 12
    to 15 of Algorithm 1:

    $$\theta_t = \theta_{t-1} - \eta \frac{\hat m_t}{\sqrt{\hat v_t} + \gamma}.$$

    Hyperparameters:

    - `clip_norm`: clipping norm $C$, the radius of the ball.
    - `beta1`, `beta2`: decay rates $\beta_1$ and $\beta_2$ of the moments.
    - `gamma`: stability constant $\gamma$.
    - `lr`: learning rate $\eta$.

    $\hat v_t$ contains the variance of the noise, $(\sigma C/B)^2$ per coordinate. If most of it is
    noise, all coordinates have nearly the same step size, as in gradient descent with momentum.
    """

    keeps: ClassVar[str] = "mv"

    lr: Scale = 1e-3
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    gamma: Stability = 1e-8

    def update(
        self, theta: "Tensor", eta: float, private: "PrivateMean", moments: "Moments"
    ) -> None:
        """Take a step of Adam, see :func:`adam`."""
        adam(theta, eta, private, moments, (self.beta1, self.beta2), self.gamma)


def adam(
    theta: "Tensor",
    eta: float,
    private: "PrivateMean",
    moments: "Moments",
    betas: tuple[float, float],
    gamma: float,
) -> None:
    """Update theta and the moments in place, in one pass over the vectors.

    Lines 12 to 15 of Algorithm 1:

        m_t = beta1 m_(t-1) + (1 - beta1) g~_t        v_t = beta2 v_(t-1) + (1 - beta2) g~_t^2
        theta_t = theta_(t-1) - eta m-hat_t / (sqrt(v-hat_t) + gamma)

    The operator is that of ``torch.optim.Adam(fused=True)``, whose Python code takes 100
    microseconds for each block.

    Args:
        theta: parameters theta_(t-1), shape (block,), which become theta_t.
        eta: learning rate of this step.
        private: private mean g-tilde_t, shape (block,).
        moments: m_(t-1) and v_(t-1), shape (block,) each, with the number t of this step.
        betas: decay rates beta1 and beta2, in [0, 1).
        gamma: stability constant, at least 0.

    Example:
        >>> from dpmac_cli.dp.mechanism import PrivateMean
        >>> from dpmac_cli.dp.moments import Moments
        >>> theta = torch.zeros(2)
        >>> moments = Moments(m=torch.zeros(2), v=torch.zeros(2), step=1)
        >>> private = PrivateMean(torch.tensor([3.0, -0.5]), torch.tensor(1.0), noise_ratio=0.1)
        >>> adam(theta, 0.5, private, moments, betas=(0.9, 0.999), gamma=0.0)
        >>> theta  # the first step of Adam has the size of the learning rate
        tensor([-0.5000,  0.5000])
    """
    torch._fused_adam_(
        [theta],
        [private.value],
        [moments.m],
        [moments.v],
        [],
        [theta.new_full((), moments.step)],
        amsgrad=False,
        lr=eta,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=gamma,
        maximize=False,
    )
