"""Layers of a model, and their slices of theta, the flat vector of all parameters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.nn.utils.parametrize import is_parametrized

from dpmac_cli.dp.clipping.batches import Batch
from dpmac_cli.dp.clipping.direct_parameters import (
    CONTAINERS,
    copied_parameters,
    directly_held,
)
from dpmac_cli.dp.clipping.example_pass import run_example
from dpmac_cli.dp.clipping.outside_reads import layers_that_read
from dpmac_cli.dp.clipping.projections import projections
from dpmac_cli.errors import ModelError

#: Coordinates that a CPU processes at a time. With fewer, the overhead of operations exceeds the
#: gain from the cache (measured from 2^15 to 2^20 coordinates).
BLOCK = 400_000
#: Modules that may share a weight: their gradients, by their rules, are added.
TIEABLE = (nn.Linear, nn.Embedding)


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters, which fill the slice ``start:stop`` of theta."""

    name: str  # name of the module or the parameter in the model
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]  # by name within the module, in theta's order
    start: int = 0
    #: Origin of gradients: calls of the module; copies of a single parameter for each row, and
    #: products; or zero, as no output depends on the parameters.
    gradients: Literal["calls", "copies", "zero"] = "calls"
    composite: nn.Module | None = None  # attention or recurrent layer that this is a projection of
    rows: int = 1  # rows per sample, adjacent, of inputs and outputs of the module, or of copies
    tied: tuple["Layer", ...] = ()  # every module with the parameter, if several have it

    @property
    def stop(self) -> int:
        """Return the end of the layer's slice."""
        return self.start + sum(p.numel() for p in self.parameters.values())

    @property
    def direct(self) -> bool:
        """Return whether gradients do not follow from calls of the module."""
        return self.gradients != "calls"

    @property
    def idle(self) -> bool:
        """Return whether gradients are zero."""
        return self.gradients == "zero"

    @property
    def users(self) -> tuple["Layer", ...]:
        """Return the layers whose modules are called: several if they share the parameter."""
        return self.tied or (self,)

    @property
    def slices(self) -> dict[str, slice]:
        """Return the slice of each parameter within the layer's slice."""
        ends = accumulate(p.numel() for p in self.parameters.values())
        pairs = zip(self.parameters.items(), ends, strict=True)
        return {name: slice(end - p.numel(), end) for (name, p), end in pairs}


def blocks(size: int, device: torch.device, about: int | None = None) -> list[slice]:
    """Split 0 to ``size`` into slices of about ``about``; a single slice on other devices."""
    count = max(1, round(size / (about or BLOCK))) if device.type == "cpu" else 1
    step = -(-size // count)
    return [slice(begin, min(begin + step, size)) for begin in range(0, size, step)]


def find_layers(model: nn.Module, example: Batch | None = None) -> list[Layer]:
    """Split a model's trainable parameters into layers, in the order of ``model.parameters()``.

    Parameters that a module's forward reads directly, or that have no effect, and projections of
    attention and recurrent layers, become separate layers if ``example``, random inputs of at least
    two samples, shows that this works; otherwise their module is one layer, and so is a module that
    reads a parameter of a layer inside it without calling it. It also shows how many rows per
    sample layers have. A parameter that :data:`TIEABLE` modules share is a layer of all of them.
    Raises ModelError if others share a parameter, or nothing is trainable.
    """
    if example is None:
        return _side_by_side(_with_ties(list(_owners(model, "", _Apart(), set()))))
    seen = run_example(model, example)
    read = set[int]().union(*seen.readers.values())
    copied = copied_parameters(model, example, read, seen.idle)
    left = {module: of - copied.keys() for module, of in seen.readers.items()}
    apart = _Apart(copied, seen.idle, seen.plain, layers_that_read(model, left), seen.rows)
    owners = map(apart.noted, _owners(model, "", apart, set()))
    return _side_by_side(_with_ties(list(owners)))


@dataclass(frozen=True)
class _Apart:
    """Ids of parameters and modules that become layers of their own."""

    #: Parameters of which every row gets a copy, with their rows per sample.
    copied: Mapping[int, int] = field(default_factory=dict)
    idle: Set[int] = frozenset()  # parameters without an effect
    composite: Set[int] = frozenset()  # attention and recurrent layers, by their projections
    whole: Set[int] = frozenset()  # modules that read what is inside them, each one layer
    #: Rows per sample of modules that have several.
    rows: Mapping[int, int] = field(default_factory=dict)

    def noted(self, owner: Layer) -> Layer:
        """Return an owner with its rows, marked if all of its trained parameters are idle."""
        trained = {id(p) for p in owner.parameters.values() if p.requires_grad}
        if trained and trained <= self.idle:
            return replace(owner, gradients="zero", composite=None)
        if owner.direct:
            [rows] = {self.copied[parameter] for parameter in trained}
        else:
            rows = self.rows.get(id(owner.composite or owner.module), 1)
        return replace(owner, rows=rows)


def split_by_module(model: nn.Module) -> list[Layer]:
    """Return one layer per module that directly has trainable parameters.

    A shared parameter is part of the first one. Raises ModelError if nothing is trainable.
    """
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for path, p in model.named_parameters():
        name, _, key = path.rpartition(".")
        owned.setdefault(name, []).append((key, p))
    return _side_by_side(
        Layer(name, model.get_submodule(name), dict(own)) for name, own in owned.items()
    )


def _side_by_side(owners: Iterable[Layer]) -> list[Layer]:
    """Assign a slice of theta to the trainable parameters of each owner."""
    layers: list[Layer] = []
    start = 0
    for owner in owners:
        parameters = {key: p for key, p in owner.parameters.items() if p.requires_grad}
        if parameters:
            layers.append(replace(owner, parameters=parameters, start=start))
            start = layers[-1].stop
    if not layers:
        raise ModelError(
            "The model has no trainable parameters. To train all: model.requires_grad_(True)."
        )
    return layers


def _with_ties(owners: list[Layer]) -> Iterator[Layer]:
    """Yield owners, with a layer of its own for each parameter that several of them have.

    It comes where the first of them was. A parameter whose gradients are given row by row needs no
    other owners. Raises ModelError if their gradients cannot be added.
    """
    users: dict[int, list[Layer]] = {}
    for owner in owners:
        for key, p in owner.parameters.items():
            if p.requires_grad:
                users.setdefault(id(p), []).append(replace(owner, parameters={key: p}))
    for owner in owners:
        own = dict[str, nn.Parameter]()
        for key, p in owner.parameters.items():
            tied = users.get(id(p), [])
            if len(tied) < 2 or (all(user.direct for user in tied) and tied[0].name == owner.name):
                own[key] = p
            elif tied[0].module is owner.module and not all(user.direct for user in tied):
                name = f"{owner.name}.{key}".strip(".")
                if not all(map(_is_tieable, tied)):
                    raise ModelError(
                        f"The parameter {name} is shared by {tied[0].name} and {tied[1].name}, "
                        "whose calls do not give its gradient. Only nn.Linear and nn.Embedding can "
                        f"share one. Copy it: nn.Parameter({name}.detach().clone())."
                    )
                yield replace(owner, name=name, parameters={key: p}, tied=tuple(tied))
        yield replace(owner, parameters=own)


def _is_tieable(user: Layer) -> bool:
    return type(user.module) in TIEABLE and not user.direct and user.composite is None


def _owners(module: nn.Module, name: str, apart: _Apart, seen: set[nn.Module]) -> Iterator[Layer]:
    """Yield modules that directly have parameters, without the modules inside them, once each.

    If all parameters of a module are in ``apart``, each becomes a separate owner. Attention and
    recurrent layers in it are replaced with their projections.
    """
    prefix = f"{name}." if name else ""
    if module in seen:
        return
    seen.add(module)
    if id(module) in apart.composite:
        for key, linear in projections(module).items():
            own = dict(linear.named_parameters())
            yield Layer(prefix + key, linear, own, composite=module)
        return
    held = directly_held(module)
    own = {key: p for key, p in held.items() if p.requires_grad}
    known = apart.copied.keys() | apart.idle
    together = is_parametrized(module) or not {*map(id, own.values())} <= known
    if (held and together) or id(module) in apart.whole:
        yield Layer(name, module, dict(module.named_parameters()))
        return
    for key, p in own.items():
        if "." not in key:
            yield Layer(prefix + key, module, {key: p}, gradients="copies")
    for child_key, child in module.named_children():
        if not isinstance(child, CONTAINERS):
            yield from _owners(child, prefix + child_key, apart, seen)
            continue
        for key, p in own.items():
            if key.startswith(f"{child_key}."):
                yield Layer(prefix + key, module, {key: p}, gradients="copies")


def flatten_parameters(layers: list[Layer]) -> Tensor:
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
