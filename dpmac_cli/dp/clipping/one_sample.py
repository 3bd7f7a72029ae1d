"""Loss and gradients of one sample at a time, without vmap: what vmap is compared with."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from dpmac_cli.dp.clipping.batches import Batch, map_rows, samples_in
from dpmac_cli.dp.losses import Loss
from dpmac_cli.dp.weights import (
    Weigh,
    Weights,
    WeightsApart,
    bounded,
    equal_weights,
    of_unit,
)
from dpmac_cli.errors import ModelError

#: Largest error of gradients in float64, relative to the layer's largest.
TOLERANCE = 1e-6
#: The same in float32, for networks that cannot be tried in float64.
SINGLE = 1e-3
#: Messages for weights that cannot be used.
TWO_WEIGHTS = "The loss has class weights, and weights= was given, too. Use one of them."
REDUCED = (
    "A unit has {} records, each with its weight, but the loss returned a tensor of shape {} for "
    "it. Return one loss per record: with torch's losses, use reduction='none'."
)


class OneSample:
    """Loss of a network on one sample, with its weight, and gradients of samples one by one.

    Args:
        loss_of: one loss per row.
        names: names of the trained parameters.
        views: number of inputs per sample, public. The network may mix them with each other.
        rowwise: whether loss and weights are built in, and so act on each row alone.
        weigh: weights of rows; None for those of the loss, if any.

    Attributes:
        single: whether outputs are converted to float32 for the loss, as in a trial in float64 of
            a loss that holds tensors in float32.
    """

    def __init__(
        self,
        loss_of: Loss,
        names: Sequence[str],
        views: int,
        *,
        rowwise: bool,
        weigh: Weigh | None,
    ) -> None:
        self._loss_of, self._names, self._views = loss_of, names, views
        self._rowwise, self._weigh = rowwise, weigh
        self.single = False

    def loss(
        self, network: Callable[[Batch], Any], x: Batch, y: Batch, apart: WeightsApart | None = None
    ) -> tuple[Tensor, Weights]:
        """Return loss and weight of one sample: the mean loss, with weights, over its views."""
        alone = partial(torch.unsqueeze, dim=0)
        rows, labels = (t if self._views > 1 else map_rows(alone, t) for t in (x, y))
        apart = apart or WeightsApart(self._views)
        with nullcontext() if self._rowwise else apart:
            outputs = network(rows)
            loss_of = _without_memory(self._loss_of)
            losses = loss_of(outputs.float() if self.single else outputs, labels)
        if self._weigh is not None:
            if apart.weights is not None:
                raise ModelError(TWO_WEIGHTS)
            if losses.numel() != self._views:
                raise ModelError(REDUCED.format(self._views, tuple(losses.shape)))
            weights = bounded(self._weigh(rows, labels, outputs))
            return of_unit(losses.reshape(self._views), weights)
        loss = losses.mean()
        if apart.weights is None:
            return loss, equal_weights(loss)
        weights = bounded(apart.weights)
        return loss, Weights(weights.value.mean(), weights.cut.any())

    def one_by_one(
        self, model: nn.Module, x: Batch, y: Batch, shared: Iterable[Tensor] = ()
    ) -> Iterator[tuple[Tensor, Weights, dict[str, Tensor | None]]]:
        """Yield loss, weight and gradients of each sample by parameter; None if it has no effect.

        Each sample gets a new copy of the network, so none leaves anything to the next. Tensors in
        ``shared`` are not copied.
        """
        same = {id(t): t for t in shared}
        for i in range(samples_in(x)):
            x_i, y_i = (map_rows(partial(row_of, i), batch) for batch in (x, y))
            alone = copy.deepcopy(model, dict(same)).requires_grad_(False)
            named = dict(alone.named_parameters())
            trained = {name: named[name].requires_grad_() for name in self._names}
            with torch.enable_grad():
                loss, weight = self.loss(alone, x_i, y_i)
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
            yield loss.detach(), weight, {name: _taken(p) for name, p in trained.items()}


def _without_memory(loss: Loss) -> Loss:
    """Return a copy of a loss that is a module, so that no record leaves anything in its buffers.

    Its parameters, such as those of a teacher, are not copied.
    """
    if not isinstance(loss, nn.Module):
        return loss
    return copy.deepcopy(loss, {id(p): p for p in loss.parameters()})


def _taken(p: Tensor) -> Tensor | None:
    """Return the gradient of a parameter, and leave none."""
    g, p.grad = p.grad, None
    return None if g is None else g.to_dense()


def row_of(index: int, rows: Tensor) -> Tensor:
    """Return a copy of one row."""
    return rows[index].clone()


def alike(
    found: Sequence[Tensor], expected: Sequence[Tensor | None], tolerance: float = TOLERANCE
) -> bool:
    """Return whether numbers are finite and differ only by rounding; overwrites ``found``.

    None stands for zeros.
    """
    sizes = [_largest(b) for b in expected if b is not None]
    errors = [
        _largest(a if b is None else a.sub_(b.reshape(a.shape)))
        for a, b in zip(found, expected, strict=True)
    ]
    return max(errors) <= tolerance * max(sizes, default=0.0) < math.inf


def _largest(numbers: Tensor) -> float:
    """Return the largest absolute value; infinity if a number is not finite."""
    size = float(vector_norm(numbers, torch.inf)) if numbers.numel() else 0.0
    return math.inf if math.isnan(size) else size
