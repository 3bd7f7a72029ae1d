"""Per-sample gradients of Linear layers as sums of outer products, never written out.

For a Linear layer with one position per sample, all norms of a batch take two matrix products of
its size in an ellipsoid, and none in a ball. The weighted sum is one more.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from dpmac_cli.dp.clipping.matmul import matmul, multiply
from dpmac_cli.dp.clipping.norms import LayerMetric, Mask, SquaredNorms, kept, roundoff


@dataclass(frozen=True)
class OuterProducts:
    """Form of the gradients of a Linear layer, g_i = sum_t delta_it a_it^T (bias: sum_t delta_it).

    A form is described by :class:`.PerSampleGradients`. Gradients are those of samples i, sums of
    terms t: positions at which the layer is used.

    With one term and A = 1/b^2, norms take two matrix products for the whole batch, or none for
    a ball. With several terms, S1_i is a sum over pairs of terms and S2_i over the terms:

        ||(g_i - m)/b||^2 = S1_i - 2 S2_i + S3,     S1_i = sum_jk delta_ij^2 a_ik^2 A_jk,
                                                    S2_i = sum_jk delta_ij a_ik (m A)_jk,
                                                    S3   = sum_jk m_jk^2 A_jk.

    Attributes:
        grad_output: gradients of the loss w.r.t. the layer's outputs, delta above, shape
            (samples, terms, out).
        a: its inputs, shape (samples, terms, in).
        bias: whether the bias is trainable.

    Example:
        >>> grad_output, a = torch.tensor([[[2.0]]]), torch.tensor([[[3.0, 4.0]]])
        >>> products = OuterProducts(grad_output, a, bias=True)
        >>> products.weights()  # of one sample
        tensor([[[6., 8.]]])
        >>> total = torch.empty(3)  # weights, then bias
        >>> products.weighted_sum(torch.tensor([0.5]), None, total)
        >>> total
        tensor([3., 4., 1.])
    """

    grad_output: Tensor
    a: Tensor
    bias: bool

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Return squared whitened norms, S1 - 2 S2 + S3 of the class, with bounds on rounding.

        By matrix products; in a ball by products of norms, so with a single term only.

        Args:
            metric: metric of this layer's coordinates: weights (out, in), then the bias.
        """
        if metric.centre_inverse is None:
            return self._in_a_ball(metric.inverse.double())
        a = self.a
        grad_output = self.grad_output
        terms = a.shape[1]
        u = roundoff(self._widths, a.dtype)
        a_squared = a.square()
        grad_output_squared = grad_output.square()
        # Pairs of a term with itself.
        alike = self._contract(a_squared, grad_output_squared, metric.inverse)
        # By Cauchy-Schwarz, the error of a pair is at most u times the product of its norms.
        norms = alike.mul(1 + u).sqrt_()
        reach = norms.sum(1)
        norm_of_centre = (metric.s3 * (1 + u)).sqrt()
        slack = (reach + norm_of_centre).square_()
        slack.mul_(u)
        underflow = self._underflow(a_squared, grad_output_squared, metric)
        slack.add_(underflow, alpha=terms)
        cross = self._contract(a, grad_output, metric.centre_inverse)
        s1 = alike.sum(1)  # without pairs of different terms
        s2 = cross.sum(1)
        value = s1.sub_(s2, alpha=2).add_(metric.s3)
        if terms == 1:
            # The sum reads the same floats as the norm.
            return SquaredNorms(value, slack, reach=torch.zeros_like(reach))
        i, j = torch.triu_indices(terms, terms, 1, device=a.device)
        a_pairs = a[:, i] * a[:, j]
        grad_output_pairs = grad_output[:, i] * grad_output[:, j]
        across = self._contract(a_pairs, grad_output_pairs, metric.inverse)
        value.add_(across.sum(1), alpha=2)
        return SquaredNorms(value, slack, reach.square_())

    def weighted_sum(self, c: Tensor, valid: Mask, out: Tensor) -> None:
        """Write sum_i c_i g_i: one matrix product for the weights, and one sum for the bias.

        Args:
            c: factors c_i, shape (samples,).
            valid: mask of finite samples; None if all are finite.
            out: memory for the result, weights (out, in) and then the bias, shape (d_layer,).
                Overwritten.
        """
        outputs = self.grad_output.shape[2]
        inputs = self.a.shape[2]
        of_samples = c.view(-1, 1, 1)
        weighted = kept(self.grad_output * of_samples, valid)
        weighted = weighted.view(-1, outputs)
        a = kept(self.a, valid).view(-1, inputs)
        weight, bias = self._split(out)
        multiply(weighted, a, weight)
        if bias is not None:
            torch.sum(weighted, 0, out=bias)

    def double(self) -> "OuterProducts":
        """Return the same form, whose factors are in float64."""
        return OuterProducts(
            grad_output=self.grad_output.double(),
            a=self.a.double(),
            bias=self.bias,
        )

    def weights(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients w.r.t. the weights, written out, shape (samples, out, in).

        Args:
            out: memory that they are written to, of that shape; None to allocate it.
        """
        return torch.bmm(self.grad_output.mT, self.a, out=out)

    @property
    def _widths(self) -> int:
        """Return the number of terms of the sums in a norm."""
        return self.a.shape[2] + self.bias + self.grad_output.shape[2]

    def _in_a_ball(self, inverse: Tensor) -> SquaredNorms:
        """Compute norms of single terms in float64; ``inverse`` is the A of all coordinates."""
        norms = vector_norm(self.grad_output, dim=(1, 2), dtype=torch.float64)
        by_grad_output = norms.square_().mul_(inverse)
        input_norms = vector_norm(self.a, dim=(1, 2), dtype=torch.float64)
        input_of_bias = float(self.bias)
        by_a = input_norms.square_() + input_of_bias
        s1 = by_grad_output * by_a
        slack = roundoff(self._widths, self.a.dtype) * s1
        return SquaredNorms(s1, slack, reach=torch.zeros_like(s1))

    def _underflow(
        self, a_squared: Tensor, grad_output_squared: Tensor, metric: LayerMetric
    ) -> Tensor:
        """Return a bound on the error of S1 - 2 S2 from products that underflow.

        Each product loses at most the smallest normal number; the bound of a pair of terms is at
        most the mean of their bounds. Summed over the terms, shape (samples,).
        """
        inputs = self.a.shape[2] + self.bias
        outputs = self.grad_output.shape[2]
        largest = metric.largest.double()
        tiny = torch.finfo(self.a.dtype).tiny
        by_grad_output = grad_output_squared.sum(2).double()
        by_grad_output.mul_(2 * inputs * tiny * (4 + largest))
        by_a = a_squared.sum(2).double().add_(1)
        by_a.mul_(2 * outputs * tiny * largest)
        in_products = 4 * (inputs + 1) * outputs * tiny
        by_term = by_grad_output.add_(by_a)
        by_term.add_(in_products)
        return by_term.sum(1)

    def _contract(self, inputs: Tensor, outputs: Tensor, coefficients: Tensor) -> Tensor:
        """Sum outputs_tj inputs_tk coefficients_jk over j and k; float64, (samples, terms)."""
        weight, bias = self._split(coefficients)
        samples, terms, _ = inputs.shape
        flat_inputs = inputs.reshape(samples * terms, -1)
        flat_outputs = outputs.reshape(samples * terms, -1)
        products = matmul(flat_inputs, weight)
        total = products.mul_(flat_outputs).sum(1)
        if bias is not None:
            total.addmv_(flat_outputs, bias)
        return total.double().view(samples, terms)

    def _split(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """View a layer's slice as weight (out, in) and bias (out,)."""
        rows = self.grad_output.shape[2]
        columns = self.a.shape[2]
        size = rows * columns
        weight = flat[:size].view(rows, columns)
        bias = flat[size:] if self.bias else None
        return weight, bias
