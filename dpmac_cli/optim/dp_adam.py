"""DP-Adam, and the update of Adam."""

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
    """

    keeps: ClassVar[str] = "mv"

    lr: Scale = 1e-3
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    gamma: Stability = 1e-8

    def update(
        self, theta: "Tensor", eta: float, private: "PrivateMean", moments: "Moments"
    ) -> None:
        """Take a step of Adam."""
        adam(theta, eta, private, moments, (self.beta1, self.beta2), self.gamma)


def adam(
    theta: "Tensor",
    eta: float,
    private: "PrivateMean",
    moments: "Moments",
    betas: tuple[float, float],
    gamma: float,
) -> None:
    """Update theta and the moments in one pass over the vectors.

    The operator is that of ``torch.optim.Adam(fused=True)``, whose Python code takes 100
    microseconds for each block.
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
