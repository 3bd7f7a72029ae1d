"""Accounts of the training that a network has gone through, which it carries along.

Training a network again with the same records composes with what was done before. So every module
and parameter of a network in private training refers to its account, also in a deep copy and as a
part of another network. A state dict does not hold it.
"""

import inspect
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from pydantic import TypeAdapter
from torch import nn

from dpmac_cli.accounting.account import RECORD_UNIT, Account
from dpmac_cli.errors import ModelError

#: Name of the attribute of modules and parameters that holds their accounts.
CARRIED = "_dpmac_accounts"


#: Variables of modules and parameters.
Parts: TypeAlias = Sequence[dict[str, Any]]
#: Folders of installed packages and of Python's library.
PACKAGES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
#: Values that hold no network.
PLAIN = (str, bytes, int, float, complex, type(None))
#: Reads an account from the result of ``asdict``.
ACCOUNT = TypeAdapter(Account)


def attach(network: nn.Module, account: Account) -> None:
    """Make a network, and every module and parameter of it, carry an account.

    What it carried before stays. :func:`carried_by` returns it, also from a copy of a part. The
    account itself is carried, not a copy: what begins later counts too.

    Args:
        network: the network, which is changed in place. Nothing of it is in its state dict.
        account: account of the training that it is about to go through.
    """
    for part in _parts(network):
        part[CARRIED] = (*part.get(CARRIED, ()), account)


def carried_by(network: nn.Module, loss: Any = None) -> tuple[Account, ...]:
    """Return the accounts with events that a network or its loss carries in any part.

    That includes networks and parameters that either holds or reads, such as a teacher in a list,
    an object, a closure or a global. A pickled copy of a network that was trained further since has
    begun fewer steps; the most count.

    Args:
        network: the network.
        loss: the loss, or any other object that a step calls or reads; None for none.

    Returns:
        Each account once, with those that it counts as earlier before it. () for a network that no
        training with records has begun for.
    """
    return accounts_of(_parts_held_by(network, loss))


def parts_held_by(network: nn.Module, loss: Any = None) -> Parts:
    """Return the parts of a network, and of others that it or its loss holds or reads.

    They are found once, and :func:`accounts_of` then reads their accounts as often as needed.

    Args:
        network: the network.
        loss: the loss, or any other object that a step calls or reads; None for none.

    Returns:
        The variables of each module and parameter: the dicts themselves, not copies.
    """
    return list(_parts_held_by(network, loss))


def accounts_of(parts: Iterable[dict[str, Any]]) -> tuple[Account, ...]:
    """Return the accounts with events that some parts carry, and those that these count as earlier.

    A network that learned from a teacher has weights that came from the teacher's training, too,
    also once the teacher is gone.

    Args:
        parts: variables of modules and parameters, see :func:`parts_held_by`.

    Returns:
        Each account once; of copies of an account, the one that has begun the most. () for none.
    """
    longest: dict[str, Account] = {}  # by number, as copies of a training may have begun fewer
    for part in parts:
        for carried in part.get(CARRIED, ()):
            if carried.count == 0:
                continue
            for account in (*carried.earlier, carried):
                known = longest.setdefault(account.number, account)
                if account.count > known.count:
                    longest[account.number] = account
    return tuple(longest.values())


def steps_of(accounts: Iterable[Account], series: str) -> int:
    """Return the number of steps of a training that have begun, in all of its parts.

    Args:
        accounts: accounts, of which those of other trainings are left out.
        series: random number of the training, as in :class:`.Account`.
    """
    return sum(each.done.steps for each in accounts if each.series == series)


def _parts(network: nn.Module) -> Iterator[dict[str, Any]]:
    """Return the variables of each module and each parameter of a network."""
    return map(vars, chain(network.modules(), network.parameters()))


def _parts_held_by(*holders: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of networks among some objects, and of those that they hold or read."""
    waiting, seen = list(holders), dict[Any, Any]()
    while waiting:
        value = waiting.pop()
        bound = isinstance(value, MethodType)  # another object each time that it is looked up
        key = (id(value.__func__), id(value.__self__)) if bound else id(value)
        if isinstance(value, PLAIN) or key in seen:
            continue
        seen[key] = value  # while it is held, no other object gets its id
        if isinstance(value, (nn.Module, nn.Parameter)):
            yield vars(value)
        if isinstance(value, nn.Module):
            waiting += [*vars(value).values(), value.forward]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, (FunctionType, MethodType)):
            holder, function = getattr(value, "__self__", None), inspect.unwrap(value)
            while isinstance(function, MethodType):
                function = function.__func__
            waiting += [function, holder]  # of a compiled network, itself
            if isinstance(function, FunctionType):
                waiting += _read_by(function, holder)
        elif not isinstance(value, (type, ModuleType)):
            held = getattr(value, "__dict__", None)
            waiting += held.values() if isinstance(held, dict) else ()
            waiting += _attributes(value, ["__call__"])


def _read_by(function: FunctionType, holder: Any) -> Iterator[Any]:
    """Yield what a function, or one inside of it, may read, by the names in its code.

    These are variables of functions around it, defaults, globals, attributes of modules and classes
    among them, and attributes of its ``holder``'s class, such as other methods. The names in
    installed packages lead to no trained network.
    """
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it has no value yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if _is_installed(function.__code__.co_filename):
        return
    names = set(_names(function.__code__))
    yield from _attributes(holder, names)
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        yield value
        if isinstance(value, ModuleType) and not _is_installed(getattr(value, "__file__", None)):
            yield from (vars(value)[each] for each in names & vars(value).keys())
        elif isinstance(value, type):
            yield from _attributes(value, names)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in some code, and in functions inside of it."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names(value)


def _attributes(holder: Any, names: Iterable[str]) -> Iterator[Any]:
    """Yield attributes of an object's class, or of a class, by their names; no property is run."""
    kind = holder if isinstance(holder, type) else type(holder)
    for name in names:
        attribute = inspect.getattr_static(kind, name, None)
        if isinstance(attribute, property):
            attribute = attribute.fget
        elif isinstance(attribute, cached_property):
            attribute = attribute.func
        elif isinstance(attribute, (classmethod, staticmethod)):
            attribute = attribute.__func__
        if isinstance(attribute, FunctionType):
            attribute = MethodType(attribute, holder)
        yield attribute


def _is_installed(file: str | None) -> bool:
    """Return whether a file is of an installed package or of Python; a built-in has none."""
    return file is None or file.startswith(PACKAGES)


def check_composable(earlier: Sequence[Account], unit: tuple[str, str] = RECORD_UNIT) -> None:
    """Reject earlier accounts whose cost cannot be added to that of a new one.

    Args:
        earlier: accounts that a network carries; () is accepted.
        unit: unit of privacy of the training to come, as in :class:`.Account`.

    Raises:
        ModelError: one is of training without privacy, of a search, or of another unit.
    """
    if any(not account.private for account in earlier):
        raise ModelError(
            "The network was trained without privacy before (no_dp), so no noise covers what its "
            "weights reveal of those records. Start from weights that are public, or that were "
            "trained privately."
        )
    if any(account.searched for account in earlier):
        raise ModelError(
            "The network is the result of a search (dpmac tune), whose cost cannot be added to "
            "that of a training. Use it as it is, or start from a network that was not trained on "
            "these records."
        )
    others = sorted({account.unit[0] for account in earlier if account.unit != unit})
    if others:
        raise ModelError(
            f"The network was trained privately before, and one {others[0]} was protected. Now it "
            f"is one {unit[0]}, and costs of different units cannot be added. Use the same unit, "
            "or start from a network that was not trained on these records."
        )
