"""Recurrent layers as two projections and a recurrence, with the gradients that cuDNN computes.

The products with the weights of inputs are one use of a Linear layer for all time steps. Those with
the weights of states are another one, at the states before each step. The recurrence itself has no
weights: :class:`_Recurrence` returns its gradients w.r.t. the gates of all steps by backpropagation
through time, from the equations of torch's documentation. Second derivatives are not supported.

These are the only functions of autograd whose rules for vmap are called. A row is one sequence, and
no operation below mixes rows.

In shapes, a gate has as many numbers as the hidden state, ``size``; "gates" stands for the number
of gates: 4 for an LSTM, 3 for a GRU, 1 for a plain recurrent layer.
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

#: Layers that compute one time step.
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
#: Layers that are run as projections and a recurrence.
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
    """Gradients of a loss through a recurrence over all time steps.

    Attributes:
        of_inputs: w.r.t. gates from the inputs, shape (rows, time, gates * size).
        of_states: w.r.t. gates from the states, in the same shape.
        first: w.r.t. the states before the first step, shape (rows, size) each.
    """

    of_inputs: Tensor
    of_states: Tensor
    first: States


class Kind(NamedTuple):
    """Equations of a kind of recurrent layer, such as the LSTM.

    Attributes:
        states: number of states: 2 for an LSTM, hidden and cell; otherwise 1.
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
    """Return the next hidden state and cell, of shape (rows, size), for gates (rows, 4 size).

        c_t = f c_(t-1) + i g,        h_t = o tanh(c_t),

    with i, f, o the sigmoids of their gates, and g the hyperbolic tangent of its gate.
    """
    gates = x + h
    update, forget, _, out = gates.sigmoid().chunk(4, 1)
    _, _, new_gate, _ = gates.chunk(4, 1)
    _, cell_before = states
    new = new_gate.tanh()
    cell = forget * cell_before + update * new
    hidden = out * cell.tanh()
    return hidden, cell


def _lstm_backward(
    through: Through,
    x: Tensor,
    h: Tensor,
    before: States,
    outputs: Tensor,
    last: States,
) -> Gradients:
    """Return the gradients of :func:`_lstm` over all time steps; arguments: see :class:`Kind`."""
    gates = x + h
    update, forget, _, out = gates.sigmoid().chunk(4, 2)
    _, _, new_gate, _ = gates.chunk(4, 2)
    new = new_gate.tanh()
    hidden_before, cell_before = before
    cell = (forget * cell_before + update * new).tanh()
    # Derivatives of the cell w.r.t. its three gates, of the hidden state w.r.t. out and the cell.
    by_gate = (
        new * update * (1 - update),
        cell_before * forget * (1 - forget),
        update * (1 - new * new),
    )
    of_cell = torch.stack(by_gate, 2)  # (rows, time, 3, size)
    of_out = cell * out * (1 - out)
    of_hidden = out * (1 - cell * cell)
    hidden = torch.zeros_like(hidden_before[:, 0])
    [carried] = last
    backwards = list[Tensor]()  # gradients w.r.t. gates, the last step first
    for t in reversed(range(x.shape[1])):
        hidden = hidden + outputs[:, t]
        carried = carried + hidden * of_hidden[:, t]
        by_cell = carried.unsqueeze(1) * of_cell[:, t]
        by_out = hidden * of_out[:, t]
        g = torch.cat([by_cell.flatten(1), by_out], 1)
        backwards.append(g)
        hidden = through(g)
        carried = carried * forget[:, t]
    gradients = torch.stack(backwards[::-1], 1)
    return Gradients(gradients, gradients, (hidden, carried))


def _gru(x: Tensor, h: Tensor, states: Sequence[Tensor]) -> States:
    """Return the next hidden state, of shape (rows, size), for gates of shape (rows, 3 size).

        h_t = n + z (h_(t-1) - n),        n = tanh(n_x + r n_h),

    with r and z the sigmoids of the sums of their gates from the input and from the state.
    """
    reset_x, update_x, new_x = x.chunk(3, 1)
    reset_h, update_h, new_h = h.chunk(3, 1)
    [hidden_before] = states
    keep = (update_x + update_h).sigmoid()
    reset = (reset_x + reset_h).sigmoid()
    new = (new_x + reset * new_h).tanh()
    hidden = new + keep * (hidden_before - new)
    return (hidden,)


def _gru_backward(
    through: Through,
    x: Tensor,
    h: Tensor,
    before: States,
    outputs: Tensor,
    _: States,
) -> Gradients:
    """Return the gradients of :func:`_gru` over all time steps; arguments: see :class:`Kind`."""
    size = outputs.shape[2]
    gates = (x + h)[..., : 2 * size]
    reset, keep = gates.sigmoid().chunk(2, 2)
    new_x = x[..., 2 * size :]
    new_h = h[..., 2 * size :]
    new = (new_x + reset * new_h).tanh()
    # Derivatives of the hidden state w.r.t. the gates.
    [hidden_before] = before
    of_new = (1 - keep) * (1 - new * new)
    of_reset = of_new * new_h * reset * (1 - reset)
    of_keep = (hidden_before - new) * keep * (1 - keep)
    of_gates = torch.stack([of_reset, of_keep, of_new * reset], 2)
    hidden = torch.zeros_like(hidden_before[:, 0])
    backwards = list[Tensor]()  # gradients w.r.t. gates, the last step first
    hidden_backwards = list[Tensor]()  # those w.r.t. hidden states
    for t in reversed(range(x.shape[1])):
        hidden = hidden + outputs[:, t]
        hidden_backwards.append(hidden)
        by_gate = hidden.unsqueeze(1) * of_gates[:, t]
        g = by_gate.flatten(1)
        backwards.append(g)
        hidden = through(g) + hidden * keep[:, t]
    of_states = torch.stack(backwards[::-1], 1)
    of_hidden = torch.stack(hidden_backwards[::-1], 1)
    by_new = of_hidden * of_new
    of_inputs = torch.cat([of_states[..., : 2 * size], by_new], 2)
    return Gradients(of_inputs, of_states, (hidden,))


def _rnn(
    activation: Callable[[Tensor], Tensor],
    x: Tensor,
    h: Tensor,
    _: Sequence[Tensor],
) -> States:
    """Return the next hidden state, of shape (rows, size): the activation of both gates' sum."""
    return (activation(x + h),)


def _tanh_backward(
    through: Through,
    x: Tensor,
    h: Tensor,
    before: States,
    outputs: Tensor,
    _: States,
) -> Gradients:
    """Return the gradients of a recurrence with tanh; arguments: see :class:`Kind`."""
    of_gates = 1 - (x + h).tanh().square()
    return _rnn_backward(through, of_gates, outputs)


def _relu_backward(
    through: Through,
    x: Tensor,
    h: Tensor,
    before: States,
    outputs: Tensor,
    _: States,
) -> Gradients:
    """Return the gradients of a recurrence with ReLU; arguments: see :class:`Kind`."""
    of_gates = torch.where(x + h <= 0, 0.0, 1.0).to(x)
    return _rnn_backward(through, of_gates, outputs)


def _rnn_backward(through: Through, of_gates: Tensor, outputs: Tensor) -> Gradients:
    """Return gradients, given the derivatives of hidden states w.r.t. gates."""
    hidden = torch.zeros_like(outputs[:, 0])
    backwards = list[Tensor]()  # gradients w.r.t. gates, the last step first
    for t in reversed(range(outputs.shape[1])):
        g = (hidden + outputs[:, t]) * of_gates[:, t]
        backwards.append(g)
        hidden = through(g)
    gradients = torch.stack(backwards[::-1], 1)
    return Gradients(gradients, gradients, (hidden,))


LSTM = Kind(2, _lstm, _lstm_backward)
GRU = Kind(1, _gru, _gru_backward)
TANH = Kind(1, partial(_rnn, torch.tanh), _tanh_backward)
RELU = Kind(1, partial(_rnn, torch.relu), _relu_backward)
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
        """Compute all rows of all samples at once.

        Args:
            info: number of samples.
            in_dims: dimension of the samples of each argument; None without one.
            kind: equations of the layer.
            weight: weight of the states' projection.
            bias: its bias.
            rows: tensors with rows, see the subclass.

        Raises:
            RuntimeError: weights depend on the sample.
        """
        if in_dims[1] is not None or in_dims[2] is not None:
            raise RuntimeError(WEIGHTS_OF_RECORDS)
        samples = info.batch_size
        all_rows = []
        for t, dim in zip(rows, in_dims[3:], strict=True):
            by_sample = t.expand(samples, *t.shape) if dim is None else t.movedim(dim, 0)
            all_rows.append(by_sample.flatten(0, 1))
        results = cls.apply(kind, weight, bias, *all_rows)
        return tuple(t.unflatten(0, (samples, -1)) for t in results), (0,) * len(results)


class _Run(_OfRows):
    """Returns gates from the states, and the states after each step, (rows, time, ...) each."""

    @staticmethod
    def forward(
        kind: Kind, weight: Tensor, bias: Tensor | None, gates: Tensor, *first: Tensor
    ) -> tuple[Tensor, ...]:
        states = first
        gates_of_states = list[Tensor]()
        after = list[States]()
        with product_of_rows() as product:
            for gates_of_inputs in gates.unbind(1):
                gates_of_states.append(product(states[0], weight, bias))
                states = kind.step(gates_of_inputs, gates_of_states[-1], states)
                after.append(states)
        results = [torch.stack(gates_of_states, 1)]
        for number in range(kind.states):
            over_time = [at_time[number] for at_time in after]
            results.append(torch.stack(over_time, 1))
        return tuple(results)

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
        # None for kind, weight and bias, and for the states before and after each step.
        return None, None, None, x, h, *[*[None] * (2 * ctx.kind.states), *first]


class _Backward(_OfRows):
    """Returns gradients, see :class:`Kind`."""

    @staticmethod
    def forward(
        kind: Kind, weight: Tensor, _: None, x: Tensor, h: Tensor, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        before = rows[: kind.states]
        outputs, *last = rows[kind.states :]
        with product_of_rows() as product:
            through = partial(product, weight=weight.T)
            gradients = kind.backward(through, x, h, before, outputs, tuple(last))
        return gradients.of_inputs, gradients.of_states.clone(), *gradients.first

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: it has no derivatives."""


#: Functions of autograd whose rules for vmap see several rows.
FUNCTIONS = (_Run, _Recurrence, _Backward)


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
    known = state is None or len(states) == _kind_of(module).states
    if not known or not all(isinstance(t, Tensor) and t.ndim == dims for t in (x, *states)):
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
        hidden, *after = _Run.apply(kind, weight, bias, gates, *first)
        for begin, states in zip(first, after, strict=True):
            before.append(torch.cat([begin.unsqueeze(1), states[:, :-1]], 1))
    hidden = product(before[0], weight, bias, hidden)
    outputs, *last = _Recurrence.apply(kind, weight, bias, gates, hidden, *before, *after, *first)
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
