"""DP-SGD, gradient descent with a fixed clipping norm."""

from typing import TYPE_CHECKING, ClassVar

from dpmac_cli.optim.optimizer import InBall, Scale, register_optimizer

if TYPE_CHECKING:
    from torch import Tensor

    from dpmac_cli.dp.mechanism import PrivateMean
    from dpmac_cli.dp.moments import Moments


@register_optimizer("dp-sgd", lr_on={"digits": 0.5}, paper=True)
class DPSGD(InBall, frozen=True):
    r"""Fixed clipping norm, gradient descent.

    Abadi et al. 2016 ([arXiv 1607.00133](https://arxiv.org/abs/1607.00133)). The geometry is a
    ball of radius $C$, and

    $$\theta_t = \theta_{t-1} - \eta \tilde g_t.$$

    If every gradient is clipped, only the product of $C$ and $\eta$ matters.
    """

    proportional: ClassVar[bool] = True

    lr: Scale = 0.1

    def update(
        self, theta: "Tensor", eta: float, private: "PrivateMean", moments: "Moments"
    ) -> None:
        """Take a step of gradient descent along g-tilde_t."""
        theta.sub_(private.value, alpha=eta)
