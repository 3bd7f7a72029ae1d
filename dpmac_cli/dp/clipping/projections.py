"""Composite layers that call their projections as Linear layers, so that their uses are recorded.

Attention and recurrent layers are products with a few weights and operations without any. Clipping
needs only inputs and output gradients of the products. In a recurrent layer, time steps are
positions: each product with the weights of a state is one use of a Linear layer per step, those
with the weights of inputs are one use for all steps. The equations are those of torch's
documentation. Attention is computed by torch's own code.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpmac_cli.errors import ModelError

#: Module of transformers that leaves out a mask that hides nothing: it asks ``mask.all()``, which
#: vmap refuses, unless it is traced.
MASKS = "transformers.masking_utils"
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


#: Gates from the input and from the states, and the states; to the next states, output first.
_Step = Callable[[Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, ...]]


def _lstm(x: Tensor, h: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    update, forget, new, out = (x + h).chunk(4, 1)
    cell = forget.sigmoid() * states[1] + update.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _gru(x: Tensor, h: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (reset, update, new), (reset_h, update_h, new_h) = x.chunk(3, 1), h.chunk(3, 1)
    keep = (update + update_h).sigmoid()
    new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return (new + keep * (states[0] - new),)


def _tanh(x: Tensor, h: Tensor, _: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return ((x + h).tanh(),)


def _relu(x: Tensor, h: Tensor, _: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return ((x + h).relu(),)


CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, *CELLS)
_STEPS: Mapping[type[nn.Module], _Step] = {
    **dict.fromkeys((nn.LSTMCell, nn.LSTM), _lstm),
    **dict.fromkeys((nn.GRUCell, nn.GRU), _gru),
}


def _is_known_recurrent(module: Any) -> bool:
    """Return whether a module has plain parameters."""
    names = {f"{kind}{end}" for end in _ends(module) for kind in _KINDS[: 4 if module.bias else 2]}
    return {name for name, _ in module.named_parameters()} == names


def _recurrent_weights(module: Any) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return weight and bias of the projections of inputs and states, layer by layer."""
    return {
        kind + end: (
            getattr(module, f"weight_{kind}{end}"),
            getattr(module, f"bias_{kind}{end}") if module.bias else None,
        )
        for end in _ends(module)
        for kind in ("ih", "hh")
    }


def _recur(
    module: Any, calls: Mapping[str, nn.Module], x: Tensor, given: Any = None, /
) -> Tensor | tuple[Tensor, ...] | tuple[Tensor, Any]:
    """Compute the result of the module's own forward, with dropout between layers of its own.

    Raises ModelError unless inputs, and states if there are any, are tensors with samples.
    """
    states_given = () if given is None else given if isinstance(given, tuple | list) else (given,)
    several, cell = _STEPS.get(type(module)) is _lstm, type(module) in CELLS
    known = len(states_given) == 1 + several or given is None
    if not known or not all(
        isinstance(t, Tensor) and t.ndim == 3 - cell for t in (x, *states_given)
    ):
        raise ModelError(
            f"A {type(module).__name__} is called differently in this step than during validation, "
            "so its gradients would be incomplete. Call it with (x) or (x, state) with tensors."
        )
    x = x if cell or module.batch_first else x.transpose(0, 1)  # (samples, time, ...)
    begun = (x.new_zeros(len(x), module.hidden_size),) * (1 + several)
    if cell:
        states = tuple(states_given) or begun
        found = _step_of(module)(calls["ih"](x), calls["hh"](states[0]), states)
        return found if several else found[0]
    last: list[tuple[Tensor, ...]] = []
    directions = 1 + module.bidirectional
    ends = _ends(module)
    for begin in range(0, len(ends), directions):
        outputs = []
        if begin and module.dropout:
            x = functional.dropout(x, module.dropout, module.training)
        for end in ends[begin : begin + directions]:
            states = tuple(state[len(last)] for state in states_given) or begun
            out, states = _through_time(module, calls, end, x, states)
            outputs.append(out)
            last.append(states)
        x = torch.cat(outputs, 2) if directions > 1 else outputs[0]
    ended = tuple(torch.stack(states) for states in zip(*last, strict=True))
    return x if module.batch_first else x.transpose(0, 1), ended if several else ended[0]


_KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _through_time(
    module: Any, calls: Mapping[str, nn.Module], end: str, x: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of one layer in one direction, (samples, time, size), and last states."""
    step, outputs = _step_of(module), []
    gates, backwards = calls["ih" + end](x).unbind(1), end.endswith("_reverse")
    for gate in reversed(gates) if backwards else gates:
        states = step(gate, calls["hh" + end](states[0]), states)
        outputs.append(states[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 1), states


def _step_of(module: Any) -> _Step:
    by_name = _relu if getattr(module, "nonlinearity", "") == "relu" else _tanh
    return _STEPS.get(type(module), by_name)


def _ends(module: Any) -> list[str]:
    """Return the ends of the names of a module's parameters, in the order of its states."""
    if type(module) in CELLS:
        return [""]
    directions = ("", "_reverse")[: 1 + module.bidirectional]
    return [f"_l{layer}{way}" for layer in range(module.num_layers) for way in directions]


KINDS: Mapping[type[nn.Module], Composite] = {
    nn.MultiheadAttention: Composite(_is_known_attention, _attention_weights, _attend),
    **dict.fromkeys(
        RECURRENT,
        Composite(_is_known_recurrent, _recurrent_weights, _recur),
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


@contextmanager
def masks_kept() -> Iterator[None]:
    """Make transformers keep every mask, as when it is traced, if it was imported."""
    utilities: Any = sys.modules.get(MASKS)
    traced = hasattr(utilities, "is_tracing")
    with replaced(utilities, "is_tracing", lambda *_, **__: True) if traced else nullcontext():
        yield
