"""Forms of a layer's per-sample gradients, and the choice of the cheapest one for each layer.

A form computes squared norms with a bound on their rounding error and a weighted sum, and selects
samples in float64 (:class:`PerSampleGradients`). :func:`choose_form` picks one per layer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import add
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from dpmac_cli.dp.clipping.layer_rules import Use, instantiate, is_plain
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.norms import ROW, LayerMetric, SquaredNorms, roundoff, row_sums

#: Numbers to instantiate at a time, so that they fit in a CPU's cache.
PIECE = 1 << 20
#: The same on CUDA, where starting an operation takes longer than this many numbers.
DEVICE_PIECE = 1 << 24
#: Terms of a Linear layer's gradient up to which their pairs cost less than instantiating it.
PAIRED = 8


class PerSampleGradients(Protocol):
    """One layer's gradients for each sample of a chunk: the interface of a form."""

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Return ||(g_i - m)/b||^2 over this layer."""

    def weighted_sum(self, c: Tensor, valid: Tensor | None, out: Tensor) -> None:
        """Write the sum of c_i g_i over the valid samples into ``out``.

        Args:
            c: weights, shape (samples,); 0 where not valid.
            valid: mask of finite samples, bool, shape (samples,); None if all are. The others add
                exactly 0.
            out: the layer's slice, shape (d_layer,).
        """

    def select(self, rows: Tensor | slice) -> "PerSampleGradients":
        """Return some samples by a mask, or all by ``slice(None)``, in float64."""


#: :func:`total_squared_norms`, or its compiled version.
Norms = Callable[[Sequence[PerSampleGradients], Sequence[LayerMetric]], SquaredNorms]


def total_squared_norms(
    gradients: Sequence[PerSampleGradients], metrics: Sequence[LayerMetric]
) -> SquaredNorms:
    """Return ||(g_i - m)/b||^2 over several layers, each with its part of the metric."""
    pairs = zip(gradients, metrics, strict=True)
    return reduce(add, [form.squared_norms(metric) for form, metric in pairs])


@dataclass(frozen=True)
class OuterProducts:
    """Gradients of a Linear layer, g_i = sum_t delta_it a_it^T (sum_t delta_it for its bias).

    With one term and A = 1/b^2, a norm takes two matrix products for the whole batch, or none for
    a ball. With several terms, S1_i is a sum over their pairs and S2_i over the terms:

        ||(g_i - m)/b||^2 = S1_i - 2 S2_i + S3,     S1_i = sum_jk delta_ij^2 a_ik^2 A_jk,
                                                    S2_i = sum_jk delta_ij a_ik (m A)_jk,
                                                    S3   = sum_jk m_jk^2 A_jk.

    ``delta`` are gradients of the loss by the layer's outputs, ``a`` are its inputs. ``bias`` is
    True if the bias is trainable.
    """

    delta: Tensor  # (samples, terms, out)
    a: Tensor  # (samples, terms, in)
    bias: bool

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Return S1 - 2 S2 + S3 by matrix products; for a ball, by products of norms alone."""
        if metric.centre_inverse is None:
            return self._in_a_ball(metric.inverse / metric.factor)
        u = roundoff(self.a.shape[2] + self.bias + self.delta.shape[2], self.a.dtype)
        terms = list(zip(self.a.unbind(1), self.delta.unbind(1), strict=True))
        alike, cross, lost = [], [], []
        for a, delta in terms:
            cross.append(self._contract(a, delta, metric.centre_inverse))
            a_squared, delta_squared = a.square(), delta.square()
            alike.append(self._contract(a_squared, delta_squared, metric.inverse))
            lost.append(self._underflow(a_squared, delta_squared, metric))
        # By Cauchy-Schwarz, the error of a pair is at most u times the product of its norms.
        reach = reduce(add, [s1.mul(1 + u).sqrt_() for s1 in alike]) + (metric.s3 * (1 + u)).sqrt()
        slack = reach.square_().mul_(u).add_(reduce(add, lost), alpha=len(lost))
        value = reduce(add, alike).sub_(reduce(add, cross), alpha=2).add_(metric.s3)
        if len(terms) > 1:
            across = [
                self._contract(a * a_too, delta * delta_too, metric.inverse)
                for (a, delta), (a_too, delta_too) in combinations(terms, 2)
            ]
            value.add_(reduce(add, across), alpha=2)
        return SquaredNorms(value.div_(metric.factor), slack.div_(metric.factor))

    def weighted_sum(self, c: Tensor, valid: Tensor | None, out: Tensor) -> None:
        """Compute (c delta)^T a, one matrix product; in float64 where terms of a sample may cancel.

        That must not grow the rounding of the others' sum.
        """
        terms = self.a.shape[1]
        if terms > 1:
            delta, a, c = self.delta.double(), self.a.double(), c.double()
            total = torch.empty_like(out, dtype=torch.float64)
        else:
            delta, a, total = self.delta, self.a, out
        weighted = _kept((delta * c.view(-1, 1, 1)).flatten(1), valid).view(-1, delta.shape[2])
        weight, bias = self._split(total)
        torch.mm(weighted.T, _kept(a.flatten(1), valid).view(-1, a.shape[2]), out=weight)
        if bias is not None:
            torch.sum(weighted, 0, out=bias)
        if terms > 1:
            out.copy_(total)

    def select(self, rows: Tensor | slice) -> "OuterProducts":
        """Return some samples, in float64."""
        return OuterProducts(self.delta[rows].double(), self.a[rows].double(), self.bias)

    def _in_a_ball(self, inverse: Tensor) -> SquaredNorms:
        """Compute norms times ``inverse``, the A of all coordinates; in float64."""
        widths = self.a.shape[2] + self.bias + self.delta.shape[2]
        if self.a.shape[1] == 1:
            norms = vector_norm(self.delta, dim=(1, 2), dtype=torch.float64)
            s1 = norms.square_().mul_(inverse) * (
                vector_norm(self.a, dim=(1, 2), dtype=torch.float64).square_() + float(self.bias)
            )
            return SquaredNorms(s1, roundoff(widths, self.a.dtype) * s1)
        delta, a = self.delta.double(), self.a.double()
        by_pair = delta @ delta.mT * (a @ a.mT + float(self.bias))
        reach = by_pair.diagonal(dim1=1, dim2=2).sqrt().sum(1)
        slack = reach.square_().mul_(inverse * 2 * roundoff(widths, torch.float64))
        return SquaredNorms(by_pair.sum((1, 2)).mul_(inverse), slack)

    def _underflow(self, a_squared: Tensor, delta_squared: Tensor, metric: LayerMetric) -> Tensor:
        """Bound what S1 - 2 S2 loses where products are too small for their dtype.

        Each product loses at most the smallest normal number; the bound of a pair of terms is at
        most the mean of theirs.
        """
        ins, outs = self.a.shape[2] + self.bias, self.delta.shape[2]
        largest, tiny = metric.largest.double(), torch.finfo(self.a.dtype).tiny
        by_delta = delta_squared.sum(1).double().mul_(2 * ins * tiny * (4 + largest))
        by_a = a_squared.sum(1).double().add_(1).mul_(2 * outs * tiny * largest)
        return by_delta.add_(by_a).add_(4 * (ins + 1) * outs * tiny)

    def _contract(self, inputs: Tensor, outputs: Tensor, coefficients: Tensor) -> Tensor:
        """Sum outputs_ij inputs_ik coefficients_jk over j and k, shape (samples,)."""
        weight, bias = self._split(coefficients)
        total = (inputs @ weight.T).mul_(outputs).sum(1)
        return (total if bias is None else total.addmv_(outputs, bias)).double()

    def _split(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """View a layer's slice as weight (out, in) and bias (out,)."""
        rows, columns = self.delta.shape[2], self.a.shape[2]
        weight = flat[: rows * columns].view(rows, columns)
        return weight, flat[rows * columns :] if self.bias else None


@dataclass(frozen=True)
class Instantiated:
    """Gradients written out, for layers with few parameters."""

    g: Tensor  # (samples, d_layer)

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Compute the norms directly; nothing cancels."""
        squares = self.g.square() if metric.centre is None else (self.g - metric.centre).square_()
        value = row_sums(squares.mul_(metric.inverse)).div_(metric.factor)
        return SquaredNorms(value, roundoff(ROW, self.g.dtype) * value)

    def weighted_sum(self, c: Tensor, valid: Tensor | None, out: Tensor) -> None:
        """Compute one matrix-vector product."""
        torch.mv(_kept(self.g, valid).T, c, out=out)

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
        return SquaredNorms(
            torch.cat([part.value for part in parts]), torch.cat([part.slack for part in parts])
        )

    def weighted_sum(self, c: Tensor, valid: Tensor | None, out: Tensor) -> None:
        """Compute one matrix-vector product per piece."""
        out.zero_()
        begin = 0
        for g in self._pieces():
            rows = slice(begin, begin + len(g))
            out.addmv_(_kept(g, None if valid is None else valid[rows]).T, c[rows])
            begin += len(g)

    def select(self, rows: Tensor | slice) -> "InPieces":
        """Return some samples, in float64."""
        return InPieces(self.layer, self.uses, self.views, rows)

    def _pieces(self) -> Iterator[Tensor]:
        """Yield gradients of the selected samples, piece by piece, shape (samples, d_layer)."""
        step = max(1, _piece(self.uses[0].delta) // (self.layer.stop - self.layer.start))
        for begin in range(0, len(self.uses[0].delta) // self.views, step):
            rows = slice(begin * self.views, (begin + step) * self.views)
            g = instantiate(self.layer, [use.part(rows) for use in self.uses], self.views)
            if isinstance(self.chosen, Tensor):
                yield g[self.chosen[begin : begin + step]].double()
            else:
                yield g if self.chosen is None else g.double()


def choose_form(layer: Layer, uses: Sequence[Use], views: int = 1) -> PerSampleGradients:
    """Return the cheapest form that the layer's type, its shapes and its uses allow.

    Args:
        layer: the layer.
        uses: each use of it in a forward pass, at least one.
        views: rows per sample in each use, next to each other; its gradient is their sum.
    """
    delta = uses[0].delta
    samples = len(delta) // views
    large = samples * (layer.stop - layer.start) > _piece(delta)
    linear = type(layer.module) is nn.Linear and "weight" in layer.parameters
    if linear and all(is_plain(layer, use) for use in uses):
        a = _by_term([use.inputs[0] for use in uses], samples)
        if a.shape[1] == 1 or (a.shape[1] <= PAIRED and large):
            delta = _by_term([use.delta for use in uses], samples)
            return OuterProducts(delta, a, "bias" in layer.parameters)
    # Gradients of a convolution are too expensive to compute twice.
    if large and not isinstance(layer.module, nn.Conv2d):
        return InPieces(layer, tuple(uses), views)
    return Instantiated(instantiate(layer, uses, views))


def _by_term(rows: Sequence[Tensor], samples: int) -> Tensor:
    """Stack rows as (samples, terms, width), with a term for each use, view and position."""
    apart = [of_use.reshape(samples, -1, of_use.shape[-1]) for of_use in rows]
    return apart[0] if len(apart) == 1 else torch.cat(apart, 1)


def _piece(like: Tensor) -> int:
    """Return how many numbers to instantiate at a time."""
    return DEVICE_PIECE if like.is_cuda else PIECE


def _kept(rows: Tensor, valid: Tensor | None) -> Tensor:
    """Set rows that are not valid to 0: 0 times a number that is not finite is not 0."""
    return rows if valid is None else torch.where(valid.unsqueeze(1), rows, 0)
