"""DP-SGD, gradient descent with a fixed clipping norm.

Of Algorithm 1, lines 3 to 11 with the centre 0 and the scale C, then a step along the private mean.
"""

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

    Hyperparameters:

    - `clip_norm`: clipping norm $C$, the radius of the ball.
    - `lr`: learning rate $\eta$.

    If every gradient is clipped, only the product of $C$ and $\eta$ matters. No moments are stored:
    the state of training is $\theta$ alone.
    """

    proportional: ClassVar[bool] = True

    lr: Scale = 0.1

    def update(
        self, theta: "Tensor", eta: float, private: "PrivateMean", moments: "Moments"
    ) -> None:
        """Take a step of gradient descent along g-tilde_t, in place.

        Args:
            theta: parameters theta_(t-1), shape (block,), which become theta_t.
            eta: learning rate of this step.
            private: private mean g-tilde_t.
            moments: not used; they are empty.

        Example:
            >>> import torch
            >>> from dpmac_cli.dp.mechanism import PrivateMean
            >>> from dpmac_cli.dp.moments import Moments
            >>> theta = torch.tensor([1.0, 2.0])
            >>> private = PrivateMean(torch.tensor([4.0, -4.0]), torch.tensor(1.0), noise_ratio=0.1)
            >>> optimizer = DPSGD(clip_norm=1.0, lr=0.25)
            >>> optimizer.update(theta, optimizer.lr, private, Moments.before(theta, DPSGD.keeps))
            >>> theta
            tensor([0., 3.])
        """
        theta.sub_(private.value, alpha=eta)
