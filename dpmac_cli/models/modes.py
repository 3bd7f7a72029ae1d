"""Training and evaluation mode of the modules of a network, which decide what it computes."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

#: Note for modules that would drop values in training mode.
NOT_DROPPING = (
    "In evaluation mode, as it was passed, the network drops nothing: {}. To train with dropout, "
    "call network.train() and create this again."
)


class Modes:
    """Training or evaluation mode of each module of a network, when this object was made.

    Args:
        network: network whose modules have ``training`` set or not.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._modes = [(module, module.training) for module in network.modules()]

    def restore(self) -> None:
        """Set each module of the network to the mode that it had when this object was made."""
        if all(module.training == mode for module, mode in self._modes):
            return
        _, mode = self._modes[0]
        self._network.train(mode)  # a module may do more in it than set its mode
        for module, mode in self._modes:
            module.training = mode

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set each module to its saved mode in a ``with`` block; then to that before the block."""
        with modes_kept(self._network):
            self.restore()
            yield


def notes_on_modes(network: nn.Module) -> list[str]:
    """Return notes for the user about dropout that is turned off by the mode of its module.

    Args:
        network: network in the mode that it trains in, perhaps inside an objective.

    Returns:
        One note that names all such modules; [] if there are none.
    """
    names = list[str]()
    for name, module in network.named_modules():
        if not module.training and _drops(module):
            names.append(f"{name.removeprefix('network.')} ({type(module).__name__})")
    if not names:
        return []
    return [NOT_DROPPING.format(", ".join(names))]


def _drops(module: nn.Module) -> bool:
    """Return whether a module of torch drops values in training mode."""
    if not type(module).__module__.startswith("torch.nn."):
        return False
    attribute = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
    rate = getattr(module, attribute, 0.0)
    return isinstance(rate, float) and rate > 0


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Set a network to evaluation mode in a ``with`` block, and restore each module's mode after.

    ``network.train()`` afterwards would also turn on what its owner had turned off.

    Args:
        network: any network.

    Example:
        >>> network = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with evaluating(network):
        ...     network[0].training
        False
        >>> network[0].training, network[1].training
        (True, False)
    """
    with modes_kept(network):
        network.eval()
        yield


@contextmanager
def modes_kept(network: nn.Module) -> Iterator[None]:
    """Restore the mode of each module of a network after a ``with`` block, also after an error.

    Args:
        network: any network, whose modes the block may change.
    """
    before = Modes(network)
    try:
        yield
    finally:
        before.restore()
