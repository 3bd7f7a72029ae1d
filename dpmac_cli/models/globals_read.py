"""Global variables that the code of a network reads."""

import dis
import functools
import inspect
import sys
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

#: Names of methods at which the code of a module begins.
ENTRIES = ("forward", "__call__", "__getattr__")
#: Parts of paths of installed packages, whose globals a program does not change.
INSTALLED = ("site-packages", "dist-packages")


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[frozenset[str], ...]:
    """Return the names of globals, attributes and imports that code reads.

    This includes code defined in it.
    """
    read, attributes, imported = set[str](), set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            attributes.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            imported.add(step.argval)
    for inner in filter(lambda part: isinstance(part, CodeType), code.co_consts):
        found = _names_in(inner)
        read, attributes, imported = read | found[0], attributes | found[1], imported | found[2]
    return frozenset(read), frozenset(attributes), frozenset(imported)


def is_installed(name: Any, path: str) -> bool:
    """Return whether a module is Python's, torch's, dpmac's, or of an installed package."""
    top = str(name).partition(".")[0]
    here = top in ("torch", "dpmac_cli") or (top in sys.stdlib_module_names and top != "__main__")
    return here or any(part in path for part in INSTALLED)


def _is_of_library(function: FunctionType) -> bool:
    return is_installed(function.__globals__.get("__name__"), function.__code__.co_filename)


def globals_read(function: FunctionType) -> Mapping[str, tuple[dict[str, Any], str]]:
    """Return where the global variables are that a function reads, by name.

    Each is a dict and its key there, which may be added later. This includes variables of the
    program's other modules, but nothing of libraries.
    """
    if _is_of_library(function):
        return {}
    names, attributes, imported = map(sorted, _names_in(function.__code__))
    found = {name: (function.__globals__, name) for name in names}
    modules = {name: function.__globals__.get(name) for name in names}
    modules |= {name: sys.modules.get(name) for name in imported}
    seen = set[int]()
    while modules:
        name, module = modules.popitem()
        if not isinstance(module, ModuleType) or id(module) in seen:
            continue
        seen.add(id(module))
        if not is_installed(module.__name__, getattr(module, "__file__", None) or ""):
            inner = {f"{name}.{attribute}": attribute for attribute in attributes}
            found |= {path: (vars(module), attribute) for path, attribute in inner.items()}
            modules |= {path: vars(module).get(key) for path, key in inner.items()}
    return found


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
