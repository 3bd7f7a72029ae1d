"""Prove, operation by operation, that a network is independent across samples.

There are two parts, both on random data. :func:`check_uniform` exports the network with a symbolic
batch size: the same operations then run for every batch, regardless of its size and values.
:class:`Dependence` tracks, through one forward and backward pass, which samples each number was
computed from. Anything unknown to either of them counts as not proven.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dpmac_cli.dp.clipping.batches import Batch, Structure, tensors_in
from dpmac_cli.dp.clipping.deep_copy import duplicate
from dpmac_cli.dp.clipping.layers import find_layers, flatten_parameters
from dpmac_cli.dp.clipping.recorder import record_uses
from dpmac_cli.dp.precision import inherited_precision
from dpmac_cli.models.hooks import UnprovenError, without_hooks
from dpmac_cli.models.trial import Trial
from dpmac_cli.storage.files import catalogue
from dpmac_cli.torch_errors import what_failed

#: Number of samples to distinguish, with one plane per sample.
SAMPLES = 4
#: Largest batch size for which the operations must be the same.
LARGEST_BATCH = 1 << 20
#: Names of operations and inputs, grouped by how outputs depend on inputs.
#: Arguments that tell a normalisation to use the statistics of its inputs.
IN_TRAINING = ("training", "train")
KNOWN = catalogue(frozenset[str], Path(__file__).with_name("operations.toml"))


class Dependence(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Context manager that tracks which samples each number is computed from.

    Each storage has a shadow with one plane per sample and one entry per element. Views, and
    assignments to parts of a tensor, therefore need no rules.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shadows: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []  # a freed storage could be mistaken for a new one

    def mark(self, batch: Batch) -> None:
        """Mark row i of every tensor as sample i; there are :data:`SAMPLES` rows."""
        for x in tensors_in(batch):
            own = torch.eye(SAMPLES, dtype=torch.bool).view(SAMPLES, *[1] * (x.ndim - 1), SAMPLES)
            self._of(x).copy_(own.expand(*x.shape, SAMPLES))

    def check_rows(self, what: str, tensor: Tensor) -> None:
        """Raise UnprovenError, which names ``what``, if row i depends on more than sample i."""
        rows = _by_row(self._of(tensor))
        if rows.shape != (SAMPLES, SAMPLES) or bool((rows & ~torch.eye(SAMPLES).bool()).any()):
            raise UnprovenError(f"In {what} a row depends on other samples.")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record which samples its outputs were computed from."""
        names = [argument.name for argument in func._schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        told = {
            name
            for name, value in named.items()
            if any(bool(self._of(tensor).any()) for tensor in tensors_in(value))
        }
        result = func(*args, **(kwargs or {}))
        if told:
            self._note(func, named, told, result)
        return result

    def _of(self, tensor: Tensor) -> Tensor:
        """Return a view of the planes of a tensor, bool, shape (*shape, SAMPLES)."""
        size, place = tensor.untyped_storage().nbytes() // tensor.itemsize, _place(tensor)
        shadow = self._shadows.get(place)
        if shadow is None or place == 0:
            shadow = torch.zeros(SAMPLES, size, dtype=torch.bool)
            self._shadows[place] = shadow
            self._kept.append(tensor)
        if shadow.shape[1] != size:
            raise UnprovenError("It reinterprets the bytes of numbers.")
        return shadow.as_strided(
            (*tensor.shape, SAMPLES), (*tensor.stride(), size), tensor.storage_offset()
        )

    def _note(self, func: Any, named: Mapping[str, Any], told: set[str], result: Any) -> None:
        """Set the planes of outputs, given the names of the inputs that depend on samples."""
        name, outputs = _name_of(func), tensors_in(result)
        if not outputs:
            raise UnprovenError(f"{name} reads a number that was computed from samples.")
        read = {_place(tensor) for tensor in tensors_in(list(named.values()))}
        view = not func._schema.is_mutable and {_place(out) for out in outputs} <= read
        if view or torch.Tag.inplace_view in func.tags or name in KNOWN["factories"]:
            return
        given = [self._of(t) for key in sorted(told) for t in tensors_in(named[key])]
        if torch.Tag.pointwise in func.tags or name in KNOWN["pointwise"]:
            found = [_union(given)] * len(outputs)
        elif name in KNOWN["along"]:
            found = _along(given, _dims_of(func, named), outputs)
        elif name in KNOWN["by_channel"] and told <= KNOWN["of_channels"] and _keeps_nothing(named):
            found = _by_channel(given, outputs)
        elif told <= KNOWN["rows"] and (name in KNOWN["by_row"] or named.get("training") is False):
            found = _row_by_row(given, outputs)
        elif name in KNOWN["products"]:
            *added, left, right = (self._of(t) for t in tensors_in(list(named.values())))
            reached = [left.any(-2, keepdim=True), right.any(-3, keepdim=True), *added]
            found = [_union(reached)]
        elif name in KNOWN["moving"] | KNOWN["scattering"] and not told & KNOWN["places"]:
            found = self._moved(func, named)
        elif name in KNOWN["multilinear"]:
            found = [_union([self._by_factor(func, named, key) for key in told])]
        elif name == "embedding" and told == {"indices"}:
            found = [given[0].unsqueeze(-2)]
        else:
            raise UnprovenError(f"It is not known how {name} treats samples.")
        for out, planes in zip(outputs, found, strict=True):
            self._of(out).copy_(planes.expand(*out.shape, SAMPLES))

    def _by_factor(self, func: Any, named: Mapping[str, Any], factor: str) -> Tensor:
        """Return the planes of a sum of products, as far as they are from one of its factors."""
        planes = self._of(named[factor])
        ones = {n: torch.ones_like(v) if isinstance(v, Tensor) else v for n, v in named.items()}
        dtype = ones[factor].dtype
        found = [func(**{**ones, factor: planes[..., i].to(dtype)}) for i in range(SAMPLES)]
        return torch.stack(found, -1) > 0

    def _moved(self, func: Any, named: Mapping[str, Any]) -> list[Tensor]:
        """Return the planes of the outputs of an operation that moves elements."""
        found, arguments = [], {argument.name for argument in func._schema.arguments}
        for sample in range(SAMPLES):

            def shadow(value: Any, sample: int = sample) -> Any:
                return self._of(value)[..., sample].double() if isinstance(value, Tensor) else value

            given = {
                n: v if n in KNOWN["places"] else tree_map(shadow, v) for n, v in named.items()
            }
            given.pop("value", None)  # the padding value
            if "accumulate" in arguments:  # of numbers for one place, any may be the last
                given["accumulate"] = True
            found.append(tensors_in(func(**given)))
        return [torch.stack(planes, -1) > 0 for planes in zip(*found, strict=True)]


def _name_of(func: Any) -> str:
    """Return the name of an operation, without the suffix of its in-place variant."""
    packet = getattr(func, "overloadpacket", func)
    return str(getattr(packet, "__name__", packet)).removesuffix("_")


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _dims_of(func: Any, named: Mapping[str, Any]) -> list[int]:
    """Return the dimensions that an operation works along; an empty list means all."""
    if "normalized_shape" in named:
        return list(range(-len(named["normalized_shape"]), 0))
    defaults = {a.name: a.default_value for a in func._schema.arguments}
    dim = named.get("dim", named.get("dims", defaults.get("dim")))
    return [dim] if isinstance(dim, int) else list(dim or ())


def _union(given: Sequence[Tensor]) -> Tensor:
    return reduce(torch.logical_or, given, torch.tensor(False))  # a copy, even of a single one


def _along(given: Sequence[Tensor], dims: list[int], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return planes of outputs that depend on all inputs along the given dimensions."""
    whole = max(given, key=Tensor.numel)[..., 0]
    places = [dim % whole.ndim for dim in dims or range(whole.ndim)]
    kept = [planes.any(places, keepdim=True) if places else planes for planes in given]
    joined = _union(kept)
    return [joined if out.ndim == whole.ndim else joined.squeeze(places) for out in outputs]


def _keeps_nothing(named: Mapping[str, Any]) -> bool:
    """Return whether a normalisation has statistics of its inputs alone, which it does not keep."""
    statistics = named.get("running_mean"), named.get("running_var")
    return statistics == (None, None) and any(named.get(key) for key in IN_TRAINING)


def _by_channel(given: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return planes of outputs whose channels, dimension 1, depend on the same ones of inputs."""
    channels = _union(
        [
            planes.transpose(0, 1).flatten(1, -2).any(1) if planes.ndim > 2 else planes
            for planes in given
        ]
    )
    return [
        channels.view(1, -1, *[1] * (out.ndim - 2), SAMPLES) if out.ndim > 1 else channels
        for out in outputs
    ]


def _by_row(planes: Tensor) -> Tensor:
    """Return which samples each row was computed from, shape (rows, SAMPLES)."""
    return planes.flatten(1, -2).any(1) if planes.ndim > 2 else planes


def _row_by_row(given: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return planes of outputs whose rows depend on the same rows of inputs."""
    if min(planes.ndim for planes in given) < 2 or len({len(planes) for planes in given}) > 1:
        raise UnprovenError("Its rows do not correspond to samples.")
    rows = torch.stack([_by_row(planes) for planes in given]).any(0)
    return [
        rows.view(len(rows), *[1] * (out.ndim - 1), SAMPLES)
        if out.ndim and len(out) == len(rows)
        else torch.zeros(*out.shape, SAMPLES, dtype=torch.bool)
        for out in outputs
    ]


def check_independent(model: nn.Module, trial: Trial) -> None:
    """Prove that a network is independent across samples in training, forwards and backwards.

    The model is in training mode, with its dropout layers replaced by identities. Its parameters
    are modified. Raises UnprovenError, which does not mean that the model mixes samples.
    """
    check_uniform(duplicate(model), trial.inputs)  # the export leaves its own tensors in caches
    x, y = trial.samples(SAMPLES)
    layers = find_layers(model, x)
    flatten_parameters(layers)
    with _following(x) as dependence:
        losses, uses = record_uses(model, layers, x, y, loss=trial.loss)
    _check_backward(losses)
    dependence.check_rows("the loss", losses)
    for layer, used in zip(layers, uses, strict=True):
        for use in used:
            for tensor in use.inputs:
                dependence.check_rows(f"the inputs of layer {layer.name}", tensor)
            dependence.check_rows(f"the gradients of layer {layer.name}", use.delta)


def check_independent_forward(model: nn.Module, inputs: Structure) -> None:
    """Prove that the output of a frozen network is independent across samples.

    Raises UnprovenError.
    """
    check_uniform(duplicate(model), inputs)  # the export leaves its own tensors in caches
    x = inputs.made_up(SAMPLES)
    with torch.no_grad(), _following(x) as dependence:
        output = model(x)
    dependence.check_rows("the output", output)


@contextlib.contextmanager
def _following(x: Batch) -> Iterator[Dependence]:
    """Track which values are computed from each row of a batch, and reject hooks."""
    dependence, fast = Dependence(), torch.backends.mha.get_fastpath_enabled()
    dependence.mark(x)
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # a single fused operation
        with without_hooks(), sdpa_kernel(SDPBackend.MATH), dependence:
            yield dependence
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _check_backward(losses: Tensor) -> None:
    """Reject functions with a custom backward, which was observed for one batch only."""
    nodes: list[Any] = [losses.grad_fn]
    seen: set[Any] = {None}
    for node in nodes:  # grows
        if node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__
        own = isinstance(node, torch.autograd.function.BackwardCFunction)
        if own and kind != "_StartedBackward":
            raise UnprovenError(f"{kind} is a custom backward function.")
        nodes += [function for function, _ in node.next_functions]


def check_uniform(model: nn.Module, inputs: Structure) -> None:
    """Prove that a forward pass runs the same operations for every batch of at least two samples.

    The batch size is a symbol in the exported graph. No operation may compute with it, reduce over
    the batch dimension, or work along it: constants with one entry per sample would reveal the
    batch size, and shifts would reveal positions. Raises UnprovenError.
    """
    x = inputs.made_up(SAMPLES + 1)
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
            graph = program.run_decompositions().graph
    except Exception as failure:
        raise UnprovenError(_why(failure)) from failure
    finally:
        logger.setLevel(level)
    for node in graph.nodes:
        if node.op == "call_function":
            _check_node(node)


def _check_node(node: torch.fx.Node) -> None:
    """Reject an operation that reveals the batch size, or positions in the batch."""
    target: Any = node.target
    arguments: Any = node.args
    name = _name_of(target)
    given = [of.meta.get("val") for of in node.all_input_nodes]
    outputs = tensors_in(node.meta.get("val"))
    counted = any(isinstance(value, torch.SymInt) for value in given)
    filled = name == "full" and isinstance(arguments[1], torch.fx.Node)
    if filled or (counted and (name not in KNOWN["shaping"] or (name == "mul" and outputs))):
        raise UnprovenError(f"{name} computes with the batch size.")
    batched = [t for t in tensors_in(given) if _batch_dim(t) is not None]
    made = [(_batch_dim(out), out) for out in outputs]
    if name == "as_strided" and not (batched and _same_places(batched[0], outputs[0])):
        raise UnprovenError("as_strided moves elements.")
    if not batched or not outputs:
        return
    if any(dim is None and 0 not in out.shape for dim, out in made):
        raise UnprovenError(f"{name} reduces over the samples of a batch.")
    place, tags = _batch_dim(batched[0]), getattr(target, "tags", ())
    keeping = ("pointwise", "factories", "reshaping", "products", "multilinear")
    if torch.Tag.pointwise in tags or any(name in KNOWN[kind] for kind in keeping):
        return
    named = dict(zip([a.name for a in target._schema.arguments], arguments, strict=False))
    dims = [dim % batched[0].ndim for dim in _dims_of(target, {**named, **node.kwargs})]
    if name in KNOWN["by_row"] or "batch_norm" in name:
        along = place not in ((0, 1) if name in KNOWN["by_channel"] else (0,))
    elif name in ("tril", "triu"):
        along = place is not None and place >= batched[0].ndim - 2
    elif name == "index":
        along = place is not None and arguments[1][place : place + 1] not in ([], [None])
    elif name in KNOWN["along"] or name in KNOWN["moving"]:
        along = place in dims or (name == "roll" and not dims)
    elif name == "embedding":
        along = False
    else:
        raise UnprovenError(f"It is not known how {name} treats samples.")
    if along:
        raise UnprovenError(f"{name} works along the samples of a batch.")


def _same_places(a: Tensor, b: Tensor) -> bool:
    """Return whether a view of a traced tensor keeps every element at its position."""
    several = [dim for dim, size in enumerate(a.shape) if size != 1]
    moved = any(a.stride(dim) != b.stride(dim) for dim in several)
    return a.shape == b.shape and bool(a.storage_offset() == b.storage_offset()) and not moved


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
