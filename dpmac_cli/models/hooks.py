"""Hooks in backward passes, which no trace follows: they may act for other batches only.

Hooks of forward passes are traced like the rest of a forward pass.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpmac_cli.models.unchanged import GLOBAL

#: Ways from a tensor to the nodes of its autograd graph, and to its hooks.
_OF_GRAPH: Any = torch._C.TensorBase
GRAPH = frozenset(
    {_OF_GRAPH.grad_fn.__get__, _OF_GRAPH._grad_fn.__get__, _OF_GRAPH._backward_hooks.__set__}
)
#: Functions of torch that put in hooks on saved tensors and, from 2.14 on, on new nodes.
SAVED, NODES = "_push_saved_tensors_default_hooks", "_push_node_creation_hook"


class UnprovenError(Exception):
    """Independence across samples could not be proven. The message gives the reason."""


def check_hooks(model: nn.Module) -> None:
    """Reject hooks that run in backward passes, untraced. Raises UnprovenError."""
    kinds = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    for name, part in itertools.chain(model.named_modules(), model.named_parameters()):
        if any(getattr(part, kind, None) for kind in kinds):
            raise UnprovenError(f"{name or 'It'} has hooks of backward passes.")
    check_global_hooks()


def check_global_hooks() -> None:
    """Reject hooks of all modules of the process. Raises UnprovenError."""
    if any(GLOBAL.values()):
        raise UnprovenError(
            "There are hooks of all modules (torch.nn.modules.module.register_...)."
        )


class _GraphReads(TorchFunctionMode):
    """Context manager that notices whether a network reads its autograd graph.

    Hooks of the graph's nodes run in backward passes and may act only for other batches than the
    traced one. It does not raise errors, because C code may run the function.
    """

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or func in GRAPH
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """Reject hooks that a network registers while it runs. Raises UnprovenError."""

    def refuse(*_: Any, **__: Any) -> None:
        raise UnprovenError("It registers hooks on tensors.")

    push = getattr(torch._C._autograd, SAVED)

    def only_of_torch(pack: Any, unpack: Any) -> None:  # as of checkpointing
        for hook in (pack, unpack):
            name = getattr(hook, "__globals__", {}).get("__name__", "")
            if name.partition(".")[0] != "torch":
                raise UnprovenError("It registers hooks on saved tensors.")
        push(pack, unpack)

    of_tensors: dict[str, Any] = {
        "register_hook": refuse,
        "register_post_accumulate_grad_hook": refuse,
    }
    of_graph: dict[str, Any] = {SAVED: only_of_torch, NODES: refuse}
    reads = _GraphReads()
    with (
        patch.multiple(Tensor, **of_tensors),
        patch.multiple(torch._C._autograd, create=True, **of_graph),
        reads,
    ):
        yield
    if reads.found:
        raise UnprovenError("It reads its autograd graph (grad_fn), whose nodes have hooks.")
