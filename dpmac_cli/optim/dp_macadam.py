"""DP-MacAdam, which clips by coordinate, and the hyperparameters of its ellipsoid.

Lines 12 to 15 of Algorithm 1 are :func:`~dpmac_cli.optim.dp_adam.adam`, lines 16 to 20 are
:class:`~dpmac_cli.dp.geometry.MacAdamEllipsoid`. Both use the same running mean of g-tilde.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from dpmac_cli.optim.dp_adam import adam
from dpmac_cli.optim.optimizer import (
    Decay,
    Optimizer,
    Scale,
    Stability,
    Variance,
    register_optimizer,
)

if TYPE_CHECKING:
    from torch import Tensor

    from dpmac_cli.dp.mechanism import PrivateMean
    from dpmac_cli.dp.moments import Moments

#: Estimate of the variance of the gradients from s_t, line 19 of Algorithm 1.
Kappa = Literal["paper", "exact", "tracked"]


class InEllipsoid(Optimizer, frozen=True):
    """Optimizer with DP-MacAdam's ellipsoid, a base class.

    Attributes:
        beta1: decay rate of m and of s, in [0, 1).
        h1: lower bound of the estimated variance, > 0.
        h2: upper bound of the estimated variance, at least h1.
        kappa: estimate of the variance; see
            :class:`~dpmac_cli.dp.geometry.MacAdamEllipsoid`.
    """

    of_privacy: ClassVar[frozenset[str]] = frozenset({"h1", "h2", "kappa"})
    clips: ClassVar[str] = "macadam"
    keeps: ClassVar[str] = "mv"
    centred: ClassVar[bool] = True

    beta1: Decay = 0.9
    h1: Variance
    h2: Variance
    kappa: Kappa = "tracked"


@register_optimizer("dp-macadam", lr_on={"digits": 0.005}, paper=True)
class DPMacAdam(InEllipsoid, frozen=True):
    r"""Coordinate-wise clipping, Adam.

    Algorithm 1 of the DP-MacAdam paper ([arXiv 2606.05435](https://arxiv.org/abs/2606.05435)). The
    update is that of DP-Adam, lines 12 to 15. The next centre is $\hat m_t$, and the next scale is
    $b_t$, lines 16 to 20:

    $$u_t = (\tilde g_t - \hat m_t)^2, \quad s_t = \beta_1 s_{t-1} + (1-\beta_1)u_t,$$

    $$\hat s_t = \mathrm{clamp}\Big(\frac{s_t}{\kappa_t} - \frac{b_{t-1}^2\sigma^2}{B^2},\ h_1,\ h_2
    \Big), \quad b_t = \hat s_t^{1/4}\Big(\sum_j \hat s_{t,j}^{1/2}\Big)^{1/2}.$$

    At step 1, $s_1 = \kappa_1 = 0$, and $0/0$ is taken as 0: every coordinate starts on $h_1$.
    There is no $C$. `--kappa` selects the estimate of line 19:

    - `paper`: $\kappa_t = 2(\beta_1-\beta_1^t)/(1+\beta_1)$, line 18.
    - `exact`: the weights inside each earlier $\hat m_k$ are those of time $k$, not of time $t$.
      With these weights, for i.i.d. $\tilde g$ and constant $b$, the unbiased factor is

    $$c_t = \frac{1-\beta_1}{1-\beta_1^t}, \quad \kappa^\ast_t = \beta_1\kappa^\ast_{t-1} +
    (1-\beta_1)\Big(1 - 2c_t + \frac{(1-\beta_1)(1+\beta_1^t)}{(1+\beta_1)(1-\beta_1^t)}\Big), \quad
    \kappa^\ast_0 = 0.$$

    - `tracked` (the default): $b$ is not constant. The noise's share of $s_t$ is therefore tracked
      with the weights of $s_t$ itself, and subtracted before the division:

    $$\psi_t = \beta_1\psi_{t-1} + (1-\beta_1)(1-c_t)^2 \frac{b_{t-1}^2\sigma^2}{B^2}, \qquad
    \hat s_t = \mathrm{clamp}\Big(\frac{s_t - \psi_t}{\kappa^\ast_t},\ h_1,\ h_2\Big).$$

    All three are functions of private values, so they have the same privacy cost.

    Hyperparameters:

    - `beta1`, `beta2`: decay rates $\beta_1$ of $m$ and $s$, and $\beta_2$ of $v$.
    - `h1`, `h2`: bounds $h_1 \le h_2$ of the estimated variance.
    - `gamma`: stability constant $\gamma$.
    - `lr`: learning rate $\eta$.
    """

    lr: Scale = 1e-3
    beta2: Decay = 0.999
    gamma: Stability = 1e-8

    def update(
        self, theta: "Tensor", eta: float, private: "PrivateMean", moments: "Moments"
    ) -> None:
        """Take a step of Adam, see :func:`~dpmac_cli.optim.dp_adam.adam`."""
        adam(theta, eta, private, moments, (self.beta1, self.beta2), self.gamma)
