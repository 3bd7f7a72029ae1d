"""Update rules, by which a private mean moves theta: lines 12 to 15 of Algorithm 1.

Each rule takes the private mean into the moments it uses and moves theta, all in place.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from dpmac_cli.dp.mechanism import PrivateMean
from dpmac_cli.dp.moments import Moments

#: theta, eta, private mean and moments.
Rule = Callable[[Tensor, float, PrivateMean, Moments], None]


def sgd(theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
    """Gradient descent along g-tilde_t (Abadi et al. 2016; Pichapati et al. 2019)."""
    del moments
    theta.sub_(private.value, alpha=eta)


@dataclass(frozen=True)
class Adam:
    """theta - eta m-hat / (sqrt(v-hat) + gamma), line 15 of Algorithm 1.

    Attributes:
        gamma: stability constant >= 0.
    """

    gamma: float

    def __call__(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
        """Move theta, shape (d,), by torch's fused kernel: one pass over the vectors."""
        before = torch.tensor(moments.step - 1.0, device=theta.device)  # torch counts on
        adam(
            [theta],
            [private.value],
            [moments.m],
            [moments.v],
            [],
            [before],
            fused=True,
            amsgrad=False,
            beta1=moments.beta1,
            beta2=moments.beta2,
            lr=eta,
            weight_decay=0.0,
            eps=self.gamma,
            maximize=False,
        )


@dataclass(frozen=True)
class AdamBC:
    """m-hat / sqrt(max(v-hat - Phi, gamma')), Tang et al. 2023.

    Phi is the noise's share of v-hat: what the moments tracked; or its variance for a ball, which
    is a constant; or, as in the paper, the variance of the noise before it is scaled by b.

    Attributes:
        gamma_prime: gamma' > 0, the floor of the corrected second moment.
    """

    gamma_prime: float

    def __call__(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
        """Move theta, shape (d,)."""
        moments.update(private)
        phi: Tensor | float
        if moments.noise is not None:
            phi = moments.noise_hat()
        else:
            phi = private.noise_variance if private.scale.ndim == 0 else private.noise_ratio**2
        signal = moments.v_hat().sub_(phi).clamp_(min=self.gamma_prime)
        theta.addcdiv_(moments.m_hat(), signal.sqrt_(), value=-eta)


#: Rules by their names in the table.
RULES: Mapping[str, Any] = {"sgd": sgd, "adam": Adam, "adam_bc": AdamBC}
