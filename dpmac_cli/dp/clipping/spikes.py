"""Gradients along one coordinate each, as canaries have: held and added up by that coordinate."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpmac_cli.dp.clipping.norms import SquaredNorms
from dpmac_cli.dp.mechanism import Ellipsoid


@dataclass(frozen=True)
class Spikes:
    """Gradients R e_j, each along one coordinate.

    Attributes:
        coordinates: j, int64, shape (spikes,).
        heights: R, float64, shape (spikes,).
    """

    coordinates: Tensor
    heights: Tensor

    def squared_norms(self, region: Ellipsoid, centre_norm: Tensor) -> SquaredNorms:
        """((R - m_j)^2 - m_j^2) / b_j^2 + ||m/b||^2, given ||m/b||; exact but for float64."""
        m, b = self.where(region)
        value = ((self.heights - m).square() - m.square()) / b.square() + centre_norm.square()
        return SquaredNorms(value, torch.zeros_like(value))

    def where(self, region: Ellipsoid) -> tuple[Tensor, Tensor]:
        """m_j and b_j, float64, shape (spikes,) or () for a ball."""
        j = ... if region.is_ball else self.coordinates
        factor = region.factor.double()
        return region.centre[j].double(), (factor / region.inverse[j].double()).sqrt()

    def add_to(self, out: Tensor, c: Tensor, region: Ellipsoid) -> None:
        """out += sum of c_i (R_i e_{j_i} - m); ``out`` float64, shape (d,)."""
        out.index_add_(0, self.coordinates, c * self.heights)
        if not region.is_ball:
            out.addcmul_(region.centre.double(), -c.sum())

    def some(self, which: Tensor) -> "Spikes":
        """Those with the given numbers."""
        return Spikes(self.coordinates[which], self.heights[which])
