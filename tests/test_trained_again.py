"""A network carries its private training along: training it again adds up."""

import copy
import json
import math
import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

from dpmac_cli import (
    ArrayData,
    BudgetError,
    InputError,
    Poisson,
    PrivateStep,
    make_private,
    total_epsilon,
)
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.statements import SEED_GIVEN
from dpmac_cli.errors import ModelError
from dpmac_cli.release.model_file import _account, load_model
from dpmac_cli.release.model_file import load_model as loaded
from dpmac_cli.release.run import Run
from dpmac_cli.runs.ledger import Ledger
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.training.carried_accounts import attach, carried_by
from tests.digits_runs import digits_network as network
from tests.digits_runs import train_digits

SETTINGS: dict[str, Any] = {"sigma": 6, "steps": 4, "batch_size": 128, "device": "cpu"}


pytestmark = pytest.mark.usefixtures("unvalidated")


def trained(net: nn.Module, **settings: Any) -> Any:
    private = make_private(net, "digits", **{**SETTINGS, **settings})
    list(private)
    return private


def both(*privates: Any) -> float:
    events = tuple(p.plan.event.first(p._step.state.step) for p in privates)
    return total_epsilon(events, privates[0].plan.settings.delta)


@pytest.mark.promise("price")
def test_delta_covers_the_random_places_of_earlier_trainings() -> None:
    """Which had as few as their own delta allows."""
    tiny = 3e-18
    assert math.isfinite(trained(network(), delta=tiny).epsilon)
    net = network()
    trained(net)  # at 1e-5
    assert math.isinf(trained(net, delta=tiny).epsilon)


def counts_of(net: nn.Module) -> dict[str, int]:
    """Return the number of steps of each account that a network carries, by its number."""
    return {account.number: account.count for account in carried_by(net)}


@pytest.mark.promise("again")
def test_a_cell_that_is_run_again_pays_for_both(tmp_path: Path) -> None:
    net = network()
    first = trained(net)
    second = trained(net, sigma=4)
    assert second.epsilon == both(first, second) > first.epsilon
    [note] = [note for note in second.notes if "trained privately before" in note]
    assert "those steps too (4)" in note
    report = second.publish(tmp_path / "out").report
    assert report["epsilon"] == pytest.approx(second.epsilon, rel=1e-3)
    assert [e["noise_multiplier"] for e in report["events"]] == [6, 4]
    assert "noise multiplier 6" in (tmp_path / "out/model-card.md").read_text()


@pytest.mark.promise("again")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    "wrapped",
    [
        copy.deepcopy,
        lambda net: nn.Sequential(*net[:3], nn.Linear(8, 10)),
        lambda net: nn.Sequential(copy.deepcopy(net), nn.Identity()),
        lambda net: nn.Sequential(nn.Flatten(), net[1].requires_grad_(False), nn.Linear(8, 10)),
        pytest.param(lambda net: torch.compile(net, backend="eager"), marks=pytest.mark.long),
    ],
    ids=["copy", "part", "part of a copy", "frozen part", "compiled"],
)
def test_copies_and_parts_carry_it_along(wrapped: Any) -> None:
    net = network()
    first = trained(net)
    second = make_private(wrapped(net), "digits", **SETTINGS)
    assert second.epsilon == first.epsilon
    second.step()
    assert second.epsilon == both(first, second)


#: A teacher of the loss below.
TEACHER = network()


class Student(nn.Module):
    """Starts from the outputs of a teacher that is not one of its modules."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.own, self.held = network(), [teacher]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            given = self.held[0](x)
        out: Tensor = self.own(x) + given
        return out


@pytest.mark.promise("again")
def test_what_a_teacher_learned_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = network()
    first = trained(teacher)
    monkeypatch.setattr(sys.modules[__name__], "TEACHER", teacher)

    def from_global(output: Tensor, target: Tensor) -> Tensor:
        pull = (output - TEACHER[3].bias.detach()).square().mean()  # type: ignore[operator]
        return cross_entropy(output, target) + pull

    def from_closure(output: Tensor, target: Tensor) -> Tensor:
        pull = (output - teacher[3].bias.detach()).square().mean()  # type: ignore[operator]
        return cross_entropy(output, target) + pull

    for loss in (from_global, from_closure):
        assert carried_by(network(), loss) == carried_by(teacher)
    assert carried_by(Student(teacher)) == carried_by(teacher)
    second = trained(network(), loss=from_closure)
    assert second.epsilon == both(first, second) > first.epsilon


@pytest.mark.promise("again")
def test_what_a_teacher_learned_is_added_also_without_the_teacher(tmp_path: Path) -> None:
    """The weights of a student came from its teacher's, too, and those of a student of it."""
    teacher, student, last = network(), network(), network()
    first = trained(teacher)

    def distilled_from(net: nn.Module) -> Any:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            pull = (output - net.get_parameter("3.bias").detach()).square().mean()
            total: Tensor = cross_entropy(output, target) + pull
            return total

        return loss

    second = trained(student, sigma=5, loss=distilled_from(teacher))
    second.publish(tmp_path / "out")
    third = trained(last, sigma=4, loss=distilled_from(student))
    assert third.epsilon == both(first, second, third) > second.epsilon
    again = trained(last, sigma=3)
    assert again.epsilon == both(first, second, third, again)
    whole = nn.ModuleList([pickle.loads(pickle.dumps(last)), teacher, student])
    assert counts_of(whole) == counts_of(last)  # none twice
    assert len(counts_of(last)) == 4
    built = loaded(tmp_path / "out", network=network()).model
    assert make_private(built, "digits", **SETTINGS).epsilon == second.epsilon


@pytest.mark.promise("again")
def test_a_pickled_network_of_a_resumed_run_carries_all_parts() -> None:
    event = resolve(SETTINGS, dataset="digits").plan.event
    before, net = Account(event=event, begun=2), network()
    attach(net, ledger := Ledger(event=event.first(2), base=2, begun=3, earlier=(before,)))
    assert counts_of(net) == {before.number: 2, ledger.number: 1}
    assert counts_of(pickle.loads(pickle.dumps(net))) == counts_of(net)


@pytest.mark.promise("again")
def test_of_copies_of_a_training_the_longest_counts() -> None:
    """As when a network is unpickled twice, and one of them is trained further."""
    event = resolve(SETTINGS, dataset="digits").plan.event
    less = Account(event=event, begun=1)
    more = replace(less, begun=3)
    one, other = network(), network()
    attach(one, less)
    attach(other, more)
    assert carried_by(nn.Sequential(one, other)) == (more,)
    assert carried_by(nn.Sequential(other, one)) == (more,)


@pytest.mark.promise("again")
def test_what_a_network_that_weights_read_learned_is_added() -> None:
    teacher = network()
    first = trained(teacher)

    def sure(x: Tensor, _: Tensor) -> Tensor:
        found: Tensor = teacher(x.float()).softmax(1).amax(1)
        return found

    second = make_private(network(), "digits", weights=sure, **SETTINGS)
    assert second.epsilon == first.epsilon > 0


class Distilling:
    """A loss with a teacher, as an object or by a method."""

    def __init__(self, teacher: nn.Module) -> None:
        self.parts = SimpleNamespace(teacher=teacher)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        bias: Tensor = self.parts.teacher[3].bias.detach()
        pull = (output - bias).square().mean()
        return cross_entropy(output, target) + pull


def distilled(output: Tensor, target: Tensor) -> Tensor:
    """A loss that reads the global by a function."""
    return Distilling(TEACHER)(output, target)


def by_function(output: Tensor, target: Tensor) -> Tensor:
    return distilled(output, target)


def by_inner_function(output: Tensor, target: Tensor) -> Tensor:
    def inner() -> Tensor:
        return distilled(output, target)

    return inner()


#: Another module of a program, with a teacher.
OTHER: Any = ModuleType("other")
OTHER.__file__ = "other.py"


def by_module(output: Tensor, target: Tensor) -> Tensor:
    loss = Distilling(OTHER.teacher_of_other)
    return loss(output, target)


class ByMethod:
    """A loss with a method, a property and a variable of its class."""

    teacher: nn.Module | None = None

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.found(output, target)

    def by_property(self, output: Tensor, target: Tensor) -> Tensor:
        found: Tensor = self.loss(output, target)
        return found

    def of_class(self, output: Tensor, target: Tensor) -> Tensor:
        return Distilling(type(self).teacher or TEACHER)(output, target)

    def found(self, output: Tensor, target: Tensor) -> Tensor:
        return distilled(output, target)

    @property
    def loss(self) -> Any:
        return Distilling(TEACHER)


class Helped(nn.Module):
    """Reads a teacher in a method beside ``forward``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.helped(x)

    def helped(self, x: Tensor) -> Tensor:
        given: Tensor = TEACHER(x)
        return given


@pytest.mark.promise("again")
@pytest.mark.parametrize(
    "holding",
    [
        Distilling,
        lambda teacher: Distilling(teacher).__call__,
        lambda teacher: lambda output, target, held=teacher: cross_entropy(output, target),
        lambda teacher: lambda *_, held=teacher: None,
        lambda teacher: partial(print, [*teacher.parameters()]),
        lambda teacher: partial(print, dict(teacher.named_parameters())),
        lambda teacher: teacher.forward,
        lambda teacher: by_function,
        lambda teacher: by_inner_function,
        lambda teacher: by_module,
        lambda teacher: ByMethod(),
        lambda teacher: ByMethod().by_property,
        lambda teacher: type("Held", (ByMethod,), {"teacher": teacher})().of_class,
        lambda teacher: Helped(),
    ],
    ids=[
        *("object", "method", "default", "keyword", "parameters", "named parameters", "forward"),
        *("function", "inner function", "module", "own method", "property", "class", "helper"),
    ],
)
def test_a_teacher_is_found_wherever_a_loss_holds_it(
    holding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = network()
    done = Account(event=resolve(SETTINGS, dataset="digits").plan.event)
    done.begin(done.steps(1))
    attach(teacher, done)
    monkeypatch.setattr(sys.modules[__name__], "TEACHER", teacher)
    monkeypatch.setattr(OTHER, "teacher_of_other", teacher, raising=False)
    assert carried_by(network(), holding(teacher)) == (done,)


@pytest.mark.promise("again")
def test_networks_that_learn_from_each_other_are_not_charged_alone() -> None:
    one, other = network(), network()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        pull = (output - other[3].bias.detach()).square().mean()  # type: ignore[operator]
        return cross_entropy(output, target) + pull

    first = make_private(one, "digits", loss=loss, **SETTINGS)
    second = make_private(other, "digits", **SETTINGS)
    first.step()
    second.step()
    with pytest.raises(ModelError, match="or one that it or its loss uses, was trained by another"):
        first.step()
    assert first.taken == 1


@pytest.mark.promise("again")
def test_a_part_that_is_trained_by_another_is_not_charged_alone() -> None:
    body = nn.Linear(64, 10)
    whole = nn.Sequential(nn.Flatten(), body, nn.ReLU(), nn.Linear(10, 10))
    first = make_private(nn.Sequential(nn.Flatten(), body), "digits", **SETTINGS)
    body.requires_grad_(False)
    second = make_private(whole, "digits", **SETTINGS)
    body.requires_grad_(True)
    first.step()
    body.requires_grad_(False)
    with pytest.raises(ModelError, match="was trained by another PrivateStep or make_private"):
        second.step()
    assert second.taken == 0


@pytest.mark.promise("target")
def test_earlier_training_does_not_go_on_below_a_budget() -> None:
    """A private step lays the network out when its records are known, and plans before."""
    net = nn.Linear(2, 2)
    settings: dict[str, Any] = {"sigma": 6, "steps": 4, "delta": 1e-5}

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

    sampling = Poisson(n=40, batch_size=8)
    first = PrivateStep(net, loss, sampling=sampling, **settings)
    data = [(torch.full((2,), float(row)), row % 2) for row in range(40)]
    batches = first.loader(data)
    first(next(batches))
    second = PrivateStep(net, loss, sampling=sampling, max_epsilon=5.0, **settings)
    first(next(batches))
    with pytest.raises(ModelError, match="since this one was created"):
        second.loader(data)


@pytest.mark.promise("again")
def test_a_copy_made_in_the_middle_counts_the_steps_that_follow() -> None:
    """A moving average is a copy that later weights are added to."""
    net = network()
    private = make_private(net, "digits", **SETTINGS)
    private.step()
    average = AveragedModel(net)
    stored = pickle.loads(pickle.dumps(net))
    private.step()
    average.update_parameters(net)
    assert [t.begun for t in carried_by(average)] == [2]
    assert [t.begun for t in carried_by(stored)] == [1]
    assert [t.begun for t in carried_by(nn.ModuleList([stored, net]))] == [2]


@pytest.mark.promise("again")
def test_noise_is_calibrated_for_what_is_left() -> None:
    net, whole = network(), 1437  # records: the cost of such batches takes little time to compute
    first = trained(net, batch_size=whole, sigma=20)
    settings: dict[str, Any] = {"epsilon": 1.0, "epochs": 1, "batch_size": whole}
    fresh, second = (make_private(n, "digits", **settings) for n in (network(), net))
    assert second.plan.event.noise_multiplier > fresh.plan.event.noise_multiplier
    list(second)
    assert second.epsilon == both(first, second) <= 1.0
    with pytest.raises(BudgetError, match=r"Epsilon 0\.01 is spent: earlier training costs"):
        make_private(net, "digits", **{**settings, "epsilon": 0.01})


@pytest.mark.promise("again")
def test_max_epsilon_counts_earlier_steps() -> None:
    net = network()
    trained(net, sigma=2)
    settings = {**SETTINGS, "steps": 400, "max_epsilon": 1.0}
    fresh, second = (make_private(n, "digits", **settings) for n in (network(), net))
    assert 0 < len(second) < len(fresh)
    cost = total_epsilon((*second._account.before, second.plan.event.first(len(second))), 1e-5)
    assert cost <= 1.0


@pytest.mark.promise("said")
def test_a_seed_of_earlier_training_is_said_at_every_door(tmp_path: Path) -> None:
    """Whoever knows it subtracts the noise of those steps."""
    run = train_digits(out=tmp_path / "run", seed=1, model="linear", **SETTINGS)
    released = load_model(run.folder).model
    poisson = Poisson(n=100, batch_size=50)
    step = PrivateStep(released, lambda net, x: net(x).sum(1), sampling=poisson, sigma=6, steps=1)
    private = make_private(released, "digits", **SETTINGS)
    report = private.publish(tmp_path / "loop").report
    card = (tmp_path / "loop" / "model-card.md").read_text()
    said = [step.statement, private.statement, *step.notes[-1:], *private.notes[-1:]]
    said += [report["sentences"]["seeds"], " ".join(card.split())]
    assert all(SEED_GIVEN in text for text in said)
    unseeded = make_private(network(), "digits", **SETTINGS)
    assert not unseeded._account.seeded
    assert SEED_GIVEN not in (*unseeded.notes, unseeded.statement)


@pytest.mark.promise("again")
def test_what_cannot_be_added_is_refused() -> None:
    net = network()
    trained(net, no_dp=True, sigma=None)
    with pytest.raises(ModelError, match="trained without privacy before"):
        make_private(net, "digits", **SETTINGS)
    with pytest.raises(ModelError, match="trained without privacy before"):
        make_private(net, "digits", epsilon=3, epochs=1, batch_size=1437)
    trained(net, no_dp=True, sigma=None)  # promises nothing
    net = network()
    trained(net)
    with pytest.raises(InputError, match="an audit tests one guarantee"):
        make_private(net, "digits", canaries=10, **SETTINGS)


@pytest.mark.promise("again")
def test_costs_of_other_units_are_not_added() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (600, 8, 8), dtype=np.uint8), np.arange(600) % 10
    names = [str(n) for n in range(10)]
    single = ArrayData(x, y, classes=names)
    grouped = ArrayData(x, y, classes=names, unit=np.arange(600) // 3)
    net = network()
    options: dict[str, Any] = {"sigma": 6, "steps": 1, "batch_size": 32, "device": "cpu"}
    list(make_private(net, single, **options))
    with pytest.raises(ModelError, match="costs of different units cannot be added"):
        make_private(net, grouped, unit="unit", **options)


@pytest.mark.promise("again")
def test_a_published_model_carries_its_training(tmp_path: Path) -> None:
    private = trained(network(), optimizer="dp-macadam")
    private.publish(tmp_path / "out")
    facts = json.loads((tmp_path / "out/report.json").read_text())
    assert facts["events"]
    config = resolve(SETTINGS, dataset="digits", model="linear").plan
    from dpmac_cli import train  # noqa: PLC0415

    train(SETTINGS, dataset="digits", out=str(tmp_path / "run"))
    loaded = load_model(tmp_path / "run").model
    again = make_private(loaded, "digits", **SETTINGS)
    assert again.epsilon == total_epsilon((config.event,), config.settings.delta)


@pytest.mark.promise("again")
def test_a_published_model_tells_of_its_seed_and_of_every_part(finished: Run) -> None:
    header: Any = loaded(finished.folder).facts
    for seeded in (True, False):
        [event] = header.events
        more = event.first(event.steps + 1)
        told = header.model_copy(update={"seeded": seeded, "events": (event, more)})
        found = _account(told)
        assert found.seeded == seeded
        assert found.own == (event, more)
