"""Global variables that the code of a network reads."""

import dis
import functools
import inspect
import sys
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

#: Names of methods at which the code of a module begins.
ENTRIES = ("forward", "__call__", "__getattr__")
#: Parts of paths of installed packages, whose globals a program does not change.
INSTALLED = ("site-packages", "dist-packages")


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of globals and of attributes that code reads, with code defined in it."""
    read, attributes = set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(step.argval)
    for inner in filter(lambda part: isinstance(part, CodeType), code.co_consts):
        found = _names_in(inner)
        read, attributes = read | found[0], attributes | found[1]
    return frozenset(read), frozenset(attributes)


def _is_of_library(function: FunctionType) -> bool:
    top = str(function.__globals__.get("__name__")).partition(".")[0]
    here = top in ("torch", "dpmac_cli") or (top in sys.stdlib_module_names and top != "__main__")
    return here or any(part in function.__code__.co_filename for part in INSTALLED)


def globals_read(function: FunctionType) -> Mapping[str, Any]:
    """Return the global variables that a function reads, by name; none for those of libraries."""
    if _is_of_library(function):
        return {}
    names = _names_in(function.__code__)[0] & function.__globals__.keys()
    return {name: function.__globals__[name] for name in sorted(names)}


def called(kind: type) -> Mapping[str, FunctionType]:
    """Return the methods of a class that its forward may call, by name; none of libraries."""
    found: dict[str, FunctionType] = {}
    names = [*ENTRIES]
    for name in names:  # grows
        method = inspect.getattr_static(kind, name, None)
        if isinstance(method, property):
            method = method.fget
        method = getattr(method, "__func__", method)  # of static and class methods
        if name not in found and isinstance(method, FunctionType) and not _is_of_library(method):
            found[name] = method
            names += sorted(_names_in(method.__code__)[1])
    return found
