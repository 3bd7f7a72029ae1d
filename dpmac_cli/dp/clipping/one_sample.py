"""Loss and gradients of one sample at a time, without vmap.

They are the reference with which gradients by rule are compared when a network is validated, and
the way to run networks that vmap cannot run.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from dpmac_cli.dp.clipping.batches import Batch, map_rows, samples_in
from dpmac_cli.dp.copies import copied, without_memory
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
    """Computes loss and weight of one sample, and gradients of samples one by one, without vmap.

    Args:
        loss_of: returns one loss per row, from outputs and labels of rows.
        names: names of the trained parameters in the network.
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
        self._loss_of = loss_of
        self._names = names
        self._views = views
        self._rowwise = rowwise
        self._weigh = weigh
        self.single = False

    def loss(
        self, network: Callable[[Batch], Any], x: Batch, y: Batch, apart: WeightsApart | None = None
    ) -> tuple[Tensor, Weights]:
        """Return loss and weight of one sample: the weighted mean of the losses of its views.

        Args:
            network: maps the rows of the sample to outputs.
            x: inputs of the sample, shape (...), or (views, ...) if there are several.
            y: its labels, in the same form.
            apart: mode that takes class weights out of the loss; None for a new one.

        Returns:
            The loss, shape (), and the weight, shape ().

        Raises:
            ModelError: there are weights in the loss and beside it, or the loss is not per record.
        """
        rows, labels = x, y
        if self._views == 1:
            add_row_dimension = partial(torch.unsqueeze, dim=0)
            rows = map_rows(add_row_dimension, x)
            labels = map_rows(add_row_dimension, y)
        apart = apart or WeightsApart(self._views)
        with nullcontext() if self._rowwise else apart:
            outputs = network(rows)
            loss_of = without_memory(self._loss_of, "The loss")
            of_loss = outputs.float() if self.single else outputs
            losses = loss_of(of_loss, labels)
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
        """Yield loss, weight and gradients of one sample after the other.

        Each sample gets a new copy of the network, so none leaves anything to the next.

        Args:
            model: the network.
            x: inputs of the samples, shape (samples, ...).
            y: labels of the samples, shape (samples, ...).
            shared: tensors of the network that are not copied.

        Yields:
            For each sample its loss, shape (); its weight, shape (); and its gradients by the names
            of the trained parameters, None for one on which the loss does not depend.
        """
        for i in range(samples_in(x)):
            x_i, y_i = sample_of(i, x), sample_of(i, y)
            alone = copied(model, shared).requires_grad_(False)
            parameters = dict(alone.named_parameters())
            trained = {name: parameters[name].requires_grad_() for name in self._names}
            with torch.enable_grad():
                loss, weight = self.loss(alone, x_i, y_i)
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
            gradients = {name: _take_gradient(p) for name, p in trained.items()}
            yield loss.detach(), weight, gradients


def _take_gradient(p: Tensor) -> Tensor | None:
    """Return the gradient of a parameter, and leave none."""
    g = p.grad
    p.grad = None
    return None if g is None else g.to_dense()


def sample_of(index: int, batch: Batch) -> Batch:
    """Return one sample of a batch, tensors of shape (...), in new memory.

    Args:
        index: number of the sample, from 0.
        batch: tensors of shape (samples, ...).

    Example:
        >>> sample_of(1, {"x": torch.tensor([[1, 2], [3, 4]])})
        {'x': tensor([3, 4])}
    """
    return map_rows(lambda rows: rows[index].clone(), batch)


def alike(
    computed: Sequence[Tensor], expected: Sequence[Tensor | None], tolerance: float = TOLERANCE
) -> bool:
    """Return whether computed numbers are finite and differ from the expected ones by rounding.

    Args:
        computed: tensors of any shapes, which are overwritten.
        expected: for each of them, a tensor with as many numbers; None stands for zeros.
        tolerance: largest difference, relative to the largest number of all that are expected.

    Example:
        >>> alike([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.0 + 1e-7])])
        True
        >>> alike([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.1])])
        False
    """
    largest = 0.0
    largest_error = 0.0
    for a, b in zip(computed, expected, strict=True):
        error = a
        if b is not None:
            largest = max(largest, _largest(b))
            error = a.sub_(b.reshape(a.shape))
        largest_error = max(largest_error, _largest(error))
    return largest_error <= tolerance * largest < math.inf


def _largest(numbers: Tensor) -> float:
    """Return the largest absolute value; infinity if a number is not finite."""
    if not numbers.numel():
        return 0.0
    size = float(vector_norm(numbers, torch.inf))
    return math.inf if math.isnan(size) else size
