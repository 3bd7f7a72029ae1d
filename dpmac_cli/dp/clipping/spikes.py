"""Gradients along one coordinate each, as canaries have."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpmac_cli.dp.clipping.norms import SquaredNorms
from dpmac_cli.dp.mechanism import Ellipsoid


@dataclass(frozen=True)
class Spikes:
    """Gradients R e_j, each along one coordinate."""

    coordinates: Tensor  # j, int64, (spikes,)
    heights: Tensor  # R, float64, (spikes,)

    def squared_norms(self, region: Ellipsoid, centre_norm: Tensor) -> SquaredNorms:
        """Return ((R - m_j)^2 - m_j^2) / b_j^2 + ||m/b||^2, given ||m/b||, without slack."""
        m, b = self.where(region)
        value = ((self.heights - m).square() - m.square()) / b.square() + centre_norm.square()
        nothing = torch.zeros_like(value)
        return SquaredNorms(value, nothing, nothing)

    def where(self, region: Ellipsoid) -> tuple[Tensor, Tensor]:
        """Return m_j and b_j, float64, shape (spikes,), or () for a ball."""
        j = ... if region.is_ball else self.coordinates
        factor = region.factor.double()
        return region.centre[j].double(), (factor / region.inverse[j].double()).sqrt()

    def add_to(self, out: Tensor, c: Tensor, region: Ellipsoid) -> None:
        """Add the sum of c_i (R_i e_{j_i} - m) to ``out``, float64, shape (d,)."""
        out.index_add_(0, self.coordinates, c * self.heights)
        if not region.is_ball:
            out.addcmul_(region.centre.double(), -c.sum())

    def some(self, which: Tensor) -> "Spikes":
        """Return the spikes at the given indices."""
        return Spikes(self.coordinates[which], self.heights[which])
