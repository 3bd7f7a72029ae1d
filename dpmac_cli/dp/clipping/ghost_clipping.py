"""Ghost clipping: norms and clipped sums of per-sample gradients that are never stored.

It is for layers with several positions (Bu, Mao and Xu 2022, arXiv 2205.10683).

Let delta_it be the gradient of the loss w.r.t. the layer's output at position t, and a_it its input
there (a patch, for a convolution). The gradient w.r.t. the weights is G_i = sum_t delta_it a_it^T.
Norms are computed from Gram matrices, pairs of positions, or temporary pieces of G_i that fit in a
cache. The clipped sum is one product, that of a plain weight gradient, with c_i delta_it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from dpmac_cli.dp.clipping import unfold
from dpmac_cli.dp.clipping.layer_rules import CONVOLUTIONS, Use, in_groups
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.norms import ROW, LayerMetric, Mask, SquaredNorms, kept, roundoff
from dpmac_cli.dp.clipping.outer_products import OuterProducts

#: Positions of a chunk up to which a product of patches is faster than a convolution's gradient.
FEW_TERMS = 64
#: Numbers of a piece of gradients that stays in a CPU's cache while it is written and read.
IN_CACHE = 1 << 18
#: Numbers to process at a time on CUDA; with fewer, launching operations takes longer.
DEVICE_PIECE = 1 << 24
#: Number of samples summed by one float32 product; products are summed in float64.
ADDED = 64
#: Cost of one coordinate of G_i besides its products, in multiplications, for norms in a ball or
#: in an ellipsoid: it is written, and centred, squared, weighted and added up.
PASSES = {True: 22, False: 47}
#: Additional cost of storing it until it is added up.
HOLDING = 40
#: Cost of a float64 product, relative to float32.
DOUBLE = 4


class UseSizes(NamedTuple):
    """Public sizes of a layer's uses. The choice of a form depends on nothing else."""

    positions: int  # T, over all uses and rows
    inputs: int  # K, per position
    outputs: int  # O
    gram: float  # cost of a norm from Gram matrices, in multiplications
    pairs: float  # the same from pairs of positions

    @property
    def product(self) -> int:
        """Return the number of multiplications for one G_i."""
        return self.positions * self.inputs * self.outputs

    def instantiating(self, ball: bool) -> int:
        """Return the cost of writing G_i and reading it once, in multiplications."""
        return self.product + PASSES[ball] * self.inputs * self.outputs

    def norm(self, ball: bool) -> float:
        """Return the cost of the cheapest norm, in multiplications."""
        return min(self.instantiating(ball), self.gram if ball else self.pairs)

    def holding_pays(self, ball: bool) -> bool:
        """Return whether storing all G_i until they are summed is cheaper than a second product."""
        holding = self.instantiating(ball) + HOLDING * self.inputs * self.outputs
        return holding <= self.norm(ball) + self.product


def sizes(layer: Layer, uses: Sequence[Use]) -> UseSizes | None:
    """Return the sizes of a layer whose gradients are sums of outer products; None for others."""
    module: Any = uses[0].module
    convolution = type(module) in CONVOLUTIONS and module.groups == 1
    outer = convolution or type(module) is nn.Linear
    if "weight" not in layer.parameters or not outer or any(use.computed for use in uses):
        return None
    outputs = len(module.weight)
    k = module.weight.numel() // outputs
    t = sum(use.grad_output[0].numel() * use.rows for use in uses) // outputs
    by_inputs = t * t * k
    if convolution and _single(uses):
        channels, *image = uses[0].inputs.shape[1:]
        taps = math.prod(module.kernel_size)
        by_inputs = math.prod(image) ** 2 * channels + 4 * taps * t * t
    gram = DOUBLE * (by_inputs + t * t * outputs)
    return UseSizes(t, k, outputs, gram, (t * (t + 1) // 2 + t) * k * outputs)


def _single(uses: Sequence[Use]) -> bool:
    """Return whether a sample has one row of one use."""
    return len(uses) == 1 and uses[0].rows == 1


@dataclass(frozen=True)
class PositionProducts:
    """Gradients of a Linear layer or a convolution that is used at several positions."""

    layer: Layer
    uses: tuple[Use, ...]
    sizes: UseSizes

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Compute norms of a few samples at a time, with the cheapest method."""
        sizes, ball = self.sizes, metric.centre is None
        factors = sizes.positions * (sizes.inputs + sizes.outputs)
        if sizes.norm(ball) == sizes.instantiating(ball):
            return SquaredNorms.of(self._by_pieces(uses, metric) for uses in self._groups(factors))
        if not ball:
            return SquaredNorms.of(self._by_pairs(uses, metric) for uses in self._groups(factors))
        numbers = 4 * sizes.gram / (sizes.inputs + sizes.outputs)
        return SquaredNorms.of(self._by_gram(uses, metric) for uses in self._groups(numbers))

    def weighted_sum(self, c: Tensor, valid: Mask, out: Tensor) -> None:
        """Compute the plain weight gradient with c_i delta_i, for :data:`ADDED` samples a time."""
        c = c.to(self.uses[0].grad_output.dtype)
        several = len(self.uses) > 1 or len(c) > ADDED
        total: dict[str, Tensor] = {}
        for use in self.uses:
            for begin in range(0, len(c), ADDED):
                rows = slice(begin, begin + ADDED)
                some = None if valid is None else valid[rows]
                for name, part in self._product(use.part(rows), c[rows], some).items():
                    if name in total:
                        total[name] += part
                    else:
                        total[name] = part.double() if several else part
        for name, slot in self.layer.slices.items():
            out[slot] = total[name].flatten()

    def double(self) -> "PositionProducts":
        """Return the gradients in float64."""
        return replace(self, uses=tuple(use.double() for use in self.uses))

    def _groups(self, numbers: float) -> Iterator[list[Use]]:
        """Yield the uses of a few samples at a time, given the numbers that each sample takes."""
        room = DEVICE_PIECE if self.uses[0].grad_output.is_cuda else 4 * IN_CACHE
        return in_groups(self.uses, max(1, room // int(numbers)))

    def _grad_outputs(self, uses: Sequence[Use]) -> Tensor:
        """Return output gradients by position, (samples, T, O)."""
        module = self.uses[0].module
        return join_positions(
            [unfold.gradients_by_position(module, u.grad_output, u.rows) for u in uses]
        )

    def _inputs(self, uses: Sequence[Use]) -> Tensor:
        """Return inputs by position, (samples, T, K)."""
        module = self.uses[0].module
        return join_positions([unfold.inputs_by_position(module, u.inputs, u.rows) for u in uses])

    def _reach(self, metric: LayerMetric, grad_output: Tensor, a: Tensor) -> Tensor:
        """Return R_i^2 or an upper bound, float64, (samples,), for (samples, T, O) and (..., K)."""
        parts = self.layer.slices
        if metric.centre is None:
            by_grad_output = vector_norm(grad_output, dim=2, dtype=torch.float64)
            by_grad_output = by_grad_output * metric.inverse.double().sqrt()
        else:
            by_name = (metric.inverse[part].view(self.sizes.outputs, -1) for part in parts.values())
            largest = reduce(torch.maximum, (inverse.amax(1) for inverse in by_name))
            by_grad_output = vector_norm(grad_output * largest.double().sqrt(), dim=2)
        squares = vector_norm(a, dim=2, dtype=torch.float64).square_()
        by_input = squares.add_(float("bias" in parts)).sqrt_()
        reach: Tensor = (by_grad_output * by_input).sum(1).square_()
        return reach

    def _by_pairs(self, uses: Sequence[Use], metric: LayerMetric) -> SquaredNorms:
        bias = "bias" in self.layer.parameters
        products = OuterProducts(self._grad_outputs(uses), self._inputs(uses), bias)
        return products.squared_norms(metric)

    def _by_gram(self, uses: Sequence[Use], metric: LayerMetric) -> SquaredNorms:
        """Compute ||G_i||^2 as sum_tt' <delta_it, delta_it'> <a_it, a_it'>, in float64."""
        module, grad_output = self.uses[0].module, self._grad_outputs(uses).double()
        if _single(uses) and type(module) in CONVOLUTIONS:
            gram = unfold.gram_by_position(module, uses[0].inputs)
        else:
            a = self._inputs(uses).double()
            gram = a @ a.mT
        if "bias" in self.layer.parameters:
            gram += 1  # the input of a bias at every position
        return norms_by_gram(grad_output @ grad_output.mT, gram, sum(self.sizes[:3]), metric)

    def _by_pieces(self, uses: Sequence[Use], metric: LayerMetric) -> SquaredNorms:
        """Compute norms from G_i itself, for some outputs of some samples at a time.

        The error of G_i is at most gamma R_i, for R_i = sum_t ||delta_it|| ||a_it|| in the metric.
        """
        grad_output, a = self._grad_outputs(uses), self._inputs(uses)
        reach = self._reach(metric, grad_output, a)
        total, inputs = torch.zeros_like(reach), self.sizes.inputs
        if "bias" in self.layer.parameters:
            total += metric.squares(grad_output.sum(1), self.layer.slices["bias"])
        for some, part in self._pieces(grad_output):
            g = OuterProducts(grad_output[some, :, part], a[some], bias=False).weights().flatten(1)
            weights = slice(part.start * inputs, part.stop * inputs)
            total[some] += metric.squares(g, weights, out=g)
        off = reach.sqrt().mul_(roundoff(self.sizes.positions, grad_output.dtype))
        slack = off * (2 * total.sqrt() + off) + roundoff(ROW, grad_output.dtype) * total
        return SquaredNorms(total, slack, reach)

    def _pieces(self, grad_output: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield some samples and outputs at a time, so that an output's metric stays in cache."""
        inputs, outputs = self.sizes.inputs, self.sizes.outputs
        room = DEVICE_PIECE if grad_output.is_cuda else IN_CACHE
        samples = max(1, room // (inputs * outputs))
        step = -(-outputs // -(-inputs * outputs // room))
        for o in range(0, outputs, step):
            for i in range(0, len(grad_output), samples):
                yield slice(i, i + samples), slice(o, min(o + step, outputs))

    def _product(self, use: Use, c: Tensor, finite: Mask) -> dict[str, Tensor]:
        """Return the sums over rows and positions of c d a^T, (O, K), and of c d.

        d are gradients of the loss w.r.t. the outputs, and a the inputs.
        """
        module: Any = use.module
        c = c.repeat_interleave(use.rows)
        finite = None if finite is None else finite.repeat_interleave(use.rows)
        a, grad_output = kept(use.inputs, finite), kept(use.grad_output, finite)
        grad_output = grad_output * c.view(-1, *[1] * (grad_output.ndim - 1))
        if type(module) is not nn.Linear and grad_output.numel() > FEW_TERMS * self.sizes.outputs:
            weight = unfold.kernel_gradient(module, a, grad_output, module.weight.shape)
            return {
                "weight": weight.flatten(1),
                "bias": grad_output.transpose(0, 1).flatten(1).sum(1),
            }
        grad_output = unfold.gradients_by_position(module, grad_output).flatten(0, 1)
        weight = grad_output.T @ unfold.inputs_by_position(module, a).flatten(0, 1)
        return {"weight": weight, "bias": grad_output.sum(0)}


def norms_by_gram(left: Tensor, right: Tensor, terms: int, metric: LayerMetric) -> SquaredNorms:
    """Return norms of G_i = sum_t l_t r_t^T in a ball, as sum_tt' <l_t, l_t'> <r_t, r_t'>.

    Args:
        left: Gram matrices of l, float64, shape (samples, T, T). Consumed.
        right: those of r, in the same form.
        terms: number of terms of the sums in a norm.
        metric: metric of the ball.
    """
    products = left.mul_(right)
    reach = products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().sum(1).square_()
    slack = 2 * roundoff(terms, torch.float64) * reach
    return SquaredNorms(*(n * metric.inverse for n in (products.sum((1, 2)), slack, reach)))


def join_positions(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the positions of several uses, (samples, T, ...)."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)
