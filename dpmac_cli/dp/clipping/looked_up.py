"""Per-sample gradients of vectors that are looked up, without those that a sample does not read.

A table of categories has a vector for each value of each column, of which a sample reads one per
column. Its gradient is 0 in all other rows, so norms and sums take the rows that are read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from dpmac_cli.dp.clipping.norms import LayerMetric, Mask, SquaredNorms, kept, roundoff


@dataclass(frozen=True)
class LookedUp:
    """Form of the gradients of :class:`~dpmac_cli.dp.clipping.custom_layers.Lookups` of a chunk.

    A form is described by :class:`.PerSampleGradients`.

    A sample reads one row for each column and view. Only views of a sample may read the same row.
    The gradient of a row is the sum h of the gradients g of its vectors, so

        ||(h - m)/b||^2 = sum h g A - 2 sum g (m A) + S3,       A = 1/b^2,  S3 = sum m^2 A,

    where the first two sums are over all vectors and the last one over all coordinates. They are
    computed in float64.

    Attributes:
        rows: rows that are read, shape (samples, views, columns).
        vectors: gradients w.r.t. their vectors, shape (samples, views, columns, width).

    Example:
        >>> rows = torch.tensor([[0, 2]])  # one sample, whose two columns read rows 0 and 2
        >>> vectors = torch.tensor([[[1.0], [3.0]]])
        >>> total = torch.empty(4)  # a table of four rows with one number each
        >>> LookedUp.of(rows, vectors, columns=2).weighted_sum(torch.tensor([0.5]), None, total)
        >>> total
        tensor([0.5000, 0.0000, 1.5000, 0.0000])
    """

    rows: Tensor
    vectors: Tensor

    @staticmethod
    def of(rows: Tensor, vectors: Tensor, columns: int) -> "LookedUp":
        """Return the form for lookups of which those of a sample's views are one after another.

        Args:
            rows: rows of the table that are read, int64, shape (samples, views * columns).
            vectors: gradients w.r.t. the vectors that they hold, shape
                (samples, views * columns, width).
            columns: number of columns, which never share a row.
        """
        by_view = (-1, columns)
        return LookedUp(
            rows=torch.unflatten(rows, 1, by_view),
            vectors=torch.unflatten(vectors, 1, by_view),
        )

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Return squared whitened norms, computed from the rows that a sample reads, in float64.

        Args:
            metric: metric of the table's coordinates.
        """
        views = self.vectors.shape[1]
        if metric.centre is None and views == 1:
            return self._in_a_ball(metric)
        g = self.vectors.double()
        inverse = metric.inverse.double()
        if metric.centre is not None:
            inverse = self._rows_of(metric.inverse)
        squares = g.square() * inverse
        by_view = squares.sum((2, 3))
        value = by_view.sum(1)
        if views > 1:
            products = self._summed(g) * g * inverse
            value = products.sum((1, 2, 3))
        if metric.centre_inverse is not None:
            products_with_centre = g * self._rows_of(metric.centre_inverse)
            cross = products_with_centre.sum((1, 2, 3))
            value = value.sub_(cross, alpha=2).add_(metric.s3)
        # By the triangle and the Cauchy-Schwarz inequality. m A has the precision of the metric.
        reach = by_view.sqrt().sum(1)
        u = roundoff(views, metric.inverse.dtype)
        slack = (reach + metric.s3.sqrt()).square_()
        slack.mul_(u)
        # With a single view, the sum reads the same floats as the norm.
        reach = reach.square_() if views > 1 else torch.zeros_like(reach)
        return SquaredNorms(value, slack, reach)

    def _in_a_ball(self, metric: LayerMetric) -> SquaredNorms:
        """Return squared norms in a ball of samples with one view, which read no row twice."""
        norms = vector_norm(self.vectors, dim=(1, 2, 3), dtype=torch.float64)
        value = norms.square_().mul_(metric.inverse)
        slack = roundoff(1, metric.inverse.dtype) * value
        return SquaredNorms(value, slack, reach=torch.zeros_like(value))

    def weighted_sum(self, c: Tensor, valid: Mask, out: Tensor) -> None:
        """Write the sum of c_i g_i, whose vectors are added up by their row, in float64.

        Args:
            c: factors c_i, shape (samples,).
            valid: mask of finite samples; None if all are finite.
            out: memory for the result, the layer's slice, shape (d_layer,). Overwritten.
        """
        of_samples = c.double().view(-1, 1, 1, 1)
        weighted = kept(self.vectors * of_samples, valid)  # in float64
        width = self.vectors.shape[3]
        table_rows = len(out) // width
        total = weighted.new_zeros(table_rows, width)
        rows = self.rows.flatten()
        vectors = weighted.flatten(0, 2)
        total.index_add_(0, rows, vectors)
        out.copy_(total.flatten())

    def double(self) -> "LookedUp":
        """Return the same form, whose gradients are in float64."""
        return LookedUp(self.rows, self.vectors.double())

    def _summed(self, g: Tensor) -> Tensor:
        """Return the gradient h of the row of each vector, in the shape of ``g``."""
        by_column = self.rows.transpose(1, 2)  # (samples, columns, views)
        alike = by_column.unsqueeze(3) == by_column.unsqueeze(2)
        summed = alike.double() @ g.transpose(1, 2)
        return summed.transpose(1, 2)

    def _rows_of(self, coordinates: Tensor) -> Tensor:
        """Return the coordinates of the row of each vector, float64, in the shape of vectors."""
        table = coordinates.view(-1, self.vectors.shape[3])
        return table[self.rows].double()
