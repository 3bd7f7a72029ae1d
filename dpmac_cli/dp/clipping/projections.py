"""Composite layers that call their projections as Linear layers, so that their uses are recorded.

Attention and recurrent layers are products with a few weights and operations without any. Clipping
needs only inputs and output gradients of the products. In a recurrent layer, time steps are
positions.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from dpmac_cli.dp.clipping import attention, recurrent
from dpmac_cli.errors import ModelError

#: Module and name of the layer x @ weight + bias of transformers, as in GPT-2.
TRANSPOSED = ("transformers.pytorch_utils", "Conv1D")
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
    for name, (weight, bias) in _kind_of(module).weights(module).items():
        linear: Any = nn.Linear(weight.shape[1], len(weight), device="meta")
        linear.weight, linear.bias = weight, bias
        found[name] = linear
    return found


def is_composite(module: nn.Module) -> bool:
    """Return whether a module can be computed with its projections, if its calls are plain."""
    return any(_is_known(kind, module) for kind in KINDS)


def transposed(module: nn.Module) -> nn.Linear | None:
    """Return the Linear layer whose weight is the transpose of a module's, if it is one.

    Its inputs are the module's output gradients, and its output gradients the module's inputs.
    """
    kind, weight = type(module), getattr(module, "weight", None)
    if (kind.__module__, kind.__name__) != TRANSPOSED or not isinstance(weight, nn.Parameter):
        return None
    linear = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    linear.weight = weight
    return linear


@contextmanager
def calling_projections(
    called: Mapping[nn.Module, Mapping[str, nn.Module]],
) -> Iterator[None]:
    """Make composite layers call their projections, given by name.

    A call that is not plain raises ModelError.
    """
    try:
        for composite, by_name in called.items():
            composite.forward = partial(_forward, composite, by_name)
        yield
    finally:
        for composite in called:
            vars(composite).pop("forward", None)


def _is_known(kind: Composite, module: nn.Module) -> bool:
    """Return whether a module is of a kind, and nothing replaces its forward."""
    return type(module) in kind.types and "forward" not in vars(module) and kind.is_known(module)


def _kind_of(module: nn.Module) -> Composite:
    return next(kind for kind in KINDS if type(module) in kind.types)


def _forward(module: nn.Module, calls: Mapping[str, nn.Module], *inputs: Any, **named: Any) -> Any:
    kind = _kind_of(module)
    if not kind.is_plain(module, inputs, named):
        raise ModelError(
            f"A {type(module).__name__} is called differently in this step than during validation, "
            f"so its gradients would be incomplete. Call it with {kind.call}."
        )
    return kind.forward(module, calls, *inputs, **named)
