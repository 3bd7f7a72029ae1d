"""Gaussian mechanism: from a clipped sum to the private mean, the only output from the data."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.randomness.noise import SeededNormals

#: Public grid of :class:`SecureMechanism`, in whitened space; a power of two, so scaling by it is
#: exact.
GRID = 2.0**-40


@dataclass(frozen=True, eq=False)
class Ellipsoid:
    """Clipping region {g : ||(g - m) / b||_2 <= 1}, public before a step begins.

    Stored as A = 1/b^2, which norms need. As in line 20 of Algorithm 1, it is a vector and a
    factor, so another factor needs no pass over the vector.
    """

    centre: Tensor  # m, (d,); or () and 0 for a ball about the origin
    inverse: Tensor  # factor / b^2, > 0, (d,); or () for a ball
    factor: Tensor  # > 0, ()

    @property
    def is_ball(self) -> bool:
        """Return whether one number scales all coordinates and the centre is the origin."""
        return self.inverse.ndim == 0

    @property
    def scale(self) -> Tensor:
        """Return b, shape (d,); or C, shape (), for a ball of radius C."""
        return self.inverse.rsqrt().mul_(self.factor.sqrt())


def ellipsoid(centre: Tensor, scale: Tensor) -> Ellipsoid:
    """Return the ellipsoid with centre m and scale b, shape (d,) each."""
    return Ellipsoid(centre, scale.square().reciprocal_(), torch.ones_like(scale[0]))


def ball(radius: float, like: Tensor | None = None) -> Ellipsoid:
    """Return the ball of radius C as an ellipsoid with the dtype and device of ``like``.

    Raises InputError unless C is a positive number, and 1/C^2 fits into the dtype: a ball with 0
    instead would clip nothing.
    """
    one = torch.ones(()) if like is None else torch.ones_like(like[0])
    largest = torch.finfo(one.dtype).tiny ** -0.5
    if not 1 / largest < radius < largest:
        raise InputError(
            f"The radius of a ball must be a positive number between {1 / largest:.1g} and "
            f"{largest:.1g}, because norms are squared in {one.dtype}, not {radius!r}."
        )
    return Ellipsoid(torch.zeros_like(one), one / radius**2, one)


@dataclass(frozen=True)
class PrivateMean:
    """Noisy mean gradient of one step. Anything computed from it has no further privacy cost."""

    value: Tensor  # g-tilde_t, (d,)
    scale: Tensor  # scale b of the noise; (d,), or () for a ball. Public
    noise_ratio: float  # sigma / B

    @property
    def noise_variance(self) -> Tensor:
        """Return the variance of the noise per coordinate, b^2 sigma^2 / B^2, in the shape of b."""
        return (self.scale * self.noise_ratio).square_()

    def without_noise(self, variance: Tensor) -> Tensor:
        """Subtract the variance of the noise from ``variance``, in place; shape (d,), as for b."""
        return variance.addcmul_(self.scale, self.scale, value=-(self.noise_ratio**2))


@dataclass(frozen=True)
class GaussianMechanism:
    """Gaussian mechanism: lines 9 to 11 of Algorithm 1.

    In whitened space the sum of clipped gradients has sensitivity 1 to adding or removing one
    record, for every ellipsoid. Adding noise of standard deviation sigma is therefore a Gaussian
    mechanism with noise multiplier sigma.

    Raises InputError for other numbers than these: a sigma that is NaN would add no noise.
    """

    noise_multiplier: float  # sigma >= 0
    expected_batch: float  # B > 0. The size of the batch drawn is private and never used

    def __post_init__(self) -> None:
        numbers = {"noise_multiplier": self.noise_multiplier, "expected_batch": self.expected_batch}
        raise_errors(
            f"{name} must be a number {said}, not {numbers[name]!r}."
            for name, said, valid in (
                ("noise_multiplier", "of at least 0", self.noise_multiplier >= 0),
                ("expected_batch", "above 0", self.expected_batch > 0),
            )
            if not (valid and math.isfinite(numbers[name]))
        )

    @classmethod
    def of(cls, event: TrainingEvent, expected_batch: float) -> Self:
        """Return the mechanism of each step of an event."""
        return cls(event.noise_multiplier, expected_batch)

    @property
    def noisy(self) -> bool:
        """Return whether it adds noise."""
        return self.noise_multiplier > 0

    def release(self, clipped: Tensor, region: Ellipsoid, noise: SeededNormals) -> PrivateMean:
        """Add noise to the clipped sum and convert it to a mean gradient.

        Args:
            clipped: sum over the batch of c_i (g_i - m), shape (d,), with every
                ||c_i (g_i - m) / b|| <= 1; or a block of it that matches ``region``. Consumed. Its
                memory is not that of the result: other blocks may have no noise yet.
                In float64 if chunks were added up: it is rounded after the noise is added.
            region: ellipsoid that the sum was clipped to.
            noise: fresh random numbers, used only here.
        """
        value, b = clipped, region.scale
        self._add_noise(value, b, noise)
        # b w-tilde_t, line 10, kept in gradient space, and line 11.
        mean = torch.add(region.centre, value, alpha=1 / self.expected_batch)
        return PrivateMean(mean.to(b.dtype), b, self.noise_multiplier / self.expected_batch)

    def _add_noise(self, value: Tensor, b: Tensor, noise: SeededNormals) -> None:
        """Add sigma b z to the sum in place: line 9 in gradient space."""
        if self.noisy:
            z = noise.standard_normal(torch.empty_like(value, dtype=b.dtype))
            value.addcmul_(z, b, value=self.noise_multiplier)

    def rounding(self, size: int) -> float:
        """Return a bound on what rounding adds to the sensitivity 1, for ``size`` coordinates."""
        return 0.0


@dataclass(frozen=True)
class SecureMechanism(GaussianMechanism):
    """Gaussian mechanism that first rounds sum and noise to a fixed public grid.

    Results always lie on the grid, so their low bits reveal nothing about the data (Mironov 2012,
    arXiv 2207.13793). Adding rounded noise to a rounded sum equals rounding the rounded sum plus
    noise. That is post-processing of a Gaussian mechanism, whose sensitivity grows by at most
    GRID sqrt(d) from rounding the sum. All computations use float64, even for float32 sums.
    """

    def _add_noise(self, value: Tensor, b: Tensor, noise: SeededNormals) -> None:
        value.copy_(self.whitened(value, b, noise)).mul_(b)

    def whitened(self, clipped: Tensor, b: Tensor, noise: SeededNormals) -> Tensor:
        """Return the noisy sum on the grid in float64, in the shape of ``clipped`` (consumed)."""
        total = clipped.double().div_(b * GRID).round_()
        if self.noisy:
            z = noise.standard_normal(torch.empty_like(total))
            # Both are integers: their float64 sum depends only on their exact sum, even beyond
            # 2^53, where it is rounded. It reveals nothing else about the two terms.
            total.add_(z.mul_(self.noise_multiplier / GRID).round_())
        # Not -0.0, which would reveal how a zero arose.
        return torch.add(torch.zeros_like(total[0]), total, alpha=GRID, out=total)

    def rounding(self, size: int) -> float:
        """Return what the grid adds: each coordinate moves by up to half of it, twice."""
        return GRID * math.sqrt(size)
