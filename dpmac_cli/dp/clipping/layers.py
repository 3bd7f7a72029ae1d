"""Layers of a model, and their slices of theta, the flat vector of all parameters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

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
        """Return the end of the layer's slice."""
        return self.start + sum(p.numel() for p in self.parameters.values())

    @property
    def size(self) -> int:
        """Return the number of coordinates that are trained."""
        whole = sum(p.numel() for p in self.parameters.values())
        padding: int = self.skipped.stop - self.skipped.start
        return whole - padding

    @property
    def slices(self) -> dict[str, slice]:
        """Return the slice of each parameter within the layer's slice."""
        ends = accumulate(p.numel() for p in self.parameters.values())
        pairs = zip(self.parameters.items(), ends, strict=True)
        return {name: slice(end - p.numel(), end) for (name, p), end in pairs}

    @property
    def skipped(self) -> slice:
        """Return the slice of the padding within the layer's slice; an empty one without it."""
        if self.padding is None:
            return slice(0, 0)
        weight = self.parameters["weight"]
        begin = self.slices["weight"].start + self.padding * weight.shape[1]
        return slice(begin, begin + weight.shape[1])


def skipped_by(layers: Iterable[Layer]) -> list[slice]:
    """Return the slices of theta that are never trained, in order."""
    gaps = ((layer.start, layer.skipped) for layer in layers if layer.padding is not None)
    return [slice(start + gap.start, start + gap.stop) for start, gap in gaps]


def blocks(size: int, device: torch.device, skipped: Sequence[slice] = ()) -> list[slice]:
    """Split 0 to ``size``, without the slices ``skipped``, into slices of about :data:`BLOCK`.

    On other devices than a CPU, only what is skipped splits it.
    """
    begins = 0, *(gap.stop for gap in skipped)
    ends = *(gap.start for gap in skipped), size
    found: list[slice] = []
    for begin, end in zip(begins, ends, strict=True):
        count = max(1, round((end - begin) / BLOCK)) if device.type == "cpu" else 1
        step = max(1, -(-(end - begin) // count))
        found += [slice(at, min(at + step, end)) for at in range(begin, end, step)]
    return found


def find_layers(model: nn.Module) -> list[Layer]:
    """Split a model's trainable parameters into layers, in the order of its modules.

    A module is one layer, an attention or recurrent layer one for each of its projections, and a
    parameter that several modules share a layer of all of them. Raises ModelError if nothing is
    trainable.
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
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        prefix = f"{name}." if name else ""
        if parts := projections(module):
            inside.update(module.modules())
            for key, linear in parts.items():
                own = _trainable(linear)
                yield Layer(prefix + key, linear, own, (linear,), composite=module)
            continue
        own = _trainable(module)
        turned = transposed(module)
        if turned is not None and "weight" in own:
            weight = {"weight": own.pop("weight")}
            yield Layer(f"{prefix}weight", turned, weight, (module,), swapped=True)
        yield Layer(name, module, own, (module,))


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {key: p for key, p in module.named_parameters(recurse=False) if p.requires_grad}


def _with_ties(owners: Sequence[Layer]) -> Iterator[Layer]:
    """Yield owners, with a layer of its own for each parameter that several of them have.

    It comes where the first of them was. If calls of others than :data:`TIEABLE` modules use it,
    no rule adds up its gradients.
    """
    users: dict[int, list[Layer]] = {}
    for owner in owners:
        for p in owner.parameters.values():
            users.setdefault(id(p), []).append(owner)
    for owner in owners:
        own = dict[str, nn.Parameter]()
        for key, p in owner.parameters.items():
            tied = users[id(p)]
            if len(tied) == 1:
                own[key] = p
            elif tied[0] is owner:
                known = all(type(each.module) in TIEABLE for each in tied)
                called = tuple(module for each in tied for module in each.called)
                name = f"{owner.name}.{key}".strip(".")
                whole = replace(owner, parameters={key: p}, called=called if known else ())
                yield _padded(replace(whole, name=name), tied)
        yield _padded(replace(owner, parameters=own), [owner])


def _padded(layer: Layer, users: Iterable[Layer]) -> Layer:
    """Return a layer with the row of its weight that all its users declare as padding."""
    row = declared(user.module for user in users)
    return replace(layer, padding=row if "weight" in layer.parameters else None)


def flatten_parameters(layers: Iterable[Layer]) -> Tensor:
    """Move all parameters into one vector theta, shape (d,), and make each a view of it.

    Updating theta in place updates the model. ``requires_grad`` of the parameters is turned off.
    """
    parameters = [p for layer in layers for p in layer.parameters.values()]
    theta = torch.cat([p.detach().reshape(-1) for p in parameters])
    vector_to_parameters(theta, parameters)
    for p in parameters:
        p.requires_grad_(False)
    return theta


@contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Turn off ``requires_grad`` of trained parameters, and on again at the end.

    Their gradients are computed per sample. Outside, a program sees what it trains, and can freeze
    it.
    """
    try:
        for p in parameters:
            p.requires_grad_(False)
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)
