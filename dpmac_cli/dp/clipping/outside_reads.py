"""Modules that read parameters of layers inside them, such as ``F.conv2d(x, self.layer.weight)``.

Calls of the layer do not give the gradient of such a parameter, but calls of the module do.
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpmac_cli.dp.clipping.batches import Batch, tensors_in
from dpmac_cli.dp.clipping.direct_parameters import CONTAINERS, directly_held
from dpmac_cli.dp.losses import DETACHING


def read_outside(model: nn.Module, example: Batch) -> dict[nn.Module, set[int]]:
    """Return the modules that read trained parameters of layers which are not running.

    They are found on an example batch, each with the ids of these parameters.
    """
    reads = _Reads(model)
    try:
        with torch.enable_grad(), reads.following(model), reads:
            model(example)
    except Exception:  # noqa: BLE001  (user code may raise anything, and would in training)
        return {}
    return reads.readers


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


class _Reads(TorchFunctionMode):
    """Context manager that finds parameters which are read while no module that holds them runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._holders: dict[int, set[nn.Module]] = {}
        for module in model.modules():
            if not isinstance(module, CONTAINERS):
                for p in directly_held(module).values():
                    self._holders.setdefault(id(p), set()).add(module)
        self._running: list[nn.Module] = []
        self.readers: dict[nn.Module, set[int]] = {}

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Keep track of the modules that are running."""
        with ExitStack() as hooks:
            for module in model.modules():
                before = module.register_forward_pre_hook(lambda m, _: self._running.append(m))
                after = module.register_forward_hook(lambda *_: self._left())
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            yield

    def _left(self) -> None:
        self._running.pop()

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
