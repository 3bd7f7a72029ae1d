"""Gradients of Linear layers as outer products, and norms of sums of outer products."""

from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import add

import torch
from torch import Tensor
from torch.linalg import vector_norm

from dpmac_cli.dp.clipping.matmul import matmul
from dpmac_cli.dp.clipping.norms import LayerMetric, SquaredNorms, kept, roundoff


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
        reach = reduce(add, [s1.mul(1 + u).sqrt_() for s1 in alike])
        slack = (reach + (metric.s3 * (1 + u)).sqrt()).square_().mul_(u)
        slack.add_(reduce(add, lost), alpha=len(lost))
        value = reduce(add, alike).sub_(reduce(add, cross), alpha=2).add_(metric.s3)
        if len(terms) > 1:
            across = [
                self._contract(a * a_too, delta * delta_too, metric.inverse)
                for (a, delta), (a_too, delta_too) in combinations(terms, 2)
            ]
            value.add_(reduce(add, across), alpha=2)
        # The sum of one term reads the floats that the norm read.
        reach = reach.square_() if len(terms) > 1 else torch.zeros_like(reach)
        return SquaredNorms(*(n.div_(metric.factor) for n in (value, slack, reach)))

    def weighted_sum(
        self, c: Tensor, valid: Tensor | None, out: Tensor, _: Tensor | None = None
    ) -> None:
        """Compute (c delta)^T a, one matrix product."""
        weighted = kept(self.delta * c.view(-1, 1, 1), valid).view(-1, self.delta.shape[2])
        weight, bias = self._split(out)
        weight.copy_(matmul(weighted.T, kept(self.a, valid).view(-1, self.a.shape[2])))
        if bias is not None:
            torch.sum(weighted, 0, out=bias)

    def select(self, rows: Tensor | slice) -> "OuterProducts":
        """Return some samples, in float64."""
        return OuterProducts(self.delta[rows].double(), self.a[rows].double(), self.bias)

    def _in_a_ball(self, inverse: Tensor) -> SquaredNorms:
        """Compute norms of single terms times ``inverse``, the A of all coordinates; in float64."""
        widths = self.a.shape[2] + self.bias + self.delta.shape[2]
        norms = vector_norm(self.delta, dim=(1, 2), dtype=torch.float64)
        s1 = norms.square_().mul_(inverse) * (
            vector_norm(self.a, dim=(1, 2), dtype=torch.float64).square_() + float(self.bias)
        )
        return SquaredNorms(s1, roundoff(widths, self.a.dtype) * s1, torch.zeros_like(s1))

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
        total = matmul(inputs, weight.T).mul_(outputs).sum(1)
        return (total if bias is None else total.addmv_(outputs, bias)).double()

    def _split(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """View a layer's slice as weight (out, in) and bias (out,)."""
        rows, columns = self.delta.shape[2], self.a.shape[2]
        weight = flat[: rows * columns].view(rows, columns)
        return weight, flat[rows * columns :] if self.bias else None
