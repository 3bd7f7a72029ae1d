"""Rules for vmap that a program wrote, which are not used.

vmap runs torch's operations on each sample alone. A rule of the program gets the samples of a whole
chunk instead, and may mix them where a few random samples do not show it: beyond a threshold, or in
larger chunks.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dpmac_cli.errors import ModelError

OWN_RULE = (
    "{} has a rule for vmap of its own, which sees several records at once and could mix them. So "
    "the network runs on one record after the other, which can be hundreds of times slower. If it "
    "consists of torch operations, leave out the rule; in a torch.autograd.Function, define "
    "setup_context and set generate_vmap_rule = True."
)
#: Namespaces of torch's own operators.
OF_TORCH = ("aten", "prims", "prim")


class OwnRuleError(ModelError):
    """The network has a rule for vmap of its own."""


@contextlib.contextmanager
def without_own_rules() -> Iterator[None]:
    """Let vmap raise OwnRuleError where a ``torch.autograd.Function`` has a rule of its own."""
    own = [kind for kind in _below(torch.autograd.Function) if "vmap" in vars(kind)]
    rules = [vars(kind)["vmap"] for kind in own]
    try:
        for kind in own:
            kind.vmap = staticmethod(_refusal(kind.__name__))
        yield
    finally:
        for kind, rule in zip(own, rules, strict=True):
            kind.vmap = rule


class OwnOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Find operators of the program that have a rule for vmap, while each sample runs alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note its name if the program has a rule for it."""
        if func.namespace not in OF_TORCH and _has_rule(func.name()):
            self.found = func.name()
        return func(*args, **(kwargs or {}))


def _has_rule(operator: str) -> bool:
    key = "FuncTorchBatched"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key))


def _refusal(name: str) -> Any:
    def refuse(*_: object) -> None:
        raise OwnRuleError(OWN_RULE.format(name))

    return refuse


def _below(kind: Any) -> Iterator[Any]:
    for below in kind.__subclasses__():
        yield below
        yield from _below(below)
