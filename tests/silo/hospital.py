"""A silo of made-up patients, and processes in which it is killed."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from dpmac_cli import Poisson, Silo, TrainingEvent, calibrate_noise, total_epsilon
from dpmac_cli.silo.silo import Reply
from dpmac_cli.training.step import Step

RECORDS, BATCH, ROUNDS, STEPS, EPSILON, DELTA = 100, 100, 5, 3, 3.0, 1e-5
#: Full batches are cheap to price.
SAMPLING = Poisson(n=RECORDS, batch_size=BATCH)


class Patients(Dataset[tuple[Tensor, Tensor]]):
    """Records of four numbers and a label; ``change`` replaces the one of number ``at``."""

    def __init__(self, change: Callable[[Tensor], Any] | None = None, at: int = 7) -> None:
        self.at = at
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(RECORDS, 4, generator=generator)
        self.y = (self.x.sum(1) > 0).long()
        self.change = change

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        return (self.change(x) if self.change and index == self.at else x), self.y[index]


def network() -> nn.Module:
    """A linear model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2))


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Loss of each record."""
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def silo(folder: Path, records: Any = None, **changes: Any) -> Silo:
    """A silo of the patients."""
    given: dict[str, Any] = {
        "sampling": SAMPLING,
        "epsilon": EPSILON,
        "rounds": ROUNDS,
        "steps": STEPS,
        "silos": 2,
        "optimizer": "dp-adam",
    }
    data = Patients() if records is None else records
    return Silo(folder, changes.pop("network", network()), loss, data, **{**given, **changes})


def start() -> dict[str, Tensor]:
    """The server's first weights."""
    return {name: p.detach().clone() for name, p in network().named_parameters()}


def ask(folder: Path, number: int, weights: Any = None, **options: Any) -> Reply:
    """A round of a silo that is opened for it alone."""
    with silo(folder) as opened:
        return opened.round("run", number, weights or start(), **options)


def event(steps: int) -> TrainingEvent:
    """The event of some steps, composed by hand."""
    return SAMPLING.event(sigma(), steps)


def sigma() -> float:
    """The noise of the silo."""
    return calibrate_noise(SAMPLING.event(0.0, ROUNDS * STEPS), DELTA, EPSILON)


def cost(steps: int) -> float:
    """Epsilon of some steps."""
    return total_epsilon((event(steps),), DELTA)


# Processes that are killed.


@contextmanager
def killed_at(place: int, log: Path) -> Iterator[None]:
    """Kill this process at a place: each write has two, and each step too. Steps are logged."""
    left = place
    replace, clip, take = os.replace, Step._clip_and_sum, Step.step

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def replaced(*args: Any) -> None:
        tick()
        replace(*args)
        tick()

    def clipped(self: Step, batch: Any) -> Tensor:
        with log.open("a") as file:
            file.write(".")
        tick()
        return clip(self, batch)

    def taken(self: Step) -> None:
        take(self)
        tick()

    with (
        patch.object(os, "replace", replaced),
        patch.object(Step, "_clip_and_sum", clipped),
        patch.object(Step, "step", taken),
    ):
        yield


def run(do: Callable[..., Any], *args: Any) -> int:
    """Run a function in a process of its own, and return its exit code."""
    process = multiprocessing.get_context("fork").Process(target=do, args=args)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def ask_until_killed(folder: Path, number: int, place: int, weights: Any = None) -> None:
    """A round in a process that is killed at a place, if it comes so far."""
    with killed_at(place, folder.parent / "steps"):
        ask(folder, number, weights)
