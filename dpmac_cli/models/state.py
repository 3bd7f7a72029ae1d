"""Compare the state of a network with an earlier copy, part by part."""

import warnings
import weakref
from collections import deque
from enum import Enum
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.deep_copy import every_part
from dpmac_cli.storage.digest import identical

#: Types compared by their representation, in which NaN equals NaN.
_NUMBERS = int | float | complex | np.generic | torch.dtype | torch.device
_PLAIN = _NUMBERS | str | bytes | set | frozenset | PurePath  # type: ignore[type-arg]
#: Types whose whole state is compared.
_HELD = (list, tuple, dict, deque, type(None))
_COMPARED = (_PLAIN, *_HELD, Tensor, np.ndarray, torch.Generator, Enum)
#: Types whose parts are compared, or that have none.
_CALLED = (
    *(FunctionType, MethodType, BuiltinFunctionType, MethodDescriptorType, partial, type),
    *(attrgetter, itemgetter, methodcaller, nn.Module),
)


def first_change(before: Any, after: Any) -> str | None:
    """Return the name of the first part that differs between an object and an earlier copy."""
    was, found = dict(_parts(before)), dict(_parts(after))
    for path in was | found:
        if not (path in was and path in found and _equal(was[path], found[path])):
            return ".".join(map(str, path))
    return None


def first_opaque(value: Any) -> str | None:
    """Return the name of the first part whose state cannot be compared, such as an iterator."""
    for path, part in _parts(value):
        if not (isinstance(part, (*_COMPARED, *_CALLED)) or _is_transparent(part)):
            return ".".join(map(str, path))
    return None


def _parts(value: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return every part by path, without weak references to other parts, which hold nothing.

    torch's recurrent layers have such references to their weights.
    """
    parts = list(every_part(value))
    own = {id(part) for _, part in parts}
    return [
        (p, part) for p, part in parts if not (isinstance(part, weakref.ref) and id(part()) in own)
    ]


def _is_transparent(value: Any) -> bool:
    """Return whether an object keeps everything in attributes, and nothing in C code."""
    kind = type(value)
    if kind.__module__.partition(".")[0] == "torch":
        return hasattr(value, "__dict__")
    own: Any = (kind.__reduce__, kind.__reduce_ex__)
    if own != (object.__reduce__, object.__reduce_ex__):
        return False  # it has something else to save than its attributes
    try:
        with warnings.catch_warnings(action="error"):
            value.__reduce_ex__(2)  # fails for types with fields that Python does not know
    except Exception:  # noqa: BLE001  (user code may raise anything)
        return False
    return True


def _equal(before: Any, after: Any) -> bool:
    """Return whether two values are equal, ignoring their parts."""
    if type(before) is not type(after):
        return False
    if isinstance(after, Tensor):
        return identical(before, after)
    if isinstance(after, torch.Generator):
        return torch.equal(before.get_state(), after.get_state())
    if isinstance(after, np.ndarray):
        return np.array_equal(before, after)
    if isinstance(after, set | frozenset):  # the order may differ
        return bool(before == after)
    return not isinstance(after, _PLAIN) or repr(before) == repr(after)
