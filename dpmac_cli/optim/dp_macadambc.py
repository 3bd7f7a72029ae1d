"""DP-MacAdamBC, which corrects DP-MacAdam for the bias of noise.

The region is that of DP-MacAdam, the update that of DP-AdamBC.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from dpmac_cli.optim.dp_adambc import descend
from dpmac_cli.optim.dp_macadam import InEllipsoid
from dpmac_cli.optim.optimizer import Decay, Scale, Variance, register_optimizer

if TYPE_CHECKING:
    from torch import Tensor

    from dpmac_cli.dp.mechanism import PrivateMean
    from dpmac_cli.dp.moments import Moments

#: Estimate of the noise's share of the second moment.
Phi = Literal["paper", "tracked"]


@register_optimizer("dp-macadambc", lr_on={"digits": 0.0005}, paper=True)
class DPMacAdamBC(InEllipsoid, frozen=True):
    r"""Coordinate-wise clipping, Adam corrected for noise bias.

    Section III-D of the DP-MacAdam paper: the ellipsoid of DP-MacAdam, and the update of DP-AdamBC.
    `--phi` selects the estimate $\Phi$ of the noise's share of $\hat v_t$:

    - `paper`: $\Phi = (\sigma/B)^2$.
    - `tracked` (the default): in gradient space, the noise has variance $b_{t-1}^2\sigma^2/B^2$ per
      coordinate, so $\phi_t = \beta_2\phi_{t-1} + (1-\beta_2) b_{t-1}^2\sigma^2/B^2$ and
      $\Phi = \phi_t/(1-\beta_2^t)$.

    If $b$ is small, $(\sigma/B)^2$ is more than all of $\hat v_t$. Every coordinate is then on the
    floor $\gamma'$, and the update is gradient descent with momentum at $\eta/\sqrt{\gamma'}$. With
    `tracked` this is not the case, and $\gamma'$ must be chosen separately.

    Hyperparameters:

    - `beta1`, `beta2`: decay rates $\beta_1$ of $m$ and $s$, and $\beta_2$ of $v$.
    - `h1`, `h2`: bounds $h_1 \le h_2$ of the estimated variance.
    - `gamma_prime`: floor $\gamma'$ of the corrected second moment.
    - `lr`: learning rate $\eta$.
    """

    of_privacy: ClassVar[frozenset[str]] = InEllipsoid.of_privacy | {"phi"}

    lr: Scale = 1e-3
    beta2: Decay = 0.999
    gamma_prime: Variance = 1e-8
    phi: Phi = "tracked"

    def update(
        self, theta: "Tensor", eta: float, private: "PrivateMean", moments: "Moments"
    ) -> None:
        """Take a step of Adam, with v-hat less the noise's share, in place.

        With ``phi="tracked"``, ``moments.v`` is v_t - phi_t, not v_t: both are running averages
        with the same weights, so their difference is one.

        Args:
            theta: parameters theta_(t-1), shape (block,), which become theta_t.
            eta: learning rate of this step.
            private: private mean g-tilde_t.
            moments: moments of step t - 1, which become those of step t.
        """
        moments.update(private.value, self.beta1, self.beta2)  # lines 12 and 13
        ratio = private.noise_ratio**2  # (sigma / B)^2
        phi = ratio
        if self.phi == "tracked":
            b = private.scale
            moments.v.addcmul_(b, b, value=-(1 - self.beta2) * ratio)
            phi = 0.0
        m_hat = moments.m_hat(self.beta1)
        signal = moments.v_hat(self.beta2).sub_(phi)
        descend(theta, eta, m_hat, signal, self.gamma_prime)
