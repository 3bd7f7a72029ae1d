"""Gaussian mechanism: from a clipped sum to the private mean, the only output from the data.

Lines 9 to 11 of Algorithm 1, for the ellipsoid with centre m = m-hat_(t-1) and scale b = b_(t-1):

    z_t ~ N(0, sigma^2 / B^2 I)                               line 9
    w~_t = 1/B sum_i w-bar_i + z_t                            line 10
    g~_t = b w~_t + m                                         line 11

Here sums are kept in gradient space, so b w-bar_i = c_i (g_i - m) is what is added up. A mean of
records would have a private divisor, the number drawn; B is the expected number, which is public.

Out of scope: how the sum is clipped (:mod:`dpmac_cli.dp.clipping.clipped_sum`), and the privacy
cost (:mod:`dpmac_cli.accounting`), which needs sigma and the sampling rate only.
"""

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
    factor, so another factor needs no pass over the vector:

        b = sqrt(factor / inverse).

    Attributes:
        centre: m, shape (d,); or 0, shape (), for a ball around the origin.
        inverse: factor / b^2, above 0, shape (d,); shape () for a ball.
        factor: above 0, shape ().

    Example:
        >>> region = ellipsoid(centre=torch.zeros(2), scale=torch.tensor([1.0, 0.5]))
        >>> region.scale
        tensor([1.0000, 0.5000])
        >>> region.is_ball
        False
    """

    centre: Tensor
    inverse: Tensor
    factor: Tensor

    @property
    def is_ball(self) -> bool:
        """Return whether the region is a ball around 0: one number scales all coordinates."""
        return self.inverse.ndim == 0

    @property
    def scale(self) -> Tensor:
        """Return the scale b = sqrt(factor / inverse), shape (d,); for a ball its radius C, ()."""
        return self.inverse.rsqrt().mul_(self.factor.sqrt())


def ellipsoid(centre: Tensor, scale: Tensor) -> Ellipsoid:
    """Return the ellipsoid {g : ||(g - m) / b||_2 <= 1} with centre m and scale b.

    Args:
        centre: m, shape (d,). Not copied: the result shares its memory.
        scale: b > 0, shape (d,).

    Example:
        >>> ellipsoid(torch.zeros(2), torch.tensor([1.0, 0.5])).inverse  # 1/b^2
        tensor([1., 4.])
    """
    return Ellipsoid(centre, scale.square().reciprocal_(), torch.ones_like(scale[0]))


def ball(radius: float, like: Tensor | None = None) -> Ellipsoid:
    """Return the ball {g : ||g||_2 <= C} of radius C around the origin, as an ellipsoid.

    Args:
        radius: C, the clipping norm, above 0.
        like: a vector with the dtype and device of theta; None for float32 on the CPU.

    Raises:
        InputError: C is not a positive number, or 1/C^2 does not fit into the dtype: a ball with 0
            instead would clip nothing.

    Example:
        >>> ball(2.0).scale
        tensor(2.)
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
    """Noisy mean gradient of one step. Anything computed from it has no further privacy cost.

    It is the argument of every optimizer and geometry, and all that they see of the records.

    Attributes:
        value: g-tilde_t, shape (d,), or a block of it.
        scale: scale b of the noise, in the shape of ``value``; shape () for a ball. Public.
        noise_ratio: sigma / B, public. The noise of a coordinate has standard deviation b sigma/B.
    """

    value: Tensor
    scale: Tensor
    noise_ratio: float

    @property
    def noise_variance(self) -> Tensor:
        """Return the variance of the noise per coordinate, b^2 sigma^2 / B^2, in the shape of b.

        It is Phi of DP-AdamBC (Tang et al. 2023) for a ball, where b = C.
        """
        return (self.scale * self.noise_ratio).square_()

    def without_noise(self, variance: Tensor) -> Tensor:
        """Subtract the variance of the noise from that of g-tilde: b^2 sigma^2 / B^2 of line 19.

        Args:
            variance: estimate of the variance of g-tilde, in the shape of ``value``. Overwritten.

        Returns:
            ``variance`` itself: an estimate of the variance without noise, which may be below 0.
        """
        return variance.addcmul_(self.scale, self.scale, value=-(self.noise_ratio**2))


@dataclass(frozen=True)
class GaussianMechanism:
    """Gaussian mechanism: lines 9 to 11 of Algorithm 1.

    In whitened space the sum of clipped gradients has sensitivity 1 to adding or removing one
    record, for every ellipsoid. Adding noise of standard deviation sigma is therefore a Gaussian
    mechanism with noise multiplier sigma.

    Attributes:
        noise_multiplier: sigma, at least 0. Without noise there is no guarantee.
        expected_batch: B, above 0. The size of the batch that was drawn is private, and never used.

    Raises:
        InputError: a number is out of range: a sigma that is NaN would add no noise.

    Example:
        >>> from dpmac_cli.randomness.keystream import make_keys
        >>> from dpmac_cli.randomness.noise import Noise
        >>> noise = Noise(make_keys(seed=0).noise)
        >>> mechanism = GaussianMechanism(noise_multiplier=0.0, expected_batch=4)  # no noise
        >>> clipped = torch.tensor([2.0, -1.0])
        >>> mechanism.release(clipped, ball(1.0, clipped), noise.at(1)).value
        tensor([ 0.5000, -0.2500])
    """

    noise_multiplier: float
    expected_batch: float

    def __post_init__(self) -> None:
        sigma, batch = self.noise_multiplier, self.expected_batch
        errors = []
        if not (math.isfinite(sigma) and sigma >= 0):
            errors.append(f"noise_multiplier must be a number of at least 0, not {sigma!r}.")
        if not (math.isfinite(batch) and batch > 0):
            errors.append(f"expected_batch must be a number above 0, not {batch!r}.")
        raise_errors(errors)

    @classmethod
    def of(cls, event: TrainingEvent, expected_batch: float, sensitivity: float = 1.0) -> Self:
        """Return the mechanism of a privacy event, with its sigma times the sensitivity.

        Args:
            event: event of the steps of a training, or of a histogram, which an account has.
            expected_batch: B, above 0.
            sensitivity: L2 norm by which one record, or all of a unit, can change the sum.

        Raises:
            InputError: a number is out of range.
        """
        return cls(event.noise_multiplier * sensitivity, expected_batch)

    @property
    def noisy(self) -> bool:
        """Return whether the mechanism adds noise; without, nothing that it releases is private."""
        return self.noise_multiplier > 0

    def release(self, clipped: Tensor, region: Ellipsoid, noise: SeededNormals) -> PrivateMean:
        """Add noise to a clipped sum, and divide it by B: g-tilde of lines 9 to 11 of Algorithm 1.

        Args:
            clipped: sum over the batch of c_i (g_i - m), shape (d,), with every
                ||c_i (g_i - m) / b|| <= 1; or a block of it that matches ``region``. Consumed. Its
                memory is not that of the result: other blocks may have no noise yet.
                In float64 if chunks were added up: it is rounded after the noise is added.
            region: ellipsoid that the sum was clipped to.
            noise: fresh random numbers, used only here.

        Returns:
            g-tilde_t in the shape of ``clipped`` and the dtype of ``region``. With noise, anything
            may be computed from it.
        """
        value = clipped
        b = region.scale
        self._add_noise(value, b, noise)
        # b w-tilde_t, line 10, kept in gradient space, and line 11.
        mean = torch.add(region.centre, value, alpha=1 / self.expected_batch)
        return PrivateMean(mean.to(b.dtype), b, self.noise_multiplier / self.expected_batch)

    def _add_noise(self, value: Tensor, b: Tensor, noise: SeededNormals) -> None:
        """Add sigma b z to the sum in place: line 9 in gradient space, with z ~ N(0, I)."""
        if self.noisy:
            z = noise.standard_normal(torch.empty_like(value, dtype=b.dtype))
            value.addcmul_(z, b, value=self.noise_multiplier)

    def rounding(self, size: int) -> float:
        """Return a bound on what rounding adds to the sensitivity 1, in whitened space.

        Here 0: the margins of :mod:`dpmac_cli.dp.clipping.clipped_sum` cover the rounding of sums.

        Args:
            size: number d of coordinates.
        """
        return 0.0


@dataclass(frozen=True)
class SecureMechanism(GaussianMechanism):
    """Gaussian mechanism that first rounds sum and noise to a fixed public grid.

    Results always lie on the grid, so their low bits reveal nothing about the data (Mironov 2012,
    arXiv 2207.13793). Adding rounded noise to a rounded sum equals rounding the rounded sum plus
    noise. That is post-processing of a Gaussian mechanism, whose sensitivity grows by at most
    GRID sqrt(d) from rounding the sum. All computations use float64, even for float32 sums.

    With b = 1 and k = GRID: g~ = k (round(sum / k) + round(sigma z / k)) / B + m.
    """

    def _add_noise(self, value: Tensor, b: Tensor, noise: SeededNormals) -> None:
        whitened = self.whitened(value, b, noise)
        value.copy_(whitened).mul_(b)

    def whitened(self, clipped: Tensor, b: Tensor, noise: SeededNormals) -> Tensor:
        """Return the noisy sum divided by b, rounded to the grid: lines 9 and 10, before 1/B.

        Args:
            clipped: clipped sum, shape (d,): see :meth:`release`. Consumed.
            b: scale of the region, shape (d,), or () for a ball.
            noise: fresh random numbers, used only here.

        Returns:
            Multiples of :data:`GRID`, float64, in the shape of ``clipped``.
        """
        total = clipped.double().div_(b * GRID).round_()
        if self.noisy:
            z = noise.standard_normal(torch.empty_like(total))
            # Both are integers: their float64 sum depends only on their exact sum, even beyond
            # 2^53, where it is rounded. It reveals nothing else about the two terms.
            total.add_(z.mul_(self.noise_multiplier / GRID).round_())
        # Not -0.0, which would reveal how a zero arose.
        return torch.add(torch.zeros_like(total[0]), total, alpha=GRID, out=total)

    def rounding(self, size: int) -> float:
        """Return what rounding to the grid adds to the sensitivity 1, GRID sqrt(d).

        Each coordinate moves by up to half of the grid, in both of two neighbouring sums.

        Args:
            size: number d of coordinates.
        """
        return GRID * math.sqrt(size)
