"""The doors by which a network is trained privately, each as a function that trains one.

Records are one-hot, so that the network of :mod:`tests.door_networks` shows which of them a step
used, and how its sum was clipped, divided and noised.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from dpmac_cli import (
    ArrayData,
    BudgetError,
    Poisson,
    PrivateStep,
    RandomAllocation,
    TrainingEvent,
    make_private,
)
from dpmac_cli.randomness.noise import SeededNormals
from dpmac_cli.release.train import finish, resume_folder, train_plan
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.training.step import Step
from tests import door_networks

RECORDS, BATCH, STEPS = 200, 20, 8
LR, CLIP_NORM = 1e-6, 0.5
SETTINGS: Mapping[str, Any] = {
    **{"optimizer": "dp-sgd", "lr": LR, "clip_norm": CLIP_NORM, "steps": STEPS, "delta": 1e-5},
}
#: What a program says of its network, and a run.
NETWORKS = {"marking": door_networks.marking, "still": door_networks.still}


class Killed(BaseException):
    """In the place of a failure in a step, after records were read."""


@dataclass
class Move:
    """A step: how far it moved the parameters, in multiples of lr C / B, and what it drew."""

    session: int
    number: int
    change: NDArray[np.float64]
    drawn: NDArray[np.int64]
    step: Step


@dataclass
class Trained:
    """A training, and what its door says of it.

    ``begun`` counts the steps that used records, also those that failed.
    """

    moves: list[Move] = field(default_factory=list)
    begun: int = 0
    events: tuple[TrainingEvent, ...] = ()
    epsilon: float = 0.0
    statement: str = ""

    @property
    def charged(self) -> int:
        """Number of steps that the events count."""
        return sum(event.steps for event in self.events)


@contextmanager
def watched(fails: tuple[int, ...]) -> Iterator[Trained]:
    """Record every step that is taken; those of ``fails``, counted from 1, fail."""
    seen, sessions = Trained(), list[Step]()
    step, clip_and_sum, draw = Step.step, Step._clip_and_sum, Step._draw
    drawn = list[NDArray[np.int64]]()

    def recorded(self: Step) -> None:
        if self not in sessions:
            sessions.append(self)
        before = self.state.theta.double()
        step(self)
        moved = (self.state.theta.double() - before).numpy()
        change = moved * BATCH / (LR * CLIP_NORM)
        seen.moves.append(
            Move(sessions.index(self), self.state.step, change, drawn[-1].copy(), self)
        )

    def noting(self: Step) -> Any:
        drawn.append(draw(self))
        return drawn[-1]

    def failing(self: Step, batch: Any) -> Tensor:
        seen.begun += 1
        if seen.begun in fails:
            raise Killed
        return clip_and_sum(self, batch)

    with (
        patch.object(Step, "step", recorded),
        patch.object(Step, "_draw", noting),
        patch.object(Step, "_clip_and_sum", failing),
    ):
        yield seen


def one_hot() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Records and their labels, which are all equal."""
    return np.eye(RECORDS, dtype=np.float32), np.zeros(RECORDS, np.int64)


def facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a dataset; with ``unit`` among the settings, its units."""
    x, y = one_hot()
    given = {"x": x, "y": y, "x_test": x[:4], "y_test": y[:4], "low": 0.0, "high": 1.0}
    if "records_per_unit" in settings:
        owners = np.array([f"unit {row // 5:03}" for row in range(RECORDS)])
        given |= {"unit": owners, "unit_test": np.array(["another one"] * 4)}
    return given | {"classes": np.array(["no", "yes"])}


def by_train(network: str, settings: dict[str, Any], seen: Trained) -> None:
    """``dpmac train``, resumed after each step that fails."""
    np.savez("data.npz", **facts(settings))
    model = f"{door_networks.__file__}:{network}"
    given = {"dataset": "data.npz", "model": model, "batch_size": BATCH, "device": "cpu"}
    again: dict[str, Any] = {"model": model, "checkpoint_every": "2"}
    again |= {"seed": settings["seed"]} if "seed" in settings else {}
    events = train_plan(resolve({**given, "checkpoint_every": "2", "out": "run", **settings}).plan)
    while True:
        with suppress(Killed):
            report = finish(events).report
            break
        events = resume_folder(Path("run"), again)
    seen.events = tuple(TrainingEvent(**event) for event in report["events"])
    seen.epsilon, seen.statement = report["epsilon"], report["sentences"]["guarantee"]


def by_make_private(network: str, settings: dict[str, Any], seen: Trained, times: int = 1) -> None:
    """``make_private``, also several times on one network; a step that fails is repeated."""
    net = NETWORKS[network]((RECORDS,), 2)
    for _ in range(times):
        data = ArrayData(**facts(settings))
        private = make_private(net, data, batch_size=BATCH, device="cpu", **settings)
        with suppress(BudgetError):
            while True:
                with suppress(Killed):
                    private.step()
    report = private.publish("loop").report
    seen.events = tuple(TrainingEvent(**event) for event in report["events"])
    seen.epsilon, seen.statement = private.epsilon, private.statement
    assert report["epsilon"] == private.epsilon


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Loss of each record."""
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def a_step(network: str, settings: Mapping[str, Any]) -> PrivateStep:
    """A ``PrivateStep`` on a new network."""
    given = dict(settings)
    kinds = {"poisson": Poisson, "random-allocation": RandomAllocation}
    sampling = kinds[given.pop("sampler", "poisson")](n=RECORDS, batch_size=BATCH)
    return PrivateStep(NETWORKS[network]((RECORDS,), 2), loss, sampling=sampling, **given)


def by_step(network: str, settings: dict[str, Any], seen: Trained) -> None:
    """``PrivateStep``; a step that fails is repeated."""
    spend(step := a_step(network, settings))
    describe(step, seen)


def by_loaded_state(network: str, settings: dict[str, Any], seen: Trained) -> None:
    """``PrivateStep``, whose state after two steps is loaded twice, by one after the other."""
    first, second, third = (a_step(network, settings) for _ in range(3))
    state = spend(first, 3)[1]
    second.load_state_dict(state, taken=first.event.steps)
    spend(second, 2)
    assert second.taken == 4
    third.load_state_dict(state, taken=first.event.steps + second.event.steps)
    spend(third)
    describe(third, seen)


def spend(step: PrivateStep, most: int = 10**6) -> list[dict[str, Any]]:
    """Take the remaining steps, or some of them; return the state after each."""
    data, states = TensorDataset(*map(torch.from_numpy, one_hot())), list[dict[str, Any]]()
    with suppress(BudgetError):
        for batch in itertools.islice(step.loader(data), most):
            while not done(step, batch):
                pass
            states.append(step.state_dict())
    return states


def done(step: PrivateStep, batch: Any) -> bool:
    """Return whether a step succeeded."""
    try:
        step(batch)
    except Killed:
        return False
    return True


def describe(step: PrivateStep, seen: Trained) -> None:
    """Note what a step says of its training."""
    seen.events, seen.epsilon, seen.statement = step._account.events, step.epsilon, step.statement


#: A training of a network of :data:`NETWORKS` by each door, and by each way to continue there.
DOORS: Mapping[str, Callable[[str, dict[str, Any], Trained], None]] = {
    "train": by_train,
    "make_private": by_make_private,
    "make_private again": partial(by_make_private, times=2),
    "PrivateStep": by_step,
    "PrivateStep from a state": by_loaded_state,
}


def train_by(
    door: str, network: str, *, fails: tuple[int, ...] = (), noisy: bool = True, **settings: Any
) -> Trained:
    """Train by a door with :data:`SETTINGS` and others; ``noisy`` if its noise is not zero."""
    with watched(fails) as seen, nullcontext() if noisy else noiseless():
        DOORS[door](network, {**SETTINGS, **settings}, seen)
    return seen


@contextmanager
def noiseless() -> Iterator[None]:
    """Have all noise be zero, so that a step shows its sum."""

    def zeros(_: Any, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    with patch.object(SeededNormals, "standard_normal", zeros):
        yield
