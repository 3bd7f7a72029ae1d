"""Digests of the code and the values that compute a network's losses, equal in every process.

Adding the same noise to two different sums reveals their difference without any noise. So who
repeats the noise of a program must know that the code is the same. Nothing here depends on
identities, addresses or hash seeds: functions are compared by their bytecode, constants and names,
modules and objects by their class and parts, arrays by content, and libraries by version.
"""

import hashlib
import io
import logging
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    NotImplementedType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.deep_copy import LINEAGE
from dpmac_cli.models.globals_read import is_installed
from dpmac_cli.models.unchanged import (
    CALLS,
    GLOBAL,
    HOLDERS,
    LATE,
    PLAIN,
    hooks_of,
    inside,
    is_of_torch,
)
from dpmac_cli.storage.digest import digest

#: Digest of a part that cannot be compared with that of another process.
UNREADABLE = ""
#: Values of the standard library whose representation is their content.
SHOWN = (
    *(range, slice, bytearray, EllipsisType, NotImplementedType, PurePath, Decimal, Fraction),
    *(date, datetime, time, timedelta, re.Pattern),
)
#: Objects without an effect on a loss, or identified by their names.
NAMED = (
    *(logging.Logger, type(threading.Lock()), type(threading.RLock()), weakref.ref, io.IOBase),
    *(BuiltinFunctionType, ClassMethodDescriptorType, GetSetDescriptorType, MemberDescriptorType),
    *(MethodDescriptorType, WrapperDescriptorType, type(object().__str__)),
)
#: Numbers and flags of a code object that say what it does, besides its constants.
CODE = (
    *("co_code", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags"),
    *("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable"),
)
#: Objects of torch whose attributes are values, unlike those of its contexts and compilers.
VALUES_OF_TORCH = ("torch.distributions",)


def code_digests(roots: Mapping[str, Any], apart: Collection[int]) -> dict[str, str]:
    """Return a digest of everything that the results of some objects depend on, by path.

    Args:
        roots: networks, functions and other objects by name.
        apart: ids of tensors whose values are not part of it, such as trained parameters.

    Returns:
        a digest for each part, :data:`UNREADABLE` where a part cannot be compared.
    """
    found: dict[str, str] = {}
    seen: set[int] = set()
    parts: list[tuple[str, Any]] = [*roots.items(), *(("all modules", h) for h in GLOBAL.values())]
    for path, part in parts:  # grows
        if id(part) in seen and not isinstance(part, (*PLAIN, tuple)):
            continue
        seen.add(id(part))
        form = _form(part, apart)
        found[path] = UNREADABLE if form is None else hashlib.sha256(form.encode()).hexdigest()
        parts += [(f"{path}.{name}", inner) for name, inner in _inner(path, part)]
    return found


def fixed_sum(network: nn.Module) -> str:
    """Return the SHA-256 of a network without the values of its trained parameters.

    That is its code, buffers, frozen parameters and attributes. Parts that cannot be compared are
    not part of it.
    """
    trained = {id(p) for p in network.parameters() if p.requires_grad}
    return digest({}, code_digests({"network": network}, trained))


def _inner(path: str, part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object, with names that are the same in every process."""
    if isinstance(part, Tensor):
        yield from ((f"hook {i}", h) for held in hooks_of(part) for i, h in _numbered(held))
    elif isinstance(part, dict):
        yield from _inside_dict(path, part)
    elif isinstance(part, type):
        yield from _inside_class(part)
    elif isinstance(part, property):
        yield from (("getter", part.fget), ("setter", part.fset))
    elif type(part).__module__.startswith(VALUES_OF_TORCH):
        yield from vars(part).items()
    elif not isinstance(part, NAMED) or isinstance(part, BuiltinFunctionType):
        yield from ((str(name), v) for name, v in inside(part).items() if name != LINEAGE)


def _numbered(held: Mapping[Any, Any] | None) -> Iterator[tuple[int, Any]]:
    return iter(enumerate((held or {}).values()))


def _inside_dict(path: str, held: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values by key; those of hooks, whose keys count up, by place."""
    for i, (key, value) in enumerate(held.items()):
        named = isinstance(key, PLAIN) and "_hooks" not in path and path != "all modules"
        yield repr(key) if named else f"{i}", value
        if not isinstance(key, PLAIN):
            yield f"key {i}", key


def _inside_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield bases and attributes of a class of the program; methods of networks where called."""
    if is_of_torch(kind):
        calls = [(name, getattr(kind, name)) for name in CALLS if issubclass(kind, nn.Module)]
        yield from ((n, f) for n, f in calls if not str(f.__module__).startswith("torch."))
    if _of_library(kind):
        return
    yield from ((f"class {base.__name__}", base) for base in kind.__bases__)
    for name, value in list(vars(kind).items()):
        known = name.startswith(("__", *LATE)) and not isinstance(value, FunctionType)
        if not known and not (issubclass(kind, nn.Module) and _functions(value)):
            yield name, value


def _functions(value: Any) -> list[FunctionType]:
    """Return the functions of an attribute of a class."""
    held = (value.fget, value.fset) if isinstance(value, property) else (value,)
    functions = [getattr(part, "__func__", part) for part in held]
    return [part for part in functions if isinstance(part, FunctionType)]


def _form(part: Any, apart: Collection[int]) -> str | None:  # noqa: PLR0911  (one for each kind)
    """Return an object without its inner parts as text; None if it cannot be compared."""
    if isinstance(part, Tensor):
        return _form_of_tensor(part, apart)
    if isinstance(part, np.ndarray):
        plain = not part.dtype.hasobject
        return f"{part.dtype.descr}{part.shape}{_sum(part.tobytes())}" if plain else None
    if isinstance(part, ModuleType):
        return f"module {part.__name__} {_version_of(part.__name__)}"
    if isinstance(part, type):
        methods = {name: _functions(value) for name, value in vars(part).items()}
        code = {name: [constant(f.__code__) for f in held] for name, held in methods.items()}
        return f"{_name_of(part)}{[] if is_of_torch(part) else sorted(code.items())}"
    if isinstance(part, FunctionType):
        return constant(part.__code__)
    kind = _name_of(type(part))
    if isinstance(part, (set, frozenset)):
        items = [constant(item) for item in part]
        return None if None in items else f"{kind}{sorted(filter(None, items))}"
    if isinstance(part, (*PLAIN, *SHOWN)) or type(part).__module__ == "typing":
        return _shown(part)
    if isinstance(part, (dict, nn.Module)):
        names = part._modules if isinstance(part, nn.Module) else part
        return f"{kind}{len(names)}{[name for name in names if isinstance(name, str)]}"
    if isinstance(part, (list, tuple, deque)):
        return f"{kind}{len(part)}"
    if isinstance(part, torch.Generator):
        return _sum(part.get_state().numpy().tobytes())
    if isinstance(part, NAMED):
        return f"{kind}{getattr(part, '__qualname__', '')}"
    return kind if _is_readable(part) else None


def _is_readable(part: Any) -> bool:
    """Return whether the parts of an object are all that it depends on."""
    kind = type(part)
    if _of_stdlib(kind):
        holder = kind.__module__.partition(".")[0] in HOLDERS and hasattr(part, "__dict__")
        return kind is object or holder or bool(inside(part))
    declared = any("__slots__" in vars(base) for base in kind.__mro__)
    return (hasattr(part, "__dict__") or declared) and not kind.__name__.startswith("Script")


def _of_stdlib(kind: type) -> bool:
    top = kind.__module__.partition(".")[0]
    return top in sys.stdlib_module_names and top != "__main__"


def _form_of_tensor(tensor: Tensor, apart: Collection[int]) -> str | None:
    if tensor.layout != torch.strided:
        return None
    form = f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}{tensor.requires_grad}"
    if id(tensor) in apart:
        return form
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return f"{form}{_sum(flat.numpy().tobytes())}"


def constant(value: Any) -> str | None:
    """Return a constant, or the code of a function, as text; None if it cannot be compared."""
    if isinstance(value, CodeType):
        inner = list(map(constant, value.co_consts))
        return f"code {[getattr(value, name) for name in CODE]}{inner}"
    if isinstance(value, tuple):
        return f"tuple {list(map(constant, value))}"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(str(constant(item)) for item in value)}"
    if isinstance(value, type):
        return _name_of(value)
    return _shown(value) if isinstance(value, (*PLAIN, *SHOWN)) else None


def _shown(value: Any) -> str | None:
    """Return the type and representation of a value, unless it contains an address."""
    shown = repr(value)
    return None if " at 0x" in shown else f"{type(value).__qualname__} {shown}"


def _of_library(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return is_installed(kind.__module__, getattr(module, "__file__", None) or "")


def _name_of(kind: type) -> str:
    """Return the name of a class; of a library's, also its module and version."""
    if not _of_library(kind):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__} {_version_of(kind.__module__)}"


def _version_of(module: str) -> str:
    top = sys.modules.get(module.partition(".")[0])
    return str(getattr(top, "__version__", ""))


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
