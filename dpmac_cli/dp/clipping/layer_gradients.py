"""Per-sample gradients of a layer in the cheapest of several forms: stored, in pieces, or ghost.

A form gives two things: squared norms of g_i - m in the metric of an ellipsoid, with bounds on
their rounding, and the weighted sum of the g_i. Which form is cheapest depends on public sizes
only: :func:`choose_form`.

| form | of | stores |
|---|---|---|
| :class:`Instantiated` | any layer | g_i, or some of them at a time |
| :class:`.OuterProducts` | Linear layers with one position | inputs and output gradients |
| :class:`.PositionProducts` | Linear layers and convolutions with several positions | the same |
| :class:`.LookedUp` | lookups of categories | gradients of the vectors that were read |
| :class:`.TiedProducts` | a weight shared by embeddings and Linear layers | factors of g_i |
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Protocol

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.custom_layers import Lookups
from dpmac_cli.dp.clipping.ghost_clipping import (
    DEVICE_PIECE,
    PositionProducts,
    UseSizes,
    join_positions,
    sizes,
)
from dpmac_cli.dp.clipping.layer_rules import ByParameter, Use, in_groups, instantiate
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.looked_up import LookedUp
from dpmac_cli.dp.clipping.norms import (
    ROW,
    LayerMetric,
    Mask,
    RegionMetric,
    SquaredNorms,
    kept,
    roundoff,
)
from dpmac_cli.dp.clipping.outer_products import OuterProducts
from dpmac_cli.dp.clipping.tied_products import TiedProducts, tied_products

#: Numbers to instantiate at a time on a CPU, to fit in its cache.
PIECE = 1 << 20
#: Numbers of one layer's gradients to hold between norm and sum: 80 MB in float32.
HELD = 20_000_000


class PerSampleGradients(Protocol):
    """Per-sample gradients of one layer for a chunk: the interface of a form."""

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Return ||(g_i - m)/b||^2 over this layer, times the metric's factor, with bounds.

        g_i is the gradient of sample i, m the centre of the ellipsoid and b its scale.

        Args:
            metric: metric of this layer's coordinates.

        Returns:
            Squared norms, float64, shape (samples,).
        """

    def weighted_sum(self, c: Tensor, valid: Mask, out: Tensor) -> None:
        """Write the sum of c_i g_i over the valid samples into ``out``: lines 7 and 10.

        Args:
            c: factors c_i, shape (samples,); 0 where not valid.
            valid: mask of finite samples, bool, shape (samples,); None if all are finite. The
                others add exactly 0.
            out: memory for the result, the layer's slice of a sum, shape (d_layer,). Overwritten.
        """

    def double(self) -> "PerSampleGradients":
        """Return the same form, whose gradients are in float64."""


#: Layers, each with its per-sample gradients for a chunk.
ByLayer = Sequence[tuple[Layer, PerSampleGradients]]


def total_squared_norms(gradients: ByLayer, metric: RegionMetric) -> SquaredNorms:
    """Return the squared whitened norms ||(g_i - m)/b||^2 of a chunk's gradients: line 7.

    Args:
        gradients: all layers with the gradients of a chunk, at least one.
        metric: metric of the ellipsoid with centre m and scale b.
    """
    total = reduce(add, [form.squared_norms(metric.of(layer)) for layer, form in gradients])
    factor = metric.region.factor.double()
    return SquaredNorms(
        value=total.value / factor,
        slack=total.slack / factor,
        reach=total.reach / factor,
    )


@dataclass(frozen=True)
class Instantiated:
    """Form of gradients that are written out: all of them, or some samples' at a time.

    A form is described by :class:`PerSampleGradients`.

    Attributes:
        pieces: yields the gradients of a few samples at a time, with the same floats every time, so
            norms and sum read the same numbers.

    Example:
        >>> gradients = Instantiated(lambda: [[torch.tensor([[1.0, 2.0], [3.0, 4.0]])]])
        >>> total = torch.empty(2)
        >>> gradients.weighted_sum(torch.tensor([1.0, 0.5]), None, total)
        >>> total
        tensor([2.5000, 4.0000])
    """

    pieces: Callable[[], Iterable[ByParameter]]

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Return squared whitened norms, computed directly from g_i - m, so that nothing cancels.

        Args:
            metric: metric of this layer's coordinates.
        """
        return SquaredNorms.of(_norms(piece, metric) for piece in self.pieces())

    def weighted_sum(self, c: Tensor, valid: Mask, out: Tensor) -> None:
        """Write the sum of c_i g_i: one matrix-vector product per parameter of a piece.

        Args:
            c: factors c_i, shape (samples,).
            valid: mask of finite samples; None if all are finite.
            out: memory for the result, the layer's slice, shape (d_layer,). Overwritten.
        """
        out.zero_()
        begin = 0
        for piece in self.pieces():
            rows = slice(begin, begin + len(piece[0]))
            finite = None if valid is None else valid[rows]
            for part, column in _slices(piece):
                out[part].addmv_(kept(column, finite).T, c[rows])
            begin = rows.stop

    def double(self) -> "Instantiated":
        """Return the same form, whose gradients are converted to float64 when they are read."""

        def pieces() -> Iterator[ByParameter]:
            for piece in self.pieces():
                yield [column.double() for column in piece]

        return Instantiated(pieces)


def _slices(columns: ByParameter) -> Iterator[tuple[slice, Tensor]]:
    """Yield each tensor with the coordinates of the layer that it has."""
    begin = 0
    for column in columns:
        part = slice(begin, begin + column.shape[1])
        yield part, column
        begin = part.stop


def _norms(columns: ByParameter, metric: LayerMetric) -> SquaredNorms:
    """Return the norms of samples, some of which at a time fit in a cache."""
    squares = []
    for part, column in _slices(columns):
        at_a_time = _at_a_time(column, column.shape[1])
        groups = [metric.squares(rows, part) for rows in torch.split(column, at_a_time)]
        squares.append(torch.cat(groups))
    value = reduce(add, squares)
    slack = roundoff(ROW, columns[0].dtype) * value
    return SquaredNorms(value, slack, reach=torch.zeros_like(value))


def choose_form(layer: Layer, uses: Sequence[Use] | Tensor, *, ball: bool) -> PerSampleGradients:
    """Return a layer's per-sample gradients of a chunk, in the form whose norms and sum cost least.

    The layer's type, shapes and number of uses decide, and no value, so the form reveals nothing of
    the records but their number.

    Args:
        layer: the layer.
        uses: all its uses in a forward pass, at least one; or its gradients, written out, shape
            (samples, d_layer), which are set to 0 at the padding.
        ball: whether norms will be those in a ball, instead of an ellipsoid.
    """
    if isinstance(uses, Tensor):
        uses[:, layer.skipped] = 0  # also where a record makes the network read it otherwise
        columns: ByParameter = [uses]
        return Instantiated(lambda: [columns])
    if all(type(use.module) is nn.Linear and use.computed is None for use in uses):
        uses = [_one_after_another(uses)]
    # Uses of one kernel with other strides or paddings are of other modules, with other patches.
    of_one_module = len({use.module for use in uses}) == 1
    use_sizes = sizes(layer, uses) if of_one_module else None
    if use_sizes is not None:
        return _of_products(layer, uses, use_sizes, ball=ball)
    of_embeddings = _of_embeddings(layer, uses, ball=ball)
    if of_embeddings is not None:
        return of_embeddings
    size = layer.stop - layer.start
    if uses[0].samples * size <= HELD:
        return _instantiated(layer, uses)
    step = _at_a_time(uses[0].grad_output, size)

    def pieces() -> Iterator[ByParameter]:
        for some in in_groups(uses, step):
            yield instantiate(layer, some)

    return Instantiated(pieces)


def _of_products(
    layer: Layer, uses: Sequence[Use], use_sizes: UseSizes, *, ball: bool
) -> PerSampleGradients:
    """Return the cheapest form of a layer whose gradients are sums of outer products."""
    first = uses[0]
    if use_sizes.positions == 1 and type(first.module) is nn.Linear:
        return OuterProducts(first.grad_output, first.inputs, "bias" in layer.parameters)
    numbers = first.samples * (layer.stop - layer.start)
    fits_in_cache = numbers <= _piece(first.grad_output)
    if fits_in_cache or (numbers <= HELD and use_sizes.holding_pays(ball)):
        return _instantiated(layer, uses)
    return PositionProducts(layer, tuple(uses), use_sizes)


def _instantiated(layer: Layer, uses: Sequence[Use]) -> Instantiated:
    """Return all gradients, computed for a few samples at a time, which stay in the cache."""
    grad_output = uses[0].grad_output
    numbers = max(layer.stop - layer.start, grad_output.numel() // uses[0].samples)
    step = max(2, _piece(grad_output) // 4 // numbers)
    columns = instantiate(layer, uses, step)
    return Instantiated(lambda: [columns])


def _of_embeddings(
    layer: Layer, uses: Sequence[Use], *, ball: bool
) -> LookedUp | TiedProducts | None:
    """Return a form that does not write out rows which a sample does not read; None if none is."""
    module = layer.module
    if type(module) is Lookups and len(uses) == 1:
        return LookedUp.of(uses[0].inputs, uses[0].grad_output, module.columns)
    return tied_products(uses) if ball else None


def _one_after_another(uses: Sequence[Use]) -> Use:
    """Return several uses of a Linear layer as one use at all their positions."""
    inputs = join_positions([use.inputs for use in uses])
    grad_output = join_positions([use.grad_output for use in uses])
    return Use(uses[0].module, inputs, grad_output)


def _piece(like: Tensor) -> int:
    """Return how many numbers to instantiate at a time."""
    return DEVICE_PIECE if like.is_cuda else PIECE


def _at_a_time(like: Tensor, size: int) -> int:
    """Return how many samples of ``size`` numbers to instantiate at a time."""
    return max(1, _piece(like) // max(1, size))
