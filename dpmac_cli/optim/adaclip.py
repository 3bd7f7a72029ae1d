"""AdaClip, which clips by coordinate.

Its ellipsoid is :class:`~dpmac_cli.dp.geometry.AdaClipEllipsoid`, which keeps the mean and the
spread of g-tilde. This file has the hyperparameters, and the update of theta.
"""

from typing import TYPE_CHECKING, ClassVar

from dpmac_cli.optim.optimizer import Decay, Optimizer, Scale, Variance, register_optimizer

if TYPE_CHECKING:
    from torch import Tensor

    from dpmac_cli.dp.mechanism import PrivateMean
    from dpmac_cli.dp.moments import Moments


@register_optimizer("adaclip", lr_on={"digits": 0.5}, paper=True)
class AdaClip(Optimizer, frozen=True):
    r"""Coordinate-wise clipping, gradient descent.

    Pichapati et al. 2019 ([arXiv 1908.07643](https://arxiv.org/abs/1908.07643)). The update is
    gradient descent, $\theta_t = \theta_{t-1} - \eta \tilde g_t$. The next centre is $m_t$, and the
    next scale is $b_t$:

    $$m_t = \beta_1 m_{t-1} + (1-\beta_1)\tilde g_t, \quad
    u_t = \mathrm{clamp}\Big((\tilde g_t - m_t)^2 - \tfrac{b_{t-1}^2\sigma^2}{B^2},\ h_1,\ h_2\Big),
    \quad s_t^2 = \beta_2 s_{t-1}^2 + (1-\beta_2) u_t,$$

    $$b_t = s_t^{1/2}\Big(\sum_j s_{t,j}\Big)^{1/2}, \qquad s_0^2 = \sqrt{h_1 h_2}.$$

    Hyperparameters:

    - `beta1`: decay rate $\beta_1$ of the centre.
    - `beta2`: decay rate $\beta_2$ of the variance.
    - `h1`, `h2`: bounds $h_1 \le h_2$ of the variance of one step. They bound $b_t$, too.
    - `lr`: learning rate $\eta$.

    There is no $C$.
    """

    of_privacy: ClassVar[frozenset[str]] = frozenset({"beta1", "beta2", "h1", "h2"})
    clips: ClassVar[str] = "adaclip"
    proportional: ClassVar[bool] = True
    centred: ClassVar[bool] = True

    lr: Scale = 1e-3
    beta1: Decay = 0.99
    beta2: Decay = 0.9
    h1: Variance
    h2: Variance

    def update(
        self, theta: "Tensor", eta: float, private: "PrivateMean", moments: "Moments"
    ) -> None:
        """Take a step of gradient descent along g-tilde_t, in place.

        Args:
            theta: parameters theta_(t-1), shape (block,), which become theta_t.
            eta: learning rate of this step.
            private: private mean g-tilde_t.
            moments: not used; centre and variance are state of the geometry.
        """
        theta.sub_(private.value, alpha=eta)
