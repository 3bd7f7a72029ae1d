"""Check that a network in training is still the one that was validated.

Validation holds for the network that it saw. :class:`Unchanged` remembers that network and finds
out in microseconds whether it is still the same: before each step, because the program around it
may have changed it, and before the sum of the step is used, because it may have changed itself.
"""

import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from itertools import chain, starmap
from operator import attrgetter, is_, methodcaller
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _dispatch_modes

from dpmac_cli.dp.clipping.deep_copy import content_of, parts_of, slots_of
from dpmac_cli.errors import ModelError
from dpmac_cli.models.globals_read import called, globals_read
from dpmac_cli.storage.digest import identical

#: Remedy for changes between steps.
BETWEEN = (
    "Undo it. Or call make_private again with the changed network: it is validated, and epsilon "
    "also counts the steps taken so far."
)
#: Remedy for changes in a forward or backward pass.
DURING = (
    "It changed itself in a forward or backward pass, by which one sample could affect others, so "
    "this step is not used. Keep nothing in the network, and do not let it change itself. If it "
    "makes a constant when it first runs, run it once on zeros before."
)
#: Remedy for parameters that are no longer views of theta.
IN_PLACE = (
    "as after p.data = ..., vector_to_parameters, .double(), .to(...) or another make_private on "
    "the network: steps would not change it. Write values in place: with torch.no_grad(): "
    "p.copy_(values), or load_state_dict. Cast and move a network before make_private. To train it "
    "as it is now, call make_private again: epsilon also counts the steps taken so far."
)
#: Values that are compared by their representation. Others are compared by identity.
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic, Enum)
#: Attributes that Python or torch fills in later without an effect.
LATE = ("__annot", "__doc__", "_abc_", "__abstract", "__static", "__firstline")
#: Modules of the standard library whose objects hold what a program puts into them.
HOLDERS = ("builtins", "functools", "types", "argparse", "collections")
#: Largest array, in bytes, whose values are compared in every step.
SMALL = 1 << 16
#: Hooks of all modules of the process.
GLOBAL: dict[str, Any] = {
    name: held
    for name, held in vars(of_modules).items()
    if name.startswith("_global_") and isinstance(held, dict)
}
#: Methods by which torch calls its own modules.
CALLS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")

_function_modes: Any = _get_current_function_mode_stack  # torch gives it no types
_calls, _values, _version = attrgetter(*CALLS), methodcaller("values"), attrgetter("_version")
_code = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_form = attrgetter(
    *("requires_grad", "shape", "dtype", "device", "_backward_hooks"),
    "_post_accumulate_grad_hooks",
)


class _Form(NamedTuple):
    """Description of a tensor, without its values."""

    number: int
    trained: bool
    requires_grad: bool
    hooks: tuple[tuple[int, ...], ...]
    place: tuple[Any, ...]


class _Watched:
    """Everything in a network that can change, in flat lists that are compared quickly."""

    def __init__(self, parts: Iterable[Any]) -> None:
        maps: list[Any] = list(GLOBAL.values())
        rows: list[Any] = []
        self._sets: list[Any] = []
        self._cells, self._functions, self._kinds = list[Any](), list[Any](), list[Any]()
        self._slotted, self._arrays, self._objects = list[Any](), list[Any](), list[Any]()
        self._globals = list[tuple[dict[str, Any], str]]()
        self.tensors = list[Tensor]()
        for part in parts:
            if isinstance(part, Tensor):
                self.tensors.append(part)
                maps += [hooks for hooks in hooks_of(part) if hooks is not None]
            elif isinstance(part, type):
                if not is_of_torch(part):
                    maps.append(vars(part))
                elif issubclass(part, nn.Module):
                    self._kinds.append(part)
            elif isinstance(part, dict):
                maps.append(part)
            elif isinstance(part, (list, deque)):
                rows.append(part)
            elif isinstance(part, (set, frozenset)):
                self._sets.append(part)
            elif isinstance(part, np.ndarray):
                self._arrays += [part] * (part.nbytes <= SMALL)
            elif not isinstance(part, (tuple, *PLAIN)):
                self._objects.append(part)
                maps += _dicts_of(part)
                if isinstance(part, FunctionType):
                    self._functions.append(part)
                    self._cells += part.__closure__ or ()
                    self._globals += globals_read(part).values()
                elif slots_of(part):
                    self._slotted.append(part)
        self._empty = [held for held in (*maps, *rows) if not held]
        self._maps, self._rows = [held for held in maps if held], [held for held in rows if held]
        self._dense = [t for t in self.tensors if t.layout == torch.strided]
        self._sizes, self._held = self._now_sizes(), [*self._now_held()]
        self._contents, self._forms = self._now_contents(), self._now_forms()

    def same(self) -> bool:
        """Return whether all is as it was when this object was made."""
        return (
            not any(self._empty)
            and self._now_sizes() == self._sizes
            and all(map(is_, self._now_held(), self._held))
            and self._now_forms() == self._forms
            and self._now_contents() == self._contents
        )

    def _now_sizes(self) -> list[int]:
        return list(map(len, chain(self._maps, self._rows)))

    def _now_held(self) -> Iterator[Any]:
        """Yield every key, value, item and variable, to be compared by identity."""
        from_all = chain.from_iterable
        return chain(
            from_all(self._maps),
            from_all(map(_values, self._maps)),
            from_all(self._rows),
            map(type, self._objects),
            from_all(map(_calls, self._kinds)),
            from_all(map(_code, self._functions)),
            map(content_of, self._cells),
            starmap(dict.get, self._globals),
            from_all(map(_values, map(slots_of, self._slotted))),
        )

    def _now_forms(self) -> list[Any]:
        forms: list[Any] = list(map(_form, self.tensors))
        forms += map(Tensor.data_ptr, self._dense)
        forms += map(Tensor.stride, self._dense)
        return forms

    def _now_contents(self) -> list[Any]:
        return [*map(set, self._sets), *(array.tobytes() for array in self._arrays)]


class Unchanged:
    """A network as it was when this object was made, in training mode.

    Args:
        network: network whose trained parameters may change in place, and nothing else.
        trained: ids of these parameters.
        loss: user-supplied loss, which must not change either.
    """

    def __init__(self, network: nn.Module, trained: Collection[int], loss: Any = None) -> None:
        self._network, self._trained, self._loss = network, trained, loss
        self._modules = list(network.modules())
        self._described = dict(self._describe())
        self._remember()
        self._copies = {
            path: (part, part.detach().clone())
            for path, part in watched(network, loss)
            if isinstance(part, Tensor) and part.layout == torch.strided and id(part) not in trained
        }

    def check(self, remedy: str = BETWEEN) -> None:
        """Raise ModelError, which names what has changed, and the remedy."""
        _check_surroundings()
        if self._parts.same() and list(map(_version, self._fixed)) == self._versions:
            return
        was, now = self._described, dict(self._describe())
        changed = [path for path in was | now if was.get(path) != now.get(path)]
        if changed:
            path = min(changed, key=lambda path: _rank(path, was.get(path), now.get(path)))
            raise ModelError(
                "The network is no longer the one that was validated: "
                f"{_said(path, was.get(path), now.get(path), remedy)}"
            )
        if list(map(_version, self._fixed)) != self._versions:
            self.check_values()
        self._remember()

    def check_values(self) -> None:
        """Raise ModelError if a buffer or a frozen parameter has another value than before.

        They are published without noise.
        """
        for path, (tensor, before) in self._copies.items():
            if not identical(tensor, before):
                raise ModelError(
                    f"The network changed its {_name(path)} during training: statistics of private "
                    "data would be published without noise, so nothing is. Keep no statistics in "
                    "it."
                )

    @contextmanager
    def training(self) -> Iterator[None]:
        """Set the network to training mode, as it was validated, and restore its modes."""
        modes = [(module, module.training) for module in self._modules]
        self._network.train()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def _describe(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        return _described(watched(self._network, self._loss), self._trained)

    def _remember(self) -> None:
        self._parts = _Watched(part for _, part in watched(self._network, self._loss))
        self._fixed = [
            t for t in self._parts.tensors if id(t) not in self._trained and not t.is_inference()
        ]
        self._versions = list(map(_version, self._fixed))


def _check_surroundings() -> None:
    """Raise ModelError if the program has modes or hooks that act on operations of a step."""
    modes: list[Any] = [*_function_modes(), *_dispatch_modes()]
    found = [type(mode).__name__ for mode in modes if not is_of_torch(type(mode))]
    saved: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in saved or ()):
        found.append("saved_tensors_hooks")
    if found:
        raise ModelError(
            f"{', '.join(found)} is active around the step and acts on its operations, by which "
            "one sample could affect others. Leave its with block before the step."
        )


def is_of_torch(kind: type) -> bool:
    """Return whether a class is torch's or Python's own."""
    return kind.__module__.partition(".")[0] in ("torch", "builtins")


def hooks_of(tensor: Tensor) -> tuple[Any, Any]:
    """Return the hooks of a tensor: before and after its gradient is added up."""
    return tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)


def _dicts_of(part: Any) -> list[Any]:
    """Return the dicts that hold an object's attributes, and those of a module's contents."""
    if isinstance(part, nn.Module):
        return [vars(part), part._parameters, part._buffers, part._modules]
    watched = isinstance(part, FunctionType) or inside(part)
    return [vars(part)] if watched and hasattr(part, "__dict__") else []


def inside(part: Any) -> Mapping[Any, Any]:
    """Return the parts to watch of an object: none of those that torch or C code maintains."""
    kind = type(part)
    if isinstance(part, nn.Module):
        return {**parts_of(part), f"class {kind.__name__}": kind, **_code_of(kind)}
    if isinstance(part, type):
        return {} if is_of_torch(part) else _inside_class(part)
    if isinstance(part, (dict, list, tuple, deque, FunctionType)):
        read = globals_read(part) if isinstance(part, FunctionType) else {}
        values = {f"global {name}": held.get(key) for name, (held, key) in read.items()}
        return {**parts_of(part), **values}
    of = kind.__module__.partition(".")[0]
    if isinstance(part, (*PLAIN, Tensor, ModuleType)) or of == "torch":
        return {}
    if of in sys.stdlib_module_names:  # others, such as loggers, change without an effect
        return parts_of(part) if of in HOLDERS else {}
    return {**parts_of(part), f"class {kind.__name__}": kind}


def _code_of(kind: type) -> Mapping[Any, Any]:
    """Return the methods that a module's forward may call, which may read globals."""
    methods = {} if is_of_torch(kind) else called(kind)
    return {f"class {kind.__name__}.{name}": method for name, method in methods.items()}


def _inside_class(kind: type) -> Mapping[Any, Any]:
    """Return a class's bases, and those of its attributes that can change in place."""
    found: dict[Any, Any] = {f"class {base.__name__}": base for base in kind.__bases__}
    for name, attribute in list(vars(kind).items()):  # reading some adds others
        part = attribute.fget if isinstance(attribute, property) else attribute
        part = getattr(part, "__func__", part)  # of static and class methods
        held: Any = isinstance(part, (list, dict, set, FunctionType)) and parts_of(part)
        if isinstance(part, FunctionType) and not issubclass(kind, nn.Module):
            held = held or globals_read(part)  # those of networks: see _code_of
        if held and not name.startswith(LATE):
            found[name] = part
    return found


def watched(network: nn.Module, loss: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield a network, a loss, and everything in them by path, once."""
    found: list[tuple[tuple[Any, ...], Any]] = [((), network), (("loss",), loss)]
    seen: set[int] = set()
    for path, part in found:  # grows
        if id(part) in seen and not isinstance(part, PLAIN):
            continue
        seen.add(id(part))
        yield path, part
        found += [((*path, key), inner) for key, inner in inside(part).items()]


def _described(
    parts: Iterable[tuple[tuple[Any, ...], Any]], trained: Collection[int]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what must stay as it is, by path, in a form that is compared by ==."""
    orders: list[tuple[tuple[Any, ...], Any]] = []
    for path, part in parts:
        if isinstance(part, Tensor):
            dense = part.layout == torch.strided
            where = (part.data_ptr(), part.stride()) if dense else ()
            hooks = tuple(tuple(map(id, (held or {}).values())) for held in hooks_of(part))
            place = (tuple(part.shape), part.dtype, part.device, *where)
            yield path, _Form(id(part), id(part) in trained, part.requires_grad, hooks, place)
        elif isinstance(part, PLAIN):
            yield path, (type(part), repr(part))
        elif isinstance(part, (set, frozenset)):
            yield path, frozenset(map(repr, part))
        elif isinstance(part, np.ndarray):
            yield path, (id(part), part.tobytes() if part.nbytes <= SMALL else b"")
        elif isinstance(part, type):
            yield from (((*path, name), id(value)) for name, value in _of_class(part).items())
        elif isinstance(part, (dict, list, tuple, deque)):
            yield path, type(part)
        else:
            yield path, (id(part), id(type(part)), id(getattr(part, "__code__", None)))
        if isinstance(part, (dict, nn.Module)):
            names = part._modules if isinstance(part, nn.Module) else part
            orders.append(((*path, "order"), tuple(map(repr, names))))
    for name, hooks in GLOBAL.items():
        yield ("all modules", name), tuple(map(id, hooks.values()))
    yield from orders


def _of_class(kind: type) -> dict[str, Any]:
    if is_of_torch(kind):
        return dict(zip(CALLS, _calls(kind), strict=True)) if issubclass(kind, nn.Module) else {}
    return {name: value for name, value in vars(kind).items() if not name.startswith(LATE)}


def _rank(path: tuple[Any, ...], before: Any, after: Any) -> tuple[bool, bool, int]:
    """Return the rank of a change by how much it says about the others, lowest first."""
    moved = isinstance(before, _Form) and isinstance(after, _Form) and before.trained
    return path[-1:] == ("order",), not moved, len(path)


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) or "the network itself"


def _said(path: tuple[Any, ...], before: Any, after: Any, remedy: str) -> str:
    """Return what changed, and the remedy, as sentences."""
    name = _name(path)
    hooks = next((n for n, key in enumerate(path) if "_hook" in str(key)), None)
    if hooks is not None:
        said = f"the hooks of {_name(path[:hooks])} changed."
    elif before is None or after is None:
        said = f"{name} was {'added' if before is None else 'removed'}."
    elif not (isinstance(before, _Form) and isinstance(after, _Form)):
        said = f"{name} changed."
    elif before.number != after.number:
        said = f"{name} was replaced with another tensor."
    elif before.requires_grad != after.requires_grad:
        how = "unfrozen" if after.requires_grad else "frozen"
        said = f"{name} was {how} (requires_grad_({after.requires_grad}))."
    elif before.hooks != after.hooks:
        said = f"the hooks of {name} changed."
    elif before.trained:
        return f"{name} is in other memory than before, {IN_PLACE}"
    else:
        said = f"{name} is in other memory, or has another shape, than before."
    return f"{said} {remedy}"
