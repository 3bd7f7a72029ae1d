"""Squared whitened norms with bounds on their rounding error, and the metric that defines them."""

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
    """Computed ||(g_i - m)/b||^2 in float64, with bounds on rounding.

    ``slack`` bounds the error of ``value``. ``reach`` is R_i^2 if the weighted sum does not read
    the same floats as the norm: c_i R_i times the precision bounds its rounding of sample i.
    """

    value: Tensor  # (samples,)
    slack: Tensor  # (samples,)
    reach: Tensor  # (samples,)

    def __add__(self, other: "SquaredNorms") -> "SquaredNorms":
        return SquaredNorms(
            self.value + other.value, self.slack + other.slack, self.reach + other.reach
        )

    @staticmethod
    def of(groups: Iterable["SquaredNorms"]) -> "SquaredNorms":
        """Return the norms of several groups of samples, one after another."""
        fields = zip(*((part.value, part.slack, part.reach) for part in groups), strict=True)
        return SquaredNorms(*map(torch.cat, fields))


@dataclass(frozen=True, eq=False)
class LayerMetric:
    """Whitened metric of one layer. Norms computed with A must be divided by the region's factor.

    A ball has one A for all coordinates and no centre.
    """

    inverse: Tensor  # A = factor / b^2, (d_layer,), or () for a ball
    centre_inverse: Tensor | None  # m A, (d_layer,)
    centre: Tensor | None  # m, (d_layer,)
    s3: Tensor  # sum of m^2 A, float64, ()
    largest: Tensor  # the largest A, ()

    def squares(self, g: Tensor, part: slice = slice(None), out: Tensor | None = None) -> Tensor:
        """Return squared norms of g - m in A over some coordinates, float64, (samples,).

        ``g`` and ``out`` have shape (samples, coordinates); ``out`` may be overwritten.
        """
        if self.centre is None:
            return row_squares(g).mul_(self.inverse)
        squares = torch.sub(g, self.centre[part], out=out).square_()
        return row_sums(squares.mul_(self.inverse[part]))


class RegionMetric:
    """Metrics of all layers for one step's ellipsoid, computed once and used by every chunk.

    Args:
        region: the ellipsoid.
        dtype: dtype of the metrics; None for that of the ellipsoid.
        scratch: memory for m A, of the shape of the centre; None to allocate it.
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
        """Return the metric of one layer."""
        if layer.name not in self._layers:
            self._layers[layer.name] = self._part(slice(layer.start, layer.stop))
        return self._layers[layer.name]

    def centre_norm(self, layers: list[Layer]) -> Tensor:
        """Return ||m/b||, float64, shape ()."""
        s3 = torch.stack([self.of(layer).s3 for layer in layers]).sum()
        return (s3 / self.region.factor.double()).sqrt_()

    def _part(self, part: slice) -> LayerMetric:
        if self.region.is_ball:
            zero = torch.zeros_like(self._inverse, dtype=torch.float64)
            return LayerMetric(self._inverse, None, None, zero, self._inverse)
        inverse, centre, times = self._inverse[part], self._centre[part], self._centre_inverse[part]
        s3, largest = [], []
        for block in blocks(len(centre), centre.device):
            torch.mul(centre[block], inverse[block], out=times[block])
            s3.append(sum_rounded_up(centre[block] * times[block]))
            largest.append(inverse[block].amax())
        total, top = torch.stack(s3).sum(), torch.stack(largest).max()
        return LayerMetric(inverse, times, centre, total, top)


def kept(rows: Tensor, valid: Mask) -> Tensor:
    """Set rows that are not valid to 0, because 0 times a non-finite number is not 0."""
    if valid is None:
        return rows
    return torch.where(valid.view(-1, *[1] * (rows.ndim - 1)), rows, 0)


def row_sums(numbers: Tensor) -> Tensor:
    """Return sums of rows, float64, shape (rows,).

    Groups of :data:`ROW` numbers are first summed in their own dtype, which is much faster.
    """
    whole = numbers.shape[1] // ROW * ROW
    parts = numbers[:, :whole].view(len(numbers), whole // ROW, ROW).sum(2)
    return parts.sum(1, dtype=torch.float64).add_(numbers[:, whole:].sum(1))


def row_squares(numbers: Tensor) -> Tensor:
    """Return sums of the squares of rows, float64, shape (rows,); rounds as :func:`row_sums`."""
    whole = numbers.shape[1] // ROW * ROW
    parts = vector_norm(numbers[:, :whole].reshape(len(numbers), whole // ROW, ROW), dim=2)
    rest = vector_norm(numbers[:, whole:], dim=1).double().square_()
    squares: Tensor = parts.double().square_().sum(1).add_(rest)
    return squares


def sum_rounded_up(terms: Tensor) -> Tensor:
    """Return an upper bound on the exact sum of non-negative terms; float64, shape ()."""
    total = row_sums(terms.unsqueeze(0)).squeeze(0)
    return total.mul_(1 + ROW * torch.finfo(terms.dtype).eps)


def roundoff(terms: int, dtype: torch.dtype) -> float:
    """Return u, a bound on the relative error of the sums behind one squared norm."""
    return (terms + 10) * torch.finfo(dtype).eps / 2
