"""Modes of modules: a network is trained in those that its program set, and left in its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from dpmac_cli import ArrayData, PrivateStep, clipped_grad, make_private
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import ModelError
from dpmac_cli.models.modes import evaluating
from dpmac_cli.randomness.sampling import Poisson
from tests.helpers import equal_keys

RECORDS, COLUMNS, CLASSES = 30, 6, 3


class Reporting(nn.Module):
    """Notes its modes when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(COLUMNS, 8), nn.Dropout(0.9)
        norm: Any = nn.BatchNorm1d(8)
        norm.running_mean += 0.3
        norm.running_var += 0.5
        self.norm, self.last = norm.eval(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append([module.training for module in self.modules()])
        logits: Tensor = self.last(self.drop(self.norm(self.first(x.flatten(1))).relu()))
        return logits


SEEN: list[list[bool]] = []


def modes_of(net: nn.Module) -> list[bool]:
    return [module.training for module in net.modules()]


def made() -> Reporting:
    torch.manual_seed(0)
    return Reporting()


def records() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(RECORDS, COLUMNS, generator=generator)
    return x, torch.arange(RECORDS) % CLASSES


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


SETTINGS: dict[str, Any] = {"sigma": 1, "steps": 4, "delta": 1e-5, "optimizer": "dp-sgd"}
#: Takes a step, and scores where a program can.
Turn = Callable[[], object]


def by_step(net: nn.Module) -> Turn:
    sampling = Poisson(n=RECORDS, batch_size=10)
    step = PrivateStep(net, loss, sampling=sampling, **SETTINGS)
    batches = iter(step.loader(TensorDataset(*records())))
    return lambda: step(next(batches))


def by_loop(net: nn.Module) -> Turn:
    x, y = records()
    data = ArrayData(x, y, x[:6], y[:6], low=0, high=1, classes="abc")
    private = make_private(net, data, batch_size=10, device="cpu", **SETTINGS)
    return lambda: (private.step(), private.evaluate())


def by_sum(net: nn.Module) -> Turn:
    clipped = clipped_grad(net, loss, ball(1.0), batch_size=10)
    return lambda: clipped(records())


@pytest.mark.promise("validated")
@pytest.mark.parametrize("start", [by_step, by_loop, by_sum])
def test_steps_run_in_the_modes_that_were_set_and_leave_those_that_they_find(
    start: Callable[[nn.Module], Turn],
) -> None:
    net = made()
    set_by_program = modes_of(net)
    assert sorted({*set_by_program}) == [False, True]
    turn = start(net)
    assert modes_of(net) == set_by_program
    for between in (None, net.eval, net.train):
        found = modes_of(between()) if between else set_by_program
        SEEN.clear()
        turn()
        trained = [modes for modes in SEEN if any(modes)]  # scores are in evaluation mode
        assert trained
        assert all(modes == set_by_program for modes in trained)
        assert modes_of(net) == found


@pytest.mark.promise("validated")
@pytest.mark.parametrize("start", [by_step, by_loop])
def test_dropout_that_was_turned_off_stays_off(start: Callable[[nn.Module], Turn]) -> None:
    """So a step is the one of the network without it."""
    weights = []
    for rate in (0.9, 0.0):
        net = made().eval()
        net.drop.p = rate
        with equal_keys():
            start(net)()
        weights.append(net.first.weight.detach().clone())
    assert torch.equal(*weights)


@pytest.mark.promise("alone")
def test_a_batch_norm_of_constants_is_a_function_of_one_record() -> None:
    net = made().eval()
    clipped = clipped_grad(net, loss, ball(1e-3), batch_size=10)
    x, y = records()
    expected = torch.zeros(sum(p.numel() for p in net.parameters()))
    for row in range(RECORDS):
        net.zero_grad()
        loss(net, (x[row : row + 1], y[row : row + 1])).sum().backward()  # type: ignore[no-untyped-call]
        g = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        expected += 1e-3 * g / g.norm()
    net.zero_grad()
    total = clipped((x, y))
    found = torch.cat([part.flatten() for part in clipped.by_parameter(total).values()])
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=1e-6)
    assert torch.equal(net.norm.running_mean, torch.full((8,), 0.3))


@pytest.mark.promise("alone")
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False).eval()]
)
def test_a_batch_norm_that_mixes_records_is_refused(norm: nn.Module) -> None:
    net = made()
    net.norm = norm
    with pytest.raises(ModelError, match=r"norm is a BatchNorm1d, which mixes.*GroupNorm"):
        clipped_grad(net, loss, ball(1.0), batch_size=10).prepare(records())


def test_dropout_that_is_off_is_named() -> None:
    sampling = Poisson(n=RECORDS, batch_size=10)
    said = []
    for net in (made(), made().eval()):
        step = PrivateStep(net, loss, sampling=sampling, example=records(), **SETTINGS)
        said.append([note for note in step.notes if "evaluation mode" in note])
    assert said[0] == []
    assert (
        "drops nothing: drop (Dropout). To train with dropout, call network.train()" in said[1][0]
    )


def test_a_network_that_fails_is_put_back() -> None:
    net = made()
    before = modes_of(net)
    with pytest.raises(KeyError), evaluating(net):
        raise KeyError(*map(str, modes_of(net)))
    assert modes_of(net) == before
