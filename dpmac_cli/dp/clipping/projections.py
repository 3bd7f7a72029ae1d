"""Composite layers that call their projections as Linear layers, so that their uses are recorded.

Attention and recurrent layers are products with a few weights and operations without any. Clipping
needs only inputs and output gradients of the products. In a recurrent layer, time steps are
positions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping import attention, recurrent
from dpmac_cli.errors import ModelError

#: Weight and bias of each projection, by name.
Weights = Mapping[str, tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Composite:
    """A kind of layers that can be computed with their projections."""

    types: frozenset[type[nn.Module]]
    is_known: Callable[[Any], bool]  # whether the options of a module are covered
    is_plain: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], bool]  # whether a call is covered
    weights: Callable[[Any], Weights]
    forward: Callable[..., Any]  # forward of the module, given the module and its projections
    call: str  # how to call it instead of a call that is not plain


KINDS = (
    Composite(
        attention.ATTENTIONS,
        attention.is_known_attention,
        attention.is_plain_attention,
        attention.attention_weights,
        attention.attend,
        "(query, key, value), tensors with samples first",
    ),
    Composite(
        recurrent.RECURRENT,
        recurrent.is_known_recurrent,
        recurrent.is_plain_recurrent,
        recurrent.recurrent_weights,
        recurrent.recur,
        "(x) or (x, state) with tensors",
    ),
)


def projections(module: nn.Module) -> dict[str, nn.Linear]:
    """Return Linear layers with the weights of a composite layer."""
    found = {}
    with torch._C.DisableTorchFunction():  # making layers is no operation of the network
        for name, (weight, bias) in _kind_of(module).weights(module).items():
            linear: Any = nn.Linear(weight.shape[1], len(weight), device="meta")
            linear.weight, linear.bias = weight, bias
            found[name] = linear
    return found


def is_composite(module: nn.Module) -> bool:
    """Return whether a module can be computed with its projections, if its calls are plain."""
    return any(_is_known(kind, module) for kind in KINDS)


def is_plainly_called(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether a call of a composite layer has arguments for which that is so."""
    return _kind_of(module).is_plain(module, inputs, named)


@contextmanager
def calling_projections(calls: Iterable[tuple[str, nn.Module, nn.Module | None]]) -> Iterator[None]:
    """Make composite layers call their projections, given as (name, projection, composite)."""
    called: dict[nn.Module, dict[str, nn.Module]] = {}
    try:
        for name, linear, composite in calls:
            if composite is not None:
                of, _, which = name.rpartition(".")
                by_name = called.setdefault(composite, dict(projections(composite)))
                by_name[which] = linear
                composite.forward = partial(_forward, of, composite, by_name)
        yield
    finally:
        for composite in called:
            del composite.forward


def _is_known(kind: Composite, module: nn.Module) -> bool:
    """Return whether a module is of a kind, and nothing replaces its forward."""
    return type(module) in kind.types and "forward" not in vars(module) and kind.is_known(module)


def _kind_of(module: nn.Module) -> Composite:
    return next(kind for kind in KINDS if type(module) in kind.types)


def _forward(
    name: str, module: nn.Module, calls: Mapping[str, nn.Module], *inputs: Any, **named: Any
) -> Any:
    kind = _kind_of(module)
    if not kind.is_plain(module, inputs, named):
        raise ModelError(
            f"The layer {name} was called differently in this step than during validation, so its "
            f"gradients would be incomplete. Call it as self.{name}{kind.call}."
        )
    return kind.forward(module, calls, *inputs, **named)
