"""Prove, operation by operation, that a network is independent across samples.

There are two parts, both on random data. :func:`.check_uniform` exports the network with a symbolic
batch size: the same operations then run for every batch, regardless of its size and values.
:class:`Dependence` tracks, through one forward and backward pass, which samples each number was
computed from. Anything unknown to either of them counts as not proven.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
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
from dpmac_cli.models.hooks import UnprovenError, without_hooks
from dpmac_cli.models.trial import Trial
from dpmac_cli.models.uniformity import KNOWN, check_uniform, dims_of, name_of

#: Number of samples to distinguish, with one plane per sample.
SAMPLES = 4
#: Arguments that tell a normalisation to use the statistics of its inputs.
IN_TRAINING = ("training", "train")


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

    def check_rows(self, what: str, tensor: Tensor, rows: int = 1) -> None:
        """Raise UnprovenError, which names ``what``, if a row depends on more than its sample.

        Sample i has the rows from i * ``rows`` on.
        """
        found = _by_row(self._of(tensor))
        own = torch.eye(SAMPLES).bool().repeat_interleave(rows, 0)
        if found.shape != own.shape or bool((found & ~own).any()):
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
        name, outputs = name_of(func), tensors_in(result)
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
            found = _along(given, dims_of(func, named), outputs)
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


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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
        # Each may depend on all; the sum of a loss's weights, without dimensions, is not used.
        else rows.any(0).expand(*out.shape, SAMPLES) & (out.ndim > 0)
        for out in outputs
    ]


def check_independent(model: nn.Module, trial: Trial) -> None:
    """Prove that a network is independent across samples in training, forwards and backwards.

    The model is in training mode, with its dropout layers replaced by identities. Its parameters
    are modified. Raises UnprovenError, which does not mean that the model mixes samples.
    """
    x, y = trial.samples(SAMPLES)
    layers = find_layers(model, x)
    rows = max(layer.rows for layer in layers)
    # The export leaves its own tensors in caches. A network may read whether its parameters require
    # gradients; in steps, in which they are views of a flat vector, they do not.
    for exported in (duplicate(model), duplicate(model).requires_grad_(False)):
        check_uniform(exported, trial.inputs, rows)
    flatten_parameters(layers)
    with _following(x) as dependence:
        losses, uses = record_uses(model, layers, x, y, loss=trial.loss)
    _check_backward(losses)
    dependence.check_rows("the loss", losses)
    for layer, used in zip(layers, uses, strict=True):
        for use in used:
            for tensor in use.inputs:
                dependence.check_rows(f"the inputs of layer {layer.name}", tensor, layer.rows)
            dependence.check_rows(f"the gradients of layer {layer.name}", use.delta, layer.rows)


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
