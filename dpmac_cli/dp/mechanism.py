"""From clipped sums to the only thing the rest of the program ever sees of the data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpmac_cli.noise import NoiseSource


@dataclass(frozen=True)
class Ellipsoid:
    """The clipping region {g : ||(g - centre) / scale||_2 <= 1}, public before a step begins.

    Attributes:
        centre: m, shape (d,); or shape () and 0 for a ball about the origin.
        scale: b > 0, shape (d,); or shape () and C for a ball of radius C.
    """

    centre: Tensor
    scale: Tensor

    @property
    def is_ball(self) -> bool:
        """Whether one number scales every coordinate and the centre is the origin."""
        return self.scale.ndim == 0


def ball(radius: float, like: Tensor) -> Ellipsoid:
    """The ball of radius C as an ellipsoid; dtype and device of ``like``."""
    return Ellipsoid(torch.zeros_like(like[0]), torch.full_like(like[0], radius))


@dataclass(frozen=True)
class PrivateMean:
    """The noisy mean gradient of one step. Everything computed from it costs no more privacy.

    Attributes:
        value: g-tilde_t, shape (d,).
        noise_variance: variance of the noise in ``value`` per coordinate, b^2 sigma^2 / B^2;
            shape (d,), or () for a ball. Public.
    """

    value: Tensor
    noise_variance: Tensor


@dataclass(frozen=True)
class GaussianMechanism:
    """Lines 9 to 11 of Algorithm 1.

    In whitened space the sum of clipped gradients has sensitivity 1 when one record is added or
    removed, for every ellipsoid, so noise of standard deviation sigma on that sum is a Gaussian
    mechanism with noise multiplier sigma.

    Attributes:
        noise_multiplier: sigma >= 0.
        expected_batch: B > 0, the expected batch size. The size drawn is private and never used.
    """

    noise_multiplier: float
    expected_batch: float

    def release(self, clipped: Tensor, region: Ellipsoid, noise: NoiseSource) -> PrivateMean:
        """Add noise to the clipped sum and turn it into a mean gradient.

        Args:
            clipped: sum over the batch of c_i (g_i - m), shape (d,), with every
                ||c_i (g_i - m) / b|| <= 1. Consumed. In float64 if chunks were added up: the
                noise then meets it in float64, and what is rounded afterwards is private.
            region: the ellipsoid that the sum was clipped to.
            noise: fresh draws, used here once.
        """
        sigma, batch = self.noise_multiplier, self.expected_batch
        whitened = clipped.div_(region.scale)
        if sigma > 0:
            like = torch.empty_like(whitened, dtype=region.scale.dtype)
            whitened.add_(noise.standard_normal(like), alpha=sigma)
        whitened.div_(batch)  # w-tilde_t, line 10
        value = whitened.mul_(region.scale)
        if not region.is_ball:
            value.add_(region.centre)  # line 11
        value = value.to(region.scale.dtype)
        return PrivateMean(value, (region.scale * (sigma / batch)).square_())
