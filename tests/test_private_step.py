"""A private step on the batches of a program: any network, any loss, any dataset."""

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from dpmac_cli import (
    ArrayData,
    BudgetError,
    Poisson,
    PrivateStep,
    RandomAllocation,
    make_private,
    total_epsilon,
)
from dpmac_cli.dp.optimizers import OPTIMIZERS

WORDS, LENGTH, RECORDS, BATCH = 20, 6, 200, 12
SETTINGS: dict[str, Any] = {"sigma": 1.0, "steps": 6, "lr": 0.01, "seed": 3}


class Notes(Dataset[dict[str, Tensor]]):
    """Texts of unequal length, padded, each with a mask and a label."""

    def __init__(self, records: int = RECORDS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, WORDS, (records, LENGTH), generator=generator)
        self.lengths = torch.randint(1, LENGTH + 1, (records,), generator=generator)
        self.labels = torch.randint(0, 2, (records,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(LENGTH) < self.lengths[index]).long()
        return {
            "input_ids": self.ids[index] * mask,
            "attention_mask": mask,
            "labels": self.labels[index],
        }


class Reader(nn.Module):
    """Classifies the mean of the vectors of the words; takes keyword arguments, returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 2)

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        mask = attention_mask.unsqueeze(2).float()
        mean = (self.words(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return {"logits": self.head(torch.tanh(mean))}


def reader() -> nn.Module:
    torch.manual_seed(0)
    return Reader()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return cross_entropy(model(**inputs)["logits"], batch["labels"], reduction="none")


POISSON = Poisson(n=RECORDS, batch_size=BATCH)


def started(**changes: Any) -> PrivateStep:
    return PrivateStep(reader(), loss, sampling=POISSON, **{**SETTINGS, **changes})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.privacy
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_program_trains_on_dicts_and_pays_what_its_steps_cost(optimizer: str) -> None:
    step = started(optimizer=optimizer)
    assert (len(step), step.epsilon, step.notes) == (6, 0.0, ())
    before = weights(step.model).clone()
    for number, batch in enumerate(step.loader(Notes()), 1):
        assert step(batch) == number
        assert step.event == POISSON.event(1.0, number)
        assert step.epsilon == total_epsilon((step.event,), step.plan.delta)
    assert number == 6
    assert not weights(step.model).equal(before)
    with pytest.raises(BudgetError, match="All 6 steps"):
        step(batch)


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Training records of a training with make_private, standardised as there."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels, reduction="none")


@pytest.mark.privacy
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sampler", ["poisson", "random-allocation"])
def test_it_is_the_same_training_as_that_of_make_private(optimizer: str, sampler: str) -> None:
    x, y = load_digits(return_X_y=True)
    data = ArrayData(x.reshape(-1, 8, 8), y, classes="0123456789", low=0, high=16)
    settings: dict[str, Any] = {**SETTINGS, "optimizer": optimizer, "physical_batch": 16}

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.2), nn.Linear(8, 10))

    private = make_private(network(), data, batch_size=60, sampler=sampler, **settings)
    list(private)
    split = private._trainer.data.train
    records = Digits(private.standardise(split.images), split.labels)
    kind = Poisson if sampler == "poisson" else RandomAllocation
    sampling = kind(n=len(records), batch_size=60)
    step = PrivateStep(network(), classify, sampling=sampling, delta=private.plan.delta, **settings)
    for batch in step.loader(records):
        step(batch)
    assert weights(step.model).equal(weights(private.model))
    assert step.epsilon == private.epsilon
    assert step.event == private.plan.event
