"""Layers of a model, and the slices of theta, the flat vector of all parameters, that they fill."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from dpmac_cli.errors import ModelError

#: Coordinates that a CPU works on at a time. With fewer, starting the operations costs more than
#: the cache saves (measured from 2^15 to 2^20 coordinates).
BLOCK = 400_000


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters, which fill the slice ``start:stop`` of theta."""

    name: str  # of the module in the model
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]  # by name within the module, in theta's order
    start: int
    stop: int

    @property
    def slices(self) -> dict[str, slice]:
        """The slice of each parameter within the layer's own."""
        found, begin = {}, 0
        for name, p in self.parameters.items():
            found[name] = slice(begin, begin + p.numel())
            begin += p.numel()
        return found


def blocks(size: int, device: torch.device, about: int | None = None) -> list[slice]:
    """Split 0 to ``size`` into slices that fit in a CPU's cache; other devices get one slice.

    Their length is near ``about``, by default :data:`BLOCK`.
    """
    count = max(1, round(size / (about or BLOCK))) if device.type == "cpu" else 1
    step = -(-size // count)
    return [slice(begin, min(begin + step, size)) for begin in range(0, size, step)]


def find_layers(model: nn.Module) -> list[Layer]:
    """Split a model's trainable parameters into layers, in the order of ``model.parameters()``.

    Raises:
        ModelError: a parameter is shared by two modules, or nothing is trainable.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    shared = sorted(set(names) - {name for name, _ in model.named_parameters()})
    if shared:
        raise ModelError(
            f"The parameter {shared[0]} is shared with another layer, and clipping layer by layer "
            "needs each to be in one. Give each layer a parameter of its own, or call one layer "
            "several times."
        )
    return _side_by_side((name, of, of.named_parameters()) for name, of in _owners(model, ""))


def split_by_module(model: nn.Module) -> list[Layer]:
    """Return a layer for each module that holds trainable parameters itself.

    For :mod:`dpmac_cli.dp.clipping.isolation`. A parameter that modules share is in the first.

    Raises:
        ModelError: nothing is trainable.
    """
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for path, p in model.named_parameters():
        name, _, key = path.rpartition(".")
        owned.setdefault(name, []).append((key, p))
    return _side_by_side((name, model.get_submodule(name), own) for name, own in owned.items())


def _side_by_side(
    owners: Iterable[tuple[str, nn.Module, Iterable[tuple[str, nn.Parameter]]]],
) -> list[Layer]:
    """Give the trainable parameters of each owner a slice of theta."""
    layers: list[Layer] = []
    start = 0
    for name, module, held in owners:
        parameters = {key: p for key, p in held if p.requires_grad}
        stop = start + sum(p.numel() for p in parameters.values())
        if parameters:
            layers.append(Layer(name, module, parameters, start, stop))
            start = stop
    if not layers:
        raise ModelError("The model has no trainable parameter.")
    return layers


def _owners(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold parameters themselves, without the modules inside them."""
    if any(True for _ in module.parameters(recurse=False)):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _owners(child, f"{name}.{child_name}" if name else child_name)


def flatten_parameters(layers: list[Layer]) -> Tensor:
    """Move all parameters into one vector theta, shape (d,), and make each a view of it.

    Updating theta in place updates the model. Gradients by the parameters are switched off.
    """
    parameters = [p for layer in layers for p in layer.parameters.values()]
    theta = torch.cat([p.detach().reshape(-1) for p in parameters])
    vector_to_parameters(theta, parameters)
    for p in parameters:
        p.requires_grad_(False)
    return theta
