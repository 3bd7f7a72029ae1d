"""Recurrent layers: results and gradients of the recurrence are those of torch's own layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from dpmac_cli.dp.clipping.recurrent import by_projections
from dpmac_cli.dp.clipping.vmap_support import supported
from tests.dp.reference import Subject
from tests.dp.test_clipped_sums import assert_matches_oracle

SAMPLES, TIME, INPUTS, SIZE = 6, 7, 3, 4
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN, tanh": nn.RNN,
    "RNN, ReLU": partial(nn.RNN, nonlinearity="relu"),
}
CELLS: dict[str, Callable[..., nn.Module]] = {
    "LSTMCell": nn.LSTMCell,
    "GRUCell": nn.GRUCell,
    "RNNCell, tanh": nn.RNNCell,
    "RNNCell, ReLU": partial(nn.RNNCell, nonlinearity="relu"),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"num_layers": 2, "bidirectional": True},
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def results(layer: Any, x: Tensor, first: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return outputs and last states, and gradients of all inputs and parameters."""
    states = first if len(first) > 1 else first[0]
    found = layer(x, states)
    found = found if isinstance(found, tuple) else (found,)
    outputs = [t for part in found for t in (part if isinstance(part, tuple) else (part,))]
    loss = torch.stack([(t.sin() * torch.arange(t.numel()).view_as(t)).sum() for t in outputs])
    return *outputs, *torch.autograd.grad(loss.sum(), [x, *first, *layer.parameters()])


def assert_as_torch(layer: Any, x: Tensor, first: tuple[Tensor, ...]) -> None:
    expected = results(layer, x, first)
    with by_projections([layer]):
        found = results(layer, x, first)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.promise("one")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_states_and_gradients_are_those_of_torch(
    name: str, options: dict[str, Any]
) -> None:
    layer = LAYERS[name](INPUTS, SIZE, batch_first=True, **options).double()
    depth = 4 if len(options) > 1 else 1
    x = torch.randn(SAMPLES, TIME, INPUTS).double().requires_grad_()
    states = torch.randn(2, depth, SAMPLES, SIZE).double()
    assert_as_torch(layer, x, tuple(t.requires_grad_() for t in states[: 1 + (name == "LSTM")]))


@pytest.mark.parametrize("name", CELLS)
def test_cells_are_those_of_torch(name: str) -> None:
    x = torch.randn(SAMPLES, INPUTS).double().requires_grad_()
    states = torch.randn(2, SAMPLES, SIZE).double()
    first = tuple(t.requires_grad_() for t in states[: 1 + name.startswith("LSTM")])
    assert_as_torch(CELLS[name](INPUTS, SIZE).double(), x, first)


class Decoder(nn.Module):
    """A recurrent layer whose first states are computed from the record by a trained layer."""

    def __init__(self, kind: Callable[..., nn.Module], *, frozen: bool) -> None:
        super().__init__()
        self.states, self.part = nn.Linear(INPUTS, SIZE), kind(INPUTS, SIZE, batch_first=True)
        self.head = nn.Linear(SIZE, 3)
        if frozen:
            self.part.get_parameter("weight_hh_l0").requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        first = self.states(x[:, 0]).unsqueeze(0)
        several = isinstance(self.part, nn.LSTM)
        outputs, _ = self.part(x, (first, first.sin()) if several else first)
        logits: Tensor = self.head(outputs[:, -1])
        return logits


@pytest.mark.promise("one")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_sums_with_states_of_a_record_are_those_of_each_record_alone(
    name: str, frozen: bool
) -> None:
    model, x = Decoder(LAYERS[name], frozen=frozen).double(), torch.randn(SAMPLES, TIME, INPUTS)
    subject = Subject(model, x.double())
    assert subject.per_sample.vmapped
    for kind in ("ball", "ellipsoid"):
        assert_matches_oracle(subject, x.double(), torch.arange(SAMPLES) % 3, kind)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("strange", [1e4, float("nan"), float("inf")])
def test_a_sequence_changes_no_bit_of_another_ones_gradients(name: str, strange: float) -> None:
    layer = LAYERS[name](INPUTS, SIZE, batch_first=True)

    def gradients(x: Tensor) -> Tensor:
        one = grad(lambda row: layer(row.unsqueeze(0))[0].square().sum())
        with by_projections([layer]), supported():
            found: Tensor = vmap(one)(x)
        return found

    x = torch.randn(16, TIME, INPUTS)
    other = x.clone()
    other[5] = strange
    before, after = gradients(x), gradients(other)
    kept = torch.arange(16) != 5
    assert before[kept].equal(after[kept])
    assert not before[5].equal(after[5])


def test_weights_that_depend_on_the_record_are_not_taken_for_shared_ones() -> None:
    layer = nn.RNN(INPUTS, SIZE, batch_first=True)

    def one(row: Tensor) -> Tensor:
        scaled = {"weight_hh_l0": row.sum() * layer.get_parameter("weight_hh_l0")}
        outputs: Tensor = torch.func.functional_call(layer, scaled, (row.unsqueeze(0),))[0]
        return outputs.sum()

    with by_projections([layer]), supported(), pytest.raises(RuntimeError, match="depend on the"):
        vmap(one)(torch.randn(2, TIME, INPUTS))
