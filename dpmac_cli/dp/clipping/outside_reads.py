"""Modules that read parameters of layers inside them, such as ``F.conv2d(x, self.layer.weight)``.

Calls of the layer do not give the gradient of such a parameter, but calls of the module do.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpmac_cli.dp.clipping.batches import tensors_in
from dpmac_cli.dp.clipping.direct_parameters import CONTAINERS, directly_held
from dpmac_cli.dp.losses import DETACHING


def layers_that_read(model: nn.Module, readers: Mapping[nn.Module, Set[int]]) -> set[int]:
    """Return the ids of modules that read parameters, and are one layer with all that is inside.

    Left out is a module of all trained parameters, of which only some are read: on each sample
    alone, the layers of the others keep their rules.
    """
    everything = _trained(model)
    return {
        id(module)
        for module, read in readers.items()
        if read and ((inside := _trained(module)) != everything or inside <= read)
    }


class Reads(TorchFunctionMode):
    """Context manager that finds parameters which are read while no module that holds them runs.

    Args:
        model: the network that runs.
        running: its modules that are running, the outermost first; it changes as they run.

    Attributes:
        readers: modules that read them, each with the ids of these parameters.
    """

    def __init__(self, model: nn.Module, running: Sequence[nn.Module]) -> None:
        super().__init__()
        self._holders: dict[int, set[nn.Module]] = {}
        for module in model.modules():
            if not isinstance(module, CONTAINERS):
                for p in directly_held(module).values():
                    self._holders.setdefault(id(p), set()).add(module)
        self._running = running
        self.readers: dict[nn.Module, set[int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function, and note its parameters."""
        result = func(*args, **(kwargs or {}))
        if func not in DETACHING and any(x.requires_grad for x in tensors_in(result)):
            for given in tensors_in((args, kwargs)):
                self._note(given)
        return result

    def _note(self, given: Tensor) -> None:
        holders = self._holders.get(id(given), set())
        if holders.isdisjoint(self._running):
            inside = (m for m in reversed(self._running) if not holders.isdisjoint(m.modules()))
            if (reader := next(inside, None)) is not None:
                self.readers.setdefault(reader, set()).add(id(given))


def _trained(module: nn.Module) -> set[int]:
    return {id(p) for p in module.parameters() if p.requires_grad}
