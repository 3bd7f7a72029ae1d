"""Recurrent layers and cells, computed with their projections of inputs and of states.

Each product with the weights of a state is one use of a Linear layer per time step; those with the
weights of inputs are one use for all steps. The equations are those of torch's documentation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from dpmac_cli.errors import ModelError

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


CELLS = frozenset({nn.LSTMCell, nn.GRUCell, nn.RNNCell})
RECURRENT = CELLS | {nn.LSTM, nn.GRU, nn.RNN}
_STEPS: Mapping[type[nn.Module], _Step] = {
    **dict.fromkeys((nn.LSTMCell, nn.LSTM), _lstm),
    **dict.fromkeys((nn.GRUCell, nn.GRU), _gru),
}


def is_known_recurrent(module: Any) -> bool:
    """Return whether a module has plain parameters."""
    kinds = [*_KINDS[: 4 if module.bias else 2], *["weight_hr"] * (_projected(module) > 0)]
    names = {f"{kind}{end}" for end in _ends(module) for kind in kinds}
    return {name for name, _ in module.named_parameters()} == names


def recurrent_weights(module: Any) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return weight and bias of the projections of inputs and states, layer by layer."""
    return {
        kind + end: (
            getattr(module, f"weight_{kind}{end}"),
            getattr(module, f"bias_{kind}{end}") if module.bias and kind != "hr" else None,
        )
        for end in _ends(module)
        for kind in ("ih", "hh", "hr")[: 3 if _projected(module) else 2]
    }


def _projected(module: Any) -> int:
    """Return the size that the outputs of an nn.LSTM are projected to; 0 if they are not."""
    return getattr(module, "proj_size", 0)


def recur(
    module: Any, calls: Mapping[str, nn.Module], x: Tensor, given: Any = None, /
) -> Tensor | tuple[Tensor, ...] | tuple[Tensor, Any]:
    """Compute the result of the module's own forward, with dropout between layers of its own.

    Raises ModelError unless inputs, and states if there are any, are tensors with samples.
    """
    ndim = 2 if type(module) in CELLS else 3
    tensors = (x, *(() if given is None else _states_of(module, given)))
    if not all(isinstance(each, Tensor) and each.ndim == ndim for each in tensors):
        raise ModelError(
            f"A {type(module).__name__} is called differently in this step than during validation, "
            "so its gradients would be incomplete. Call it with (x) or (x, state) with tensors."
        )
    size, several = module.hidden_size, type(module) in (nn.LSTMCell, nn.LSTM)
    if type(module) in CELLS:
        zeros = x.new_zeros(len(x), size)
        states = _states_of(module, given) if given is not None else (zeros,) * (1 + several)
        found = _step_of(module)(calls["ih"](x), calls["hh"](states[0]), states)
        return found if several else found[0]
    x = x if module.batch_first else x.transpose(0, 1)  # (samples, time, ...)
    widths = (_projected(module) or size, size)[: 1 + several]
    begun = tuple(x.new_zeros(len(x), width) for width in widths)
    last: list[tuple[Tensor, ...]] = []
    directions = 1 + module.bidirectional
    ends = _ends(module)
    for begin in range(0, len(ends), directions):
        outputs = []
        x = dropout(x, module.dropout, module.training) if begin and module.dropout else x
        for end in ends[begin : begin + directions]:
            states = begun
            if given is not None:
                states = tuple(state[len(last)] for state in _states_of(module, given))
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
        if _projected(module):
            states = (calls["hr" + end](states[0]), *states[1:])
        outputs.append(states[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 1), states


def _step_of(module: Any) -> _Step:
    by_name = _relu if getattr(module, "nonlinearity", "") == "relu" else _tanh
    return _STEPS.get(type(module), by_name)


def _states_of(module: Any, given: Any) -> tuple[Any, ...]:
    """Return the states of a call; no tensors if they are not as the module takes them."""
    if type(module) not in (nn.LSTMCell, nn.LSTM):
        return (given,)
    return tuple(given) if isinstance(given, tuple | list) and len(given) == 2 else (None,)


def _ends(module: Any) -> list[str]:
    """Return the ends of the names of a module's parameters, in the order of its states."""
    if type(module) in CELLS:
        return [""]
    directions = ("", "_reverse")[: 1 + module.bidirectional]
    return [f"_l{layer}{way}" for layer in range(module.num_layers) for way in directions]
