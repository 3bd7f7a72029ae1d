"""Composite layers that call their projections as Linear layers, so that their uses are recorded.

Attention and recurrent layers are products with a few weights and operations without any. Clipping
needs only inputs and output gradients of the products. In a recurrent layer, time steps are
positions. Attention is computed by torch's own code.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from dpmac_cli.dp.clipping import recurrent

#: Module and name of the layer x @ weight + bias of transformers, as in GPT-2.
TRANSPOSED = ("transformers.pytorch_utils", "Conv1D")
#: Weight and bias of each projection, by name.
Weights = Mapping[str, tuple[Tensor, Tensor | None]]


class Composite(NamedTuple):
    """A kind of layers that can be computed with their projections."""

    is_known: Callable[[Any], bool]  # whether the options of a module are covered
    weights: Callable[[Any], Weights]
    forward: Callable[..., Any]  # forward of the module, given the module and its projections


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute, and restore it at the end."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _is_known_attention(module: Any) -> bool:
    """Return whether a module has no other parameters than those of its projections."""
    names = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    return {name for name, _ in module.named_parameters()} <= names


def _attention_weights(module: Any) -> Weights:
    outer = module.out_proj
    return {
        "in_proj": (module.in_proj_weight, module.in_proj_bias),
        "out_proj": (outer.weight, outer.bias),
    }


def _attend(module: Any, calls: Mapping[str, nn.Module], *inputs: Any, **named: Any) -> Any:
    """Compute ``nn.MultiheadAttention.forward`` with its two projections.

    It multiplies queries, keys and values with adjacent rows of one weight, in this order. Each of
    them that is another tensor has all projections, of which the others are not used.
    """
    plain, taken = functional.linear, 0

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        nonlocal taken
        del bias
        with replaced(functional, "linear", plain):
            if weight is module.out_proj.weight:
                found: Tensor = calls["out_proj"](x)
            else:
                begin, taken = taken, taken + len(weight)
                found = calls["in_proj"](x)[..., begin:taken].contiguous()
            return found

    with replaced(functional, "linear", linear):
        return nn.MultiheadAttention.forward(module, *inputs, **named)


KINDS: Mapping[type[nn.Module], Composite] = {
    nn.MultiheadAttention: Composite(_is_known_attention, _attention_weights, _attend),
    **dict.fromkeys(
        recurrent.RECURRENT,
        Composite(recurrent.is_known_recurrent, recurrent.recurrent_weights, recurrent.recur),
    ),
}


def projections(module: nn.Module) -> dict[str, nn.Linear]:
    """Return Linear layers with the weights of a composite layer."""
    found = {}
    for name, (weight, bias) in KINDS[type(module)].weights(module).items():
        linear: Any = nn.Linear(weight.shape[1], len(weight), device="meta")
        linear.weight, linear.bias = weight, bias
        found[name] = linear
    return found


def is_composite(module: nn.Module) -> bool:
    """Return whether a module has a known kind, and nothing replaces its forward."""
    kind = KINDS.get(type(module))
    return kind is not None and "forward" not in vars(module) and kind.is_known(module)


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
    """Make composite layers call their projections, given by name."""
    try:
        for composite, by_name in called.items():
            composite.forward = partial(KINDS[type(composite)].forward, composite, by_name)
        yield
    finally:
        for composite in called:
            vars(composite).pop("forward", None)
