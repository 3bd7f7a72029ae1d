"""Random draws of a program's network: from the secret key alone, at every door."""

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from dpmac_cli import ArrayData, PrivateStep, clipped_grad, make_private
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.randomness.layers import MT_BEGIN, MT_WORDS
from dpmac_cli.randomness.sampling import Poisson
from dpmac_cli.runs.resolve import resolve
from tests.digits_runs import run_trainer
from tests.helpers import equal_keys

RECORDS, COLUMNS, CLASSES = 40, 6, 3
SETTINGS: dict[str, Any] = {"sigma": 1, "steps": 3, "delta": 1e-5, "optimizer": "dp-sgd"}
#: States of torch's generator, in words, when a network of these tests was called.
STATES: list[list[int]] = []


def words_of(generator: torch.Generator) -> list[int]:
    return generator.get_state()[MT_BEGIN:].view(torch.int64)[:MT_WORDS].tolist()


class Dropping(nn.Module):
    """Notes the state of torch's generator when it is called."""

    def __init__(self, columns: int = COLUMNS) -> None:
        super().__init__()
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(columns, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        STATES.append(words_of(torch.default_generator))
        logits: Tensor = self.last(self.drop(x.flatten(1)))
        return logits


FACTORY = """
from tests.test_layer_draws import Dropping

def make(shape, classes):
    return Dropping(12)
"""


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def records() -> tuple[Tensor, Tensor]:
    return torch.ones(RECORDS, COLUMNS), torch.arange(RECORDS) % CLASSES


def by_step() -> Iterator[Tensor]:
    net, sampling = Dropping(), Poisson(n=RECORDS, batch_size=10)
    step = PrivateStep(net, loss, sampling=sampling, **SETTINGS)
    for batch in step.loader(TensorDataset(*records())):
        step(batch)
        yield net.last.weight.detach().clone()


def by_loop() -> Iterator[Tensor]:
    x, y = records()
    data = ArrayData(x, y, x[:6], y[:6], low=0, high=2, classes="abc")
    net = Dropping()
    for _ in make_private(net, data, batch_size=10, device="cpu", **SETTINGS):
        yield net.last.weight.detach().clone()


def by_command() -> Iterator[Tensor]:
    Path("net.py").write_text(FACTORY)
    x = np.random.default_rng(0).integers(0, 255, (RECORDS, 2, 2, 3), dtype=np.uint8)
    np.savez("images.npz", x=x, y=np.arange(RECORDS) % CLASSES)
    chosen: dict[str, Any] = {"dataset": "images.npz", "model": "net.py:make", **SETTINGS}
    plan = resolve(**chosen, batch_size=10, device="cpu").plan
    trainer = run_trainer(plan)
    for _ in range(3):
        trainer.take()
        yield trainer.state.theta.clone()


def by_sum() -> Iterator[Tensor]:
    clipped = clipped_grad(Dropping(), loss, ball(1.0), batch_size=RECORDS)
    clipped.prepare(records())
    for _ in range(3):
        yield clipped(records())


DOORS = (by_step, by_loop, by_command, by_sum)


def is_seeded(words: list[int]) -> bool:
    """Return whether a seed of 32 bits gives this state of mt19937."""
    following = enumerate(pairwise(words), 1)
    return all(
        after == (1812433253 * (before ^ (before >> 30)) + i) % 2**32
        for i, (before, after) in following
    )


def states_of_steps(door: Callable[[], Iterator[Tensor]]) -> list[list[int]]:
    """Return the states in which a network was called first, in each step of a run."""
    torch.manual_seed(3)
    run, found = door(), []
    for _ in range(3):
        torch.manual_seed(7)
        STATES.clear()
        next(run)
        found.append(STATES[-1])
    return found


@pytest.mark.promise("noise")
@pytest.mark.parametrize("door", DOORS)
def test_dropout_of_a_program_is_drawn_from_more_than_a_seed_of_32_bits(
    door: Callable[[], Iterator[Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who tries all seeds would know which values of a record were dropped."""
    monkeypatch.chdir(tmp_path)
    assert is_seeded(words_of(torch.Generator().manual_seed(5)))
    states = [state for _ in range(2) for state in states_of_steps(door)]
    assert not any(map(is_seeded, states))
    for one, other in combinations(states, 2):
        assert np.mean(np.equal(one, other)) < 0.05  # all of their words are drawn


@pytest.mark.promise("noise")
@pytest.mark.parametrize("door", [door for door in DOORS if door is not by_sum])
def test_dropout_of_a_program_does_not_depend_on_its_own_seed(
    door: Callable[[], Iterator[Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for seed in (1, 2):
        torch.manual_seed(0)  # for the weights
        with equal_keys(4), patch("tests.digits_runs.make_keys", lambda _: make_keys(4)):
            run = door()
            first = next(run)
            torch.manual_seed(seed)
            found.append([first, *run])
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[0][0], found[0][1])
