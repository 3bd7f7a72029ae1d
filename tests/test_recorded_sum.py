"""Clipped sums that are recorded and replayed, with a recorder for the CPU.

It has the semantics of a CUDA graph: no Python runs in a replay, memory is fixed, and operations
whose result is read, or whose shape depends on values, are refused.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpmac_cli.dp.clipping.batch_invariance import Manner
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.recorded_sum import RecordedChunkSum
from tests.conftest import every_optimizer
from tests.helpers import CLASSES, make_trainer, tiny_data, tiny_model

#: Operations that a capture does not permit.
REFUSED = re.compile(r"_local_scalar_dense|nonzero|masked_select|equal|unique|item")


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):
    """Keeps every operation with its memory, and computes them again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.partition("::")[2], kwargs or {}
        masks = name in ("index", "index_put_") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])
        )
        if masks or REFUSED.match(name):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        out = func(*args, **kwargs)
        given = {memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if func._schema.is_mutable:
            self.calls.append((func, args, kwargs, ()))
        elif not made or any(memory(x) not in given for x in made):  # views need no call
            self.calls.append((func, args, kwargs, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            found = func(*args, **kwargs)
            if out != ():
                for to, value in zip(tree_leaves(out), tree_leaves(found), strict=True):
                    if isinstance(to, Tensor):
                        to.copy_(value)


def on_tape(function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    with Tape() as tape:
        found = function()
    return found, tape.replay


class Mixed(nn.Module):
    """A network that runs under vmap, as its own code is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x.flatten(1))).square())
        return out


class Drawing(Mixed):
    """Draws numbers that a replay would repeat."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(1 + np.random.random())


class Rarely(Mixed):
    """Draws numbers that hardly ever change anything."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if np.random.random() < 1e-9 else 1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "known layers": lambda: tiny_model(torch.float32),
    "own code": Mixed,
}


def trainer_of(optimizer: str, network: str = "own code") -> Trainer:
    torch.manual_seed(0)
    trainer = make_trainer(
        optimizer, dtype=torch.float32, model=NETWORKS[network](), data=tiny_data(torch.float32)
    )
    trainer.sums.manner = Manner(full=True)
    return trainer


def recording(trainer: Trainer, record: Any = on_tape) -> RecordedChunkSum:
    """Let a trainer record its sums."""
    sums = trainer.sums
    found = RecordedChunkSum(sums.per_sample, 64, trainer.mechanism.expected_batch, record)
    sums.clipped_sum = found
    return found


@pytest.mark.promise("alone")
@pytest.mark.parametrize("network", NETWORKS)
@every_optimizer
def test_replays_are_the_steps_that_are_computed(
    name: str, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with other draws in each step, and without running the network's code."""
    computed, replayed = trainer_of(name, network), trainer_of(name, network)
    sums, calls, as_before = recording(replayed), [0], PerSample.__call__

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return as_before(*args)

    for step in range(4):
        computed.step()
        with monkeypatch.context() as patch:
            patch.setattr(PerSample, "__call__", counted)
            replayed.step()
        assert computed.state.theta.equal(replayed.state.theta)
        if step == 0:
            assert calls[0] > 0
            calls[0] = 0
    assert [found is not None for found in sums.recordings.values()] == [True]
    assert calls == [0]


@pytest.mark.promise("alone")
def test_a_chunk_for_which_float32_does_not_do_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed, replayed = trainer_of("dp-macadam"), trainer_of("dp-macadam")
    sums = recording(replayed)
    replayed.step()
    computed.step()
    (found,) = filter(None, sums.recordings.values())
    precise, again = ClippedChunkSum.sum_up_precisely, []

    def noted(*args: Any) -> None:
        again.append(True)
        precise(*args)

    monkeypatch.setattr(ClippedChunkSum, "sum_up_precisely", noted)
    monkeypatch.setattr(ClippedChunkSum, "_share", lambda _, of: torch.ones_like(of.value))
    monkeypatch.setitem(vars(found), "replay", lambda: found.doubtful.fill_(True))
    for trainer in (computed, replayed):
        trainer.step()
    assert again == [True, True]
    assert computed.state.theta.equal(replayed.state.theta)


def otherwise(function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """A recorder whose replays compute nothing."""
    return function(), lambda: None


@pytest.mark.promise("alone")
@pytest.mark.parametrize(
    ("network", "record"),
    [
        (Drawing, on_tape),
        (Rarely, on_tape),
        (lambda: nn.Sequential(Mixed(), nn.Dropout()), on_tape),
        (Mixed, otherwise),
    ],
    ids=["NumPy's numbers", "a rare number", "dropout", "another result"],
)
def test_what_a_replay_would_compute_otherwise_is_not_recorded(
    network: Callable[[], nn.Module], record: Any
) -> None:
    trainer = make_trainer(
        "dp-adam", dtype=torch.float32, model=network(), data=tiny_data(torch.float32)
    )
    sums = recording(trainer, record)
    trainer.step()
    assert [*sums.recordings.values()] == [None]
