"""Layers of a model, and the slices of theta, the flat vector of all parameters, that they fill."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.nn.utils.parametrize import is_parametrized

from dpmac_cli.dp.clipping.attention import projections, self_attentions
from dpmac_cli.dp.clipping.direct import copied_parameters
from dpmac_cli.errors import ModelError

#: Coordinates that a CPU works on at a time. With fewer, starting the operations costs more than
#: the cache saves (measured from 2^15 to 2^20 coordinates).
BLOCK = 400_000


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters, which fill the slice ``start:stop`` of theta."""

    name: str  # of the module, or of the parameter, in the model
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]  # by name within the module, in theta's order
    start: int = 0
    stop: int = 0
    direct: bool = False  # one parameter that the module's own forward reads
    attention: nn.Module | None = None  # of which the module is a projection

    @property
    def slices(self) -> dict[str, slice]:
        """The slice of each parameter within the layer's own."""
        ends = accumulate(p.numel() for p in self.parameters.values())
        pairs = zip(self.parameters.items(), ends, strict=True)
        return {name: slice(end - p.numel(), end) for (name, p), end in pairs}


def blocks(size: int, device: torch.device, about: int | None = None) -> list[slice]:
    """Split 0 to ``size`` into slices near ``about`` long; into one slice on other devices."""
    count = max(1, round(size / (about or BLOCK))) if device.type == "cpu" else 1
    step = -(-size // count)
    return [slice(begin, min(begin + step, size)) for begin in range(0, size, step)]


def find_layers(model: nn.Module, example: Tensor | None = None) -> list[Layer]:
    """Split a model's trainable parameters into layers, in the order of ``model.parameters()``.

    Parameters that the forward of a module reads itself, and projections of self-attention, are
    layers of their own if made-up inputs of two samples or more, ``example``, show that they can
    be; else their module is one layer. Raises ModelError if a parameter is shared by two modules,
    or nothing is trainable.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    shared = sorted(set(names) - {name for name, _ in model.named_parameters()})
    if shared:
        raise ModelError(
            f"The parameter {shared[0]} is shared with another layer, and clipping layer by layer "
            "needs each to be in one. Give each a parameter of its own: "
            f"{shared[0]} = nn.Parameter({shared[0]}.detach().clone()). Or call one layer twice."
        )
    with self_attentions(model) as attentions:
        alone = set() if example is None else copied_parameters(model, example)
    return _side_by_side(_owners(model, "", alone | attentions))


def split_by_module(model: nn.Module) -> list[Layer]:
    """Return a layer for each module that holds trainable parameters itself.

    A parameter that modules share is in the first. Raises ModelError if nothing is trainable.
    """
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for path, p in model.named_parameters():
        name, _, key = path.rpartition(".")
        owned.setdefault(name, []).append((key, p))
    return _side_by_side(
        Layer(name, model.get_submodule(name), dict(own)) for name, own in owned.items()
    )


def _side_by_side(owners: Iterable[Layer]) -> list[Layer]:
    """Give the trainable parameters of each owner a slice of theta."""
    layers: list[Layer] = []
    start = 0
    for owner in owners:
        parameters = {key: p for key, p in owner.parameters.items() if p.requires_grad}
        stop = start + sum(p.numel() for p in parameters.values())
        if parameters:
            layers.append(replace(owner, parameters=parameters, start=start, stop=stop))
            start = stop
    if not layers:
        raise ModelError(
            "The model has no trainable parameter. Train all of them: model.requires_grad_(True)."
        )
    return layers


def _owners(module: nn.Module, name: str, apart: set[int]) -> Iterator[Layer]:
    """Modules that hold parameters themselves, without the modules inside them.

    Parameters in ``apart``, by id, are owners of their own where all of their module's are.
    Attention in it is its projections.
    """
    prefix = f"{name}." if name else ""
    if id(module) in apart:
        for key, linear in projections(module).items():
            own = dict(linear.named_parameters())
            yield Layer(prefix + key, linear, own, attention=module)
        return
    held = dict(module.named_parameters(recurse=False))
    own = {key: p for key, p in held.items() if p.requires_grad}
    if held and (is_parametrized(module) or not all(id(p) in apart for p in own.values())):
        yield Layer(name, module, dict(module.named_parameters()))
        return
    for key, p in own.items():
        yield Layer(prefix + key, module, {key: p}, direct=True)
    for key, child in module.named_children():
        yield from _owners(child, prefix + key, apart)


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
