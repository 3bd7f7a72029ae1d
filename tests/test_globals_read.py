"""A network that reads a global variable is another one when the variable changes."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpmac_cli.errors import ModelError
from dpmac_cli.models.globals_read import called, globals_read
from dpmac_cli.models.unchanged import Unchanged

HERE = sys.modules[__name__]
MIXING = False
TABLE = {"mixing": False}
ROWS: list[Any] = []
CONFIG = SimpleNamespace(mixing=False)
SCALE = torch.ones(3)
MASK = np.ones(3)
HISTORY: list[Any] = []
SEEN = 0


class Flags:
    mixing = False

    @staticmethod
    def on() -> bool:
        return Flags.mixing


def helper(x: Tensor) -> Tensor:
    return x - x.mean(0) if CONFIG.mixing or Flags.on() else x


class Reads(nn.Module):
    """Reads globals in its forward, in what that calls, and in what is defined there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    @property
    def mixing(self) -> bool:
        return MIXING or bool(ROWS)

    def mixed(self, x: Tensor) -> Tensor:
        def late(y: Tensor) -> Tensor:
            return y - y.mean(0) if TABLE["mixing"] else y

        return late(x - x.mean(0) if self.mixing else x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(helper(self.mixed(x))) * SCALE * torch.from_numpy(MASK).to(x)
        return out

    def log(self) -> None:
        """Not called by the forward."""
        HISTORY.append(SEEN)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "MIXING": lambda m: m.setattr(HERE, "MIXING", True),
    "TABLE": lambda m: m.setitem(TABLE, "mixing", True),
    "ROWS": lambda m: m.setattr(HERE, "ROWS", [1]),
    "CONFIG": lambda m: m.setattr(CONFIG, "mixing", True),
    "Flags": lambda m: m.setattr(Flags, "mixing", True),
    "MASK": lambda m: m.setattr(HERE, "MASK", np.zeros(3)),
    "SCALE": lambda m: m.setattr(HERE, "SCALE", torch.zeros(3)),
    "helper": lambda m: m.setattr(HERE, "helper", lambda x: x - x.mean(0)),
}


@pytest.mark.privacy
@pytest.mark.parametrize("name", CHANGES)
def test_a_global_that_the_forward_reads_may_not_change(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Reads()
    unchanged = Unchanged(net, {id(p) for p in net.parameters()})
    unchanged.check()
    with monkeypatch.context() as patched:
        CHANGES[name](patched)
        with pytest.raises(ModelError, match=rf"global {name}\b.*make_private again"):
            unchanged.check()
    unchanged.check()  # undone


@pytest.mark.privacy
def test_a_global_list_may_not_grow() -> None:
    net = Reads()
    unchanged = Unchanged(net, {id(p) for p in net.parameters()})
    ROWS.append(1)
    try:
        with pytest.raises(ModelError, match="global ROWS"):
            unchanged.check()
    finally:
        ROWS.clear()


def test_globals_that_no_step_reads_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Reads()
    unchanged = Unchanged(net, {id(p) for p in net.parameters()})
    monkeypatch.setattr(HERE, "SEEN", 5)
    net.log()
    unchanged.check()
    HISTORY.clear()


def test_what_is_read_is_found() -> None:
    assert set(called(Reads)) == {"forward", "mixed", "mixing"}
    mixed: Any = Reads.mixed
    assert set(globals_read(mixed)) >= {"TABLE"}  # also by functions that it defines
    assert called(nn.Linear) == {}
    assert globals_read(torch.manual_seed) == {}  # type: ignore[arg-type]
