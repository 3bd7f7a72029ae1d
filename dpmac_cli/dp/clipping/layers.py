"""Layers of a model, and their slices of theta, the flat vector of all parameters.

Algorithm 1 is one of vectors: theta, m, v, s and b have shape (d,), one coordinate per trained
parameter. Networks have modules. A layer is where both meet: a module's parameters are a slice of
theta, and the module's type decides how per-sample gradients in this slice are computed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from dpmac_cli.dp.clipping.padding import declared
from dpmac_cli.dp.clipping.projections import projections, transposed
from dpmac_cli.errors import ModelError

#: Coordinates that a CPU processes at a time. With fewer, the overhead of operations exceeds the
#: gain from the cache (measured from 2^15 to 2^20 coordinates).
BLOCK = 400_000
#: Modules that may share a weight: their gradients, by their rules, are added.
TIEABLE = (nn.Linear, nn.Embedding)


@dataclass(frozen=True)
class Layer:
    """Trainable parameters that fill the slice ``start:stop`` of theta.

    Attributes:
        name: name in the model of the module or the parameter.
        module: module whose type decides how gradients follow from inputs and output gradients.
        parameters: by name within the module, in theta's order.
        called: modules whose calls give the gradients: several if they share the parameter.
        composite: attention or recurrent layer that this is a projection of.
        swapped: the weight is that of a Linear layer, transposed, so inputs and output gradients
            are exchanged.
        padding: row of an embedding's weight that is never trained.

    Example:
        >>> [layer] = find_layers(nn.Linear(3, 2))
        >>> layer.stop, layer.slices
        (8, {'weight': slice(0, 6, None), 'bias': slice(6, 8, None)})
    """

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    called: tuple[nn.Module, ...]
    start: int = 0
    composite: nn.Module | None = None
    swapped: bool = False
    padding: int | None = None

    @property
    def stop(self) -> int:
        """Return the end of the layer's slice ``start:stop`` of theta."""
        return self.start + sum(p.numel() for p in self.parameters.values())

    @property
    def size(self) -> int:
        """Return the number of the layer's coordinates that are trained: all but the padding."""
        padding: int = self.skipped.stop - self.skipped.start
        return self.stop - self.start - padding

    @property
    def slices(self) -> dict[str, slice]:
        """Return the slice of each parameter by name, counted from the begin of the layer's."""
        slices = {}
        begin = 0
        for name, p in self.parameters.items():
            slices[name] = slice(begin, begin + p.numel())
            begin += p.numel()
        return slices

    @property
    def skipped(self) -> slice:
        """Return the slice of the padding, counted from the begin of the layer's slice.

        Without padding, it is ``slice(0, 0)``.
        """
        if self.padding is None:
            return slice(0, 0)
        width = self.parameters["weight"].shape[1]
        begin = self.slices["weight"].start + self.padding * width
        return slice(begin, begin + width)


def skipped_by(layers: Iterable[Layer]) -> list[slice]:
    """Return the slices of theta that are never trained, the padding of embeddings, in order.

    Args:
        layers: layers of a network, in the order of their slices.
    """
    gaps = []
    for layer in layers:
        if layer.padding is not None:
            gap = layer.skipped
            gaps.append(slice(layer.start + gap.start, layer.start + gap.stop))
    return gaps


def blocks(size: int, device: torch.device, skipped: Sequence[slice] = ()) -> list[slice]:
    """Return slices of about :data:`BLOCK` coordinates of a vector, which stay in a CPU's cache.

    Args:
        size: number of coordinates.
        device: device of the vector. On others than a CPU, only what is skipped splits it.
        skipped: slices that are left out, in order.

    Example:
        >>> blocks(10, torch.device("cpu"), skipped=[slice(4, 6)])
        [slice(0, 4, None), slice(6, 10, None)]
    """
    begins = [0] + [gap.stop for gap in skipped]
    ends = [gap.start for gap in skipped] + [size]
    slices: list[slice] = []
    for begin, end in zip(begins, ends, strict=True):
        size_between = end - begin
        count = max(1, round(size_between / BLOCK)) if device.type == "cpu" else 1
        step = max(1, -(-size_between // count))
        for first in range(begin, end, step):
            slices.append(slice(first, min(first + step, end)))
    return slices


def find_layers(model: nn.Module) -> list[Layer]:
    """Split a model's trainable parameters into layers, in the order of its modules.

    A module is one layer, an attention or recurrent layer one for each of its projections, and a
    parameter that several modules share a layer of all of them.

    Args:
        model: a network. Parameters with ``requires_grad=False`` are in no layer.

    Raises:
        ModelError: nothing is trainable.

    Example:
        >>> layers = find_layers(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)))
        >>> [(layer.name, layer.start, layer.stop) for layer in layers]
        [('0', 0, 8), ('2', 8, 11)]
    """
    layers: list[Layer] = []
    start = 0
    for owner in _with_ties(list(_owners(model))):
        if owner.parameters:
            layers.append(replace(owner, start=start))
            start = layers[-1].stop
    if not layers:
        raise ModelError(
            "The model has no trainable parameters. To train all: model.requires_grad_(True)."
        )
    return layers


def _owners(model: nn.Module) -> Iterator[Layer]:
    """Yield modules with the trainable parameters that they have directly."""
    inside_composites: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside_composites:
            continue
        prefix = f"{name}." if name else ""
        linear_layers = projections(module)
        if linear_layers:
            inside_composites.update(module.modules())
            for key, linear in linear_layers.items():
                yield Layer(prefix + key, linear, _trainable(linear), (linear,), composite=module)
            continue
        parameters = _trainable(module)
        linear_transposed = transposed(module)
        if linear_transposed is not None and "weight" in parameters:
            weight = {"weight": parameters.pop("weight")}
            yield Layer(f"{prefix}weight", linear_transposed, weight, (module,), swapped=True)
        yield Layer(name, module, parameters, (module,))


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that a module has directly."""
    trainable = dict[str, nn.Parameter]()
    for key, p in module.named_parameters(recurse=False):
        if p.requires_grad:
            trainable[key] = p
    return trainable


def _with_ties(owners: Sequence[Layer]) -> Iterator[Layer]:
    """Yield owners, with a separate layer for each parameter that several of them have.

    It comes where the first of them was. If calls of others than :data:`TIEABLE` modules use it,
    no rule adds up its gradients.
    """
    owners_of: dict[int, list[Layer]] = {}
    for owner in owners:
        for p in owner.parameters.values():
            owners_of.setdefault(id(p), []).append(owner)
    for owner in owners:
        untied = dict[str, nn.Parameter]()
        for key, p in owner.parameters.items():
            tied = owners_of[id(p)]
            if len(tied) == 1:
                untied[key] = p
            elif tied[0] is owner:
                yield _tied_layer(key, p, tied)
        yield _padded(replace(owner, parameters=untied), [owner])


def _tied_layer(key: str, p: nn.Parameter, owners: Sequence[Layer]) -> Layer:
    """Return the layer of a parameter that several modules share, by the name of the first."""
    first = owners[0]
    called: tuple[nn.Module, ...] = ()
    if all(type(owner.module) in TIEABLE for owner in owners):
        for owner in owners:
            called += owner.called
    name = f"{first.name}.{key}".strip(".")
    layer = replace(first, name=name, parameters={key: p}, called=called)
    return _padded(layer, owners)


def _padded(layer: Layer, users: Iterable[Layer]) -> Layer:
    """Return a layer with the row of its weight that all its users declare as padding."""
    row = declared(user.module for user in users)
    return replace(layer, padding=row if "weight" in layer.parameters else None)


def flatten_parameters(layers: Iterable[Layer]) -> Tensor:
    """Move all parameters into one vector theta, shape (d,), and make each a view of it.

    Updating theta in place updates the model. ``requires_grad`` of the parameters is turned off.

    Args:
        layers: all layers of a model, in the order of their slices.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> theta = flatten_parameters(find_layers(model))
        >>> _ = theta.fill_(0.5)
        >>> model.bias.tolist()
        [0.5]
    """
    parameters = list[nn.Parameter]()
    for layer in layers:
        parameters += layer.parameters.values()
    theta = torch.cat([p.detach().reshape(-1) for p in parameters])
    vector_to_parameters(theta, parameters)
    for p in parameters:
        p.requires_grad_(False)
    return theta


@contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Turn off ``requires_grad`` of trained parameters in a ``with`` block, and on again after it.

    Inside, their gradients are computed per sample. Outside, a program sees which parameters it
    trains, and can freeze some.

    Args:
        parameters: the trained parameters, all of which have ``requires_grad`` afterwards.
    """
    try:
        for p in parameters:
            p.requires_grad_(False)
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)
