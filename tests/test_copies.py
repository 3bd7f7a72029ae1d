"""Objects of a program that write to themselves: no record leaves anything in them for another.

Each of these keeps the largest number that it has met, and divides by it.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from dpmac_cli import ArrayData, Poisson, Silo, make_private
from dpmac_cli.dp.clipping.one_sample import OneSample
from dpmac_cli.dp.copies import without_memory
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import ModelError
from dpmac_cli.training.clipped_grad import clipped_grad

RECORDS = 60


class Loss:
    """Losses of a batch, as an object."""

    def __init__(self) -> None:
        self.largest = 1.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        self.largest = max(self.largest, float(x.abs().max()))
        return cross_entropy(model(x), y, reduction="none") / self.largest


class LossInBuffer(nn.Module):
    """Losses of a batch, as a module with a buffer."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return cross_entropy(model(x), y, reduction="none") / self.largest


class Weights:
    """Weights of the records of a batch."""

    def __init__(self) -> None:
        self.largest = 1.0

    def __call__(self, batch: Any) -> Tensor:
        self.largest = max(self.largest, float(batch[0].abs().max()))
        return torch.ones(len(batch[0])) / self.largest


def plain(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def records(first: float) -> tuple[Tensor, Tensor]:
    """Made-up records, of which the first one has numbers of this size."""
    x = torch.rand(RECORDS, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[0] = first
    return x, (x[:, 0] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


@pytest.mark.promise("alone")
@pytest.mark.parametrize(
    ("loss", "weights"),
    [(Loss, None), (LossInBuffer, None), (lambda: plain, Weights)],
    ids=["object", "module", "weights"],
)
def test_loss_and_weights_of_a_silo_leave_nothing_to_the_next_record(
    loss: Any, weights: Any, tmp_path: Path
) -> None:
    """The sum is that of the silo's steps. Of all records, one differs, which adds at most 1."""
    sums = []
    for number, first in enumerate((1.0, 1e4)):
        x, y = records(first)
        options = {} if weights is None else {"weights": weights()}
        silo = Silo(
            tmp_path / str(number),
            network(),
            loss(),
            TensorDataset(x, y),
            sampling=Poisson(n=RECORDS, batch_size=30),
            epsilon=3,
            rounds=2,
            steps=2,
            **options,
        )
        clipped = clipped_grad(
            network(),
            silo._loss,
            ball(1.0),
            batch_size=RECORDS,
            weights=silo._options.get("weights"),
        )
        sums.append(clipped({"record": [x, y], "used": torch.ones(RECORDS)}))
    assert (sums[0] - sums[1]).norm() <= 2  # one record is replaced: removed, and another added


@pytest.mark.promise("alone")
@pytest.mark.parametrize("kind", [Loss, LossInBuffer])
def test_records_that_are_checked_leave_nothing_in_the_loss_of_a_silo(
    kind: Any, tmp_path: Path
) -> None:
    loss = kind()
    Silo(
        tmp_path / "silo",
        network(),
        loss,
        TensorDataset(*records(1e4)),
        sampling=Poisson(n=RECORDS, batch_size=30),
        epsilon=3,
        rounds=2,
        steps=2,
    )
    assert float(loss.largest) == 1.0


@pytest.mark.promise("alone")
def test_an_object_as_loss_leaves_nothing_to_the_next_record() -> None:
    """Of records as ``make_private`` runs them, in Python, one by one."""

    class OfOutputs(Loss):
        def __call__(self, outputs: Tensor, labels: Any) -> Tensor:  # type: ignore[override]
            self.largest = max(self.largest, float(outputs.detach().abs().max()))
            return cross_entropy(outputs, labels, reduction="none") / self.largest

    loss = OfOutputs()
    alone = OneSample(loss, ["weight", "bias"], 1, rowwise=False, weigh=None)
    x, y = records(1e4)
    losses = [loss for loss, _, _ in alone.one_by_one(network(), x, y)]
    again = [loss for loss, _, _ in alone.one_by_one(network(), x[1:], y[1:])]
    assert torch.equal(torch.stack(losses[1:]), torch.stack(again))
    assert loss.largest == 1.0


def test_what_is_learned_is_shared_with_a_copy() -> None:
    """A teacher is not copied for each record, wherever an object has it."""

    class Distilled:
        def __init__(self) -> None:
            self.teacher = nn.Linear(4, 2)

        def loss(self) -> None:
            """A method, which has its object."""

        def __call__(self) -> None:
            """The object itself."""

    distilled = Distilled()
    weight = distilled.teacher.weight
    assert without_memory(distilled, "The loss").teacher.weight is weight
    method: Any = without_memory(distilled.loss, "The loss")
    assert method.__self__ is not distilled
    assert method.__self__.teacher.weight is weight


def test_an_object_that_cannot_be_copied_is_refused() -> None:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(outputs, labels)

    x, y = records(1.0)
    data = ArrayData(x.numpy(), y.numpy(), low=-1, high=1, classes=["a", "b"])
    with pytest.raises(ModelError, match=r"The loss cannot be copied.*Use a function"):
        make_private(network(), data, loss=Locked(), epsilon=3, epochs=1, batch_size=30)
