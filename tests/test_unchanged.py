"""A network in training is the one that was validated: each step finds out what has changed."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.modules import module as of_modules
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpmac_cli.errors import ModelError
from tests.helpers import CLASSES, PLAN, SIDE, make_trainer, tiny_data

Change = Callable[[Any], object]
IN, WIDTH = SIDE**2, 5


class Flags:
    """A flag where vars() does not look."""

    __slots__ = ("mixing",)

    def __init__(self) -> None:
        self.mixing = False


class Adjustable(nn.Module):
    """Holds a frozen layer, buffers, and flags of every kind that a forward pass may read."""

    shared = False
    table: dict[str, bool] = {"mixing": False}  # noqa: RUF012  (that is the test)

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(IN, WIDTH).requires_grad_(False)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.middle = nn.Sequential(nn.Conv2d(1, 2, 2, padding=1), nn.Flatten(), nn.Linear(32, IN))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.constant, self.array = torch.ones(WIDTH), np.ones(WIDTH)
        self.mixing, self.sizes, self.inside = False, [1, 2], {"deep": [SimpleNamespace(mixing=0)]}
        self.flags, self.names, self.pair = Flags(), {"a"}, (1, [False])
        mixing = False

        def closing(x: Tensor) -> Tensor:
            return x - x.mean(0) if mixing else x

        def switch() -> None:
            nonlocal mixing
            mixing = True

        self.switch = switch
        self.closing: Callable[[Tensor], Tensor] = closing
        self.bound = functools.partial(self.centred, self.inside)

    def centred(self, flags: Any, x: Tensor) -> Tensor:
        return x - x.mean(0) if flags["deep"][0].mixing else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(self.middle(x)) * self.scale * self.constant
        x = self.bound(self.closing(torch.tanh(self.first(x))))
        if self.mixing or self.flags.mixing or self.shared or self.table["mixing"]:
            x = x - x.mean(0)
        logits: Tensor = self.last(x)
        return logits


def replaced_class(net: Any) -> None:
    class Other(Adjustable):
        pass

    net.__class__ = Other


def late_hook(kind: str, *args: Any) -> Change:
    return lambda net: getattr(net.first, f"register_{kind}")(lambda *_: None, *args)


#: Changes to an :class:`Adjustable`, and what the refusal says. ``first.weight`` is trained.
CHANGES: dict[str, tuple[Change, str]] = {
    "double().float()": (lambda n: n.double().float(), "first.weight is in other memory"),
    "p.data =": (
        lambda n: setattr(n.first.weight, "data", n.first.weight.data.clone()),
        "first.weight is in other memory",
    ),
    "vector_to_parameters": (
        lambda n: vector_to_parameters(parameters_to_vector(n.parameters()), n.parameters()),
        "is in other memory",
    ),
    "assign": (
        lambda n: n.load_state_dict(copy.deepcopy(n.state_dict()), assign=True),
        "weight was replaced",
    ),
    "channels_last": (
        lambda n: n.to(memory_format=torch.channels_last),
        r"middle\.0\.weight is in other memory",
    ),
    "a Parameter replaced": (
        lambda n: setattr(n.first, "weight", nn.Parameter(n.first.weight.detach().clone())),
        "first.weight was replaced",
    ),
    "frozen": (lambda n: n.first.requires_grad_(False), r"first\.weight was frozen"),
    "unfrozen": (lambda n: n.base.requires_grad_(True), r"base\.weight was unfrozen"),
    "a layer added": (
        lambda n: n.middle.append(nn.BatchNorm1d(IN, affine=False, track_running_stats=False)),
        r"middle\.3 was added",
    ),
    "a layer replaced": (
        lambda n: setattr(n, "first", copy.deepcopy(n.first)),
        r"first\.weight was replaced",
    ),
    "a layer removed": (lambda n: n.middle.pop(1), r"middle\.1 changed"),
    "layers in another order": (
        lambda n: n.middle._modules.update({"0": n.middle._modules.pop("0")}),
        r"middle\.order changed",
    ),
    "parametrised": (lambda n: weight_norm(n.first), "first"),
    "a forward of its own": (
        lambda n: setattr(n.first, "forward", lambda x: x - x.mean(0)),
        r"first\.forward was added",
    ),
    "another class": (replaced_class, "the network itself changed"),
    "a flag": (lambda n: setattr(n, "mixing", True), "mixing changed"),
    "a flag in slots": (lambda n: setattr(n.flags, "mixing", True), r"flags\.mixing changed"),
    "a flag inside": (
        lambda n: setattr(n.inside["deep"][0], "mixing", 1),
        r"inside\.deep\.0\.mixing changed",
    ),
    "a flag of the class": (lambda n: setattr(type(n), "shared", True), "shared changed"),
    "a table of the class": (
        lambda n: n.table.update(mixing=True),
        r"class Adjustable\.table\.mixing changed",
    ),
    "a flag in a closure": (lambda n: n.switch(), "mixing changed"),
    "a list": (lambda n: n.sizes.append(3), r"sizes\.2 was added"),
    "a set": (lambda n: n.names.add("b"), "names changed"),
    "a tuple's list": (lambda n: n.pair[1].__setitem__(0, True), r"pair\.1\.0 changed"),
    "an array": (lambda n: n.array.fill(2), "array changed"),
    "a function": (lambda n: setattr(n, "closing", torch.relu), "closing changed"),
    "an attribute added": (lambda n: setattr(n, "extra", 1), "extra was added"),
    "a buffer": (lambda n: n.scale.mul_(2), "changed its scale"),
    "a buffer added": (lambda n: n.register_buffer("more", torch.ones(1)), "more was added"),
    "a buffer replaced": (lambda n: setattr(n, "scale", torch.ones(WIDTH)), "scale was replaced"),
    "a tensor attribute": (lambda n: n.constant.mul_(2), "changed its constant"),
    "a frozen parameter": (lambda n: n.base.weight.mul_(2), r"changed its base\.weight"),
    "forward hook": (late_hook("forward_hook"), "hooks of first changed"),
    "forward pre-hook": (late_hook("forward_pre_hook"), "hooks of first changed"),
    "backward hook": (late_hook("full_backward_hook"), "hooks of first changed"),
    "backward pre-hook": (late_hook("full_backward_pre_hook"), "hooks of first changed"),
    "state hook": (late_hook("state_dict_post_hook"), "hooks of first changed"),
    "hook on a parameter": (
        lambda n: n.first.weight.register_hook(lambda g: 2 * g),
        r"hooks of first\.weight changed",
    ),
    "hook after a parameter": (
        lambda n: n.first.weight.register_post_accumulate_grad_hook(lambda p: None),
        r"hooks of first\.weight changed",
    ),
}


@pytest.fixture(autouse=True)
def _classes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adjustable, "shared", False)
    monkeypatch.setattr(Adjustable, "table", {"mixing": False})


def trainer_of(net: nn.Module, **options: Any) -> Any:
    return make_trainer(
        "dp-sgd", model=net, dtype=torch.float32, data=tiny_data(torch.float32), **options
    )


@pytest.mark.privacy
@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_steps_is_refused_by_name(name: str) -> None:
    torch.manual_seed(0)
    net = Adjustable()
    trainer = trainer_of(net)
    trainer.step()
    change, said = CHANGES[name]
    change(net)
    before, begun = trainer.state.theta.clone(), list[int]()
    trainer.training = SimpleNamespace(begin=lambda: begun.append(1))
    with pytest.raises(ModelError, match=said):
        trainer.step()
    assert not begun  # nothing was spent
    assert torch.equal(trainer.state.theta, before)
    with pytest.raises(ModelError, match=said):
        trainer.check_network()  # as before the network is published


@pytest.mark.privacy
@pytest.mark.parametrize("kind", [n for n in vars(of_modules) if "register_module" in n])
def test_hooks_of_all_modules_are_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_modules, "_global_is_full_backward_hook", None)
    trainer = trainer_of(Adjustable())
    trainer.step()
    handle = getattr(of_modules, kind)(lambda *_: None)
    try:
        with pytest.raises(ModelError, match="hooks of all modules changed"):
            trainer.step()
    finally:
        handle.remove()
    trainer.step()


@pytest.mark.privacy
def test_torchs_own_layers_are_seen_to_be_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(Adjustable())
    trainer.step()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x - x.mean(0))
    with pytest.raises(ModelError, match=r"class Linear\.forward changed"):
        trainer.step()


class ChangesItself(Adjustable):
    """Changes itself in a forward pass, counted from 0."""

    def __init__(self, change: Change, when: int) -> None:
        super().__init__()
        self.change, self.when, self.calls = change, when, iter(range(100))

    def forward(self, x: Tensor) -> Tensor:
        if next(self.calls) == self.when:
            self.change(self)
        return super().forward(x)


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["a flag", "a buffer", "forward hook", "a flag in a closure"])
def test_a_network_that_changes_itself_is_refused_before_the_noise(name: str) -> None:
    torch.manual_seed(0)
    change, said = CHANGES[name]
    never = ChangesItself(change, 100)
    trainer_of(never)
    trainer = trainer_of(ChangesItself(change, next(never.calls) + 2))
    trainer.step()
    trainer.step()
    before = trainer.state.theta.clone()
    with pytest.raises(ModelError, match=said):
        trainer.step()
    assert torch.equal(trainer.state.theta, before)
    assert trainer.state.step == 2


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["a flag", "a buffer", "forward hook", "a flag in a closure"])
def test_a_network_that_changes_itself_before_the_first_step_is_refused(name: str) -> None:
    """The trial of how rows are rounded runs it after it was validated."""
    change, said = CHANGES[name]
    with pytest.raises(ModelError, match=said):
        trainer_of(ChangesItself(change, 2))


class Mixing(TorchFunctionMode):
    """Changes what an operation of the program returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result - result.mean(0) if func is torch.tanh else result


class MixingBelow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """The same, below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result - result.mean(0) if func is torch.ops.aten.tanh.default else result


def mixing_saved() -> Any:
    return saved_tensors_hooks(lambda x: x.mean(0, keepdim=True).expand_as(x), lambda x: x)


@pytest.mark.privacy
@pytest.mark.parametrize("around", [Mixing, MixingBelow, mixing_saved])
def test_nothing_of_the_program_acts_on_operations_around_a_step(around: Callable[[], Any]) -> None:
    trainer = trainer_of(Adjustable())
    before = trainer.state.theta.clone()
    with around(), pytest.raises(ModelError, match="around the step"):
        trainer.step()
    assert torch.equal(trainer.state.theta, before)
    with torch.device("cpu"), save_on_cpu():  # torch's own
        trainer.step()
    assert trainer.state.step == 1


def restored(net: Any) -> None:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()})


#: What a program may do between steps, with the result that it had before.
HARMLESS: dict[str, Change] = {
    "eval": lambda n: n.eval(),
    "eval of a layer": lambda n: n.first.eval(),
    "load_state_dict": restored,
    "the same flag": lambda n: setattr(n, "mixing", False),
    "an equal list": lambda n: setattr(n, "sizes", [1, 2]),
    "float": lambda n: n.float(),
    "cpu": lambda n: n.cpu(),
    "a copy": copy.deepcopy,
    "state_dict": lambda n: n.state_dict(),
    "gradients on public data": lambda n: n(torch.ones(2, 1, SIDE, SIDE)).sum().backward(),
    "a hook put in and out": lambda n: n.first.register_forward_hook(print).remove(),
    "a backward hook put in and out": lambda n: n.first.register_full_backward_hook(print).remove(),
    "compiled": lambda n: torch.compile(n, backend="eager"),
    "evaluation": lambda n: n.eval()(torch.ones(2, 1, SIDE, SIDE)),
}


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_was_right_stays_right(name: str, isolated: bool) -> None:
    thetas = []
    for between in (lambda _: None, HARMLESS[name]):
        torch.manual_seed(0)
        net = Adjustable()
        trainer = trainer_of(net, plan=replace(PLAN, isolated=isolated))
        for _ in range(3):
            trainer.step()
            between(net)
        trainer.check_network()
        thetas.append(trainer.state.theta.clone())
    assert torch.equal(*thetas)


def test_a_program_sees_which_parameters_are_trained() -> None:
    net = Adjustable()
    trainer = trainer_of(net)
    for _ in range(2):
        trainer.step()
        assert [n for n, p in net.named_parameters() if not p.requires_grad] == [
            "base.weight",
            "base.bias",
        ]


def test_values_written_in_place_are_trained_on() -> None:
    net = Adjustable()
    trainer = trainer_of(net)
    trainer.step()
    with torch.no_grad():
        net.last.weight.fill_(3.0)
    assert (trainer.state.theta == 3.0).sum() == net.last.weight.numel()
    trainer.step()
