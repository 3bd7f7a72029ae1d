"""Proofs, operation by operation, that a network is independent across samples.

Two parts, both on made-up data. :func:`check_uniform` exports the network with a symbolic batch
size: the same operations then run for every batch, whatever its size and its values.
:class:`Dependence` follows through one forward and backward pass which samples each number was
computed from. What either of them does not know counts as not proven.
"""

import contextlib
import itertools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpmac_cli.dp.clipping.direct import tensors_in
from dpmac_cli.dp.clipping.layers import find_layers, flatten_parameters
from dpmac_cli.dp.clipping.recorder import record_uses
from dpmac_cli.models import dependence as ops
from dpmac_cli.models.dependence import SAMPLES, Dependence, UnprovenError
from dpmac_cli.torch_errors import what_failed

#: Largest batch for which the operations must be the same.
LARGEST_BATCH = 1 << 20
#: What gives a tensor another shape, of which the dimension of the samples is looked at.
_RESHAPING = ops.FACTORIES | ops.names("""
    view _unsafe_view reshape permute transpose t expand unsqueeze squeeze select slice split
    split_with_sizes unbind alias getitem sym_size repeat detach as_strided
""")
#: What may be told the number of samples: it only gives tensors their shape.
_SHAPING = ops.names("""
    view _unsafe_view reshape expand unflatten repeat sym_size mul zeros ones empty full new_zeros
    new_ones new_empty new_full native_group_norm rand randn as_strided
""")


def check_independent(model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Prove that a network is independent across samples in training, forwards and backwards.

    The model is in the mode in which it is trained, its dropout layers being identities. Its
    parameters are moved. Raises UnprovenError, which does not mean that it is not independent.
    """
    check_uniform(model, shape)
    x, y = torch.randn(SAMPLES, *shape), torch.arange(SAMPLES) % classes
    layers = find_layers(model, x)
    flatten_parameters(layers)
    with _following(x) as dependence:
        losses, uses = record_uses(model, layers, x, y)
    _check_backward(losses)
    dependence.check_rows("the loss", losses)
    for layer, used in zip(layers, uses, strict=True):
        for use in used:
            for tensor in use.inputs:
                dependence.check_rows(f"the inputs of layer {layer.name}", tensor)
            dependence.check_rows(f"the gradients of layer {layer.name}", use.delta)


def check_independent_forward(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Prove independence across samples of the output of a network that is not trained.

    Raises UnprovenError.
    """
    check_uniform(model, shape)
    x = torch.randn(SAMPLES, *shape)
    with torch.no_grad(), _following(x) as dependence:
        output = model(x)
    dependence.check_rows("the output", output)


def check_hooks(model: nn.Module) -> None:
    """Reject hooks, which may run backwards, where nothing is traced. Raises UnprovenError."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, part in itertools.chain(model.named_modules(), model.named_parameters()):
        if any(getattr(part, kind, None) for kind in kinds):
            raise UnprovenError(f"{name or 'It'} has hooks.")


@contextlib.contextmanager
def _following(x: Tensor) -> Iterator[Dependence]:
    """Follow what is computed from each row of x, by operations that are known; reject hooks."""

    def refuse(*_: Any, **__: Any) -> None:
        raise UnprovenError("It registers hooks on tensors.")

    names = ("register_hook", "register_post_accumulate_grad_hook")
    kept = {name: getattr(Tensor, name) for name in names}
    dependence, fast = Dependence(), torch.backends.mha.get_fastpath_enabled()
    dependence.mark(x)
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # one operation that does everything
        for name in names:
            setattr(Tensor, name, refuse)
        with sdpa_kernel(SDPBackend.MATH), dependence:
            yield dependence
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for name, method in kept.items():
            setattr(Tensor, name, method)


def _check_backward(losses: Tensor) -> None:
    """Reject functions with a backward of their own, of which only one batch was seen."""
    waiting: list[Any] = [losses.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__
        own = isinstance(node, torch.autograd.function.BackwardCFunction)
        if own and kind != "_StartedBackward":
            raise UnprovenError(f"{kind} is a backward of its own.")
        waiting += [function for function, _ in node.next_functions]


def check_uniform(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Prove that a forward pass runs the same operations for every batch of at least two samples.

    The batch is a symbol in the exported graph. No operation may compute with it, reduce over the
    dimension that has it, or work along that dimension: constants that are as many as the samples
    would tell their number, and shifts would tell their places. Raises UnprovenError.
    """
    x = torch.zeros(SAMPLES + 1, *shape)
    size = torch.export.Dim("samples", min=1, max=LARGEST_BATCH)
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # of a network that it cannot trace, torch.export prints much
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.export.export(model, (x,), dynamic_shapes=({0: size},))
            graph = program.run_decompositions().graph
    except Exception as failure:
        raise UnprovenError(_why(failure)) from failure
    finally:
        logger.setLevel(level)
    for node in graph.nodes:
        if node.op == "call_function":
            _check_node(node)


def _check_node(node: torch.fx.Node) -> None:
    """Reject an operation of a graph that tells the size of the batch, or places in it."""
    target: Any = node.target
    arguments: Any = node.args
    name = ops.name_of(target)
    given = [of.meta.get("val") for of in node.all_input_nodes]
    outputs = tensors_in(node.meta.get("val"))
    counted = any(isinstance(value, torch.SymInt) for value in given)
    filled = name == "full" and isinstance(arguments[1], torch.fx.Node)
    if filled or (counted and (name not in _SHAPING or (name == "mul" and outputs))):
        raise UnprovenError(f"{name} computes with the size of the batch.")
    batched = [t for t in tensors_in(given) if _batch_dim(t) is not None]
    made = [(_batch_dim(out), out) for out in outputs]
    if name == "as_strided" and not (batched and _same_places(batched[0], outputs[0])):
        raise UnprovenError("as_strided moves numbers.")
    if not batched or not outputs:
        return
    if any(dim is None and 0 not in out.shape for dim, out in made):
        raise UnprovenError(f"{name} reduces over the samples of a batch.")
    place, known = _batch_dim(batched[0]), getattr(target, "tags", ())
    if torch.Tag.pointwise in known or name in (ops.POINTWISE | _RESHAPING | ops.PRODUCTS):
        return
    named = dict(zip([a.name for a in target._schema.arguments], arguments, strict=False))
    dims = [dim % batched[0].ndim for dim in ops.dims_of(target, {**named, **node.kwargs})]
    if name in ops.BY_ROW or "batch_norm" in name:
        along = place != 0
    elif name in ("tril", "triu"):
        along = place is not None and place >= batched[0].ndim - 2
    elif name == "index":
        along = place is not None and arguments[1][place : place + 1] not in ([], [None])
    elif name in ops.ALONG or name in ops.MOVING:
        along = place in dims or (name == "roll" and not dims)
    elif name == "embedding":
        along = False
    else:
        raise UnprovenError(f"It is not known how {name} treats samples.")
    if along:
        raise UnprovenError(f"{name} works along the samples of a batch.")


def _same_places(a: Tensor, b: Tensor) -> bool:
    """Return whether a view of a traced tensor has each number in the place that it had."""
    several = [dim for dim, size in enumerate(a.shape) if size != 1]
    moved = any(a.stride(dim) != b.stride(dim) for dim in several)
    return a.shape == b.shape and bool(a.storage_offset() == b.storage_offset()) and not moved


def _batch_dim(tensor: Tensor) -> int | None:
    """Return the dimension of a traced tensor that has a symbolic size; None if there is none.

    Raises UnprovenError if there are several, or its size is not a multiple of the batch's.
    """
    shape: Any = tensor.shape
    symbolic = {d: size.node.expr for d, size in enumerate(shape) if isinstance(size, torch.SymInt)}
    for size in symbolic.values():
        symbols = list(size.free_symbols)  # u..: by the numbers in it
        alone = len(symbols) == 1 and not str(symbols[0]).startswith("u")
        if not alone or not (size / symbols[0]).is_Integer:
            raise UnprovenError("A tensor of it has another size than a multiple of the batch's.")
    if len(symbolic) > 1:
        raise UnprovenError("It computes with pairs of samples.")
    return next(iter(symbolic), None)


def _why(failure: Exception) -> str:
    """Return why torch.export could not trace a network, as a sentence."""
    kind = type(failure).__name__
    if "Constraints violated" in str(failure):
        return "What it does depends on the size of the batch (len(x) counts as that)."
    if kind == "GuardOnDataDependentSymNode":
        where = what_failed(failure).partition(":")[0].removeprefix(kind)
        return f"What it does depends on numbers that were computed from samples{where}."
    return f"torch.export cannot trace it: {what_failed(failure)}"
