"""Forms of a layer's per-sample gradients, and the choice of the cheapest one for each layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Protocol

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.layer_rules import Use, in_groups, instantiate
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.norms import ROW, LayerMetric, Metric, SquaredNorms, kept, roundoff
from dpmac_cli.dp.clipping.outer_products import OuterProducts
from dpmac_cli.dp.clipping.products import DEVICE_PIECE, PositionProducts, sizes

#: Numbers to instantiate at a time on a CPU, so that they fit in its cache.
PIECE = 1 << 20
#: Numbers of one layer's gradients to hold between norm and sum: 80 MB in float32.
HELD = 20_000_000


class PerSampleGradients(Protocol):
    """One layer's gradients for each sample of a chunk: the interface of a form."""

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Return ||(g_i - m)/b||^2 over this layer, with bounds on rounding."""

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


#: Layers, each with its gradients for each sample of a chunk.
ByLayer = Sequence[tuple[Layer, PerSampleGradients]]


def total_squared_norms(gradients: ByLayer, metric: Metric) -> SquaredNorms:
    """Return ||(g_i - m)/b||^2 over several layers, each with its part of the metric."""
    return reduce(add, [form.squared_norms(metric.of(layer)) for layer, form in gradients])


@dataclass(frozen=True)
class Instantiated:
    """Gradients written out, for layers with few parameters."""

    g: Tensor  # (samples, d_layer)

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Compute the norms directly; nothing cancels."""
        step = max(1, _piece(self.g) // max(1, self.g.shape[1]))
        value = torch.cat([metric.squares(g) for g in torch.split(self.g, step)])
        value.div_(metric.factor)
        slack = roundoff(ROW, self.g.dtype) * value
        return SquaredNorms(value, slack, torch.zeros_like(value))

    def weighted_sum(
        self, c: Tensor, valid: Tensor | None, out: Tensor, _: Tensor | None = None
    ) -> None:
        """Compute one matrix-vector product."""
        torch.mv(kept(self.g, valid).T, c, out=out)

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
        return SquaredNorms.of(Instantiated(g).squared_norms(metric) for g in self._pieces())

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
        for uses in in_groups(self.uses, self.views, step):
            g = instantiate(self.layer, uses, self.views)
            if isinstance(self.chosen, Tensor):
                yield g[self.chosen[begin : begin + step]].double()
            else:
                yield g if self.chosen is None else g.double()
            begin += step


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
    # A few samples at a time, whose gradients stay in a cache while they are written.
    return Instantiated(instantiate(layer, uses, views, max(2, _piece(delta) // 4 // size)))


def _piece(like: Tensor) -> int:
    """Return how many numbers to instantiate at a time."""
    return DEVICE_PIECE if like.is_cuda else PIECE
