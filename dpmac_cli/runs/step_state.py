"""Saved states of private steps: what they must have in common with the program that loads them."""

from collections.abc import Mapping
from dataclasses import replace
from platform import python_version
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batches import map_rows
from dpmac_cli.dp.rules import Rule
from dpmac_cli.errors import InputError, ModelError, raise_errors
from dpmac_cli.models.code_digests import UNREADABLE, code_digests
from dpmac_cli.runs.environment import differences, environment, repeatable
from dpmac_cli.runs.step_arguments import device_of
from dpmac_cli.runs.step_engine import StepEngine
from dpmac_cli.storage.digest import digest
from dpmac_cli.training.lineage import Training, attach

#: Software that must be the same: its versions and source decide what is computed.
SOFTWARE = ("dpmac", "source of dpmac", "torch", "numpy", "Python")
#: Largest number of changed parts that a message names.
NAMED = 4
#: Remedy if a training cannot be continued exactly.
AGAIN = (
    "PrivateStep.load_parameters(network, state, taken=N) copies the saved parameters into a "
    "network, with the privacy cost of the N steps taken so far. Then create a new PrivateStep on "
    "it: it draws new noise, and its epsilon also counts those steps."
)


def program_of(model: nn.Module, loss: object, rule: Rule | None) -> dict[str, str]:
    """Return digests by name of the software and code that compute a step.

    Parameters and buffers of the network are not included: see :func:`fixed_of`.
    """
    apart = [*model.state_dict(keep_vars=True).values(), *model.parameters()]
    if isinstance(loss, nn.Module):
        apart += [p for p in loss.parameters() if p.requires_grad]
    found = environment(device_of(model)) | {"Python": python_version()}
    software = {name: str(found[name]) for name in SOFTWARE}
    parts = {"network": model, "loss": loss, "rule": rule}
    return software | code_digests(parts, set(map(id, apart)))


def check_readable(program: Mapping[str, str]) -> None:
    """Raise InputError if a part of a program cannot be compared with that of another one."""
    unreadable = [name for name, value in program.items() if value == UNREADABLE]
    if unreadable:
        raise InputError(
            f"{_listed(unreadable)} cannot be compared with that of another program, so this "
            "training cannot be continued by one: with other code, the same noise would be added "
            "to other sums. Keep only tensors, numbers, text, functions and plain objects in the "
            "network and the loss."
        )


def check_program(now: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Raise InputError if a saved training computed its steps with other code or software."""
    check_readable(now)
    changed = [name for name in {**saved, **now} if now.get(name) != saved.get(name)]
    if changed:
        raise InputError(
            f"The code that computes a step is not that of the saved state: {_listed(changed)} "
            "changed. The noise of steps that the other program took would be added to other "
            "sums, and the difference of the two reveals records without any noise. Use the same "
            f"network, loss and versions. {AGAIN}"
        )


def check_settings(mine: Mapping[str, Any], saved: Mapping[str, Any], free: set[str]) -> None:
    """Raise InputError if a saved training has other settings, except for those that are free."""
    names = [n for n in {**mine, **saved} if n not in free and mine.get(n) != saved.get(n)]
    raise_errors(
        f"{name} is {mine.get(name)}, but {saved.get(name)} in the saved state. Use the same."
        for name in names
    )


def why_not_repeated(device: torch.device, saved: Mapping[str, Any], *, drawn: bool) -> str:
    """Return why further steps cannot repeat those of another program; "" if they do.

    Args:
        device: device of the network.
        saved: environment of the other program.
        drawn: whether dpmac draws the batches.
    """
    changed = sorted(differences(environment(device), saved))
    if changed:
        return f"the machine or its settings changed ({', '.join(changed)})"
    if not repeatable(device):
        return "steps on a GPU cannot be repeated bit for bit"
    return "" if drawn else "the batches of your own loader may be others"


def new_noise_note(why: str, taken: int) -> str:
    """Return a note on a continuation with new noise, from the number of steps in the state."""
    return (
        f"New noise is drawn after step {taken}: {why}. Epsilon does not count steps that another "
        f"program took after it saved this state. If it took any, do not continue it: {AGAIN}"
    )


def fixed_of(model: nn.Module, trained: set[int]) -> str:
    """Return the SHA-256 of everything in a network that is not trained."""
    fixed = {
        name: tensor.detach().cpu()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if id(tensor) not in trained
    }
    return digest(fixed, {})


class SavedEngine(TypedDict):
    """Saved values of a network and its engine, with tensors on the CPU.

    ``places`` says where parameters are in theta: shape, strides and offset by name.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    last_lr: float
    environment: dict[str, Any]
    training: dict[str, Any]
    structure: Any
    public: Any
    fixed: str
    places: dict[str, tuple[Any, ...]]


class SavedStep(SavedEngine):
    """A state of :class:`.PrivateStep`: its engine, and what was said of the training."""

    begun: int
    earlier: list[dict[str, Any]]
    settings: dict[str, Any]
    sampling: str
    lr: float
    steps: int
    program: dict[str, Any]
    records: str


def saved_of(model: nn.Module, engine: StepEngine) -> SavedEngine:
    """Return what is saved of a network and its engine."""
    engine.history.before_step()  # parameters that were written are part of the state
    state, structure, trained = engine.descent.state, engine.structure, engine.sums.trained
    return {
        "tensors": {name: t.detach().cpu().clone() for name, t in state.tensors().items()},
        "numbers": state.numbers(),
        "last_lr": engine.history.rate,
        "environment": dict(engine.environment),
        "training": engine.training.as_json(),
        "structure": map_rows(Tensor.cpu, structure.template),
        "public": structure.keep,
        "fixed": fixed_of(model, trained),
        "places": {
            name: (tuple(p.shape), p.stride(), p.storage_offset())
            for name, p in model.named_parameters()
            if id(p) in trained
        },
    }


def checked_state(given: object) -> SavedStep:
    """Return a state of :class:`.PrivateStep`. Raises InputError if it is not one."""
    known = SavedStep.__required_keys__
    missing = sorted(known - given.keys()) if isinstance(given, Mapping) else sorted(known)
    if missing:
        raise InputError(
            f"This is not a state of PrivateStep: it has no {_listed(missing)}. Pass what "
            "step.state_dict() returned, or what torch.load read of it. The state_dict of a "
            "network goes to network.load_state_dict(...), which does not know what its training "
            "cost."
        )
    return cast(SavedStep, given)


@torch.no_grad()
def load_parameters(model: nn.Module, given: object, taken: int) -> None:
    """Copy saved parameters into a network, which then carries their privacy cost.

    For arguments and errors see :meth:`.PrivateStep.load_parameters`.
    """
    saved = checked_state(given)
    training = Training.of_json(saved["training"])
    if not training.begun <= taken <= training.event.steps:
        raise InputError(
            f"taken is {taken}, but the state holds {training.begun} of {training.event.steps} "
            "steps. Set it to the number of steps that were taken, also after the state was saved."
        )
    mine: dict[str, Tensor] = dict(model.named_parameters())
    odd = [n for n, (shape, *_) in saved["places"].items() if shape != tuple(_shape(mine.get(n)))]
    if odd:
        raise ModelError(f"The saved state belongs to another network: {_listed(odd)} differ.")
    for each in (*map(Training.of_json, saved["earlier"]), replace(training, begun=taken)):
        attach(model, each)
    for name, place in saved["places"].items():
        mine[name].copy_(saved["tensors"]["theta"].as_strided(*place))


def _shape(tensor: Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.shape)


def _listed(names: list[str]) -> str:
    named = ", ".join(names[:NAMED])
    rest = len(names) - NAMED
    return named if rest <= 0 else f"{named} and {rest} more"
