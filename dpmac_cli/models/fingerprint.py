"""Fingerprint of a network: what must be the same before and after each step.

Validation holds for the network that it saw. A program may change that network between steps by
mistake, and the network may change itself in a step, by which it could carry a record to the next.

Compared are modules, attributes and the objects in them, hooks, ``requires_grad``, and the memory
of tensors; the values of tensors only for buffers and frozen parameters. An object inside an object
is compared by identity, so a change inside it is not noticed.
"""

from collections import OrderedDict, deque
from collections.abc import Collection
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules

from dpmac_cli.errors import ModelError
from dpmac_cli.models.digest import identical
from dpmac_cli.models.modes import Modes

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
#: Remedy for gradients of parameters, which a step leaves without any.
OUTSIDE = (
    "which no noise covers: loss.backward() was called outside of the step. If an optimizer then "
    "changed the network, build it again. To go on without: net.zero_grad()."
)
#: Containers that are compared by identity and by their items, as dicts and other objects are.
CONTAINERS = (list, tuple, set, frozenset, deque)
#: Values that are compared by ==.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
#: Beginnings of the names of attributes that dpmac and torch.compile give to modules, lists of its
#: weights that a recurrent layer makes again when one of them was replaced for a moment, and
#: attributes whose tensors are compared one by one.
PASSED_OVER = ("_dpmac_", "_is_torch_compile", "_flat_weight", "_parameters", "_buffers")
#: Types of containers of which a module has many that are empty, such as those of its hooks.
DICTS = (dict, OrderedDict)
#: Hooks of all modules of the process.
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    *(of_modules._global_forward_hooks, of_modules._global_forward_pre_hooks),
    *(of_modules._global_backward_hooks, of_modules._global_backward_pre_hooks),
)


class _Place(NamedTuple):
    """A tensor, without its values.

    Attributes:
        number: identity of the tensor.
        trained: whether it is a parameter that steps change.
        requires_grad: as of the tensor.
        gradient: whether it is trained and has a gradient.
        hooks: numbers of the hooks on its gradient.
        memory: shape, dtype, device, address and strides.
    """

    number: int
    trained: bool
    requires_grad: bool
    gradient: bool
    hooks: tuple[int, ...]
    memory: tuple[Any, ...]


class Fingerprint:
    """Copy of a network's state at some time, to tell later whether and how the network changed.

    The modes of its modules are not compared: :meth:`as_validated` sets them.

    A step compares before it begins, for what a program did, and after its passes, for what the
    network did. Buffers and frozen parameters are copied, and their values compared only where
    torch counts that they were written to; so a comparison costs little beside a step.

    Args:
        network: network whose trained parameters may change in place, and nothing else.
        trained: ids of these parameters.
    """

    def __init__(self, network: nn.Module, trained: Collection[int]) -> None:
        self._network, self._trained = network, frozenset(trained)
        self._modes = Modes(network)
        self._held: list[Any] = []  # while it is held, no other object gets its id
        self._copies = dict[str, tuple[Tensor, Tensor]]()
        for name, tensor in chain(network.named_parameters(), network.named_buffers()):
            if id(tensor) not in self._trained:
                self._copies[name] = (tensor, tensor.detach().clone())
        self._before, self._versions = self._now(), self._written()

    def check(self, remedy: str = BETWEEN) -> None:
        """Raise an error if the network has changed since this object was made: :meth:`changed`.

        Args:
            remedy: sentences on what to do about a change, for the message; :data:`BETWEEN` or
                :data:`DURING`.

        Raises:
            ModelError: names what has changed, and the remedy.
        """
        changes = self.changed(remedy)
        if changes:
            raise ModelError(f"The network is no longer the one that was validated: {changes}")

    def changed(self, remedy: str) -> str:
        """Return how the network has changed since this object was made, as sentences.

        Of several changes, one is named: first of a trained parameter that was moved, because it
        explains others, then of the module that contains the others.

        Args:
            remedy: sentences that follow, on what to do; some changes have one of their own.

        Returns:
            The change and its remedy, "" if nothing has changed.
        """
        before, now = self._before, self._now()
        if before != now:
            paths = [path for path in before | now if before.get(path) != now.get(path)]

            def rank(path: tuple[str, ...]) -> tuple[bool, int]:
                return not _moved(before.get(path), now.get(path)), len(path)

            path = min(paths, key=rank)
            return _explained(path, before.get(path), now.get(path), remedy)
        versions = self._written()
        if versions != self._versions:
            name = self._written_to()
            if name:
                return f"{name} was written to. {remedy}"
            self._versions = versions
        return ""

    def check_values(self) -> None:
        """Raise an error if a buffer or a frozen parameter has another value than before.

        They are published without noise.

        Raises:
            ModelError: names the tensor.
        """
        name = self._written_to()
        if name:
            raise ModelError(
                f"The network changed its {name} during training: statistics of private data "
                "would be published without noise, so nothing is. Keep no statistics in it."
            )

    def as_validated(self) -> AbstractContextManager[None]:
        """Return a context in which each module is in the mode in which it was validated.

        At the end of the ``with`` block, modules have the modes again that they had before it.
        """
        return self._modes.applied()

    def _now(self) -> dict[tuple[str, ...], Any]:
        """Return everything that must stay as it is, by path, in a form that is compared by ==.

        A path is the name of a module, alone or with that of an attribute or a tensor. Objects are
        held from the first call on, so that an id is that of one object.
        """
        state: dict[tuple[str, ...], Any] = {
            ("all modules", "hooks"): tuple(map(tuple, GLOBAL_HOOKS))
        }
        held: list[Any] = []
        for name, module in self._network.named_modules():
            held.append(module)
            state[(name,)] = (id(module), type(module))
            for key, value in vars(module).items():
                if key.startswith(PASSED_OVER):
                    continue
                kind = type(value)
                if kind in PLAIN or isinstance(value, PLAIN):
                    state[name, key] = value
                elif kind in DICTS and not value:
                    held.append(value)
                    state[name, key] = (id(value),)
                else:
                    items = _inside(value)
                    held.append((value, items))
                    state[name, key] = self._plainly(value, items)
            for key, tensor in chain(module._parameters.items(), module._buffers.items()):
                if tensor is not None:
                    state[name, key] = self._place(tensor)
        self._held = self._held or held
        return state

    def _written_to(self) -> str:
        """Return the name of a buffer or frozen parameter with another value; "" if none has."""
        for name, (tensor, copied) in self._copies.items():
            if not identical(tensor, copied):
                return name
        return ""

    def _written(self) -> list[int]:
        """Return how often each buffer and frozen parameter was written to."""
        tensors = [tensor for tensor, _ in self._copies.values()]
        return [tensor._version for tensor in tensors if not tensor.is_inference()]

    def _plainly(self, value: Any, items: list[Any]) -> Any:
        """Return an attribute in a form that is compared by ==, given what is inside it."""
        if isinstance(value, Tensor):
            return self._place(value)
        return (id(value), *map(_item, items))

    def _place(self, tensor: Tensor) -> _Place:
        """Return everything about a tensor but its values."""
        trained = id(tensor) in self._trained
        hooks = *(tensor._backward_hooks or ()), *_after(tensor)
        # A tensor that was kept from a pass under vmap has no memory of its own.
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        memory: tuple[Any, ...] = (tensor.shape, tensor.dtype, tensor.device)
        if tensor.layout == torch.strided and not wrapped:
            memory = (*memory, tensor.data_ptr(), tensor.stride())
        gradient = trained and tensor.grad is not None
        return _Place(id(tensor), trained, tensor.requires_grad, gradient, hooks, memory)


def _after(tensor: Tensor) -> tuple[int, ...]:
    """Return the numbers of the hooks that run after a gradient is added up."""
    return tuple(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


def _inside(value: Any) -> list[Any]:
    """Return the items of a container, or names and values of what a dict or an object holds."""
    if isinstance(value, CONTAINERS):
        return list(value)
    held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not isinstance(held, dict):
        return []
    return list(held.items())


def _item(item: Any) -> Any:
    """Return an item of a container, or of a dict with its key, in a form that is compared."""
    if isinstance(item, tuple):
        return tuple(map(_item, item))
    return item if isinstance(item, PLAIN) else id(item)


def _moved(before: Any, after: Any) -> bool:
    """Return whether a trained parameter is no longer in place, which says most of a change."""
    return isinstance(before, _Place) and isinstance(after, _Place) and before.trained


def _explained(path: tuple[str, ...], before: Any, after: Any, remedy: str) -> str:
    """Return what changed, and the remedy, as sentences.

    Args:
        path: name of a module, and of an attribute, parameter or buffer of it.
        before, after: values in the form that is compared; None where there is none.
        remedy: sentences for a change that has no remedy of its own.
    """
    name = ".".join(part for part in path if part) or "the network itself"
    if "_hook" in path[-1] or path[0] == "all modules":
        change = f"the hooks of {path[0] or 'the network itself'} changed."
    elif before is None or after is None:
        change = f"{name} was {'added' if before is None else 'removed'}."
    elif not (isinstance(before, _Place) and isinstance(after, _Place)):
        change = f"{name} changed."
    elif before.number != after.number:
        change = f"{name} was replaced with another tensor."
    elif before.requires_grad != after.requires_grad:
        how = "unfrozen" if after.requires_grad else "frozen"
        change = f"{name} was {how} (requires_grad_({after.requires_grad}))."
    elif after.gradient and not before.gradient:
        return f"{name} has a gradient, {OUTSIDE}"
    elif before.hooks != after.hooks:
        change = f"the hooks of {name} changed."
    elif before.trained:
        return f"{name} is in other memory than before, {IN_PLACE}"
    else:
        change = f"{name} is in other memory, or has another shape, than before."
    return f"{change} {remedy}"
