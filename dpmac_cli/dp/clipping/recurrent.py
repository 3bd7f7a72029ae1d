"""Recurrent layers as two projections and a recurrence.

The products with the weights of inputs are one use of a Linear layer for all time steps. Those with
the weights of states are another one, at the states before each step. What is left has no weights:
:mod:`.recurrence`, whose shapes are those below.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear

from dpmac_cli.dp.clipping.recurrence import (
    GRU,
    LSTM,
    RELU,
    TANH,
    Kind,
    Recurrence,
    Run,
    States,
)
from dpmac_cli.errors import ModelError

#: Layers that compute one time step.
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
#: Layers that are run as projections and a recurrence.
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, *CELLS)
#: Message for other arguments than those of the trial.
OTHER_ARGUMENTS = (
    "A {} is called differently in this step than during validation, so its gradients would be "
    "incomplete. Call it with (x) or (x, state) with tensors."
)
#: Computes a projection: see :func:`by_projections`.
Product = Callable[..., Tensor]

_KINDS: Mapping[type[nn.Module], Kind] = {
    nn.LSTM: LSTM,
    nn.LSTMCell: LSTM,
    nn.GRU: GRU,
    nn.GRUCell: GRU,
}


def _kind_of(module: Any) -> Kind:
    """Return the equations of a module of :data:`RECURRENT`."""
    kind = _KINDS.get(type(module))
    if kind is not None:
        return kind
    return RELU if module.nonlinearity == "relu" else TANH


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, known: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias with its gradients, also where the result is known."""
    return linear(x, weight, bias)


def _recur(
    module: Any, product: Product, x: Tensor, state: Any = None, /
) -> Tensor | tuple[Tensor, ...] | tuple[Tensor, Any]:
    """Compute what the forward of torch's recurrent layers and cells does.

    Args:
        module: a module of :data:`RECURRENT`.
        product: computes a projection, see :func:`by_projections`.
        x: inputs, in the form that the module takes.
        state: first state, (hidden, cell) for an LSTM; None for zeros.

    Raises:
        ModelError: inputs, or states if there are any, are not tensors with samples.
    """
    _check_arguments(module, x, state)
    states = _as_states(state)
    count = _kind_of(module).states
    if type(module) in CELLS:
        zeros = (x.new_zeros(len(x), module.hidden_size),) * count
        _, last = _through_time(module, product, "", x.unsqueeze(1), states or zeros)
        return last if count > 1 else last[0]
    x = x if module.batch_first else x.transpose(0, 1)  # (samples, time, ...)
    x, ended = _through_layers(module, product, x, states)
    outputs = x if module.batch_first else x.transpose(0, 1)
    return outputs, ended if count > 1 else ended[0]


def _check_arguments(module: Any, x: Any, state: Any) -> None:
    """Raise ModelError unless inputs, and states if there are any, are tensors with samples."""
    states = _as_states(state)
    dims = 2 if type(module) in CELLS else 3
    as_expected = state is None or len(states) == _kind_of(module).states
    for t in (x, *states):
        if not isinstance(t, Tensor) or t.ndim != dims:
            as_expected = False
    if not as_expected:
        raise ModelError(OTHER_ARGUMENTS.format(type(module).__name__))


def _as_states(state: Any) -> tuple[Any, ...]:
    """Return the tensors of a state; () without one."""
    if state is None:
        return ()
    return tuple(state) if isinstance(state, tuple | list) else (state,)


def _through_layers(
    module: Any, product: Product, x: Tensor, first: States
) -> tuple[Tensor, States]:
    """Run all layers and directions of a module, with dropout between layers.

    Args:
        module: an LSTM, a GRU or a plain recurrent module.
        product: computes a projection.
        x: inputs, shape (samples, time, ...).
        first: first states, shape (layers * directions, samples, size) each; () for zeros.

    Returns:
        Outputs, shape (samples, time, ...), and last states in the shape of the first ones.
    """
    zeros = (x.new_zeros(len(x), module.hidden_size),) * _kind_of(module).states
    last: list[States] = []
    directions = 1 + module.bidirectional
    ends = ends_of(module)
    for begin in range(0, len(ends), directions):
        outputs = []
        if begin and module.dropout:
            x = functional.dropout(x, module.dropout, module.training)
        for end in ends[begin : begin + directions]:
            begins = tuple(state[len(last)] for state in first) or zeros
            out, states = _through_time(module, product, end, x, begins)
            outputs.append(out)
            last.append(states)
        x = torch.cat(outputs, 2) if directions > 1 else outputs[0]
    return x, tuple(torch.stack(states) for states in zip(*last, strict=True))


def _through_time(
    module: Any, product: Product, end: str, x: Tensor, first: States
) -> tuple[Tensor, States]:
    """Return the outputs of one layer in one direction, (samples, time, size), and last states.

    Args:
        module: the recurrent layer or cell.
        product: computes a projection.
        end: end of the names of its parameters, see :func:`ends_of`.
        x: inputs, shape (samples, time, ...).
        first: states before the first step, shape (samples, size) each.
    """
    kind = _kind_of(module)
    backwards = end.endswith("_reverse")
    gates = product(x, *_parameters(module, "ih" + end))
    gates = gates.flip(1) if backwards else gates
    weight, bias = _parameters(module, "hh" + end)
    before = []
    with torch.no_grad():
        hidden, *after = Run.apply(kind, weight, bias, gates, *first)
        for begin, states in zip(first, after, strict=True):
            before.append(torch.cat([begin.unsqueeze(1), states[:, :-1]], 1))
    hidden = product(before[0], weight, bias, hidden)
    outputs, *last = Recurrence.apply(kind, weight, bias, gates, hidden, *before, *after, *first)
    ended = (outputs[:, -1], *last)
    return outputs.flip(1) if backwards else outputs, ended


def _parameters(module: Any, projection: str) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a projection, by the end of their names."""
    bias = getattr(module, f"bias_{projection}") if module.bias else None
    return getattr(module, f"weight_{projection}"), bias


def ends_of(module: Any) -> list[str]:
    """Return the ends of the parameters' names of a recurrent layer, in the order of its states.

    Each layer and direction has one: "weight_ih" + end is the name of a weight.

    Args:
        module: a module of :data:`RECURRENT`. A cell has one end, "".

    Example:
        >>> ends_of(nn.LSTM(2, 3, num_layers=2, bidirectional=True))
        ['_l0', '_l0_reverse', '_l1', '_l1_reverse']
    """
    if type(module) in CELLS:
        return [""]
    ends = []
    for layer in range(module.num_layers):
        ends.append(f"_l{layer}")
        if module.bidirectional:
            ends.append(f"_l{layer}_reverse")
    return ends


@contextmanager
def by_projections(
    modules: Iterable[nn.Module | None], product: Product = _product
) -> Iterator[None]:
    """Make recurrent layers compute their projections by a function, for a ``with`` block.

    Args:
        modules: modules of a network; others than :data:`RECURRENT` are left as they are.
        product: returns x @ weight.T + bias, given x, weight, bias, and the result where it is
            known without its gradients.

    Raises:
        ModelError: in the block, for a call with other arguments than tensors with samples.
    """
    with ExitStack() as stack:
        for module in modules:
            if type(module) in RECURRENT:
                vars(module)["forward"] = partial(_recur, module, product)
                stack.callback(vars(module).pop, "forward")
        yield
