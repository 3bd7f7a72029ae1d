"""Gaussian mechanism: from a clipped sum to the private mean, all that is seen of the data."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpmac_cli.dp.clipping.layers import blocks
from dpmac_cli.randomness.noise import SeededNormals

#: The public grid of :class:`SecureMechanism`, in whitened space; a power of two, so that scaling
#: by it is exact.
GRID = 2.0**-40
#: Coordinates that a CPU makes secure noise for at a time: what they are made from stays in cache.
GRID_BLOCK = 1 << 16


@dataclass(frozen=True)
class Ellipsoid:
    """The clipping region {g : ||(g - m) / b||_2 <= 1}, public before a step begins.

    Kept as what norms need of it, A = 1/b^2, and as line 20 of Algorithm 1 makes it: a vector and a
    number, so that a new number needs no pass over the vector.
    """

    centre: Tensor  # m, (d,); or () and 0 for a ball about the origin
    inverse: Tensor  # factor / b^2, > 0, (d,); or () for a ball
    factor: Tensor  # > 0, ()

    @property
    def is_ball(self) -> bool:
        """Whether one number scales every coordinate and the centre is the origin."""
        return self.inverse.ndim == 0

    @property
    def scale(self) -> Tensor:
        """b, shape (d,); or shape () and C for a ball of radius C."""
        return self.inverse.rsqrt().mul_(self.factor.sqrt())


def ellipsoid(centre: Tensor, scale: Tensor) -> Ellipsoid:
    """The ellipsoid of a centre m and a scale b, shape (d,) each."""
    return Ellipsoid(centre, scale.square().reciprocal_(), torch.ones_like(scale[0]))


def ball(radius: float, like: Tensor) -> Ellipsoid:
    """The ball of radius C as an ellipsoid; dtype and device of ``like``."""
    one = torch.ones_like(like[0])
    return Ellipsoid(torch.zeros_like(one), one / radius**2, one)


@dataclass(frozen=True)
class PrivateMean:
    """The noisy mean gradient of one step. Everything computed from it costs no more privacy."""

    value: Tensor  # g-tilde_t, (d,)
    scale: Tensor  # b, that the noise was scaled by; (d,), or () for a ball. Public
    noise_ratio: float  # sigma / B

    @property
    def noise_variance(self) -> Tensor:
        """Variance of the noise per coordinate, b^2 sigma^2 / B^2; shape of b."""
        return (self.scale * self.noise_ratio).square_()

    def without_noise(self, variance: Tensor) -> Tensor:
        """``variance`` less that of the noise, in place; shape (d,), and b's too."""
        return variance.addcmul_(self.scale, self.scale, value=-(self.noise_ratio**2))


@dataclass(frozen=True)
class GaussianMechanism:
    """Lines 9 to 11 of Algorithm 1.

    In whitened space the sum of clipped gradients has sensitivity 1 when one record is added or
    removed, for every ellipsoid, so noise of standard deviation sigma on that sum is a Gaussian
    mechanism with noise multiplier sigma.
    """

    noise_multiplier: float  # sigma >= 0
    expected_batch: float  # B > 0. The size of the batch drawn is private and never used

    def release(self, clipped: Tensor, region: Ellipsoid, noise: SeededNormals) -> PrivateMean:
        """Add noise to the clipped sum and turn it into a mean gradient.

        Args:
            clipped: sum over the batch of c_i (g_i - m), shape (d,), with every
                ||c_i (g_i - m) / b|| <= 1; or the same block of it as of the ellipsoid. Consumed.
                In float64 if chunks were added up: it is rounded after the noise is added.
            region: the ellipsoid that the sum was clipped to.
            noise: fresh draws, used here once.
        """
        value, b = clipped, region.scale
        self._add_noise(value, b, noise)
        value.div_(self.expected_batch)  # b w-tilde_t: line 10, kept in gradient space
        if not region.is_ball:
            value.add_(region.centre)  # line 11
        return PrivateMean(value.to(b.dtype), b, self.noise_multiplier / self.expected_batch)

    def placeholder(self, region: Ellipsoid, like: Tensor) -> PrivateMean:
        """Return a private mean to receive the value of one that another process released."""
        b = region.scale
        ratio = self.noise_multiplier / self.expected_batch
        return PrivateMean(torch.empty_like(like, dtype=b.dtype), b, ratio)

    def _add_noise(self, value: Tensor, b: Tensor, noise: SeededNormals) -> None:
        """Line 9, in place, as it is in gradient space: the sum and sigma b z."""
        if self.noise_multiplier > 0:
            z = noise.standard_normal(torch.empty_like(value, dtype=b.dtype))
            value.add_(z.mul_(b), alpha=self.noise_multiplier)

    def rounding(self, size: int) -> float:
        """Return what rounding adds at most to a sensitivity of 1, in ``size`` coordinates."""
        return 0.0


@dataclass(frozen=True)
class SecureMechanism(GaussianMechanism):
    """Gaussian mechanism on a fixed public grid, to which sum and noise are rounded first.

    Whatever the data, what is released lies on the grid, so that its low bits tell nothing of them
    (Mironov 2012, arXiv 2207.13793). Adding rounded noise to a rounded sum is rounding the sum and
    its noise together: post-processing of a Gaussian mechanism, whose sensitivity the rounding of
    the sum raises by GRID sqrt(d) at most. Everything in float64, also for float32 sums.
    """

    def _add_noise(self, value: Tensor, b: Tensor, noise: SeededNormals) -> None:
        for part in blocks(len(value), value.device, GRID_BLOCK):
            value[part] = self.whitened(value[part], b if b.ndim == 0 else b[part], noise)
        value.mul_(b)

    def whitened(self, clipped: Tensor, b: Tensor, noise: SeededNormals) -> Tensor:
        """The noisy sum on the grid; float64, shape of ``clipped``, which is consumed."""
        total = clipped.double().div_(b).div_(GRID).round_()
        if self.noise_multiplier > 0:
            z = noise.standard_normal(torch.empty_like(total))
            # Whole numbers both: their float64 sum depends on their exact sum alone, beyond 2^53
            # too, where it is rounded. What came before that sum, no bit of it tells.
            total.add_(z.mul_(self.noise_multiplier / GRID).round_())
        return total.mul_(GRID).add_(0.0)  # or -0.0 would tell of two zeros from 0.0

    def rounding(self, size: int) -> float:
        """Return what the grid adds: each coordinate moves by half of it, twice."""
        return GRID * math.sqrt(size)
