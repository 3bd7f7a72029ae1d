"""CIFAR-10 in dpmac, with the settings of Opacus's own example."""

from torch import Tensor, nn

from dpmac_cli import Moments, PrivateMean, make_private


def momentum(theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
    """Step by torch's momentum."""
    moments.update(private)
    theta.sub_(moments.m, alpha=eta / (1 - moments.beta1))  # m is an average, torch's is a sum


def run(net: nn.Module, folder: str, epochs: int) -> tuple[float, float]:
    """Return test accuracy and epsilon."""
    private = make_private(
        net,
        "cifar10",
        data_dir=folder,
        optimizer="dp-adam",  # whose moments the rule takes
        rule=momentum,
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
