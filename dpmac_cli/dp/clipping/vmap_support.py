"""Contexts in which vmap runs a network on one record at a time, and reasons why it cannot.

vmap has no rule for some operations, and some have a rule that sees several records. The contexts
choose an implementation with a rule where torch has one, and refuse the others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import autograd_function
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dpmac_cli.dp.clipping.batches import tensors_in
from dpmac_cli.dp.clipping.eager_mode import EagerMode
from dpmac_cli.dp.clipping.matmul import RowProducts
from dpmac_cli.dp.clipping.projections import masks_kept, replaced
from dpmac_cli.dp.clipping.recurrence import FUNCTIONS
from dpmac_cli.dp.torch_errors import what_failed

#: Remedy for a function of autograd without a rule.
_NO_RULE = (
    "it has a torch.autograd.Function without a rule for vmap. If its forward and backward consist "
    "of torch operations, define setup_context in it and set generate_vmap_rule = True."
)
#: Message for a function of autograd whose rule is the network's, and the word that finds it.
OWN_RULE = "a torch.autograd.Function with a vmap of its own"
#: Words of messages of torch, and remedies.
REMEDIES = {
    "generate_vmap_rule": _NO_RULE,
    "setup_context": _NO_RULE,
    OWN_RULE: (
        f"it has {OWN_RULE}, which sees several records. If its forward and backward consist of "
        "torch operations, remove its vmap, and set generate_vmap_rule = True."
    ),
    "data-dependent control flow": (
        "it decides by the values of a record, as in if x.max() > 1 or x.item(). Use "
        "torch.where(condition, a, b)."
    ),
    "saved tensor hooks": "it uses torch.utils.checkpoint. Leave that out.",
}


def reason_of_vmap(failure: Exception) -> str:
    """Return why vmap failed on made-up samples and what to do, as a sentence or the end of one.

    Args:
        failure: an exception that was raised under vmap. One that is not known is quoted.

    Example:
        >>> reason_of_vmap(RuntimeError("vmap: data-dependent control flow")).split(", as in")[0]
        'it decides by the values of a record'
    """
    message = str(failure)
    for words, remedy in REMEDIES.items():
        if words in message:
            return remedy
    return what_failed(failure)


def unwrapped(network: nn.Module) -> nn.Module:
    """Return the network inside of torch.compile and nn.DataParallel, which vmap cannot run.

    Args:
        network: a network, which is returned as it is, or any number of wrappers around one.
    """
    if isinstance(network, nn.DataParallel):
        return unwrapped(network.module)
    not_compiled = getattr(network, "_orig_mod", None)
    return not_compiled if isinstance(not_compiled, nn.Module) else network


def called_with(model: nn.Module, parameters: dict[str, Tensor], x: Any) -> Any:
    """Return the outputs of a network with other parameters; the network is not changed.

    Args:
        model: the network.
        parameters: parameters to use instead of its own, by name in the network.
        x: its only argument, also if it is a tuple.
    """
    return functional_call(model, parameters, (x,))


def each_alone(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function (rows, ...) to (rows, ...) that runs another on each row alone, by vmap.

    No gradients are computed.

    Args:
        run: maps one row, shape (1, ...), to (1, ...), by operations that vmap can run.

    Example:
        >>> minus_mean = each_alone(lambda rows: rows - rows.mean(0))  # of one row
        >>> minus_mean(torch.tensor([[1.0], [5.0]]))
        tensor([[0.],
                [0.]])
    """

    def one(row: Tensor) -> Tensor:
        return run(row.unsqueeze(0)).squeeze(0)

    def mapped(rows: Tensor) -> Tensor:
        with torch.no_grad(), supported(), RowProducts():
            outputs: Tensor = vmap(one, randomness="different")(rows)
        return outputs

    return mapped


@contextmanager
def supported() -> Iterator[None]:
    """Make torch choose operations that vmap supports, for the block below ``with``.

    Attention uses its only backend with a rule for vmap, and transformers keeps its masks.

    Raises:
        RuntimeError: in the block, for a function of autograd with a rule for vmap of its own,
            which would see several samples.
    """
    with (
        sdpa_kernel(SDPBackend.MATH),
        masks_kept(),
        replaced(autograd_function, "custom_function_call_vmap_helper", _reject_own_rule),
    ):
        yield


#: Calls the rule for vmap of a function of autograd.
_call_rule: Callable[..., Any] = autograd_function.custom_function_call_vmap_helper


def _reject_own_rule(interpreter: Any, rule: Any, function: Any, *args: Any, **named: Any) -> Any:
    """Call the rule of a function of autograd; raise RuntimeError unless it is one of dpmac's."""
    if function not in FUNCTIONS:
        raise RuntimeError(OWN_RULE)
    return _call_rule(interpreter, rule, function, *args, **named)


class Constant(EagerMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Mode in which every operation that draws random numbers returns one half instead."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in tensors_in(result):
                tensor.fill_(0.5)
        return result


class DrawnAgain(TorchFunctionMode):
    """Mode in which ``tensor.bernoulli_(p)`` returns a new tensor instead of filling this one.

    vmap runs it on batched tensors alone.

    So stochastic depth is written: ``torch.empty(shape).bernoulli_(p)``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not Tensor.bernoulli_:
            return func(*args, **kwargs)

        def probabilities(tensor: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
            filled: Tensor = torch.zeros_like(tensor) + p
            return filled

        return torch.bernoulli(probabilities(*args, **kwargs))


class KeptResults(TorchFunctionMode):
    """Mode that keeps copies of the results of all operations on a sample, inside of vmap.

    Args:
        results: list that they are added to, in the order of the operations.
    """

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self._results = results
        self._level = torch._C._functorch.maybe_current_level() or 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in getattr(func, "__name__", ""):
            return result  # which has no values yet
        for tensor in tensors_in(result):
            if self._keeps(tensor):
                self._results.append(tensor.detach().clone())
        return result

    def _keeps(self, tensor: Tensor) -> bool:
        """Return whether a result depends on samples, and outlives a vmap of the network's own."""
        level: int = torch._C._functorch.maybe_get_level(tensor)
        return 0 < level <= self._level


@contextmanager
def constant_draws() -> Iterator[None]:
    """Make torch's random numbers one half in the block below ``with``, wherever they are drawn.

    So a trial computes the same for a sample alone and within a batch.
    """
    # The other kernels of attention draw and use random numbers in one operation.
    with sdpa_kernel(SDPBackend.MATH), Constant():
        yield
