"""A network that reads a global variable is another one when the variable changes."""

import sys
from argparse import Namespace
from collections import UserDict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
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


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Another module of the program."""
    module = ModuleType("settings_of_the_program")
    module.mixing = False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(HERE, "SETTINGS", module, raising=False)
    monkeypatch.setattr(HERE, "HELPER", Helper())
    return module


class Helper:
    """A plain object of the program, whose methods read globals."""

    def on(self) -> bool:
        return MIXING

    @property
    def also(self) -> bool:
        return MIXING


HELPER = Helper()


def _in_another_module() -> bool:
    return bool(SETTINGS.mixing)  # type: ignore[name-defined]  # noqa: F821


def _imported() -> bool:
    from settings_of_the_program import mixing  # type: ignore[import-not-found]  # noqa: PLC0415

    return bool(mixing)


def _by_method() -> bool:
    return HELPER.on()


def _later() -> bool:
    try:
        return bool(LATER)  # type: ignore[name-defined]
    except NameError:
        return False


#: What a forward calls to learn whether to mix samples, and how that is switched on.
ELSEWHERE: dict[str, tuple[Callable[[], bool], Callable[[pytest.MonkeyPatch, ModuleType], Any]]] = {
    "of another module": (_in_another_module, lambda m, s: m.setattr(s, "mixing", True)),
    "imported in a function": (_imported, lambda m, s: m.setattr(s, "mixing", True)),
    "added later": (_later, lambda m, s: m.setattr(HERE, "LATER", True, raising=False)),
    "read by a method": (_by_method, lambda m, s: m.setattr(HERE, "MIXING", True)),
    "read by a property": (lambda: HELPER.also, lambda m, s: m.setattr(HERE, "MIXING", True)),
}


class Asks(nn.Module):
    """Mixes samples if something says so."""

    def __init__(self, mixing: Callable[[], bool]) -> None:
        super().__init__()
        self.layer, self.mixing = nn.Linear(3, 3), mixing

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x - x.mean(0) if self.mixing() else x)
        return out


@pytest.mark.privacy
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_global_that_is_not_beside_the_forward_may_not_change(
    name: str, settings: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixing, change = ELSEWHERE[name]
    net = Asks(mixing)
    unchanged = Unchanged(net, {id(p) for p in net.parameters()})
    unchanged.check()
    change(monkeypatch, settings)
    assert mixing()
    with pytest.raises(ModelError, match=r"global .*make_private again"):
        unchanged.check()


@pytest.mark.privacy
@pytest.mark.parametrize("make", [Namespace, UserDict])
def test_settings_in_objects_of_the_standard_library_may_not_change(make: Any) -> None:
    net = nn.Linear(3, 3)
    net.held = make(mixing=False)
    unchanged = Unchanged(net, {id(p) for p in net.parameters()})
    unchanged.check()
    getattr(net.held, "data", vars(net.held))["mixing"] = True
    with pytest.raises(ModelError, match=r"held\..*mixing changed"):
        unchanged.check()


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
