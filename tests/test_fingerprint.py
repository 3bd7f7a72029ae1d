"""A network in training is the one that was validated: each step finds out what has changed."""

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.nn.utils.parametrizations import weight_norm

from dpmac_cli.errors import ModelError
from dpmac_cli.models.fingerprint import Fingerprint
from tests.helpers import CLASSES, SIDE, in_chunks_of, make_trainer, tiny_data

Change = Callable[[Any], object]
IN, WIDTH = SIDE**2, 5


class Adjustable(nn.Module):
    """Holds a frozen layer, a buffer, and attributes that a forward pass may read."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(IN, WIDTH).requires_grad_(False)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.middle = nn.Sequential(nn.Conv2d(1, 2, 2, padding=1), nn.Flatten(), nn.Linear(32, IN))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.mixing, self.sizes, self.names = False, [1, 2], {"a"}
        self.table, self.queue = {"mixing": False}, deque([0], maxlen=4)
        self.closing, self.memory = torch.tanh, SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.closing(self.first(self.base(self.middle(x)) * self.scale))
        logits: Tensor = self.last(x)
        return logits


def replaced_class(net: Any) -> None:
    class Other(Adjustable):
        pass

    net.__class__ = Other


def late_hook(kind: str) -> Change:
    return lambda net: getattr(net.first, f"register_{kind}")(lambda *_: None)


#: Changes to an :class:`Adjustable`, and what the refusal says. ``first.weight`` is trained.
CHANGES: dict[str, tuple[Change, str]] = {
    "double().float()": (lambda n: n.double().float(), "weight is in other memory"),
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
        r"middle\._modules changed",
    ),
    "weight_norm": (lambda n: weight_norm(n.first), "first changed"),
    "prune": (
        lambda n: prune.l1_unstructured(n.first, "weight", 0.5),  # type: ignore[no-untyped-call]
        r"first\.weight was replaced",
    ),
    "a forward of its own": (
        lambda n: setattr(n.first, "forward", lambda x: x - x.mean(0)),
        r"first\.forward was added",
    ),
    "another class": (replaced_class, "the network itself changed"),
    "a flag": (lambda n: setattr(n, "mixing", True), "mixing changed"),
    "a list": (lambda n: n.sizes.append(3), "sizes changed"),
    "a set": (lambda n: n.names.add("b"), "names changed"),
    "a dict": (lambda n: n.table.update(mixing=True), "table changed"),
    "a queue": (lambda n: n.queue.append(1), "queue changed"),
    "a function": (lambda n: setattr(n, "closing", torch.relu), "closing changed"),
    "an object's attribute": (lambda n: setattr(n.memory, "calls", 1), "memory changed"),
    "an attribute added": (lambda n: setattr(n, "extra", 1), "extra was added"),
    "a buffer": (lambda n: n.scale.mul_(2), "scale was written to"),
    "a buffer added": (lambda n: n.register_buffer("more", torch.ones(1)), "more was added"),
    "a buffer replaced": (lambda n: setattr(n, "scale", torch.ones(WIDTH)), "scale was replaced"),
    "a frozen parameter": (lambda n: n.base.weight.mul_(2), r"base\.weight was written to"),
    "forward hook": (late_hook("forward_hook"), "hooks of first changed"),
    "forward pre-hook": (late_hook("forward_pre_hook"), "hooks of first changed"),
    "backward hook": (late_hook("full_backward_hook"), "hooks of first changed"),
    "backward pre-hook": (late_hook("full_backward_pre_hook"), "hooks of first changed"),
    "hook on a parameter": (
        lambda n: n.first.weight.register_hook(lambda g: 2 * g),
        r"hooks of first\.weight changed",
    ),
    "hook after a parameter": (
        lambda n: n.first.weight.register_post_accumulate_grad_hook(lambda p: None),
        r"hooks of first\.weight changed",
    ),
}


def trainer_of(net: nn.Module) -> Any:
    """In chunks of one record, which are not tried for rounding."""
    data, plan = tiny_data(torch.float32), in_chunks_of(1)
    return make_trainer("dp-sgd", model=net, dtype=torch.float32, data=data, plan=plan)


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
@pytest.mark.parametrize(
    "kind",
    [
        *("register_module_forward_hook", "register_module_forward_pre_hook"),
        *("register_module_full_backward_hook", "register_module_full_backward_pre_hook"),
    ],
)
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


class ChangesItself(Adjustable):
    """Changes itself in forward passes from a call on, counted from 0."""

    def __init__(self, change: Change, when: int) -> None:
        super().__init__()
        self.change, self.when, self.calls = change, when, iter(range(10**6))

    def forward(self, x: Tensor) -> Tensor:
        if next(self.calls) == self.when:
            self.change(self)
        return super().forward(x)


#: Ways in which a network would carry a record to the next.
ITSELF = ("a flag", "a list", "a queue", "an object's attribute", "a buffer replaced")


def never(net: nn.Module) -> None:
    """Change nothing."""


@pytest.mark.privacy
@pytest.mark.parametrize("name", ITSELF)
def test_a_network_that_changes_itself_is_refused_before_the_noise(name: str) -> None:
    torch.manual_seed(0)
    change, said = CHANGES[name]
    net = ChangesItself(never, 0)
    trainer = trainer_of(net)
    trainer.step()
    trainer.step()
    before, net.change, net.when = trainer.state.theta.clone(), change, next(net.calls) + 1
    trainer.sums.unchanged = Fingerprint(net, trainer.sums.trained)
    with pytest.raises(ModelError, match=rf"{said}.*this step is not used"):
        trainer.step()
    assert torch.equal(trainer.state.theta, before)
    assert trainer.state.step == 2


@pytest.mark.privacy
def test_statistics_in_a_buffer_are_not_published() -> None:
    net = Adjustable()
    trainer = trainer_of(net)
    trainer.step()
    net.scale.data.mul_(2)  # .data hides it from autograd, and from the check around each step
    trainer.step()
    with pytest.raises(ModelError, match="changed its scale during training"):
        trainer.check_network()


def restored(net: Any) -> None:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()})


#: What a program may do between steps, with the result that it had before.
HARMLESS: dict[str, Change] = {
    "eval": lambda n: n.eval(),
    "eval of a layer": lambda n: n.first.eval(),
    "load_state_dict": restored,
    "the same flag": lambda n: setattr(n, "mixing", False),
    "float": lambda n: n.float(),
    "cpu": lambda n: n.cpu(),
    "a copy": copy.deepcopy,
    "state_dict": lambda n: n.state_dict(),
    "gradients on public data": lambda n: n(torch.ones(2, 1, SIDE, SIDE)).sum().backward(),
    "a hook put in and out": lambda n: n.first.register_forward_hook(print).remove(),
    "compiled": lambda n: torch.compile(n, backend="eager"),
    "evaluation": lambda n: n.eval()(torch.ones(2, 1, SIDE, SIDE)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_was_right_stays_right(name: str) -> None:
    thetas = []
    for between in (never, HARMLESS[name]):
        torch.manual_seed(0)
        net = Adjustable()
        trainer = trainer_of(net)
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
