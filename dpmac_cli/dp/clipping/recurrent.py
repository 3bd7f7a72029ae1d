"""Recurrent layers as two projections and a recurrence, with the gradients that cuDNN computes.

The products with the weights of inputs are one use of a Linear layer for all time steps. Those with
the weights of states are another one, at the states before each step. The recurrence itself has no
weights: :class:`_Recurrence` returns its gradients w.r.t. the gates of all steps by backpropagation
through time, from the equations of torch's documentation. Second derivatives are not supported.

These are the only functions of autograd whose rules for vmap are called. A row is one sequence, and
no operation below mixes rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear

from dpmac_cli.dp.clipping.matmul import product_of_rows
from dpmac_cli.errors import ModelError

CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, *CELLS)
#: Message for other arguments than those of the trial.
OTHER_ARGUMENTS = (
    "A {} is called differently in this step than during validation, so its gradients would be "
    "incomplete. Call it with (x) or (x, state) with tensors."
)
WEIGHTS_OF_RECORDS = "the weights of a recurrent layer depend on the record."

#: States, and their gradients: hidden, (rows, size), and for an LSTM also cell.
States = tuple[Tensor, ...]
#: Maps gradients w.r.t. gates, (rows, gates * size), to those w.r.t. hidden states.
Through = Callable[[Tensor], Tensor]


#: Computes a projection: see :func:`by_projections`.
Product = Callable[..., Tensor]


class Gradients(NamedTuple):
    """Gradients of a recurrence."""

    of_inputs: Tensor  # w.r.t. gates from the inputs, (rows, time, gates * size)
    of_states: Tensor  # w.r.t. gates from the states, the same shape
    first: States  # w.r.t. the states before the first step


class Kind(NamedTuple):
    """Equations of a kind of layer.

    Attributes:
        states: number of states.
        step: returns the next states from gates from the input, gates from the states, and states.
        backward: returns gradients. Its arguments are the map from gradients w.r.t. gates from the
            states to those w.r.t. hidden states, gates from inputs and from states of all steps,
            the states before each step, gradients w.r.t. all hidden states, (rows, time, size), and
            those w.r.t. the other last states.
    """

    states: int
    step: Callable[[Tensor, Tensor, Sequence[Tensor]], States]
    backward: Callable[[Through, Tensor, Tensor, States, Tensor, States], Gradients]


def _lstm(x: Tensor, h: Tensor, states: Sequence[Tensor]) -> States:
    gates = x + h
    update, forget, _, out = gates.sigmoid().chunk(4, 1)
    cell = forget * states[1] + update * gates.chunk(4, 1)[2].tanh()
    return out * cell.tanh(), cell


def _lstm_backward(
    through: Through, x: Tensor, h: Tensor, before: States, outputs: Tensor, last: States
) -> Gradients:
    gates = x + h
    update, forget, _, out = gates.sigmoid().chunk(4, 2)
    new = gates.chunk(4, 2)[2].tanh()
    cell = (forget * before[1] + update * new).tanh()
    # Derivatives of the cell w.r.t. its three gates, of the hidden state w.r.t. out and the cell.
    by_gate = (
        new * update * (1 - update),
        before[1] * forget * (1 - forget),
        update * (1 - new * new),
    )
    of_cell = torch.stack(by_gate, 2)
    of_out, of_hidden = cell * out * (1 - out), out * (1 - cell * cell)
    hidden, carried, found = torch.zeros_like(before[0][:, 0]), last[0], list[Tensor]()
    for t in reversed(range(x.shape[1])):
        hidden = hidden + outputs[:, t]
        carried = carried + hidden * of_hidden[:, t]
        by_cell = (carried.unsqueeze(1) * of_cell[:, t]).flatten(1)
        found.append(torch.cat([by_cell, hidden * of_out[:, t]], 1))
        hidden, carried = through(found[-1]), carried * forget[:, t]
    gradients = torch.stack(found[::-1], 1)
    return Gradients(gradients, gradients, (hidden, carried))


def _gru(x: Tensor, h: Tensor, states: Sequence[Tensor]) -> States:
    (reset, update, new), (reset_h, update_h, new_h) = x.chunk(3, 1), h.chunk(3, 1)
    keep = (update + update_h).sigmoid()
    new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return (new + keep * (states[0] - new),)


def _gru_backward(
    through: Through, x: Tensor, h: Tensor, before: States, outputs: Tensor, _: States
) -> Gradients:
    size = outputs.shape[2]
    reset, keep = (x + h)[..., : 2 * size].sigmoid().chunk(2, 2)
    new_h = h[..., 2 * size :]
    new = (x[..., 2 * size :] + reset * new_h).tanh()
    # Derivatives of the hidden state w.r.t. the gates.
    of_new = (1 - keep) * (1 - new * new)
    of_reset, of_keep = of_new * new_h * reset * (1 - reset), (before[0] - new) * keep * (1 - keep)
    of_gates = torch.stack([of_reset, of_keep, of_new * reset], 2)
    hidden, hiddens, found = torch.zeros_like(before[0][:, 0]), list[Tensor](), list[Tensor]()
    for t in reversed(range(x.shape[1])):
        hidden = hidden + outputs[:, t]
        hiddens.append(hidden)
        found.append((hidden.unsqueeze(1) * of_gates[:, t]).flatten(1))
        hidden = through(found[-1]) + hidden * keep[:, t]
    of_states = torch.stack(found[::-1], 1)
    by_new = torch.stack(hiddens[::-1], 1) * of_new
    of_inputs = torch.cat([of_states[..., : 2 * size], by_new], 2)
    return Gradients(of_inputs, of_states, (hidden,))


def _rnn(
    activation: Callable[[Tensor], Tensor], x: Tensor, h: Tensor, _: Sequence[Tensor]
) -> States:
    return (activation(x + h),)


def _tanh_backward(
    through: Through, x: Tensor, h: Tensor, before: States, outputs: Tensor, _: States
) -> Gradients:
    return _rnn_backward(through, 1 - (x + h).tanh().square(), outputs)


def _relu_backward(
    through: Through, x: Tensor, h: Tensor, before: States, outputs: Tensor, _: States
) -> Gradients:
    return _rnn_backward(through, torch.where(x + h <= 0, 0.0, 1.0).to(x), outputs)


def _rnn_backward(through: Through, of_gates: Tensor, outputs: Tensor) -> Gradients:
    """Return gradients, given the derivatives of hidden states w.r.t. gates."""
    hidden, found = torch.zeros_like(outputs[:, 0]), list[Tensor]()
    for t in reversed(range(outputs.shape[1])):
        found.append((hidden + outputs[:, t]) * of_gates[:, t])
        hidden = through(found[-1])
    gradients = torch.stack(found[::-1], 1)
    return Gradients(gradients, gradients, (hidden,))


LSTM, GRU = Kind(2, _lstm, _lstm_backward), Kind(1, _gru, _gru_backward)
TANH = Kind(1, partial(_rnn, torch.tanh), _tanh_backward)
RELU = Kind(1, partial(_rnn, torch.relu), _relu_backward)
_KINDS: Mapping[type[nn.Module], Kind] = {
    **dict.fromkeys((nn.LSTMCell, nn.LSTM), LSTM),
    **dict.fromkeys((nn.GRUCell, nn.GRU), GRU),
}


def _kind_of(module: Any) -> Kind:
    plain = RELU if getattr(module, "nonlinearity", "tanh") == "relu" else TANH
    return _KINDS.get(type(module), plain)


class _OfRows(torch.autograd.Function):
    """Function of a kind, a weight and a bias, and of tensors with a row for each sequence."""

    @classmethod
    def vmap(
        cls,
        info: Any,
        in_dims: Sequence[int | None],
        kind: Kind,
        weight: Tensor,
        bias: Tensor | None,
        *rows: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Compute all rows of all samples at once."""
        if in_dims[1] is not None or in_dims[2] is not None:
            raise RuntimeError(WEIGHTS_OF_RECORDS)
        samples = info.batch_size
        by_sample = (
            t.expand(samples, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(rows, in_dims[3:], strict=True)
        )
        found = cls.apply(kind, weight, bias, *(t.flatten(0, 1) for t in by_sample))
        return tuple(t.unflatten(0, (samples, -1)) for t in found), (0,) * len(found)


class _Run(_OfRows):
    """Returns gates from the states, and the states after each step, (rows, time, ...) each."""

    @staticmethod
    def forward(
        kind: Kind, weight: Tensor, bias: Tensor | None, gates: Tensor, *first: Tensor
    ) -> tuple[Tensor, ...]:
        states, hidden, after = first, list[Tensor](), list[States]()
        with product_of_rows() as product:
            for gate in gates.unbind(1):
                hidden.append(product(states[0], weight, bias))
                states = kind.step(gate, hidden[-1], states)
                after.append(states)
        return tuple(torch.stack([*times], 1) for times in (hidden, *zip(*after, strict=True)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: it runs without gradients."""


class _Recurrence(_OfRows):
    """Returns states that were computed before, with gradients w.r.t. gates and first states.

    Its rows are gates from inputs and from states, the states before and after each step, and the
    first states. It returns all hidden states, (rows, time, size), and the other last states.
    """

    @staticmethod
    def forward(
        kind: Kind, weight: Tensor, bias: Tensor | None, x: Tensor, h: Tensor, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        hidden, *others = rows[kind.states : 2 * kind.states]
        return hidden.clone(), *(state[:, -1].clone() for state in others)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save gates and the states before each step."""
        ctx.kind, weight, _, *rows = inputs
        ctx.save_for_backward(weight, *rows[: 2 + ctx.kind.states])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        x, h, *first = _Backward.apply(ctx.kind, weight, None, *saved, *grad_outputs)
        return None, None, None, x, h, *[*[None] * (2 * ctx.kind.states), *first]


class _Backward(_OfRows):
    """Returns gradients, see :class:`Kind`."""

    @staticmethod
    def forward(
        kind: Kind, weight: Tensor, _: None, x: Tensor, h: Tensor, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        before, (outputs, *last) = rows[: kind.states], rows[kind.states :]
        with product_of_rows() as product:
            through = partial(product, weight=weight.T)
            found = kind.backward(through, x, h, before, outputs, tuple(last))
        return found.of_inputs, found.of_states.clone(), *found.first

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: it has no derivatives."""


#: Functions of autograd whose rules for vmap see several rows.
FUNCTIONS = (_Run, _Recurrence, _Backward)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, known: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias with its gradients, also where the result is known."""
    return linear(x, weight, bias)


def _recur(
    module: Any, product: Product, x: Tensor, given: Any = None, /
) -> Tensor | tuple[Tensor, ...] | tuple[Tensor, Any]:
    """Compute the result of the module's own forward, with dropout between layers of its own.

    Raises ModelError unless inputs, and states if there are any, are tensors with samples.
    """
    states_given = () if given is None else given if isinstance(given, tuple | list) else (given,)
    cell, count = type(module) in CELLS, _kind_of(module).states
    known = len(states_given) == count or given is None
    if not known or not all(
        isinstance(t, Tensor) and t.ndim == 3 - cell for t in (x, *states_given)
    ):
        raise ModelError(OTHER_ARGUMENTS.format(type(module).__name__))
    x = x if cell or module.batch_first else x.transpose(0, 1)  # (samples, time, ...)
    begun = (x.new_zeros(len(x), module.hidden_size),) * count
    if cell:
        _, states = _through_time(module, product, "", x.unsqueeze(1), tuple(states_given) or begun)
        return states if count > 1 else states[0]
    last: list[States] = []
    directions = 1 + module.bidirectional
    ends = ends_of(module)
    for begin in range(0, len(ends), directions):
        outputs = []
        if begin and module.dropout:
            x = functional.dropout(x, module.dropout, module.training)
        for end in ends[begin : begin + directions]:
            first = tuple(state[len(last)] for state in states_given) or begun
            out, states = _through_time(module, product, end, x, first)
            outputs.append(out)
            last.append(states)
        x = torch.cat(outputs, 2) if directions > 1 else outputs[0]
    ended = tuple(torch.stack(states) for states in zip(*last, strict=True))
    return x if module.batch_first else x.transpose(0, 1), ended if count > 1 else ended[0]


def _through_time(
    module: Any, product: Product, end: str, x: Tensor, first: States
) -> tuple[Tensor, States]:
    """Return the outputs of one layer in one direction, (samples, time, size), and last states."""
    kind, backwards = _kind_of(module), end.endswith("_reverse")
    gates = product(x, *_parameters(module, "ih" + end))
    gates = gates.flip(1) if backwards else gates
    weight, bias = _parameters(module, "hh" + end)
    with torch.no_grad():
        hidden, *after = _Run.apply(kind, weight, bias, gates, *first)
        before = [
            torch.cat([begin.unsqueeze(1), states[:, :-1]], 1)
            for begin, states in zip(first, after, strict=True)
        ]
    hidden = product(before[0], weight, bias, hidden)
    outputs, *last = _Recurrence.apply(kind, weight, bias, gates, hidden, *before, *after, *first)
    ended = outputs[:, -1], *last
    return outputs.flip(1) if backwards else outputs, ended


def _parameters(module: Any, projection: str) -> tuple[Tensor, Tensor | None]:
    bias = getattr(module, f"bias_{projection}") if module.bias else None
    return getattr(module, f"weight_{projection}"), bias


def ends_of(module: Any) -> list[str]:
    """Return the ends of the names of a module's parameters, in the order of its states."""
    if type(module) in CELLS:
        return [""]
    directions = ("", "_reverse")[: 1 + module.bidirectional]
    return [f"_l{layer}{way}" for layer in range(module.num_layers) for way in directions]


@contextmanager
def by_projections(
    modules: Iterable[nn.Module | None], product: Product = _product
) -> Iterator[None]:
    """Make the recurrent layers among some modules compute their projections by a function.

    ``product`` returns x @ weight.T + bias, given x, weight, bias, and the result where it is known
    without its gradients.
    """
    with ExitStack() as stack:
        for module in modules:
            if type(module) in RECURRENT:
                vars(module)["forward"] = partial(_recur, module, product)
                stack.callback(vars(module).pop, "forward")
        yield
