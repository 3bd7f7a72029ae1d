"""Private training that a network has gone through, which it carries along.

Training a network again with the same records composes with what was done before. So every module
and parameter of a network in private training refers to a :class:`Training`, also in a deep copy
and as a part of another network. A state dict does not hold it.
"""

import inspect
import secrets
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from pydantic import TypeAdapter
from torch import nn

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.errors import ModelError

#: Name of the attribute of modules and parameters that holds their trainings.
LINEAGE = "_dpmac_lineage"


@dataclass(slots=True, kw_only=True)
class Training:
    """One training of a network.

    Attributes:
        event: its accounting event, with any number of steps.
        unit: unit of privacy, in words, and what tells the units of records apart.
        private: whether it was private at all. seeded: whether a seed was chosen.
        secure: whether all random numbers came from a cipher.
        begun: number of steps that may have used records.
        number: random number, the same in copies of the network.
        searched: whether it is the best trial of a search, which costs more than its event.
    """

    event: TrainingEvent
    unit: tuple[str, str]
    private: bool
    seeded: bool
    secure: bool
    begun: int = 0
    number: str = field(default_factory=lambda: secrets.token_hex(16))
    searched: bool = False

    def __deepcopy__(self, memo: Any) -> "Training":
        """Return this training: a copy of a network may average the weights of later steps."""
        return self

    def begin(self, steps: int = 1) -> None:
        """Count steps that are about to use records, or that are left out of an epoch."""
        self.begun += steps

    @property
    def done(self) -> TrainingEvent:
        """Return the event of the steps that have begun."""
        return replace(self.event, steps=self.begun)


#: Variables of modules and parameters.
Parts: TypeAlias = Sequence[dict[str, Any]]
#: Folders of installed packages and of Python's library.
PACKAGES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
#: Values that hold no network.
PLAIN = (str, bytes, int, float, complex, type(None))
#: Reads a training from the result of ``asdict``.
TRAINING = TypeAdapter(Training)


def attach(network: nn.Module, training: Training) -> None:
    """Make a network, and every part of it, carry a training."""
    for part in _parts(network):
        part[LINEAGE] = (*part.get(LINEAGE, ()), training)


def carried_by(network: nn.Module, loss: Any = None) -> tuple[Training, ...]:
    """Return the trainings with steps that a network or its loss carries in any part.

    That includes networks and parameters that either holds or reads, such as a teacher in a list,
    an object, a closure or a global. A pickled copy of a network that was trained further since has
    begun fewer steps; the most count.
    """
    return trainings_of(_parts_held_by(network, loss))


def parts_held_by(network: nn.Module, loss: Any = None) -> Parts:
    """Return the parts of a network, and of others that it or its loss holds or reads."""
    return list(_parts_held_by(network, loss))


def trainings_of(parts: Iterable[dict[str, Any]]) -> tuple[Training, ...]:
    """Return the trainings with steps that some parts carry."""
    found: dict[str, Training] = {}
    for training in chain.from_iterable(part.get(LINEAGE, ()) for part in parts):
        if training.begun > 0:
            known = found.setdefault(training.number, training)
            found[training.number] = max(known, training, key=lambda each: each.begun)
    return tuple(found.values())


def check_counted(now: Iterable[Training], counted: Mapping[str, int]) -> None:
    """Raise ModelError if a training has begun more steps than are counted, by its number."""
    if any(training.begun > counted.get(training.number, 0) for training in now):
        raise ModelError(
            "The network, or one that it or its loss uses, was trained by another PrivateStep or "
            "make_private since this one was created, so its epsilon does not count those steps. "
            "Create this one again. To train several networks together, make them parts of one."
        )


def check_composable(earlier: Sequence[Training], unit: tuple[str, str]) -> None:
    """Raise ModelError if the cost of earlier trainings cannot be added to that of a new one."""
    if any(not training.private for training in earlier):
        raise ModelError(
            "The network was trained without privacy before (no_dp), so no noise covers what its "
            "weights reveal of those records. Start from weights that are public, or that were "
            "trained privately."
        )
    if any(training.searched for training in earlier):
        raise ModelError(
            "The network is the result of a search (dpmac tune), whose cost cannot be added to "
            "that of a training. Use it as it is, or start from a network that was not trained on "
            "these records."
        )
    others = sorted({training.unit[0] for training in earlier if training.unit != unit})
    if others:
        raise ModelError(
            f"The network was trained privately before, and one {others[0]} was protected. Now it "
            f"is one {unit[0]}, and costs of different units cannot be added. Use the same unit, "
            "or start from a network that was not trained on these records."
        )


def _parts(network: nn.Module) -> Iterator[dict[str, Any]]:
    return map(vars, chain(network.modules(), network.parameters()))


def _parts_held_by(*holders: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of networks among some objects, and of those that they hold or read."""
    left, seen = list(holders), dict[int, Any]()
    while left:
        value = left.pop()
        if isinstance(value, PLAIN) or id(value) in seen:
            continue
        seen[id(value)] = value  # while it is held, no other object gets its id
        if isinstance(value, (nn.Module, nn.Parameter)):
            yield vars(value)
        if isinstance(value, nn.Module):
            left += [*vars(value).values(), value.forward]
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, partial):
            left += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, (FunctionType, MethodType)):
            function = inspect.unwrap(value)
            left += [function, getattr(value, "__self__", None)]  # of a compiled network, itself
            if isinstance(function, (FunctionType, MethodType)):
                read = inspect.getclosurevars(function)
                left += [*read.nonlocals.values(), *filter(_is_followed, read.globals.values())]
                given = getattr(function, "__kwdefaults__", None) or {}
                left += [*(function.__defaults__ or ()), *given.values()]
        elif not isinstance(value, (type, ModuleType)):
            held = getattr(value, "__dict__", None)
            left += held.values() if isinstance(held, dict) else ()


def _is_followed(value: Any) -> bool:
    """Return whether a global of a function may lead to a trained network.

    The functions of installed packages do not.
    """
    return not (isinstance(value, FunctionType) and value.__code__.co_filename.startswith(PACKAGES))
