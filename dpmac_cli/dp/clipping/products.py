"""Gradients of layers that act at several positions: sums of outer products that are never held.

With delta_it the gradient of the loss by the layer's output at position t, and a_it its input there
(a patch, for a convolution), the gradient by the weights is G_i = sum_t delta_it a_it^T. Norms come
from Gram matrices, from pairs of positions or from pieces of G_i that fit in a cache and are thrown
away; the clipped sum is one product, that of a plain weight gradient, with c_i delta_it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import unfold
from torch.nn.grad import conv2d_weight

from dpmac_cli.dp.clipping.layer_rules import Use, is_plain, through_standardisation
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.modules import LEAST_SQUARE, StandardisedConv2d
from dpmac_cli.dp.clipping.norms import (
    ROW,
    LayerMetric,
    SquaredNorms,
    concatenated,
    kept,
    roundoff,
    row_sums,
)
from dpmac_cli.dp.clipping.outer_products import OuterProducts

#: Numbers of a piece of gradients, and of the factors of a group of samples: half a CPU's cache.
PIECE = 1 << 17
#: The same on CUDA, where starting an operation takes longer than this many numbers.
DEVICE_PIECE = 1 << 24
#: Samples that one float32 product adds up; products are added up in float64.
ADDED = 64
#: Numbers that one coordinate of a piece costs beside its products, in multiplications: it is
#: centred, squared, weighted, added up.
PASSES = 12


class Sizes(NamedTuple):
    """Public sizes of a layer's use: all that the choice of a form depends on."""

    positions: int  # T, over all uses and views
    inputs: int  # K, of one position
    outputs: int  # O

    @property
    def instantiating(self) -> int:
        """Multiplications, or what takes as long, of writing G_i and reading it once."""
        slow = 1 if self.positions >= 64 else 2  # short products run at half the speed
        return (self.positions * slow + PASSES) * self.inputs * self.outputs

    @property
    def norm_by_factors(self) -> tuple[int, int]:
        """The same of a norm without G_i: of a ball by Gram matrices, of an ellipsoid by pairs."""
        t, weights = self.positions, self.inputs * self.outputs
        return 2 * t * t * (self.inputs + self.outputs), (t * (t + 1) // 2 + t) * weights

    def holding_pays(self, ball: bool) -> bool:
        """Return whether holding all G_i until they are added costs less than a second product."""
        twice = self.instantiating + PASSES * self.inputs * self.outputs
        norm = min(self.instantiating, self.norm_by_factors[0 if ball else 1])
        return twice <= norm + self.positions * self.inputs * self.outputs


def sizes(layer: Layer, uses: Sequence[Use], views: int) -> Sizes | None:
    """Return the sizes of a layer whose gradients are sums of outer products; None for others."""
    module: Any = layer.module
    if "weight" not in layer.parameters or not all(is_plain(layer, use) for use in uses):
        return None
    if type(module) is nn.Linear:
        positions = sum(use.delta[0].numel() for use in uses) // module.out_features
    elif type(module) in {nn.Conv2d, StandardisedConv2d}:
        zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        if not zeros or module.groups != 1 or any(use.inputs[0].ndim != 4 for use in uses):
            return None
        positions = sum(use.delta[0, 0].numel() for use in uses)
    else:
        return None
    outputs = len(module.weight)
    return Sizes(positions * views, module.weight.numel() // outputs, outputs)


@dataclass(frozen=True)
class PositionProducts:
    """Gradients of a Linear layer or a convolution that is used at several positions."""

    layer: Layer
    uses: tuple[Use, ...]
    views: int
    sizes: Sizes

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Compute norms of a few samples at a time, in the way that costs least."""
        by_factors = self.sizes.norm_by_factors[metric.centre is not None]
        standardised = isinstance(self.layer.module, StandardisedConv2d)
        whole = not standardised and by_factors < self.sizes.instantiating
        part = self._by_factors if whole else self._by_pieces
        return concatenated(part(delta, a, metric) for delta, a in self._groups())

    def weighted_sum(
        self, c: Tensor, valid: Tensor | None, out: Tensor, exact: Tensor | None = None
    ) -> None:
        """Compute the plain weight gradient with c_i delta_i, of some samples at a time.

        Samples in ``exact`` are added in float64: their terms cancel so much that they would grow
        the rounding of the others' sum.
        """
        if exact is None:
            self._add_up(c, valid, out)
            return
        rest = out.double()
        self.select(exact)._add_up(c[exact].double(), None, rest)
        self._add_up(torch.where(exact, 0, c), ~exact if valid is None else valid & ~exact, out)
        out.copy_(rest.add_(out))

    def select(self, rows: Tensor | slice) -> "PositionProducts":
        """Return some samples, in float64."""
        by_row = rows.repeat_interleave(self.views) if isinstance(rows, Tensor) else rows
        uses = tuple(
            Use((use.inputs[0][by_row].double(),), use.delta[by_row].double()) for use in self.uses
        )
        return PositionProducts(self.layer, uses, self.views, self.sizes)

    def instantiated(self) -> Tensor:
        """Return all gradients, (samples, d_layer)."""
        layer, begin = self.layer, 0
        g = self.uses[0].delta.new_empty(
            len(self.uses[0].delta) // self.views, layer.stop - layer.start
        )
        for delta, a in self._groups():
            kernel = torch.bmm(delta.mT, a)
            parts = {"weight": kernel, "bias": delta.sum(1)}
            if isinstance(layer.module, StandardisedConv2d):
                parts |= through_standardisation(layer.module, kernel)
            rows = g[begin : begin + len(delta)]
            torch.cat([parts[name].flatten(1) for name in layer.parameters], 1, out=rows)
            begin += len(delta)
        return g

    def _groups(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield delta, (samples, T, O), and a, (samples, T, K), of as many samples as fit."""
        like, views = self.uses[0].delta, self.views
        room = DEVICE_PIECE if like.is_cuda else 4 * PIECE
        step = max(1, room // (self.sizes.positions * (self.sizes.inputs + self.sizes.outputs)))
        for begin in range(0, len(like) // views, step):
            rows = slice(begin * views, (begin + step) * views)
            factors = [self._factors(use.part(rows)) for use in self.uses]
            deltas, inputs = zip(*factors, strict=True)
            yield (
                deltas[0] if len(deltas) == 1 else torch.cat(deltas, 1),
                inputs[0] if len(inputs) == 1 else torch.cat(inputs, 1),
            )

    def _factors(self, use: Use) -> tuple[Tensor, Tensor]:
        """Return delta, (samples, positions, O), and a, (samples, positions, K), of one use."""
        module: Any = self.layer.module
        a, delta = use.inputs[0], use.delta
        if not isinstance(module, nn.Linear):
            a = unfold(a, module.kernel_size, module.dilation, module.padding, module.stride).mT
            delta = delta.flatten(2).mT
        samples = len(delta) // self.views
        return (
            delta.reshape(samples, -1, self.sizes.outputs),
            a.reshape(samples, -1, self.sizes.inputs),
        )

    def _by_factors(self, delta: Tensor, a: Tensor, metric: LayerMetric) -> SquaredNorms:
        return OuterProducts(delta, a, "bias" in self.layer.parameters).squared_norms(metric)

    def _by_pieces(self, delta: Tensor, a: Tensor, metric: LayerMetric) -> SquaredNorms:
        """Compute norms from G_i itself, some outputs of some samples at a time.

        G_i is off by at most gamma R_i, for R_i = sum_t ||delta_it|| ||a_it|| in the metric.
        """
        kernel = _Kernel(self.layer, metric, delta.dtype)
        reach = kernel.reach(delta, a)
        total = torch.zeros(len(delta), dtype=torch.float64, device=delta.device)
        if "bias" in self.layer.parameters:
            total += kernel.distance(delta.sum(1), "bias")
        gross = total.clone()
        a = kernel.centred(a)
        room = DEVICE_PIECE if delta.is_cuda else PIECE
        samples = max(1, min(len(delta), room // self.sizes.inputs // 16))
        outputs = max(1, room // (samples * self.sizes.inputs))
        for i in range(0, len(delta), samples):
            some = slice(i, i + samples)
            by_output = delta[some].mT
            for o in range(0, self.sizes.outputs, outputs):
                part = slice(o, min(o + outputs, self.sizes.outputs))
                value, before = kernel.squares(torch.bmm(by_output[:, part], a[some]), part)
                total[some] += value
                gross[some] += before
        u = roundoff(self.sizes.positions + kernel.extra, delta.dtype)
        off = reach.sqrt().mul_(u)
        slack = off * (2 * gross.sqrt() + off) + roundoff(ROW + kernel.extra, delta.dtype) * gross
        norms = (total, slack, reach)
        return SquaredNorms(*(n.div_(metric.factor) for n in norms))

    def _add_up(self, c: Tensor, valid: Tensor | None, out: Tensor) -> None:
        """Write the sum of c_i G_i; products of at most :data:`ADDED` samples."""
        by_row = c.to(self.uses[0].delta.dtype).repeat_interleave(self.views)
        finite = None if valid is None else valid.repeat_interleave(self.views)
        step = ADDED * self.views
        several = len(self.uses) > 1 or len(by_row) > step
        total: dict[str, Tensor] = {}
        for use in self.uses:
            for begin in range(0, len(by_row), step):
                rows = slice(begin, begin + step)
                by_product = self._product(
                    use.part(rows), by_row[rows], None if finite is None else finite[rows]
                )
                for name, part in by_product.items():
                    if name in total:
                        total[name] += part
                    else:
                        total[name] = part.double() if several else part
        if isinstance(self.layer.module, StandardisedConv2d):
            total |= through_standardisation(self.layer.module, total["weight"].unsqueeze(0))
        torch.cat([total[name].flatten() for name in self.layer.parameters], out=out)

    def _product(self, use: Use, c: Tensor, finite: Tensor | None) -> dict[str, Tensor]:
        """Return the sums over rows and positions of c delta a^T, and of c delta."""
        module: Any = self.layer.module
        a, delta = kept(use.inputs[0], finite), kept(use.delta, finite)
        delta = delta * c.view(-1, *[1] * (delta.ndim - 1))
        if isinstance(module, nn.Linear):
            delta = delta.reshape(-1, self.sizes.outputs)
            return {"weight": delta.T @ a.reshape(-1, self.sizes.inputs), "bias": delta.sum(0)}
        options = (module.stride, module.padding, module.dilation)
        weight: Tensor = conv2d_weight(a, module.weight.shape, delta, *options)  # type: ignore[no-untyped-call]
        return {"weight": weight, "bias": delta.sum((0, 2, 3))}


class _Kernel:
    """One layer's metric, and the map from G_i to gradients by its parameters.

    The map is linear: the identity, or that of :func:`through_standardisation`.

    Attributes:
        extra: terms of the sums in the map, for the bound on its rounding.
    """

    def __init__(self, layer: Layer, metric: LayerMetric, dtype: torch.dtype) -> None:
        self._metric, self._parts, begin = metric, {}, 0
        for name, p in layer.parameters.items():
            self._parts[name] = slice(begin, begin + p.numel())
            begin += p.numel()
        module: Any = layer.module
        self._rows = len(module.weight)
        self.extra, self._standardised = 0, isinstance(module, StandardisedConv2d)
        if self._standardised:
            direction, scale = module.standardised()
            self.extra = ROW
            self._moves = (scale.square() * LEAST_SQUARE < 1).to(dtype).squeeze(1)
            self._direction = direction.to(dtype)
            self._scale = (module.gain * scale.squeeze(1)).to(dtype)  # (O,)

    def distance(self, g: Tensor, name: str) -> Tensor:
        """Return the squared norm of g - m over one parameter, float64, shape (samples,)."""
        return self._squares(g, self._parts[name])

    def reach(self, delta: Tensor, a: Tensor) -> Tensor:
        """Return R_i^2, or more: float64, shape (samples,)."""
        largest = self._metric.largest.double()
        weights = largest
        if self._standardised:
            weights = self._scale.double().square() + float("gain" in self._parts)
            weights = weights.mul_(largest)
        by_delta = vector_norm(delta * weights.sqrt(), dim=2)
        squares = vector_norm(a, dim=2, dtype=torch.float64).square_()
        by_input = squares.add_(float("bias" in self._parts)).sqrt_()
        return (by_delta * by_input).sum(1).square_()

    def centred(self, a: Tensor) -> Tensor:
        """Return inputs that make G_i centred where the map centres it."""
        return a - a.mean(2, keepdim=True) if self._standardised else a

    def squares(self, g: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Return the squared norms of some outputs' gradients, and those before anything cancels.

        Args:
            g: G_i of these outputs, by centred inputs, (samples, outputs, K); is overwritten.
            part: these outputs.

        Returns:
            float64, shape (samples,) each.
        """
        samples, outputs, inputs = g.shape
        weights = slice(part.start * inputs, part.stop * inputs)
        if not self._standardised:
            value = self._squares(g.view(samples, -1), weights)
            return value, value
        direction, moves = self._direction[part], self._moves[part]
        along = row_sums((g * direction).view(-1, inputs)).view(samples, outputs)
        by_gain = torch.zeros(samples, dtype=torch.float64, device=g.device)
        if "gain" in self._parts:
            gains = self._parts["gain"]
            by_gain = self._squares(
                along.to(g.dtype), slice(gains.start + part.start, gains.start + part.stop)
            )
        if self._metric.centre is None:
            rows = row_sums(g.square_().view(-1, inputs)).view(samples, outputs)
            scales = self._scale[part].double().square() * self._metric.inverse
            before = rows @ scales + by_gain
            return before - along.square_() @ (scales * moves), before
        g.addcmul_(direction, along.to(g.dtype).mul_(moves).unsqueeze(2), value=-1)
        g.mul_(self._scale[part].unsqueeze(1))
        value = self._squares(g.view(samples, -1), weights).add_(by_gain)
        return value, value

    def _squares(self, g: Tensor, part: slice) -> Tensor:
        """Return the squared norm of g - m over some coordinates; may overwrite g."""
        metric = self._metric
        if metric.centre is None:
            return row_sums(g.square()).mul_(metric.inverse)
        squares = (g - metric.centre[part]).square_()
        total: Tensor = row_sums(squares.mul_(metric.inverse[part]))
        return total
