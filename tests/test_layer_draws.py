"""Random draws of a program's network: from the secret key alone, at every door."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import TensorDataset

from dpmac_cli import ArrayData, PrivateStep, clipped_grad, make_private
from dpmac_cli.accounting.account import Account
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.features import stored
from dpmac_cli.features.frozen import FrozenFeatures
from dpmac_cli.models.dataset import Data
from dpmac_cli.randomness.keystream import STREAMS, make_keys
from dpmac_cli.randomness.layers import MT_BEGIN, MT_WORDS, LayerDraws
from dpmac_cli.randomness.sampling import Poisson
from dpmac_cli.runs.prepare import prepare
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.trainer import make_trainer
from dpmac_cli.training.evaluation import outputs_of
from tests.digits_runs import digits_config, run_trainer
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


# Passes without gradients, of which epsilon covers what is computed.


class AlwaysDropping(nn.Module):
    """Drops values in evaluation, too: ``F.dropout`` does, unless it is told not to."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.last = nn.Linear(columns, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(dropout(x.flatten(1)))
        return logits


class Dropped(nn.Module):
    """A frozen part that drops values."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x.flatten(1))


def some_digits() -> Data:
    plan = resolve(dataset="digits", model="linear", device="cpu", **SETTINGS).plan
    data = run_trainer(plan).data
    return replace(data, train=data.train.taken(np.arange(300)))


@pytest.mark.promise("noise")
def test_outputs_that_epsilon_covers_are_drawn_from_a_key_alone() -> None:
    """One who knows which values were dropped sees how one record moves those of all others."""
    data, net = some_digits(), AlwaysDropping(64)

    def logits(seed: int, key: bytes) -> Tensor:
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found = outputs_of(net, data, data.train, covered=LayerDraws(key))
        all_of_them = torch.cat([rows for _, rows in found])
        assert torch.equal(torch.get_rng_state(), before)
        return all_of_them

    first = logits(1, bytes(32))
    assert torch.equal(first, logits(2, bytes(32)))
    assert not torch.equal(first, logits(1, b"k" * 32))


@pytest.mark.promise("noise")
def test_batches_that_epsilon_covers_have_draws_of_their_own() -> None:
    data, net = some_digits(), AlwaysDropping(64)
    same = data.train.images[:1].expand(300, *data.train.images.shape[1:])
    split = replace(data.train, images=same.contiguous())
    found = outputs_of(net, data, split, covered=LayerDraws(bytes(32)))
    rows = torch.cat([rows for _, rows in found])
    assert len(torch.unique(rows, dim=0)) > 290


@pytest.mark.promise("noise")
def test_each_pass_has_a_key_of_its_own() -> None:
    plan = digits_config(cover_scores=True, epsilon=1, epochs=1)
    keys = make_keys(4)
    account = Account(event=plan.event, histogram=plan.histogram)
    trainer = make_trainer(plan, prepare(plan, torch.device("cpu"), keys), keys, account)
    assert trainer.counted is not None
    assert trainer.covered is not None
    streams = {getattr(keys, name): name for name in STREAMS}
    assert streams[trainer.counted[-1]._keys.key] == "count_layers"
    assert streams[trainer.covered[-1]._keys.key] == "score_layers"


@pytest.mark.promise("features")
def test_features_are_drawn_from_a_secret_key(tmp_path: Path) -> None:
    """A program's seed says which values were dropped, of every record."""
    data = some_digits()
    found = []
    for folder in ("one", "another"):
        torch.manual_seed(0)
        parts = FrozenFeatures(Dropped(), nn.Linear(64, 10), torch.float32)
        parts.user_supplied = True
        found.append(stored.featured(parts, data, {}, tmp_path / folder).train.images)
    assert not torch.equal(*found)
