"""Copies of a network that share none of the parts that its behaviour may depend on.

Besides attributes, these are the variables that functions keep: closures, default values and
attributes of functions, and the objects of bound methods. ``copy.deepcopy`` shares most of them
between copies.
"""

import copy
import functools
from collections import deque
from collections.abc import Iterator
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Types that are compared as a whole, besides plain values.
WHOLE = (Tensor, np.ndarray, torch.Generator, type, ModuleType)
#: Type of functions that remember results in memory that cannot be inspected or copied.
CACHED = type(functools.lru_cache(len))
#: Attribute with a network's earlier private training, which its behaviour does not depend on.
LINEAGE = "_dpmac_lineage"
#: Attributes of a module whose contents are its parts.
GROUPS = ("_parameters", "_buffers", "_modules")
#: Attributes that torch leaves in a module whose hooks were removed, or that was compiled.
MARKS = ("_is_full_backward_hook", "_is_torch_compile")
#: Packages whose functions wrap others to compile them, and keep state of the compiler.
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx")
_COMPILED = "_torchdynamo_orig_callable"


def parts_of(value: Any) -> dict[Any, Any]:  # noqa: PLR0911  (one for each kind)
    """Return the parts of an object by name; an empty result if it is compared as a whole."""
    if isinstance(value, nn.Module):
        without = (*GROUPS, *MARKS, LINEAGE) if not value._backward_hooks else (*GROUPS, LINEAGE)
        own = {key: part for key, part in vars(value).items() if key not in without}
        if type(value).get_extra_state is not nn.Module.get_extra_state:
            own["get_extra_state()"] = value.get_extra_state()
        return {**value._parameters, **value._buffers, **value._modules, **own}
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, MethodType):
        return {"__self__": value.__self__, "__func__": value.__func__}
    if isinstance(value, functools.partial):
        named = {"func": value.func, "args": value.args, "keywords": value.keywords}
        return {**named, **vars(value)}
    if isinstance(value, BuiltinMethodType):
        bound = value.__self__
        return {} if bound is None or isinstance(bound, WHOLE) else {"__self__": bound}
    return {} if isinstance(value, WHOLE) else {**slots_of(value), **getattr(value, "__dict__", {})}


def _parts_of_function(function: FunctionType) -> dict[Any, Any]:
    """Return what a function keeps from one call to the next, except in globals."""
    if str(function.__globals__.get("__name__")).startswith(COMPILERS):
        return {_COMPILED: vars(function)[_COMPILED]} if _COMPILED in vars(function) else {}
    kept = dict(zip(function.__code__.co_freevars, map(content_of, function.__closure__ or ())))  # noqa: B905
    given = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
    return {**kept, **{key: part for key, part in given.items() if part}, **vars(function)}


def content_of(cell: CellType) -> Any:
    """Return the value of a function's variable; None if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are declared in ``__slots__``."""
    found = {}
    for kind in type(value).__mro__:
        declared = vars(kind).get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else declared:
            private = name.startswith("__") and not name.endswith("__")
            mangled = f"_{kind.__name__.lstrip('_')}{name}" if private else name
            if hasattr(value, mangled):
                found[name] = getattr(value, mangled)
    return found


def every_part(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield an object and all its parts by path; parts of shared objects appear once."""
    found: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    seen: set[int] = set()
    for path, part in found:  # grows
        yield path, part
        if id(part) not in seen:
            seen.add(id(part))
            found += [((*path, key), inner) for key, inner in parts_of(part).items()]


def duplicate(network: nn.Module) -> nn.Module:
    """Return a deep copy of a network that shares no state with it, not even that of functions.

    Globals and class attributes are shared. Raises TypeError if a part cannot be copied.
    """
    memo: dict[int, Any] = {}
    cells: dict[int, tuple[CellType, CellType]] = {}
    functions: list[tuple[FunctionType, FunctionType]] = []
    bound: list[Any] = []
    for path, part in every_part(network):
        if isinstance(part, CACHED):
            name = ".".join(map(str, path))
            raise TypeError(f"{name} remembers its results (functools.cache).")
        if id(part) in memo or not parts_of(part):
            continue
        if isinstance(part, BuiltinMethodType):
            bound.append(part)
        elif isinstance(part, FunctionType) and _COMPILED not in vars(part):
            memo[id(part)] = _without_values(part, cells)
            functions.append((part, memo[id(part)]))
    for method in bound:
        memo[id(method)] = getattr(copy.deepcopy(method.__self__, memo), method.__name__)
    copied: nn.Module = copy.deepcopy(network, memo)
    for cell, made in cells.values():
        content = content_of(cell)  # modules, such as those imported in a function, are shared
        made.cell_contents = (
            content if isinstance(content, ModuleType) else copy.deepcopy(content, memo)
        )
    for function, again in functions:
        again.__defaults__ = copy.deepcopy(function.__defaults__, memo)
        again.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
        vars(again).update(copy.deepcopy(vars(function), memo))
    return copied


def _without_values(
    function: FunctionType, cells: dict[int, tuple[CellType, CellType]]
) -> FunctionType:
    """Return a function with the same code and new, empty variables."""
    closure = [
        cells.setdefault(id(cell), (cell, CellType()))[1] for cell in function.__closure__ or ()
    ]
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, None, tuple(closure)
    )
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return made
