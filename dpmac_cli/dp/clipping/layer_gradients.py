"""Per-sample gradients of a layer in the cheapest of several forms: stored, in pieces, or ghost."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping import unfold
from dpmac_cli.dp.clipping.custom_layers import Lookups
from dpmac_cli.dp.clipping.ghost_clipping import (
    DEVICE_PIECE,
    PositionProducts,
    UseSizes,
    join_positions,
    sizes,
)
from dpmac_cli.dp.clipping.layer_rules import CHANNELS, ByParameter, Use, in_groups, instantiate
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
        """Return ||(g_i - m)/b||^2 over this layer times the metric's factor, with bounds."""

    def weighted_sum(self, c: Tensor, valid: Mask, out: Tensor) -> None:
        """Write the sum of c_i g_i over the valid samples into ``out``.

        Args:
            c: weights, shape (samples,); 0 where not valid.
            valid: mask of finite samples; None if all are finite. The others add exactly 0.
            out: the layer's slice, shape (d_layer,).
        """

    def double(self) -> "PerSampleGradients":
        """Return the same gradients, in float64."""


#: Layers, each with its per-sample gradients for a chunk.
ByLayer = Sequence[tuple[Layer, PerSampleGradients]]


def total_squared_norms(gradients: ByLayer, metric: RegionMetric) -> SquaredNorms:
    """Return ||(g_i - m)/b||^2 over several layers, each with its part of the metric."""
    found = reduce(add, [form.squared_norms(metric.of(layer)) for layer, form in gradients])
    factor = metric.region.factor.double()
    return SquaredNorms(found.value / factor, found.slack / factor, found.reach / factor)


@dataclass(frozen=True)
class Instantiated:
    """Instantiated gradients: all of them, or some samples at a time if they are too large.

    ``pieces`` yields those of a few samples at a time, with the same floats every time, so norms
    and sum read the same numbers.
    """

    pieces: Callable[[], Iterable[ByParameter]]

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Compute the norms directly; nothing cancels."""
        return SquaredNorms.of(_norms(piece, metric) for piece in self.pieces())

    def weighted_sum(self, c: Tensor, valid: Mask, out: Tensor) -> None:
        """Compute one matrix-vector product per parameter of a piece."""
        out.zero_()
        begin = 0
        for piece in self.pieces():
            rows = slice(begin, begin + len(piece[0]))
            finite = None if valid is None else valid[rows]
            for part, column in _slices(piece):
                out[part].addmv_(kept(column, finite).T, c[rows])
            begin = rows.stop

    def double(self) -> "Instantiated":
        """Return the gradients in float64."""
        return Instantiated(lambda: ([g.double() for g in piece] for piece in self.pieces()))


@dataclass(frozen=True)
class ByChannel:
    """Instantiated gradients of a convolution, whose weights are in the order of its patches.

    That is (out, *kernel size, in), which is faster to compute than (out, in, *kernel size), as in
    theta. Norms are computed in a metric in the same order, and the sum is put back into theta's.
    """

    layer: Layer
    gradients: Instantiated

    @staticmethod
    def of(layer: Layer, use: Use) -> "ByChannel":
        """Return the gradients of one use, computed for a few samples at a time."""
        weight: Any = use.module.weight
        samples, outputs, inputs = use.samples, len(weight), weight[0].numel()
        columns = [use.grad_output.new_empty(samples, p.numel()) for p in layer.parameters.values()]
        by_name = dict(zip(layer.parameters, columns, strict=True))
        positions = use.grad_output.numel() // (samples * outputs)
        step = max(2, _piece(weight) // 4 // (positions * inputs))
        for begin, [some] in zip(range(0, samples, step), in_groups([use], step), strict=True):
            rows = slice(begin, begin + some.samples)
            grad_output = unfold.gradients_by_position(use.module, some.grad_output, some.rows)
            patches = unfold.patches_by_channel(use.module, some.inputs, some.rows)
            to = by_name["weight"][rows].view(-1, outputs, inputs)
            OuterProducts(grad_output, patches, bias=False).weights(to)
            if "bias" in by_name:
                torch.sum(grad_output, 1, out=by_name["bias"][rows])
        return ByChannel(layer, Instantiated(lambda: [columns]))

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Compute the norms directly; nothing cancels."""
        if metric.centre is not None:
            # m A, which products of a whole batch need, is not read.
            of = self._by_channel
            metric = replace(metric, inverse=of(metric.inverse), centre=of(metric.centre))
        return self.gradients.squared_norms(metric)

    def weighted_sum(self, c: Tensor, valid: Mask, out: Tensor) -> None:
        """Compute the sum in the order of the patches, and write it in theta's."""
        total = torch.empty_like(out)
        self.gradients.weighted_sum(c, valid, total)
        out.copy_(total)
        slot, shape = self._weight
        outputs, inputs, *kernel = shape
        by_channel = total[slot].view(outputs, *kernel, inputs)
        out[slot].view(shape).copy_(by_channel.movedim(-1, 1))

    def double(self) -> "ByChannel":
        """Return the gradients in float64."""
        return ByChannel(self.layer, self.gradients.double())

    @property
    def _weight(self) -> tuple[slice, torch.Size]:
        """Return the slice of the weight within the layer's, and its shape."""
        return self.layer.slices["weight"], self.layer.parameters["weight"].shape

    def _by_channel(self, vector: Tensor) -> Tensor:
        """Return a vector of the layer's coordinates in the order of the patches."""
        slot, shape = self._weight
        ordered = vector.clone()
        ordered[slot] = vector[slot].view(shape).movedim(1, -1).flatten()
        return ordered


def _slices(columns: ByParameter) -> Iterator[tuple[slice, Tensor]]:
    """Yield each tensor with the coordinates of the layer that it has."""
    begin = 0
    for column in columns:
        part = slice(begin, begin + column.shape[1])
        yield part, column
        begin = part.stop


def _norms(columns: ByParameter, metric: LayerMetric) -> SquaredNorms:
    """Return the norms of samples, some of which at a time fit in a cache."""
    squares = [
        torch.cat([metric.squares(rows, part) for rows in _few(column)])
        for part, column in _slices(columns)
    ]
    value = reduce(add, squares)
    slack = roundoff(ROW, columns[0].dtype) * value
    return SquaredNorms(value, slack, torch.zeros_like(value))


def _few(column: Tensor) -> Sequence[Tensor]:
    """Split samples into groups that fit in a cache."""
    return torch.split(column, _at_a_time(column, column.shape[1]))


def choose_form(layer: Layer, uses: Sequence[Use] | Tensor, *, ball: bool) -> PerSampleGradients:
    """Return the cheapest form that the layer's type, its shapes and its uses allow.

    ``uses`` are all uses in a forward pass, or the instantiated gradients, shape (samples,
    d_layer). ``ball``: norms are taken in a ball.
    """
    if isinstance(uses, Tensor):
        uses[:, layer.skipped] = 0  # also where a record makes the network read it otherwise
        whole = [uses]
        return Instantiated(lambda: [whole])
    if all(type(use.module) is nn.Linear and use.computed is None for use in uses):
        uses = [_one_after_another(uses)]
    grad_output = uses[0].grad_output
    samples, size = uses[0].samples, layer.stop - layer.start
    small = samples * size <= _piece(grad_output)
    # Uses of one kernel with other strides or paddings are of other modules, with other patches.
    found = sizes(layer, uses) if len({use.module for use in uses}) == 1 else None
    if found is not None:
        if found.positions == 1 and type(uses[0].module) is nn.Linear:
            return OuterProducts(grad_output, uses[0].inputs, "bias" in layer.parameters)
        held = samples * size <= HELD
        by_channel = held and _patches_pay(uses, found)
        if not small and (by_channel or not held or not found.holding_pays(ball)):
            positions = PositionProducts(layer, tuple(uses), found)
            return ByChannel.of(layer, uses[0]) if by_channel else positions
    elif (products := _of_embeddings(layer, uses, ball=ball)) is not None:
        return products
    elif samples * size > HELD:
        step = _at_a_time(grad_output, size)
        return Instantiated(lambda: (instantiate(layer, some) for some in in_groups(uses, step)))
    # A few samples at a time, whose outputs and gradients stay in the cache.
    step = max(2, _piece(grad_output) // 4 // max(size, grad_output.numel() // samples))
    columns = instantiate(layer, uses, step)
    return Instantiated(lambda: [columns])


def _patches_pay(uses: Sequence[Use], sizes: UseSizes) -> bool:
    """Return whether gradients are faster to compute from patches with channels last."""
    module: Any = uses[0].module
    several = len(uses) > 1 or uses[0].grad_output.is_cuda or type(module) is nn.Linear
    return not several and module.in_channels >= CHANNELS and sizes.positions <= sizes.outputs


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
    return Use(uses[0].module, inputs, join_positions([use.grad_output for use in uses]))


def _piece(like: Tensor) -> int:
    """Return how many numbers to instantiate at a time."""
    return DEVICE_PIECE if like.is_cuda else PIECE


def _at_a_time(like: Tensor, size: int) -> int:
    """Return how many samples of ``size`` numbers to instantiate at a time."""
    return max(1, _piece(like) // max(1, size))
