"""CIFAR-10 in dpmac, with the settings of Opacus's own example."""

from typing import ClassVar

from torch import Tensor, nn

from dpmac_cli import make_private, register_optimizer
from dpmac_cli.dp.mechanism import PrivateMean
from dpmac_cli.dp.moments import Moments
from dpmac_cli.optim.dp_sgd import DPSGD


@register_optimizer("dp-momentum")
class Momentum(DPSGD, frozen=True):
    """Fixed clipping norm, gradient descent with torch's momentum."""

    keeps: ClassVar[str] = "m"

    beta1: float = 0.9

    def update(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
        """Take a step."""
        theta.sub_(moments.m.mul_(self.beta1).add_(private.value), alpha=eta)


def run(net: nn.Module, folder: str, epochs: int) -> tuple[float, float]:
    """Return test accuracy and epsilon."""
    private = make_private(
        net,
        "cifar10",
        data_dir=folder,
        optimizer="dp-momentum",
        beta1=0.9,
        lr=0.1,
        batch_size=2000,
        epochs=epochs,
        sigma=1.5,
        clip_norm=10.0,
        delta=1e-5,
    )
    for _ in private:
        pass
    return private.evaluate().accuracy, private.epsilon
