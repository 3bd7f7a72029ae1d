"""State that plain functions keep, losses that use the network, and hooks of autograd's graph."""

import functools
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.nn.modules import module as of_modules

from dpmac_cli.dp.clipping.deep_copy import duplicate
from dpmac_cli.dp.losses import alone
from dpmac_cli.errors import ModelError
from dpmac_cli.models.independence import independence
from dpmac_cli.models.validation import check_model
from tests.helpers import CLASSES, PLAN, SIDE, Batches, make_trainer, tiny_data, tiny_model

SHAPE, PIXELS = (1, SIDE, SIDE), SIDE**2
Centring = Callable[[Tensor], Tensor]
#: Calls between two estimates of the mean.
PERIOD = 20

# Functions with state. Each subtracts a mean that it estimates again every now and then.


class Callable_:  # noqa: N801
    """An object that is called like a function."""

    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(())

    def __call__(self, x: Tensor) -> Tensor:
        if self.calls % PERIOD == 0:
            self.mean = x.detach().mean()
        self.calls += 1
        return x - self.mean

    def method(self, x: Tensor) -> Tensor:
        return self(x)


class Slotted(Callable_):
    """The same without a dict."""

    __slots__ = ("calls", "mean")


def closure() -> Centring:
    calls, mean = 0, torch.zeros(())

    def centre(x: Tensor) -> Tensor:
        nonlocal calls, mean
        if calls % PERIOD == 0:
            mean = x.detach().mean()
        calls += 1
        return x - mean

    return centre


def of_list(kept: list[Tensor], x: Tensor) -> Tensor:
    kept.append(x.detach().mean())
    return x - kept[len(kept) // PERIOD * PERIOD - 1 if len(kept) >= PERIOD else 0]


def default() -> Centring:
    def centre(x: Tensor, kept: list[Tensor] = []) -> Tensor:  # noqa: B006
        return of_list(kept, x)

    return centre


def attribute() -> Any:
    def centre(x: Tensor) -> Tensor:
        return of_list(centre.kept, x)  # type: ignore[attr-defined]

    centre.kept = []  # type: ignore[attr-defined]
    return centre


def built_in() -> Any:
    kept: list[Tensor] = []
    return kept.append, kept.__getitem__


STATEFUL: dict[str, Callable[[], Any]] = {
    "an object": Callable_,
    "an object with slots": Slotted,
    "a bound method": lambda: Callable_().method,
    "a partial": lambda: functools.partial(of_list, []),
    "a partial of a closure": lambda: functools.partial(closure()),
    "a closure": closure,
    "a closure in a list": lambda: [closure()],
    "a closure behind no_grad": lambda: torch.enable_grad()(closure()),
    "a default value": default,
    "a function's attribute": attribute,
}


class Calling(nn.Module):
    """Calls a function on its inputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(PIXELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        [function] = self.function if isinstance(self.function, list) else [self.function]
        logits: Tensor = self.layer(function(x.flatten(1)))
        return logits


@pytest.mark.privacy
@pytest.mark.parametrize("kind", STATEFUL)
def test_state_of_a_function_is_seen_to_change(kind: str) -> None:
    with pytest.raises(ModelError, match="A forward pass changes function"):
        check_model(Calling(STATEFUL[kind]()), SHAPE, CLASSES)


def moves(trainer: Any, rows: int = 12, rounds: int = 4) -> float:
    """How far one record moves the sum of a step, at most, over so many steps."""
    found: list[float] = []
    for _ in range(rounds):
        sums = [
            trainer._clip_and_sum(torch.arange(n, rows).numpy()).double().clone() for n in (0, 1)
        ]
        radius: Any = trainer.optimizer.model_dump()["clip_norm"]
        found.append(float((sums[0] - sums[1]).norm()) / radius)
    return max(found, default=0.0)


def isolated(net: nn.Module, **options: Any) -> Any:
    data, plan = tiny_data(), replace(PLAN, isolated=True)
    return make_trainer("dp-sgd", model=net.double(), data=data, plan=plan, **options)


@pytest.mark.privacy
@pytest.mark.parametrize("kind", STATEFUL)
def test_state_of_a_function_is_isolated(kind: str) -> None:
    """Each sample's gradient is that of a network that has seen nothing else."""
    torch.manual_seed(0)
    net = Calling(STATEFUL[kind]())
    trainer = isolated(net)
    first = trainer._clip_and_sum(torch.arange(3).numpy()).clone()
    for _ in range(3):
        trainer._clip_and_sum(torch.arange(3, 20).numpy())
    assert torch.equal(trainer._clip_and_sum(torch.arange(3).numpy()), first)
    assert moves(trainer) <= 1


@pytest.mark.privacy
def test_a_copy_shares_no_state_of_functions() -> None:
    class Referring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, shared = nn.Linear(2, 2), [0]

            def count() -> int:
                shared[0] += 1
                return shared[0]

            def forward(x: Tensor) -> Tensor:
                out: Tensor = self.layer(x) * count()
                return out

            self.inner, self.count, self.method = forward, count, self.other
            self.append = shared.append

        def other(self) -> "Referring":
            return self

    net: Any = Referring()
    again: Any = duplicate(net)
    again.append(7)
    again.inner(torch.ones(1, 2))
    assert again.count() == 2  # both functions share the count
    assert net.count() == 1
    assert again.method() is again
    with torch.no_grad():
        again.layer.weight.zero_()
        again.layer.bias.zero_()
    assert again.inner(torch.ones(1, 2)).abs().sum() == 0  # reads its own layer
    assert net.append.__self__ == [1]


@pytest.mark.privacy
def test_what_remembers_results_is_neither_traced_nor_copied() -> None:
    net = Calling(functools.cache(torch.relu))
    with pytest.raises(ModelError, match=r"function remembers its results \(functools.cache\)"):
        check_model(net, SHAPE, CLASSES, isolated=True)


OUTSIDE = nn.Parameter(torch.zeros(1))


@pytest.mark.privacy
@pytest.mark.parametrize(
    "hidden",
    [random.Random(0), iter([]), functools.partial(next, iter([])), weakref.ref(OUTSIDE)],
)
def test_state_in_c_is_not_trusted(hidden: object) -> None:
    net = Calling(torch.relu)
    net.hidden = hidden  # type: ignore[assignment]
    kind, why = independence(net, SHAPE, CLASSES)
    assert kind == "isolated"
    assert "hidden" in why
    assert "may store information" in why


@pytest.mark.long
def test_functions_without_state_are_traced() -> None:
    scale = torch.tensor(2.0)

    def scaled(by: float, x: Tensor) -> Tensor:
        return x * scale * by

    for function in (functools.partial(scaled, 2.0), torch.relu, F.relu, lambda x: x * scale):
        net = Calling(function)
        check_model(net, SHAPE, CLASSES)
        assert independence(net, SHAPE, CLASSES) == ("traced", "")


# Losses that use the network.


def user_trainer(net: nn.Module, loss: Any, **changes: Any) -> Any:
    outputs, labels = torch.randn(4, CLASSES).double(), torch.arange(4)
    names = {id(p): name for name, p in net.named_parameters()}
    checked = alone(loss, outputs, labels, names)
    return make_trainer("dp-sgd", model=net, plan=replace(PLAN, loss=checked, **changes))


def unmapped(output: Tensor, target: Tensor) -> Tensor:
    """A loss that vmap cannot run."""
    return F.cross_entropy(output, target) * (1 if float(output.detach().sum()) < 1e9 else 2)


PUBLIC = torch.ones(1, *SHAPE, dtype=torch.float64)
USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "calls the network": lambda net, out: (net(PUBLIC) - out).square().sum(),
    "calls a layer": lambda net, out: (net[3](torch.ones(1, 5).double()) - out).square().sum(),
    "calls forward of a layer": lambda net, out: net[1].forward(PUBLIC.flatten(1)).sum(),
    "reads a weight": lambda net, _: net[1].weight.square().sum(),
    "reads a view": lambda net, _: net[1].weight[0].square().sum(),
}


@pytest.mark.privacy
@pytest.mark.parametrize("use", USES)
def test_a_loss_that_uses_the_network_is_refused(use: str) -> None:
    net = tiny_model()
    for base in (F.cross_entropy, unmapped):

        def loss(output: Tensor, target: Tensor, base: Any = base) -> Tensor:
            total: Tensor = base(output, target) + USES[use](net, output)
            return total

        with pytest.raises(ModelError, match=r"The loss uses \d\.(weight|bias) of the network"):
            user_trainer(net, loss)


@pytest.mark.privacy
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("use", USES)
def test_a_loss_that_uses_the_network_later_is_refused(use: str, isolated: bool) -> None:
    net, late = tiny_model(), [False]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return unmapped(output, target) + (USES[use](net, output) if late[0] else 0)

    trainer = user_trainer(net, loss, isolated=isolated)
    trainer.step()
    late[0] = True
    with pytest.raises(ModelError, match=r"loss.*changed"):
        trainer.step()  # the flag is seen
    trainer._unchanged.check = lambda *_: None
    with pytest.raises(ModelError, match=r"The loss uses \d\.(weight|bias) of the network"):
        trainer.step()


@pytest.mark.privacy
@pytest.mark.parametrize("isolated", [False, True])
def test_constants_of_the_network_are_no_part_of_the_gradient(isolated: bool) -> None:
    """A teacher under no_grad, and a shape, have the gradients that autograd gives."""
    net: Any = tiny_model()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = net(PUBLIC)
        scale = net[1].weight.detach().sum() / net[1].weight.shape[0]
        total: Tensor = F.cross_entropy(output, target) + (output - teacher).square().sum() + scale
        return total

    trainer = user_trainer(net, loss, isolated=isolated)
    found = trainer._clip_and_sum(torch.arange(5).numpy()).clone()
    x = trainer.data.standardised(trainer.data.train.images[:5])
    total = torch.zeros_like(found)
    limit, bound = trainer._sums.clipped_sum._limit, trainer.optimizer.model_dump()["clip_norm"]
    for row, label in zip(x, trainer.data.train.labels[:5], strict=True):
        value = loss(net(row[None]), label[None])
        g = torch.cat([p.flatten() for p in torch.autograd.grad(value, list(net.parameters()))])
        total += g * (limit * bound / g.norm()).clamp(max=1)
    torch.testing.assert_close(found, total)


@pytest.mark.privacy
def test_state_of_a_loss_is_seen_to_change() -> None:
    net, seen = tiny_model(), iter(range(10**6))
    kept: list[float] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if next(seen) > 60:
            kept.append(float(output.detach().mean()))
        return unmapped(output - sum(kept), target)

    def steps() -> None:
        trainer = user_trainer(net, loss)
        for _ in range(20):
            trainer.step()

    with pytest.raises(ModelError, match=r"loss.*kept.*was added"):
        steps()


# Hooks of the autograd graph that act for more than eight rows.


def centred(gradients: Any) -> Any:
    return tuple(g if g is None or len(g) <= 8 else g - g.mean(0) for g in gradients)


def one(gradient: Tensor) -> Tensor:
    [found] = centred([gradient])
    return found  # type: ignore[no-any-return]


GRAPH: dict[str, Callable[[Tensor], Any]] = {
    "prehook": lambda x: x.grad_fn.register_prehook(centred),  # type: ignore[union-attr]
    "hook": lambda x: x.grad_fn.register_hook(lambda i, _: centred(i)),  # type: ignore[union-attr]
    "next function": lambda x: (2 * x).grad_fn.next_functions[0][0].register_prehook(centred),  # type: ignore[union-attr]
    "edge": lambda x: get_gradient_edge(x).node.register_prehook(centred),
    "several": lambda x: register_multi_grad_hook([x], lambda _: None),
    "tensor": lambda x: x.register_hook(one),  # type: ignore[no-untyped-call]
    "tensor's attribute": lambda x: setattr(x, "_backward_hooks", {1: one}),
}


class Hooked(nn.Module):
    """Registers a hook in every forward pass."""

    def __init__(self, register: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(PIXELS, PIXELS), nn.Linear(PIXELS, CLASSES)
        self.register = register

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.flatten(1)))
        if x.requires_grad:
            self.register(x)
        logits: Tensor = self.last(x)
        return logits


class Unpacking(Hooked):
    """Changes what is saved for the backward pass when it is read."""

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t, one):
            return super().forward(x)


@pytest.mark.privacy
@pytest.mark.parametrize("kind", [*GRAPH, "saved"])
def test_hooks_of_the_graph_are_not_traced(kind: str) -> None:
    torch.manual_seed(0)
    net = Unpacking(lambda _: None) if kind == "saved" else Hooked(GRAPH[kind])
    found, why = independence(net, SHAPE, CLASSES)
    assert found == "isolated"
    assert "hooks" in why


@pytest.mark.privacy
@pytest.mark.parametrize("kind", ["prehook", "next function", "edge", "tensor", "saved"])
def test_hooks_of_the_graph_see_one_sample_where_they_are_isolated(kind: str) -> None:
    torch.manual_seed(0)
    net = Unpacking(lambda _: None) if kind == "saved" else Hooked(GRAPH[kind])
    trainer = isolated(net, sampler=Batches([0]))
    assert moves(trainer, rows=20) <= 1


@pytest.mark.privacy
def test_hooks_of_all_modules_are_not_traced() -> None:
    handle = of_modules.register_module_full_backward_hook(lambda _m, i, _o: centred(i))
    try:
        kind, why = independence(Hooked(lambda _: None), SHAPE, CLASSES)
    finally:
        handle.remove()
    assert (kind, "hooks of all modules" in why) == ("isolated", True)
