"""Ghost clipping: norms and clipped sums of per-sample gradients that are never stored.

It is for layers with several positions (Bu, Mao and Xu 2022, arXiv 2205.10683).

Let delta_it be the gradient of the loss w.r.t. the layer's output at position t, and a_it its input
there (a patch, for a convolution). The gradient w.r.t. the weights is G_i = sum_t delta_it a_it^T.
Norms are computed from Gram matrices, pairs of positions, or temporary pieces of G_i that fit in a
cache. The clipped sum is one product, that of a plain weight gradient, with c_i delta_it:

    sum_i c_i G_i = sum_i sum_t (c_i delta_it) a_it^T.

In the shapes below, T is the number of positions, K that of inputs and O that of outputs.
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
    """Public sizes of a layer's uses by one sample, which decide how its norms are computed.

    Costs are in multiplications, for one sample's gradient G_i or its norm.

    Attributes:
        positions: number T of positions, over all uses and rows of a sample.
        inputs: number K of inputs per position.
        outputs: number O of outputs per position.
        gram: cost of a norm from Gram matrices, in multiplications.
        pairs: cost of a norm from pairs of positions, in multiplications.

    Example:
        >>> few = UseSizes(positions=2, inputs=512, outputs=512, gram=8e3, pairs=1e6)
        >>> few.holding_pays(ball=True)  # Gram matrices are much cheaper
        False
    """

    positions: int
    inputs: int
    outputs: int
    gram: float
    pairs: float

    @property
    def product(self) -> int:
        """Return the cost of the products of one gradient G_i, T K O multiplications."""
        return self.positions * self.inputs * self.outputs

    def instantiating(self, ball: bool) -> int:
        """Return the cost of writing G_i to memory and reading it once, in multiplications.

        Args:
            ball: whether it is read for a norm in a ball, which takes fewer passes.
        """
        return self.product + PASSES[ball] * self.inputs * self.outputs

    def norm(self, ball: bool) -> float:
        """Return the cost of the norm of one G_i by the cheapest method, in multiplications.

        Args:
            ball: whether it is a norm in a ball, where Gram matrices do, or in an ellipsoid.
        """
        without_writing = self.gram if ball else self.pairs
        return min(self.instantiating(ball), without_writing)

    def holding_pays(self, ball: bool) -> bool:
        """Return whether storing all G_i until they are summed is cheaper than a second product.

        Args:
            ball: whether norms are those in a ball.
        """
        holding = self.instantiating(ball) + HOLDING * self.inputs * self.outputs
        computing_twice = self.norm(ball) + self.product
        return holding <= computing_twice


def sizes(layer: Layer, uses: Sequence[Use]) -> UseSizes | None:
    """Return the sizes of a layer whose gradients are sums of outer products.

    Args:
        layer: the layer.
        uses: its uses by all samples of a chunk, at least one, all of one module.

    Returns:
        None for other layers: those that are neither Linear nor a convolution with one group, that
        compute their weight, or whose weight is not trained.
    """
    module: Any = uses[0].module
    convolution = type(module) in CONVOLUTIONS and module.groups == 1
    if not convolution and type(module) is not nn.Linear:
        return None
    if "weight" not in layer.parameters or any(use.computed for use in uses):
        return None
    outputs = len(module.weight)
    k = module.weight.numel() // outputs
    output_numbers = 0  # of a sample
    for use in uses:
        numbers_of_row = use.grad_output[0].numel()
        output_numbers += numbers_of_row * use.rows
    t = output_numbers // outputs
    by_inputs = t * t * k
    if convolution and _single(uses):
        channels, *image = uses[0].inputs.shape[1:]
        taps = math.prod(module.kernel_size)
        pairs_of_pixels = math.prod(image) ** 2
        by_inputs = pairs_of_pixels * channels + 4 * taps * t * t
    by_outputs = t * t * outputs
    pairs_of_positions = t * (t + 1) // 2 + t
    return UseSizes(
        positions=t,
        inputs=k,
        outputs=outputs,
        gram=DOUBLE * (by_inputs + by_outputs),
        pairs=pairs_of_positions * k * outputs,
    )


def _single(uses: Sequence[Use]) -> bool:
    """Return whether a sample has one row of one use."""
    return len(uses) == 1 and uses[0].rows == 1


@dataclass(frozen=True)
class PositionProducts:
    """Form of the gradients of a Linear layer or a convolution that is used at several positions.

    Gradients G_i = sum_t delta_it a_it^T are not stored, see the module. A form is described by
    :class:`.PerSampleGradients`.

    Attributes:
        layer: the layer.
        uses: its uses by all samples of a chunk, of one module.
        sizes: sizes of these uses.
    """

    layer: Layer
    uses: tuple[Use, ...]
    sizes: UseSizes

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Return squared whitened norms, computed for a few samples at a time, by the cheapest way.

        Args:
            metric: metric of this layer's coordinates.
        """
        sizes = self.sizes
        ball = metric.centre is None
        numbers: float = sizes.positions * (sizes.inputs + sizes.outputs)  # per sample
        if sizes.norm(ball) == sizes.instantiating(ball):
            norms_of = self._by_pieces
        elif not ball:
            norms_of = self._by_pairs
        else:
            norms_of = self._by_gram
            numbers = 4 * sizes.gram / (sizes.inputs + sizes.outputs)
        return SquaredNorms.of(norms_of(uses, metric) for uses in self._groups(numbers))

    def weighted_sum(self, c: Tensor, valid: Mask, out: Tensor) -> None:
        """Write sum_i c_i G_i: the plain weight gradient with c_i delta_it as output gradients.

        Products of :data:`ADDED` samples are added up in float64.

        Args:
            c: factors c_i, shape (samples,); 0 where not valid.
            valid: mask of finite samples; None if all are finite.
            out: memory for the result, the layer's slice, shape (d_layer,). Overwritten.
        """
        c = c.to(self.uses[0].grad_output.dtype)
        several = len(self.uses) > 1 or len(c) > ADDED
        total: dict[str, Tensor] = {}
        for use in self.uses:
            for begin in range(0, len(c), ADDED):
                samples = slice(begin, begin + ADDED)
                some_valid = None if valid is None else valid[samples]
                products = self._product(use.part(samples), c[samples], some_valid)
                for name, product in products.items():
                    if name in total:
                        total[name] += product
                    else:
                        total[name] = product.double() if several else product
        for name, part in self.layer.slices.items():
            out[part] = total[name].flatten()

    def double(self) -> "PositionProducts":
        """Return the gradients of the same calls of the layer, from their tensors in float64.

        Norms and sums whose rounding in float32 is too large are computed from it again.
        """
        uses = [use.double() for use in self.uses]
        return replace(self, uses=tuple(uses))

    def _groups(self, numbers: float) -> Iterator[list[Use]]:
        """Yield the uses of a few samples at a time, given the numbers that each sample takes."""
        room = DEVICE_PIECE if self.uses[0].grad_output.is_cuda else 4 * IN_CACHE
        samples = max(1, room // int(numbers))
        return in_groups(self.uses, samples)

    def _grad_outputs(self, uses: Sequence[Use]) -> Tensor:
        """Return output gradients by position, (samples, T, O)."""
        parts = []
        for use in uses:
            by_position = unfold.gradients_by_position(use.module, use.grad_output, use.rows)
            parts.append(by_position)
        return join_positions(parts)

    def _inputs(self, uses: Sequence[Use]) -> Tensor:
        """Return inputs by position, (samples, T, K)."""
        parts = []
        for use in uses:
            by_position = unfold.inputs_by_position(use.module, use.inputs, use.rows)
            parts.append(by_position)
        return join_positions(parts)

    def _reach(self, metric: LayerMetric, grad_output: Tensor, a: Tensor) -> Tensor:
        """Return R_i^2 or an upper bound, for R_i = sum_t ||delta_it|| ||a_it|| in the metric.

        Args:
            metric: metric of the layer. In an ellipsoid, that of the largest 1/b^2 of each output.
            grad_output: shape (samples, T, O).
            a: shape (samples, T, K).

        Returns:
            float64, shape (samples,).
        """
        parts = self.layer.slices
        if metric.centre is None:
            norms = vector_norm(grad_output, dim=2, dtype=torch.float64)
            by_grad_output = norms * metric.inverse.double().sqrt()
        else:
            largest_by_parameter = []
            for part in parts.values():
                by_output = metric.inverse[part].view(self.sizes.outputs, -1)
                largest_by_parameter.append(by_output.amax(1))
            largest = reduce(torch.maximum, largest_by_parameter)
            whitened = grad_output * largest.double().sqrt()
            by_grad_output = vector_norm(whitened, dim=2)
        squares = vector_norm(a, dim=2, dtype=torch.float64).square_()
        input_of_bias = float("bias" in parts)
        by_input = squares.add_(input_of_bias).sqrt_()
        products = by_grad_output * by_input
        reach: Tensor = products.sum(1).square_()
        return reach

    def _by_pairs(self, uses: Sequence[Use], metric: LayerMetric) -> SquaredNorms:
        """Compute norms from pairs of positions, see :class:`.OuterProducts`."""
        products = OuterProducts(
            grad_output=self._grad_outputs(uses),
            a=self._inputs(uses),
            bias="bias" in self.layer.parameters,
        )
        return products.squared_norms(metric)

    def _by_gram(self, uses: Sequence[Use], metric: LayerMetric) -> SquaredNorms:
        """Compute ||G_i||^2 as sum_tt' <delta_it, delta_it'> <a_it, a_it'>, in float64."""
        module = self.uses[0].module
        grad_output = self._grad_outputs(uses).double()
        if _single(uses) and type(module) in CONVOLUTIONS:
            gram = unfold.gram_by_position(module, uses[0].inputs)
        else:
            a = self._inputs(uses).double()
            gram = a @ a.mT
        if "bias" in self.layer.parameters:
            gram += 1  # the input of a bias at every position
        gram_of_outputs = grad_output @ grad_output.mT
        terms = self.sizes.positions + self.sizes.inputs + self.sizes.outputs
        return norms_by_gram(gram_of_outputs, gram, terms, metric)

    def _by_pieces(self, uses: Sequence[Use], metric: LayerMetric) -> SquaredNorms:
        """Compute norms from G_i itself, for some outputs of some samples at a time.

        The error of G_i is at most u R_i, for R_i = sum_t ||delta_it|| ||a_it|| in the metric, so
        that of its squared norm is at most u R_i (2 ||G_i|| + u R_i).
        """
        grad_output = self._grad_outputs(uses)
        a = self._inputs(uses)
        inputs = self.sizes.inputs
        reach = self._reach(metric, grad_output, a)
        total = torch.zeros_like(reach)
        if "bias" in self.layer.parameters:
            total += metric.squares(grad_output.sum(1), self.layer.slices["bias"])
        for samples, outputs in self._pieces(grad_output):
            piece = grad_output[samples, :, outputs]
            products = OuterProducts(piece, a[samples], bias=False)
            g = products.weights().flatten(1)
            weights = slice(outputs.start * inputs, outputs.stop * inputs)
            total[samples] += metric.squares(g, weights, scratch=g)
        u = roundoff(self.sizes.positions, grad_output.dtype)
        error_of_norm = reach.sqrt().mul_(u)
        error_of_gradient = error_of_norm * (2 * total.sqrt() + error_of_norm)
        error_of_sum = roundoff(ROW, grad_output.dtype) * total
        slack = error_of_gradient + error_of_sum
        return SquaredNorms(total, slack, reach)

    def _pieces(self, grad_output: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield some samples and outputs at a time, so that an output's metric stays in cache."""
        outputs = self.sizes.outputs
        numbers = self.sizes.inputs * outputs  # of G_i
        room = DEVICE_PIECE if grad_output.is_cuda else IN_CACHE
        samples = max(1, room // numbers)
        pieces = -(-numbers // room)  # of G_i, rounded up
        step = -(-outputs // pieces)
        for first_output in range(0, outputs, step):
            end = min(first_output + step, outputs)
            some_outputs = slice(first_output, end)
            for first_sample in range(0, len(grad_output), samples):
                some_samples = slice(first_sample, first_sample + samples)
                yield some_samples, some_outputs

    def _product(self, use: Use, c: Tensor, finite: Mask) -> dict[str, Tensor]:
        """Return the sums over samples and positions of c_i delta_it a_it^T, and of c_i delta_it.

        Args:
            use: a use by some samples.
            c: weights of the samples, shape (samples,).
            finite: samples whose gradients are finite; None for all.

        Returns:
            "weight", shape (O, K), and "bias", shape (O,).
        """
        module: Any = use.module
        c = c.repeat_interleave(use.rows)  # one for each row
        if finite is not None:
            finite = finite.repeat_interleave(use.rows)
        a = kept(use.inputs, finite)
        finite_gradients = kept(use.grad_output, finite)
        other_dimensions = [1] * (finite_gradients.ndim - 1)
        grad_output = finite_gradients * c.view(-1, *other_dimensions)
        many_terms = grad_output.numel() > FEW_TERMS * self.sizes.outputs
        if type(module) is not nn.Linear and many_terms:
            weight = unfold.kernel_gradient(module, a, grad_output, module.weight.shape)
            by_output = grad_output.transpose(0, 1).flatten(1)
            return {"weight": weight.flatten(1), "bias": by_output.sum(1)}
        outputs_by_position = unfold.gradients_by_position(module, grad_output)
        inputs_by_position = unfold.inputs_by_position(module, a)
        deltas = outputs_by_position.flatten(0, 1)
        inputs = inputs_by_position.flatten(0, 1)
        return {"weight": deltas.T @ inputs, "bias": deltas.sum(0)}


def norms_by_gram(left: Tensor, right: Tensor, terms: int, metric: LayerMetric) -> SquaredNorms:
    """Return squared norms of G_i = sum_t l_t r_t^T in a ball: sum_tt' <l_t, l_t'> <r_t, r_t'>.

    Args:
        left: Gram matrices <l_t, l_t'> of the left factors of each sample, float64, shape
            (samples, T, T). Overwritten.
        right: Gram matrices of the right factors, in the same form.
        terms: number of terms of the sums in a norm, for the bound on rounding.
        metric: metric of the ball.
    """
    products = left.mul_(right)
    terms_squared = products.diagonal(dim1=1, dim2=2).clamp(min=0)  # ||l_t||^2 ||r_t||^2
    reach = terms_squared.sqrt().sum(1).square_()
    slack = 2 * roundoff(terms, torch.float64) * reach
    value = products.sum((1, 2))
    inverse = metric.inverse
    return SquaredNorms(value * inverse, slack * inverse, reach * inverse)


def join_positions(parts: Sequence[Tensor]) -> Tensor:
    """Return the positions of several uses of a layer one after another, shape (samples, T, ...).

    Args:
        parts: inputs or output gradients of each use by position, shape
            (samples, positions, ...); at least one. A single one is returned as it is.
    """
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), 1)
