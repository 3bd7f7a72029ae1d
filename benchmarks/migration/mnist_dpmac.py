"""MNIST in dpmac, with the settings of Opacus's own example."""

from torch import nn

from dpmac_cli import make_private


def run(net: nn.Module, folder: str, epochs: int) -> tuple[float, float]:
    """Return test accuracy and epsilon."""
    private = make_private(
        net,
        "mnist",
        data_dir=folder,
        optimizer="dp-sgd",
        lr=0.1,
        batch_size=64,
        epochs=epochs,
        sigma=1.0,
        clip_norm=1.0,
        delta=1e-5,
    )
    for _ in private:
        pass
    return private.evaluate().accuracy, private.epsilon
