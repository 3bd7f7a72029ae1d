"""Per-sample gradients of vectors that are looked up, without those that a sample does not read.

A table of categories has a vector for each value of each column, of which a sample reads one per
column. Its gradient is 0 in all other rows, so norms and sums take the rows that are read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpmac_cli.dp.clipping.norms import LayerMetric, Mask, SquaredNorms, kept, roundoff


@dataclass(frozen=True)
class LookedUp:
    """Gradients of :class:`~dpmac_cli.dp.clipping.custom_layers.Lookups` of a chunk of samples.

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
        """Return the gradients of all vectors of a sample side by side, views one after another.

        Args:
            rows: shape (samples, views * columns).
            vectors: shape (samples, views * columns, width).
            columns: number of columns, which never share a row.
        """
        by_view = (-1, columns)
        return LookedUp(
            rows=torch.unflatten(rows, 1, by_view),
            vectors=torch.unflatten(vectors, 1, by_view),
        )

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Compute norms from the rows that a sample reads."""
        g = self.vectors.double()
        views = self.vectors.shape[1]
        inverse = metric.inverse.double()
        if metric.centre is not None:
            inverse = self._rows_of(metric.inverse)
        by_view = (g.square() * inverse).sum((2, 3))
        value = by_view.sum(1)
        if views > 1:
            value = (self._summed(g) * g * inverse).sum((1, 2, 3))
        if metric.centre_inverse is not None:
            cross = (g * self._rows_of(metric.centre_inverse)).sum((1, 2, 3))
            value = value.sub_(cross, alpha=2).add_(metric.s3)
        # By the triangle and the Cauchy-Schwarz inequality. m A has the precision of the metric.
        reach = by_view.sqrt().sum(1)
        u = roundoff(views, metric.inverse.dtype)
        slack = (reach + metric.s3.sqrt()).square_()
        slack.mul_(u)
        # With a single view, the sum reads the same floats as the norm.
        reach = reach.square_() if views > 1 else torch.zeros_like(reach)
        return SquaredNorms(value, slack, reach)

    def weighted_sum(self, c: Tensor, valid: Mask, out: Tensor) -> None:
        """Add up vectors by their row, in float64."""
        weighted = kept(self.vectors.double() * c.double().view(-1, 1, 1, 1), valid)
        width = self.vectors.shape[3]
        table_rows = len(out) // width
        total = weighted.new_zeros(table_rows, width)
        total.index_add_(0, self.rows.flatten(), weighted.flatten(0, 2))
        out.copy_(total.flatten())

    def double(self) -> "LookedUp":
        """Return the gradients in float64."""
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
