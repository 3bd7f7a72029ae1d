"""Squared whitened norms with bounds on their rounding error, and the metric that defines them.

||w_i||^2 of line 7 of Algorithm 1 is ||(g_i - m)/b||^2 = sum_j (g_ij - m_j)^2 A_j with A = 1/b^2.
A norm that is computed too small would let a sample contribute more than 1. So every norm carries a
bound on its error, and samples are clipped by the sum of both.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.linalg import vector_norm

from dpmac_cli.dp.clipping.layers import Layer, blocks
from dpmac_cli.dp.mechanism import Ellipsoid

#: Mask of samples of a chunk, bool, shape (samples,).
Mask: TypeAlias = Tensor | None
#: Number of terms of a sum that are added in float32 before it continues in float64.
ROW = 256


@dataclass(frozen=True)
class SquaredNorms:
    """Squared whitened norms ||(g_i - m)/b||^2 of a chunk's samples, with bounds on rounding.

    All are float64. They can be added, for gradients whose coordinates are in several layers.

    Attributes:
        value: squared norms, shape (samples,).
        slack: bound on the error of ``value``, shape (samples,).
        reach: R_i^2 if the weighted sum does not read the same floats as the norm: c_i R_i times
            the precision bounds its rounding of sample i; shape (samples,). Otherwise 0.
    """

    value: Tensor
    slack: Tensor
    reach: Tensor

    def __add__(self, other: "SquaredNorms") -> "SquaredNorms":
        """Return the norms of the same samples over the coordinates of both."""
        return SquaredNorms(
            value=self.value + other.value,
            slack=self.slack + other.slack,
            reach=self.reach + other.reach,
        )

    @staticmethod
    def of(groups: Iterable["SquaredNorms"]) -> "SquaredNorms":
        """Return the norms of several groups of samples, one after another.

        Args:
            groups: norms of each group, in the order of the samples; at least one.
        """
        parts = list(groups)
        return SquaredNorms(
            value=torch.cat([part.value for part in parts]),
            slack=torch.cat([part.slack for part in parts]),
            reach=torch.cat([part.reach for part in parts]),
        )


@dataclass(frozen=True, eq=False)
class LayerMetric:
    """Metric A = factor / b^2 of one layer's coordinates, in which gradients have whitened norms.

    For an ellipsoid with centre m and scale b = sqrt(factor / A), norms computed with A must be
    divided by the factor. A ball has one A for all coordinates and no centre.

    Attributes:
        inverse: A = factor / b^2, shape (d_layer,); shape () for a ball.
        centre_inverse: m A, shape (d_layer,); None for a ball.
        centre: m, shape (d_layer,); None for a ball.
        s3: sum of m^2 A, rounded up, float64, shape ().
        largest: the largest A, shape ().
    """

    inverse: Tensor
    centre_inverse: Tensor | None
    centre: Tensor | None
    s3: Tensor
    largest: Tensor

    def squares(
        self,
        g: Tensor,
        part: slice = slice(None),
        scratch: Tensor | None = None,
    ) -> Tensor:
        """Return sum_j (g_j - m_j)^2 A_j of each sample over some coordinates j of the layer.

        Args:
            g: gradients, shape (samples, coordinates).
            part: slice of the layer's coordinates that ``g`` has; all by default.
            scratch: memory that is overwritten with intermediate results, in the shape of ``g``,
                which it may be; None to allocate it.

        Returns:
            Squared norms times the factor of the ellipsoid, float64, shape (samples,).
        """
        if self.centre is None:
            return row_squares(g).mul_(self.inverse)
        centred = torch.sub(g, self.centre[part], out=scratch)
        squares = centred.square_()
        return row_sums(squares.mul_(self.inverse[part]))


class RegionMetric:
    """Metrics of all layers in one step's ellipsoid, each computed once and used by every chunk.

    Args:
        region: the ellipsoid, with centre m and scale b.
        dtype: dtype of the metrics; None for that of the ellipsoid.
        scratch: memory for m A, with A = factor / b^2, of the shape of the centre; in use as long
            as the metrics are. None to allocate it.
    """

    def __init__(
        self, region: Ellipsoid, dtype: torch.dtype | None = None, scratch: Tensor | None = None
    ) -> None:
        dtype = dtype or region.inverse.dtype
        self.region = region
        self._centre, self._inverse = region.centre.to(dtype), region.inverse.to(dtype)
        self._centre_inverse = torch.empty_like(self._centre) if scratch is None else scratch
        self._layers: dict[str, LayerMetric] = {}

    def of(self, layer: Layer) -> LayerMetric:
        """Return the metric of one layer's coordinates; a second call returns the same object.

        Args:
            layer: layer of the network whose ellipsoid this is.
        """
        if layer.name not in self._layers:
            self._layers[layer.name] = self._part(slice(layer.start, layer.stop))
        return self._layers[layer.name]

    def centre_norm(self, layers: list[Layer]) -> Tensor:
        """Return the whitened norm ||m/b|| of the ellipsoid's centre, float64, shape ().

        Args:
            layers: all layers of the network.
        """
        s3 = torch.stack([self.of(layer).s3 for layer in layers]).sum()
        return (s3 / self.region.factor.double()).sqrt_()

    def _part(self, part: slice) -> LayerMetric:
        """Return the metric of a slice of theta."""
        if self.region.is_ball:
            zero = torch.zeros_like(self._inverse, dtype=torch.float64)
            return LayerMetric(self._inverse, None, None, zero, self._inverse)
        inverse = self._inverse[part]
        centre = self._centre[part]
        centre_inverse = self._centre_inverse[part]
        s3_of_blocks = []
        largest_of_blocks = []
        for block in blocks(len(centre), centre.device):
            torch.mul(centre[block], inverse[block], out=centre_inverse[block])
            s3_of_blocks.append(sum_rounded_up(centre[block] * centre_inverse[block]))
            largest_of_blocks.append(inverse[block].amax())
        s3 = torch.stack(s3_of_blocks).sum()
        largest = torch.stack(largest_of_blocks).max()
        return LayerMetric(inverse, centre_inverse, centre, s3, largest)


def kept(rows: Tensor, valid: Mask) -> Tensor:
    """Return rows with 0 in those that are not valid, because 0 times NaN or infinity is NaN.

    Args:
        rows: shape (samples, ...).
        valid: mask of the samples, bool, shape (samples,); None if all are valid, for which
            ``rows`` itself is returned.

    Example:
        >>> rows = torch.tensor([[1.0], [float("inf")]])
        >>> 0 * rows[1], kept(rows, torch.tensor([True, False]))[1]
        (tensor([nan]), tensor([0.]))
    """
    if valid is None:
        return rows
    return torch.where(valid.view(-1, *[1] * (rows.ndim - 1)), rows, 0)


def row_sums(numbers: Tensor) -> Tensor:
    """Return the sum of each row, float64, shape (rows,).

    Groups of :data:`ROW` numbers are first summed in their own dtype, which is much faster.

    Args:
        numbers: shape (rows, columns), with at least one row.
    """
    groups = numbers.shape[1] // ROW
    in_groups = numbers[:, : groups * ROW].view(len(numbers), groups, ROW)
    rest = numbers[:, groups * ROW :].sum(1)
    return in_groups.sum(2).sum(1, dtype=torch.float64).add_(rest)


def row_squares(numbers: Tensor) -> Tensor:
    """Return the sum of the squares of each row, float64, shape (rows,).

    Its rounding has the bound of :func:`row_sums`.

    Args:
        numbers: shape (rows, columns), with at least one row.
    """
    groups = numbers.shape[1] // ROW
    in_groups = numbers[:, : groups * ROW].reshape(len(numbers), groups, ROW)
    norms = vector_norm(in_groups, dim=2)
    rest = vector_norm(numbers[:, groups * ROW :], dim=1).double().square_()
    squares: Tensor = norms.double().square_().sum(1).add_(rest)
    return squares


def sum_rounded_up(terms: Tensor) -> Tensor:
    """Return an upper bound on the exact sum of non-negative terms; float64, shape ().

    Args:
        terms: shape (terms,).
    """
    total = row_sums(terms.unsqueeze(0)).squeeze(0)
    return total.mul_(1 + ROW * torch.finfo(terms.dtype).eps)


def roundoff(terms: int, dtype: torch.dtype) -> float:
    """Return u, a bound on the relative error of the sums behind one squared norm.

    Args:
        terms: number of terms of the sums that are added in ``dtype``.
        dtype: type of the numbers.

    Example:
        >>> roundoff(100, torch.float32) < 1e-5
        True
    """
    return (terms + 10) * torch.finfo(dtype).eps / 2
