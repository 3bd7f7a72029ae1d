"""Copies of what a program gives, for one record each, so that no record leaves anything in them.

A copy shares parameters, which are read, and nothing that is written when it runs. A plain function
is its own copy: what it keeps in a global variable, or in one of the function around it, stays.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from dpmac_cli.dp.torch_errors import type_and_place
from dpmac_cli.errors import ModelError

Module = TypeVar("Module", bound=nn.Module)
Function = TypeVar("Function", bound=Callable[..., Any])


def copied(module: Module, shared: Iterable[Tensor] = ()) -> Module:
    """Return a deep copy of a module.

    Args:
        module: a network or a loss.
        shared: tensors of the module that the copy shares with it.

    Example:
        >>> module = nn.BatchNorm1d(2)
        >>> copy_of = copied(module, module.parameters())
        >>> copy_of.weight is module.weight, copy_of.running_mean is module.running_mean
        (True, False)
    """
    return copy.deepcopy(module, {id(t): t for t in shared})


def without_memory(function: Function, name: str) -> Function:
    """Return a copy of a callable object, so that no record leaves anything in it for the next.

    Parameters of a module are shared, such as those of a teacher: of the object itself, of the
    object whose method it is, and of modules among its attributes.

    Args:
        function: a function, which is returned as it is; a module, a method, or another object.
        name: what it is, for the message, such as "The loss".

    Raises:
        ModelError: the object cannot be copied.

    Example:
        >>> loss = nn.CrossEntropyLoss(weight=Tensor([1, 1]))
        >>> without_memory(loss, "The loss").weight is loss.weight
        False
    """
    owner = getattr(function, "__self__", function)
    held = [owner, *getattr(owner, "__dict__", {}).values()]
    shared = dict[int, Tensor]()
    for each in held:
        if isinstance(each, nn.Module):
            shared |= {id(p): p for p in each.parameters()}
    try:
        return copy.deepcopy(function, shared)
    except Exception as failure:
        raise ModelError(
            f"{name} cannot be copied ({type_and_place(failure)}). Each record gets a copy of it, "
            "so that none leaves anything in it for the next. Use a function, or keep what "
            "cannot be copied out of the object."
        ) from failure
