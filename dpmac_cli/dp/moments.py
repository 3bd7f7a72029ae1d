"""Moments of the private mean: lines 12 to 14 of Algorithm 1.

    m_t = beta1 m_(t-1) + (1 - beta1) g~_t                    line 12
    v_t = beta2 v_(t-1) + (1 - beta2) g~_t^2                  line 13
    m-hat_t = m_t / (1 - beta1^t), v-hat_t = v_t / (1 - beta2^t)    line 14

They are functions of private means only, so they are public. DP-MacAdam uses m-hat_t twice: in the
update of theta, and as the centre of the next ellipsoid.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Moments:
    """Exponential moving averages of g-tilde, which start at 0. Post-noise, so public.

    Attributes:
        m: average of g-tilde, shape (d,); shape (0,) for an optimizer without it.
        v: average of g-tilde^2, shape (d,); shape (0,) for an optimizer without it.
        step: step t, from 1, of the last private mean; 0 before the first.

    Example:
        >>> import torch
        >>> moments = Moments.before(torch.zeros(2), keeps="mv")
        >>> moments.step = 1
        >>> moments.update(torch.tensor([1.0, -2.0]), beta1=0.5, beta2=0.5)
        >>> moments.m, moments.m_hat(beta1=0.5)
        (tensor([ 0.5000, -1.0000]), tensor([ 1., -2.]))
    """

    m: Tensor
    v: Tensor
    step: int = 0

    @staticmethod
    def before(theta: Tensor, keeps: str) -> "Moments":
        """Return the moments before step 1, m_0 = v_0 = 0: line 1 of Algorithm 1.

        Args:
            theta: parameters, shape (d,); only shape, dtype and device are used.
            keeps: names of the averages that an optimizer uses: "m", "v", "mv" or "". Others are
                empty, shape (0,).
        """
        nothing = theta.new_zeros(0)
        m = torch.zeros_like(theta) if "m" in keeps else nothing
        v = torch.zeros_like(theta) if "v" in keeps else nothing.clone()
        return Moments(m, v)

    def update(self, g: Tensor, beta1: float, beta2: float) -> None:
        """Update m and v with the private mean of a step, in place: lines 12 and 13.

        ``step`` is not changed: the caller sets it, once per step, also if it updates by blocks.

        Args:
            g: g-tilde_t, in the shape of the averages.
            beta1: decay rate of m, in [0, 1).
            beta2: decay rate of v, in [0, 1).
        """
        self.m.lerp_(g, 1 - beta1)  # line 12
        self.v.mul_(beta2).addcmul_(g, g, value=1 - beta2)  # line 13

    def m_hat(self, beta1: float, out: Tensor | None = None) -> Tensor:
        """Return m-hat_t = m_t / (1 - beta1^t), without the bias of a start at 0: line 14, (d,).

        Args:
            beta1: decay rate of m.
            out: memory that the result is written to, shape (d,); None to allocate it.
        """
        return torch.div(self.m, 1 - beta1**self.step, out=out)

    def v_hat(self, beta2: float) -> Tensor:
        """Return v-hat_t = v_t / (1 - beta2^t), without the bias of a start at 0: line 14, (d,).

        Args:
            beta2: decay rate of v.
        """
        return self.v / (1 - beta2**self.step)
