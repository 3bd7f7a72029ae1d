"""Privacy loss of random allocation: each record is in one of an epoch's t steps, uniformly.

With ``Z_i = exp(g_i/sigma - 1/(2 sigma^2))`` for independent normal ``g_i``, the dominating pair of
an epoch is Q, under which the likelihood ratio is ``R = (Z_1 + ... + Z_t)/t``, and P with
``dP = R dQ`` (Chua et al. 2024, arXiv 2412.16802; for adaptive steps see docs/accounting.md).
Therefore

    delta(epsilon) = E_Q (R - e^epsilon)+    and, with P and Q exchanged,    E_Q (1 - e^epsilon R)+.

Both are convex in every ``Z_i``, so spreading it without changing its mean gives an upper bound.
Here each value is split between its two neighbours on an even grid, an error of second order in the
grid's width. The sum's distribution is then one power of a Fourier transform. The second expression
depends on small sums only, which have a finer grid of their own. Below epsilon 0 each follows from
the other, since R has mean 1:

    E_Q (R - e^epsilon)+ = 1 - e^epsilon + e^epsilon E_Q (1 - e^-epsilon R)+.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpmac_cli.accounting.events import LEAST_NOISE
from dpmac_cli.libraries import (
    fft,
    np,
    pld_pmf,
    privacy_loss_distribution,
    signal,
    stats,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64Array = NDArray[np.float64]

#: Largest number of grid points; grid width in standard deviations of Z, and its lower limit.
POINTS = 2**22
WIDTH, WIDEST = 0.005, 0.2
#: Number of grid points for sums up to t, and a bound on the rounding errors of their distribution.
FEW, ROUNDING = 2**16, 1e-13
#: Probability that Z, in the step with the record, exceeds the grid, where the loss is infinite.
BEYOND = 1e-14


@dataclass(frozen=True)
class Ratios:
    """Likelihood ratio of an epoch, spread over an even grid.

    :func:`likelihood_ratios` returns it.

    Attributes:
        at: ratios, increasing; shape (points,).
        without: probability of each ratio under Q, without the record; shape (points,).
        with_record: probability of each ratio under P, with the record; shape (points,).
        lost_without: bound on the probability outside the grid under Q.
        lost_with: bound on the probability outside the grid under P.
    """

    at: Float64Array  # ratios, increasing; shape (points,)
    without: Float64Array  # probability of each ratio under Q, without the record; shape (points,)
    with_record: Float64Array  # the same under P
    lost_without: float  # bound on the probability outside the grid under Q
    lost_with: float  # the same under P

    def deltas(self, epsilons: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return upper bounds of delta at each epsilon: P against Q, and Q against P.

        Args:
            epsilons: of either sign, shape (epsilons,), which is that of both results.
        """
        factors = np.exp(epsilons)
        above = np.searchsorted(self.at, factors, side="right")
        remove = _from(self.with_record)[above] - factors * _from(self.without)[above]
        below = np.searchsorted(self.at, 1 / factors)
        add = _until(self.without)[below] - factors * _until(self.with_record)[below]
        return remove + self.lost_with, add + self.lost_without


def allocated_gaussian(steps: int, noise_multiplier: float, width: float) -> Any:
    """Return a privacy loss distribution that dominates an epoch of random allocation.

    Args:
        steps: number t of steps per epoch.
        noise_multiplier: sigma > 0; below :data:`LEAST_NOISE` no amplification is claimed.
        width: width of the loss grid of Connect-the-Dots; an upper bound for every width.

    Returns:
        An object of dp-accounting. It is never worse than t = 1, the mechanism on all records.
    """
    if steps == 1 or noise_multiplier < LEAST_NOISE:
        return privacy_loss_distribution.from_gaussian_mechanism(
            noise_multiplier, value_discretization_interval=width
        )
    ratios = likelihood_ratios(steps, noise_multiplier)
    largest = 10 / noise_multiplier + 0.5 / noise_multiplier**2  # at 10 standard deviations
    most = math.ceil(largest / width)
    epsilons: Float64Array = width * np.arange(-most, most + 1, dtype=np.float64)
    plain = gaussian_deltas(noise_multiplier, epsilons)
    remove, add = np.minimum(plain, ratios.deltas(epsilons))
    add[most:] = np.minimum(add[most:], small_sums(steps, noise_multiplier, epsilons[most:]))
    connect_dots, parts = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap, []
    for bound, other in ((remove, add), (add, remove)):
        dual = np.exp(epsilons[:most]) * other[:most:-1] - np.expm1(epsilons[:most])
        deltas = np.append(np.minimum(bound[:most], dual), bound[most:])
        convex = _convex(np.exp(epsilons), deltas)
        parts.append(connect_dots(width, -most, most, convex))
    return privacy_loss_distribution.PrivacyLossDistribution(*parts)


def small_sums(steps: int, noise_multiplier: float, epsilons: Float64Array) -> Float64Array:
    """Return upper bounds of E_Q (1 - e^epsilon R)+, see the module.

    Sums above t contribute nothing, so each Z and each partial sum above t is left out.

    Args:
        steps: number t of steps per epoch.
        noise_multiplier: sigma.
        epsilons: at least 0, shape (epsilons,), which is that of the result.
    """
    width = steps / FEW
    power, _, _ = _split_lognormal(noise_multiplier, width, FEW)
    sums, remaining = np.ones(1), steps
    while remaining:  # t-fold convolution, by the binary digits of t
        if remaining % 2:
            sums = _added(sums, power)
        remaining //= 2
        if remaining:
            power = _added(power, power)
    at = width * np.arange(sums.size)
    factors = np.exp(epsilons) / steps
    below = np.searchsorted(at, 1 / factors)
    return _until(sums)[below] - factors * _until(sums * at)[below] + ROUNDING


def _added(one: Float64Array, other: Float64Array) -> Float64Array:
    """Return the distribution of the sum of independent variables on the first FEW + 1 points."""
    total: Float64Array = np.maximum(0.0, signal.fftconvolve(one, other)[: FEW + 1])
    return total


@functools.lru_cache(maxsize=2)
def likelihood_ratios(steps: int, noise_multiplier: float) -> Ratios:
    """Return the likelihood ratio of an epoch, spread over an even grid.

    Args:
        steps: number t of steps per epoch, at least 2.
        noise_multiplier: sigma, at least :data:`LEAST_NOISE`.
    """
    sigma, t = noise_multiplier, steps
    spread = math.sqrt(math.expm1(1 / sigma**2))
    largest = math.exp(stats.norm.isf(BEYOND) / sigma + 0.5 / sigma**2)
    cap = min(largest, WIDEST * spread * POINTS / 2)
    # Room for two of the largest values; the probability of needing more is negligible.
    room = 2 * (cap + t)
    width = max(WIDTH * spread, room / POINTS)
    masses, lost_without, lost_with = _split_lognormal(sigma, width, math.ceil(cap / width))
    size = fft.next_fast_len(math.ceil(room / width), real=True)
    without = np.maximum(0.0, fft.irfft(fft.rfft(masses, size) ** t, size))
    at = (width / t) * np.arange(size)
    with_record = at * without
    wrapped = _wrapped(masses, width, t, size)
    lost_with = min(1.0, lost_with + (t - 1) * lost_without + wrapped)
    lost_without = min(1.0, t * lost_without + wrapped)
    # Add a bound on the transform's rounding errors to the lost probability.
    lost_with = max(lost_with, 1 - with_record.sum())
    lost_without = max(lost_without, 1 - without.sum())
    return Ratios(at, without, with_record, lost_without, lost_with)


def _split_lognormal(sigma: float, width: float, cells: int) -> tuple[Float64Array, float, float]:
    """Split Z between the ends of each cell of a grid, which preserves the cell's mean.

    Returns:
        Probabilities of ``0, width, ..., cells * width``, and the probabilities that Z exceeds the
        grid without and with the record in the step.
    """
    normal = sigma * (np.log(width * np.arange(1, cells + 1)) + 0.5 / sigma**2)

    def between(bounds: Float64Array) -> Float64Array:
        lower = np.diff(stats.norm.cdf(bounds), prepend=0.0)
        upper = -np.diff(stats.norm.sf(bounds), prepend=1.0)  # accurate where the other is not
        masses: Float64Array = np.where(bounds < 0, lower, upper)
        return masses

    mass, moment = between(normal), between(normal - 1 / sigma)  # Z's mean is 1
    rising = np.clip(moment / width - np.arange(cells) * mass, 0.0, mass)
    masses = np.append(mass - rising, 0.0)
    masses[1:] += rising
    beyond = normal[-1]
    return masses, float(stats.norm.sf(beyond)), float(stats.norm.sf(beyond - 1 / sigma))


def _wrapped(masses: Float64Array, width: float, t: int, size: int) -> float:
    """Return a Chernoff bound on the probability, under P or Q, that the sum exceeds the grid."""
    values = width * np.arange(masses.size)
    best, rates = 0.0, np.geomspace(1e-3, 1e3, 40)
    for rate in rates[rates < 600] / values[-1]:  # larger ones would overflow
        growing = masses * np.exp(rate * values)
        each = math.log(growing.sum())
        without = t * each
        with_record = math.log((growing * values).sum()) + (t - 1) * each
        bound = max(without, with_record) - rate * width * size
        best = min(best, bound)
    return math.exp(best)


def gaussian_deltas(sigma: float, epsilons: Float64Array) -> Float64Array:
    """Return delta of one Gaussian mechanism at each epsilon (Balle and Wang 2018, Theorem 8).

    Args:
        sigma: noise multiplier, above 0.
        epsilons: of either sign, shape (epsilons,), which is that of the result.
    """
    more, less = 0.5 / sigma - epsilons * sigma, -0.5 / sigma - epsilons * sigma
    deltas: Float64Array = stats.norm.cdf(more) - np.exp(epsilons + stats.norm.logcdf(less))
    return deltas


def _convex(factors: Float64Array, deltas: Float64Array) -> Float64Array:
    """Return the largest convex function of e^epsilon below ``deltas``, still a bound on delta."""
    at, values = factors.tolist(), deltas.tolist()
    corners: list[int] = []
    for new in range(len(at)):
        while len(corners) > 1:
            first, last = corners[-2:]
            rise, run = values[last] - values[first], at[last] - at[first]
            if rise * (at[new] - at[first]) < (values[new] - values[first]) * run:
                break
            corners.pop()
        corners.append(new)
    return np.interp(factors, factors[corners], deltas[corners])


def _from(masses: Float64Array) -> Float64Array:
    """Return the sums from each index to the end; shape (points + 1,)."""
    return np.append(np.cumsum(masses[::-1])[::-1], 0.0)


def _until(masses: Float64Array) -> Float64Array:
    """Return the sums before each index; shape (points + 1,)."""
    return np.append(0.0, np.cumsum(masses))
