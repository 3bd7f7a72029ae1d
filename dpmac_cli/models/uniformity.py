"""Prove that a network runs the same operations for every batch, from its graph.

The network is exported with a symbolic batch size. An operation that is not known counts as not
proven.
"""

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from dpmac_cli.dp.clipping.batches import Structure, tensors_in
from dpmac_cli.dp.precision import inherited_precision
from dpmac_cli.models.hooks import UnprovenError
from dpmac_cli.storage.files import catalogue
from dpmac_cli.torch_errors import what_failed

#: Number of samples in the batch that is exported.
TRACED = 5
#: Largest batch size for which the operations must be the same.
LARGEST_BATCH = 1 << 20
#: Names of operations and inputs, grouped by how outputs depend on inputs.
KNOWN = catalogue(frozenset[str], Path(__file__).with_name("operations.toml"))
#: Kinds of operations that keep the order of samples wherever their dimension is.
KEEPING = ("pointwise", "factories", "reshaping", "products", "multilinear")


def name_of(func: Any) -> str:
    """Return the name of an operation, without the suffix of its in-place variant."""
    packet = getattr(func, "overloadpacket", func)
    return str(getattr(packet, "__name__", packet)).removesuffix("_")


def dims_of(func: Any, named: Mapping[str, Any]) -> list[int]:
    """Return the dimensions that an operation works along; an empty list means all."""
    if "normalized_shape" in named:
        return list(range(-len(named["normalized_shape"]), 0))
    if "pad" in named:  # two numbers for each dimension, from the last one
        return [-1 - place // 2 for place, number in enumerate(named["pad"]) if number != 0]
    defaults = {a.name: a.default_value for a in func._schema.arguments}
    dim = named.get("dim", named.get("dims", defaults.get("dim")))
    return [dim] if isinstance(dim, int) else list(dim or ())


def check_uniform(model: nn.Module, inputs: Structure, rows: int = 1) -> None:
    """Prove that a forward pass runs the same operations for every batch of at least two samples.

    The batch size is a symbol in the exported graph. No operation may compute with it, reduce over
    the batch dimension, or work along it: constants with one entry per sample would reveal the
    batch size, and shifts would reveal positions. Raises UnprovenError.

    Args:
        model: the network.
        inputs: structure of a sample.
        rows: most rows per sample of a layer. If there are several, no operation may separate those
            of a sample.
    """
    before: dict[torch.fx.Node, int] = {}
    for node in _exported(model, inputs).nodes:
        if node.op == "call_function":
            _check_node(node)
            before[node] = _before_samples(node, before, rows)


def _exported(model: nn.Module, inputs: Structure) -> torch.fx.Graph:
    """Return the graph of a network for any batch size. Raises UnprovenError if there is none."""
    x = inputs.made_up(TRACED)
    size = torch.export.Dim("samples", min=1, max=LARGEST_BATCH)
    sizes: Any = tree_map(lambda _: {0: size}, x)
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # torch.export is verbose if it cannot trace a network
    try:
        # It also prints the graph so far.
        quiet = contextlib.redirect_stderr(io.StringIO())
        silent = warnings.catch_warnings(action="ignore")
        # Fused attention, of which every device has another, is not known here.
        with silent, quiet, inherited_precision(), sdpa_kernel(SDPBackend.MATH):
            program = torch.export.export(model, (x,), dynamic_shapes=(sizes,))
            graph: torch.fx.Graph = program.run_decompositions().graph
            return graph
    except Exception as failure:
        raise UnprovenError(_why(failure)) from failure
    finally:
        logger.setLevel(level)


def _check_node(node: torch.fx.Node) -> None:
    """Reject an operation that reveals the batch size, or positions in the batch."""
    name = name_of(node.target)
    given = [of.meta.get("val") for of in node.all_input_nodes]
    outputs = tensors_in(node.meta.get("val"))
    if _computes_with_batch_size(node, given, outputs):
        raise UnprovenError(f"{name} computes with the batch size.")
    batched = [t for t in tensors_in(given) if _batch_dim(t) is not None]
    made = [(_batch_dim(out), out) for out in outputs]
    if name == "as_strided" and not (batched and _same_places(batched[0], outputs[0])):
        raise UnprovenError("as_strided moves elements.")
    if not batched or not outputs:
        return
    if any(dim is None and 0 not in out.shape for dim, out in made):
        raise UnprovenError(f"{name} reduces over the samples of a batch.")
    if _works_along_samples(node, batched[0]):
        raise UnprovenError(f"{name} works along the samples of a batch.")


def _computes_with_batch_size(
    node: torch.fx.Node, given: Sequence[Any], outputs: Sequence[Tensor]
) -> bool:
    """Return whether an operation uses the batch size for more than shapes."""
    name, arguments = name_of(node.target), node.args
    counted = any(isinstance(value, torch.SymInt) for value in given)
    filled = name == "full" and isinstance(arguments[1], torch.fx.Node)
    shaping = name in KNOWN["shaping"] and not (name == "mul" and outputs)
    return filled or (counted and not shaping)


def _works_along_samples(node: torch.fx.Node, batched: Tensor) -> bool:
    """Return whether an operation works along the batch dimension of its first batched input.

    Raises UnprovenError for one that is not known.
    """
    target: Any = node.target
    arguments: Any = node.args
    name, place = name_of(target), _place_of(batched)
    kept = torch.Tag.pointwise in getattr(target, "tags", ())
    if kept or any(name in KNOWN[kind] for kind in KEEPING) or name == "embedding":
        return False
    if name in KNOWN["by_row"] or "batch_norm" in name:
        return place not in ((0, 1) if name in KNOWN["by_channel"] else (0,))
    if name in ("tril", "triu"):
        return place >= batched.ndim - 2
    if name == "index":
        return arguments[1][place : place + 1] not in ([], [None])
    if name in KNOWN["along"] or name in KNOWN["moving"]:
        named = dict(zip([a.name for a in target._schema.arguments], arguments, strict=False))
        dims = [dim % batched.ndim for dim in dims_of(target, {**named, **node.kwargs})]
        return place in dims or (name == "roll" and not dims)
    raise UnprovenError(f"It is not known how {name} treats samples.")


def _before_samples(node: torch.fx.Node, before: Mapping[torch.fx.Node, int], rows: int) -> int:
    """Return how many positions come before the samples in the batch dimension of an output.

    A dimension of k samples has index (position before * samples + sample) * rest + position after.
    In inputs, samples come first. Raises UnprovenError for an operation after which the dimension
    may not have this order for every number of samples, or, if a layer has several ``rows`` per
    sample, after which they may not be adjacent.
    """
    name = name_of(node.target)
    given = {
        of: [t for t in tensors_in(of.meta.get("val")) if _batch_dim(t) is not None]
        for of in node.all_input_nodes
    }
    batched = [t for tensors in given.values() for t in tensors]
    made = [t for t in tensors_in(node.meta.get("val")) if _batch_dim(t) is not None]
    if not batched or not made:
        return 1
    sizes = {_rows_of(t) for t in batched}
    found = {before.get(of, 1) for of, tensors in given.items() if tensors}
    if name in KNOWN["factories"] and sizes != {_rows_of(t) for t in made}:
        return 1  # all its rows are alike
    if len(sizes) == len(found) == 1:
        [positions_before] = found
        positions = _positions_after(name, positions_before, batched[0], made)
        if positions is not None and (rows == 1 or positions == 1):
            return positions
    if rows > 1:
        raise UnprovenError(
            f"{name} could separate the rows of a sample that a layer gets. Keep positions in a "
            "dimension after the samples: self.layer(x), not self.layer(x.flatten(0, 1))."
        )
    raise UnprovenError(f"{name} could mix the samples of batches of other sizes.")


def _positions_after(
    name: str, positions: int, batched: Tensor, made: Sequence[Tensor]
) -> int | None:
    """Return the positions before the samples after an operation; None if it may mix samples.

    Args:
        name: name of the operation. positions: positions before the samples of its inputs.
        batched: one of the inputs with samples, which all have as many rows per sample.
        made: outputs with samples.
    """
    if name in KNOWN["viewing"]:
        numbers, outside = _numbers_before(batched) * positions, _numbers_before(made[0])
        found, rest = divmod(numbers, outside) if outside else (0, 0)
        known = rest == 0 < found and _rows_of(made[0]) % found == 0
        return found if known else None
    if name == "repeat":
        return positions * (_rows_of(made[0]) // _rows_of(batched))
    return positions if {_rows_of(t) for t in made} == {_rows_of(batched)} else None


def _numbers_before(tensor: Tensor) -> int:
    """Return how many times the batch dimension of a traced tensor is repeated before it."""
    return math.prod(tensor.shape[: _place_of(tensor)])


def _rows_of(tensor: Tensor) -> int:
    """Return how many rows per sample the batch dimension of a traced tensor has."""
    size: Any = tensor.shape[_place_of(tensor)]
    rows = size.node.expr / next(iter(size.node.expr.free_symbols))
    if not rows.is_Integer:
        raise UnprovenError("Its batch dimension has rows that are not samples.")
    return int(rows)


def _same_places(a: Tensor, b: Tensor) -> bool:
    """Return whether a view of a traced tensor keeps every element at its position."""
    several = [dim for dim, size in enumerate(a.shape) if size != 1]
    moved = any(a.stride(dim) != b.stride(dim) for dim in several)
    return a.shape == b.shape and bool(a.storage_offset() == b.storage_offset()) and not moved


def _place_of(batched: Tensor) -> int:
    """Return the batch dimension of a traced tensor. Raises UnprovenError if it has none."""
    place = _batch_dim(batched)
    if place is None:
        raise UnprovenError("A tensor has no batch dimension.")
    return place


def _batch_dim(tensor: Tensor) -> int | None:
    """Return the dimension of a traced tensor that has a symbolic size; None if there is none.

    Raises UnprovenError if there are several, or its size is not a multiple of the batch size.
    """
    shape: Any = tensor.shape
    symbolic = {d: size.node.expr for d, size in enumerate(shape) if isinstance(size, torch.SymInt)}
    for size in symbolic.values():
        symbols = list(size.free_symbols)  # u..: depends on the data
        alone = len(symbols) == 1 and not str(symbols[0]).startswith("u")
        if not alone or not (size / symbols[0]).is_Integer:
            raise UnprovenError("The size of a tensor is not a multiple of the batch size.")
    if len(symbolic) > 1:
        raise UnprovenError("It computes with pairs of samples.")
    return next(iter(symbolic), None)


def _why(failure: Exception) -> str:
    """Return why torch.export could not trace a network, as a sentence."""
    kind = type(failure).__name__
    if "Constraints violated" in str(failure):
        return "Its operations depend on the batch size (which includes len(x))."
    if kind == "GuardOnDataDependentSymNode":
        where = what_failed(failure).partition(":")[0].removeprefix(kind)
        return f"Its operations depend on numbers that were computed from samples{where}."
    return f"torch.export cannot trace it: {what_failed(failure)}"
