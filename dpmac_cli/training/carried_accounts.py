"""Accounts of the training that a network has gone through, which it carries along.

Training a network again with the same records composes with what was done before. So every module
and parameter of a network in private training refers to its account, also in a deep copy and as a
part of another network. A state dict does not hold it.
"""

import inspect
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from pydantic import TypeAdapter
from torch import nn

from dpmac_cli.accounting.account import Account

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
    """Make a network, and every part of it, carry an account."""
    for part in _parts(network):
        part[CARRIED] = (*part.get(CARRIED, ()), account)


def carried_by(network: nn.Module, loss: Any = None) -> tuple[Account, ...]:
    """Return the accounts with events that a network or its loss carries in any part.

    That includes networks and parameters that either holds or reads, such as a teacher in a list,
    an object, a closure or a global. A pickled copy of a network that was trained further since has
    begun fewer steps; the most count.
    """
    return accounts_of(_parts_held_by(network, loss))


def parts_held_by(network: nn.Module, loss: Any = None) -> Parts:
    """Return the parts of a network, and of others that it or its loss holds or reads."""
    return list(_parts_held_by(network, loss))


def accounts_of(parts: Iterable[dict[str, Any]]) -> tuple[Account, ...]:
    """Return the accounts with events that some parts carry, and those that these count as earlier.

    A network that learned from a teacher has weights that came from the teacher's training, too,
    also once the teacher is gone.
    """
    found: dict[str, Account] = {}
    carried = chain.from_iterable(part.get(CARRIED, ()) for part in parts)
    begun = (account for account in carried if account.count > 0)
    for account in chain.from_iterable((*each.earlier, each) for each in begun):
        known = found.setdefault(account.number, account)
        found[account.number] = max(known, account, key=lambda each: each.count)
    return tuple(found.values())


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
