"""Recurrences over time without weights, with the gradients that cuDNN computes.

A recurrence gets gates from the inputs of all steps, which are one product with weights, and maps
the states before a step to those after it. Its gradients w.r.t. the gates of all steps are found by
backpropagation through time, from the equations of torch's documentation. Second derivatives are
not supported.

:data:`FUNCTIONS` are the only functions of autograd whose rules for vmap are called. A row is one
sequence, and no operation below mixes rows.

In shapes, a gate has as many numbers as the hidden state, ``size``; "gates" stands for the number
of gates: 4 for an LSTM, 3 for a GRU, 1 for a plain recurrent layer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dpmac_cli.dp.clipping.matmul import product_of_rows

WEIGHTS_OF_RECORDS = "the weights of a recurrent layer depend on the record."

#: States, and their gradients: hidden, (rows, size), and for an LSTM also cell.
States: TypeAlias = tuple[Tensor, ...]
#: Maps gradients w.r.t. gates, (rows, gates * size), to those w.r.t. hidden states.
Through = Callable[[Tensor], Tensor]
#: Gradients through one step: w.r.t. its gates from the input and its gates from the states, both
#: (rows, gates * size), and w.r.t. the states before it.
OfStep: TypeAlias = tuple[Tensor, Tensor, States]
#: Returns gradients through step t, given t, the map from gradients w.r.t. gates from the states to
#: those w.r.t. hidden states, and gradients w.r.t. each state after the step, (rows, size).
Back = Callable[..., OfStep]


class Kind(NamedTuple):
    """Equations of a kind of recurrent layer, such as the LSTM.

    Attributes:
        states: number of states: 2 for an LSTM, hidden and cell; otherwise 1.
        step: returns the next states from gates from the input, gates from the states, and states.
        backward: returns the way back through its steps, given gates from inputs and gates from
            states of all steps, (rows, time, gates * size), and the states before each step.
    """

    states: int
    step: Callable[[Tensor, Tensor, Sequence[Tensor]], States]
    backward: Callable[[Tensor, Tensor, States], Back]


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


def _lstm_backward(x: Tensor, h: Tensor, before: States) -> Back:
    """Return the way back through steps of :func:`_lstm`; arguments: see :class:`Kind`."""
    gates = x + h
    update, forget, _, out = gates.sigmoid().chunk(4, 2)
    _, _, new_gate, _ = gates.chunk(4, 2)
    new = new_gate.tanh()
    _, cell_before = before
    cell = (forget * cell_before + update * new).tanh()
    # Derivatives of the cell w.r.t. its three gates, of the hidden state w.r.t. out and the cell.
    by_gate = (
        new * update * (1 - update),
        cell_before * forget * (1 - forget),
        update * (1 - new * new),
    )
    of_cell = torch.stack(by_gate, 2).unbind(1)  # of each step: (rows, 3, size)
    of_out = (cell * out * (1 - out)).unbind(1)
    of_hidden = (out * (1 - cell * cell)).unbind(1)
    of_cell_before = forget.unbind(1)

    def back(t: int, through: Through, hidden: Tensor, carried: Tensor) -> OfStep:
        carried = carried + hidden * of_hidden[t]
        by_cell = carried.unsqueeze(1) * of_cell[t]
        by_out = hidden * of_out[t]
        g = torch.cat([by_cell.flatten(1), by_out], 1)
        return g, g, (through(g), carried * of_cell_before[t])

    return back


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


def _gru_backward(x: Tensor, h: Tensor, before: States) -> Back:
    """Return the way back through steps of :func:`_gru`; arguments: see :class:`Kind`."""
    [hidden_before] = before
    size = hidden_before.shape[2]
    gates = (x + h)[..., : 2 * size]
    reset, keep = gates.sigmoid().chunk(2, 2)
    new_x = x[..., 2 * size :]
    new_h = h[..., 2 * size :]
    new = (new_x + reset * new_h).tanh()
    # Derivatives of the hidden state w.r.t. the gates.
    of_new = (1 - keep) * (1 - new * new)
    of_reset = of_new * new_h * reset * (1 - reset)
    of_keep = (hidden_before - new) * keep * (1 - keep)
    of_gates = torch.stack([of_reset, of_keep, of_new * reset], 2).unbind(1)
    of_new_from_inputs = of_new.unbind(1)
    of_hidden_before = keep.unbind(1)

    def back(t: int, through: Through, hidden: Tensor) -> OfStep:
        by_gate = hidden.unsqueeze(1) * of_gates[t]
        by_states = by_gate.flatten(1)
        by_new = hidden * of_new_from_inputs[t]
        by_inputs = torch.cat([by_states[:, : 2 * size], by_new], 1)
        return by_inputs, by_states, (through(by_states) + hidden * of_hidden_before[t],)

    return back


def _rnn(
    activation: Callable[[Tensor], Tensor],
    x: Tensor,
    h: Tensor,
    _: Sequence[Tensor],
) -> States:
    """Return the next hidden state, of shape (rows, size): the activation of both gates' sum."""
    return (activation(x + h),)


def _tanh_backward(x: Tensor, h: Tensor, _: States) -> Back:
    """Return the way back through steps with tanh; arguments: see :class:`Kind`."""
    return _rnn_backward(1 - (x + h).tanh().square())


def _relu_backward(x: Tensor, h: Tensor, _: States) -> Back:
    """Return the way back through steps with ReLU; arguments: see :class:`Kind`."""
    return _rnn_backward(torch.where(x + h <= 0, 0.0, 1.0).to(x))


def _rnn_backward(of_gates: Tensor) -> Back:
    """Return the way back through steps, given derivatives of hidden states w.r.t. gates."""
    of_steps = of_gates.unbind(1)

    def back(t: int, through: Through, hidden: Tensor) -> OfStep:
        g = hidden * of_steps[t]
        return g, g, (through(g),)

    return back


LSTM = Kind(2, _lstm, _lstm_backward)
GRU = Kind(1, _gru, _gru_backward)
TANH = Kind(1, partial(_rnn, torch.tanh), _tanh_backward)
RELU = Kind(1, partial(_rnn, torch.relu), _relu_backward)


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
            of_samples = t.expand(samples, *t.shape) if dim is None else t.movedim(dim, 0)
            all_rows.append(of_samples.flatten(0, 1))
        results = cls.apply(kind, weight, bias, *all_rows)
        by_sample = tuple(t.unflatten(0, (samples, -1)) for t in results)
        return by_sample, (0,) * len(results)


class Run(_OfRows):
    """Returns gates from the states, and the states after each step, (rows, time, ...) each."""

    @staticmethod
    def forward(
        kind: Kind, weight: Tensor, bias: Tensor | None, gates: Tensor, *first: Tensor
    ) -> tuple[Tensor, ...]:
        """Return gates from the states of all steps, and each state after them.

        Args:
            kind: equations of the layer.
            weight: weight of the states' projection, shape (gates * size, size).
            bias: its bias, shape (gates * size,); None without one.
            gates: gates from the inputs, shape (rows, time, gates * size).
            first: states before the first step, shape (rows, size) each.

        Returns:
            Gates, shape (rows, time, gates * size); and states, shape (rows, time, size) each.
        """
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


class Recurrence(_OfRows):
    """Returns states that were computed before, with gradients w.r.t. gates and first states."""

    @staticmethod
    def forward(
        kind: Kind, weight: Tensor, bias: Tensor | None, x: Tensor, h: Tensor, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        """Return copies of the states after the steps.

        Args:
            kind: equations of the layer.
            weight: weight of the states' projection.
            bias: its bias; None without one.
            x: gates from the inputs, shape (rows, time, gates * size).
            h: gates from the states, in the same shape.
            rows: the states before each step, those after it, and the first ones.

        Returns:
            All hidden states, shape (rows, time, size), and the other last states, (rows, size).
        """
        hidden, *others = rows[kind.states : 2 * kind.states]
        return hidden.clone(), *(state[:, -1].clone() for state in others)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save gates and the states before each step."""
        ctx.kind, weight, _, *rows = inputs
        ctx.save_for_backward(weight, *rows[: 2 + ctx.kind.states])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients w.r.t. both kinds of gates and the first states; None for all others.

        Args:
            ctx: what :meth:`setup_context` saved.
            grad_outputs: gradients w.r.t. what :meth:`forward` returned.
        """
        weight, *saved = ctx.saved_tensors
        x, h, *first = _Backward.apply(ctx.kind, weight, None, *saved, *grad_outputs)
        # None for kind, weight and bias, and for the states before and after each step.
        return None, None, None, x, h, *[*[None] * (2 * ctx.kind.states), *first]


class _Backward(_OfRows):
    """Returns gradients w.r.t. gates from the inputs and from the states, and w.r.t. first states.

    Its rows are both kinds of gates, (rows, time, gates * size), the states before each step, and
    gradients w.r.t. all hidden states, (rows, time, size), and w.r.t. the other last states.
    """

    @staticmethod
    def forward(
        kind: Kind, weight: Tensor, _: None, x: Tensor, h: Tensor, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        outputs, *last = rows[kind.states :]
        back = kind.backward(x, h, rows[: kind.states])
        states = (torch.zeros_like(outputs[:, 0]), *last)
        of_outputs = outputs.unbind(1)
        of_inputs = list[Tensor]()  # the last step first
        of_states = list[Tensor]()
        with product_of_rows() as product:
            through = partial(product, weight=weight.T)
            for t in reversed(range(len(of_outputs))):
                hidden, *others = states
                by_inputs, by_states, states = back(t, through, hidden + of_outputs[t], *others)
                of_inputs.append(by_inputs)
                of_states.append(by_states)
        return torch.stack(of_inputs[::-1], 1), torch.stack(of_states[::-1], 1), *states

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: it has no derivatives."""


#: Functions of autograd whose rules for vmap see several rows.
FUNCTIONS = (Run, Recurrence, _Backward)
