"""Compare the state of a network with an earlier copy, part by part."""

from collections import deque
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpmac_cli.storage.digest import identical

#: Types compared by their representation, in which NaN equals NaN.
_NUMBERS = int | float | complex | np.generic | torch.dtype | torch.device
_PLAIN = _NUMBERS | str | bytes | set | frozenset | PurePath  # type: ignore[type-arg]
#: Types whose whole state is compared.
_HELD = (list, tuple, dict, deque, type(None))
_COMPARED = (_PLAIN, *_HELD, Tensor, np.ndarray, torch.Generator, Enum)
_OF_TORCH = vars(nn.Module()).keys()


def first_change(before: Any, after: Any) -> str | None:
    """Return the name of the first part that differs between an object and an earlier copy."""
    was, found = _state(before), _state(after)
    for path in was | found:
        if not (path in was and path in found and _equal(was[path], found[path])):
            return ".".join(map(str, path))
    return None


def first_opaque(value: Any) -> str | None:
    """Return the name of the first part whose state cannot be compared, such as an iterator."""
    for path, part in _state(value).items():
        known = isinstance(part, _COMPARED) or callable(part) or hasattr(part, "__dict__")
        if not known:
            return ".".join(map(str, path))
    return None


def _state(value: Any) -> dict[tuple[Any, ...], Any]:
    """Return an object and all its parts by path; parts of shared objects appear once."""
    found: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    seen: set[int] = set()
    for path, part in found:  # grows
        if id(part) not in seen:
            seen.add(id(part))
            found += [((*path, key), inner) for key, inner in _parts(part).items()]
    return dict(found)


def _parts(value: Any) -> dict[Any, Any]:
    """Return the parts of an object; an empty result if it is compared as a whole."""
    if isinstance(value, nn.Module):
        own = {key: part for key, part in vars(value).items() if key not in _OF_TORCH}
        if type(value).get_extra_state is not nn.Module.get_extra_state:
            own["get_extra_state()"] = value.get_extra_state()
        return {**value._parameters, **value._buffers, **value._modules, **own}
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    whole = isinstance(value, (Tensor, np.ndarray, torch.Generator, type)) or callable(value)
    return {} if whole else getattr(value, "__dict__", {})


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
