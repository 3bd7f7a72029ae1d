"""Forms of a layer's per-sample gradients, and the choice of the cheapest one for each layer.

A form computes squared norms with a bound on their rounding error and a weighted sum, and selects
samples in float64 (:class:`PerSampleGradients`). :func:`choose_form` picks one per layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Protocol

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.attention import projections
from dpmac_cli.dp.clipping.layer_rules import Use, instantiate, instantiated
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.norms import (
    ROW,
    LayerMetric,
    SquaredNorms,
    concatenated,
    kept,
    roundoff,
    row_squares,
    row_sums,
)
from dpmac_cli.dp.clipping.outer_products import OuterProducts
from dpmac_cli.dp.clipping.products import DEVICE_PIECE, PositionProducts, sizes

#: Numbers to instantiate at a time on a CPU, so that they fit in its cache.
PIECE = 1 << 20
#: Numbers of one layer's gradients to hold between norm and sum: 80 MB in float32.
HELD = 20_000_000


class PerSampleGradients(Protocol):
    """One layer's gradients for each sample of a chunk: the interface of a form."""

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Return ||(g_i - m)/b||^2 over this layer."""

    def weighted_sum(
        self, c: Tensor, valid: Tensor | None, out: Tensor, exact: Tensor | None = None
    ) -> None:
        """Write the sum of c_i g_i over the valid samples into ``out``.

        Args:
            c: weights, shape (samples,); 0 where not valid.
            valid: mask of finite samples, bool, shape (samples,); None if all are. The others add
                exactly 0.
            out: the layer's slice, shape (d_layer,).
            exact: mask of samples to add in float64, whose terms cancel within the sample; None if
                there are none. Forms that hold the gradients ignore it.
        """

    def select(self, rows: Tensor | slice) -> "PerSampleGradients":
        """Return some samples by a mask, or all by ``slice(None)``, in float64."""


def total_squared_norms(
    gradients: Sequence[PerSampleGradients], metrics: Sequence[LayerMetric]
) -> SquaredNorms:
    """Return ||(g_i - m)/b||^2 over several layers, each with its part of the metric."""
    pairs = zip(gradients, metrics, strict=True)
    return reduce(add, [form.squared_norms(metric) for form, metric in pairs])


@dataclass(frozen=True)
class Instantiated:
    """Gradients written out, for layers with few parameters."""

    g: Tensor  # (samples, d_layer)

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Compute the norms directly; nothing cancels."""
        step = max(1, _piece(self.g) // max(1, self.g.shape[1]))
        found = [self._squares(g, metric) for g in torch.split(self.g, step)]
        value = (found[0] if len(found) == 1 else torch.cat(found)).div_(metric.factor)
        slack = roundoff(ROW, self.g.dtype) * value
        return SquaredNorms(value, slack, torch.zeros_like(value))

    def weighted_sum(
        self, c: Tensor, valid: Tensor | None, out: Tensor, _: Tensor | None = None
    ) -> None:
        """Compute one matrix-vector product."""
        torch.mv(kept(self.g, valid).T, c, out=out)

    @staticmethod
    def _squares(g: Tensor, metric: LayerMetric) -> Tensor:
        if metric.centre is None:
            return row_squares(g).mul_(metric.inverse)
        return row_sums((g - metric.centre).square_().mul_(metric.inverse))

    def select(self, rows: Tensor | slice) -> "Instantiated":
        """Return some samples, in float64."""
        return Instantiated(self.g[rows].double())


@dataclass(frozen=True)
class InPieces:
    """Gradients too large to hold, instantiated for a few samples at a time.

    Norms and sum instantiate the same samples in the same pieces, so both read the same floats.
    ``chosen`` samples are in float64; None is all of them, in their own dtype.
    """

    layer: Layer
    uses: tuple[Use, ...]
    views: int = 1
    chosen: Tensor | slice | None = None

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Compute the norms directly, from instantiated gradients."""
        parts = [Instantiated(g).squared_norms(metric) for g in self._pieces()]
        return concatenated(parts)

    def weighted_sum(
        self, c: Tensor, valid: Tensor | None, out: Tensor, _: Tensor | None = None
    ) -> None:
        """Compute one matrix-vector product per piece."""
        out.zero_()
        begin = 0
        for g in self._pieces():
            rows = slice(begin, begin + len(g))
            out.addmv_(kept(g, None if valid is None else valid[rows]).T, c[rows])
            begin += len(g)

    def select(self, rows: Tensor | slice) -> "InPieces":
        """Return some samples, in float64."""
        return InPieces(self.layer, self.uses, self.views, rows)

    def _pieces(self) -> Iterator[Tensor]:
        """Yield gradients of the selected samples, piece by piece, shape (samples, d_layer)."""
        step = max(1, _piece(self.uses[0].delta) // (self.layer.stop - self.layer.start))
        begin = 0
        for g in instantiated(self.layer, self.uses, self.views, step):
            if isinstance(self.chosen, Tensor):
                yield g[self.chosen[begin : begin + step]].double()
            else:
                yield g if self.chosen is None else g.double()
            begin += step


@dataclass(frozen=True)
class Parts:
    """Gradients of a layer as those of several, side by side."""

    forms: tuple[PerSampleGradients, ...]
    slices: tuple[slice, ...]  # of the layer's parameters, by form

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Add up the norms of the parts."""
        return total_squared_norms(self.forms, [metric.part(part) for part in self.slices])

    def weighted_sum(
        self, c: Tensor, valid: Tensor | None, out: Tensor, exact: Tensor | None = None
    ) -> None:
        """Compute the sums of the parts."""
        for form, part in zip(self.forms, self.slices, strict=True):
            form.weighted_sum(c, valid, out[part], exact)

    def select(self, rows: Tensor | slice) -> "Parts":
        """Return some samples, in float64."""
        return Parts(tuple(form.select(rows) for form in self.forms), self.slices)


def choose_form(
    layer: Layer, uses: Sequence[Use], views: int = 1, *, ball: bool
) -> PerSampleGradients:
    """Return the cheapest form that the layer's type, its shapes and its uses allow.

    Args:
        layer: the layer.
        uses: each use of it in a forward pass, at least one.
        views: rows per sample in each use, next to each other; its gradient is their sum.
        ball: True if norms are taken in a ball.
    """
    if (parts := projections(layer, uses)) is not None:
        return Parts(
            tuple(choose_form(*part, views, ball=ball) for part in parts),
            tuple(slice(of.start - layer.start, of.stop - layer.start) for of, _ in parts),
        )
    delta = uses[0].delta
    samples, size = len(delta) // views, layer.stop - layer.start
    found = sizes(layer, uses, views)
    small = samples * size <= _piece(delta)
    if found is not None:
        if found.positions == 1 and type(layer.module) is nn.Linear:
            a = uses[0].inputs[0].reshape(samples, 1, -1)
            return OuterProducts(delta.reshape(samples, 1, -1), a, "bias" in layer.parameters)
        products = PositionProducts(layer, tuple(uses), views, found)
        if not small and (samples * size > HELD or not found.holding_pays(ball)):
            return products
    elif not small and not isinstance(layer.module, nn.Conv2d):
        # Gradients of other convolutions are too expensive to compute twice.
        return InPieces(layer, tuple(uses), views)
    return Instantiated(_held(layer, uses, views))


def _held(layer: Layer, uses: Sequence[Use], views: int) -> Tensor:
    """Instantiate gradients of a few samples at a time; return all, (samples, d_layer)."""
    delta, size = uses[0].delta, layer.stop - layer.start
    samples, step = len(delta) // views, max(2, _piece(delta) // 4 // size)
    if step >= samples:
        return instantiate(layer, uses, views)
    g = delta.new_empty(samples, size)
    for _ in instantiated(layer, uses, views, step, out=g):
        pass
    return g


def _piece(like: Tensor) -> int:
    """Return how many numbers to instantiate at a time."""
    return DEVICE_PIECE if like.is_cuda else PIECE
