"""Projections of attention and recurrent layers, as Linear layers whose uses are recorded.

These layers are products with a few weights and operations without any. Clipping needs only inputs
and output gradients of the products. torch's attention computes them by ``F.linear``. Recurrent
layers do, too, with the equations of torch's documentation: time steps are positions. Each product
with the weights of a state is one use of a Linear layer per step, those with the weights of inputs
are one use for all steps.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpmac_cli.errors import ModelError

#: Module of transformers that leaves out a mask that hides nothing: it asks ``mask.all()``, which
#: vmap refuses, unless it is traced.
MASKS = "transformers.masking_utils"
#: Module and name of the layer x @ weight + bias of transformers, as in GPT-2.
TRANSPOSED = ("transformers.pytorch_utils", "Conv1D")


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute, and restore it at the end."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


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


def _plain(
    activation: Callable[[Tensor], Tensor], x: Tensor, h: Tensor, _: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    return (activation(x + h),)


CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, *CELLS)
_STEPS: Mapping[type[nn.Module], _Step] = {
    **dict.fromkeys((nn.LSTMCell, nn.LSTM), _lstm),
    **dict.fromkeys((nn.GRUCell, nn.GRU), _gru),
}


def _parts(module: nn.Module) -> Mapping[str, tuple[str, str]]:
    """Return the names of weight and bias of each projection; {} for other layers."""
    if type(module) is nn.MultiheadAttention:
        return {
            "in_proj": ("in_proj_weight", "in_proj_bias"),
            "out_proj": ("out_proj.weight", "out_proj.bias"),
        }
    if type(module) not in RECURRENT:
        return {}
    kinds = (kind + end for end in _ends(module) for kind in ("ih", "hh"))
    return {kind: (f"weight_{kind}", f"bias_{kind}") for kind in kinds}


def _recur(
    module: Any, x: Tensor, given: Any = None, /
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
        gates = _projected(module, "ih", x), _projected(module, "hh", states[0])
        found = _step_of(module)(*gates, states)
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
            out, states = _through_time(module, end, x, states)
            outputs.append(out)
            last.append(states)
        x = torch.cat(outputs, 2) if directions > 1 else outputs[0]
    ended = tuple(torch.stack(states) for states in zip(*last, strict=True))
    return x if module.batch_first else x.transpose(0, 1), ended if several else ended[0]


def _projected(module: Any, projection: str, x: Tensor) -> Tensor:
    bias = getattr(module, f"bias_{projection}") if module.bias else None
    return functional.linear(x, getattr(module, f"weight_{projection}"), bias)


def _through_time(
    module: Any, end: str, x: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of one layer in one direction, (samples, time, size), and last states."""
    step, outputs = _step_of(module), []
    gates, backwards = _projected(module, "ih" + end, x).unbind(1), end.endswith("_reverse")
    for gate in reversed(gates) if backwards else gates:
        states = step(gate, _projected(module, "hh" + end, states[0]), states)
        outputs.append(states[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 1), states


def _step_of(module: Any) -> _Step:
    activation = getattr(torch, getattr(module, "nonlinearity", "tanh"))
    return _STEPS.get(type(module), partial(_plain, activation))


def _ends(module: Any) -> list[str]:
    """Return the ends of the names of a module's parameters, in the order of its states."""
    if type(module) in CELLS:
        return [""]
    directions = ("", "_reverse")[: 1 + module.bidirectional]
    return [f"_l{layer}{way}" for layer in range(module.num_layers) for way in directions]


def projections(module: nn.Module) -> dict[str, nn.Linear]:
    """Return Linear layers with the weights of attention or a recurrent layer; {} for others.

    It has no other parameters, and nothing replaces its forward.
    """
    named, found = dict(module.named_parameters()), {}
    for name, (weight, bias) in _parts(module).items():
        if weight not in named:
            return {}
        rows, columns = named[weight].shape
        linear: Any = nn.Linear(columns, rows, device="meta")
        linear.weight, linear.bias = named.pop(weight), named.pop(bias, None)
        found[name] = linear
    return {} if named or "forward" in vars(module) else found


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
def by_projections(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make the recurrent layers among some modules compute their projections by ``F.linear``."""
    with ExitStack() as stack:
        for module in modules:
            if type(module) in RECURRENT:
                vars(module)["forward"] = partial(_recur, module)
                stack.callback(vars(module).pop, "forward")
        yield


@contextmanager
def masks_kept() -> Iterator[None]:
    """Make transformers keep every mask, as when it is traced, if it was imported."""
    utilities: Any = sys.modules.get(MASKS)
    traced = hasattr(utilities, "is_tracing")
    with replaced(utilities, "is_tracing", lambda *_, **__: True) if traced else nullcontext():
        yield
