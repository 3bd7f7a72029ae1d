"""Privacy loss of the Gaussian mechanism on a Poisson sample, at all points of a grid at once.

dp-accounting inverts the privacy loss for one point of the grid after the other, in Python, which
is most of the time of a price. Here the same formulas take arrays. Its distributions of the
noise, the ends of the grid and Connect-the-Dots are used as they are.
"""

import functools
import math
from typing import Any

from dpmac_cli.libraries import (
    np,
    pld_pmf,
    privacy_loss_distribution,
    privacy_loss_mechanism,
)


@functools.lru_cache(maxsize=4)
def sampled_gaussian(sampling_rate: float, noise_multiplier: float, width: float) -> Any:
    """Return the pessimistic privacy loss distribution of one step, by Connect-the-Dots.

    It is that of ``from_gaussian_mechanism`` of dp-accounting.

    >>> step = sampled_gaussian(0.01, 1.0, width=1e-3)
    >>> float(round(step.get_delta_for_epsilon(0.0), 5))
    0.00383

    Args:
        sampling_rate: probability q in (0, 1] that a record is in the step.
        noise_multiplier: sigma > 0, with a sensitivity of 1.
        width: width of the grid of losses; an upper bound for every width.

    Returns:
        A ``PrivacyLossDistribution`` of dp-accounting.
    """
    adjacency = privacy_loss_mechanism.AdjacencyType
    removed = _losses(sampling_rate, noise_multiplier, width, adjacency.REMOVE)
    if sampling_rate == 1.0:
        return privacy_loss_distribution.PrivacyLossDistribution(removed)
    added = _losses(sampling_rate, noise_multiplier, width, adjacency.ADD)
    return privacy_loss_distribution.PrivacyLossDistribution(removed, added)


def _losses(q: float, sigma: float, width: float, adjacency: Any) -> Any:
    """Return the losses of one direction, rounded up to a grid."""
    loss = privacy_loss_mechanism.GaussianPrivacyLoss(
        sigma, sampling_prob=q, adjacency_type=adjacency
    )
    bounds = loss.connect_dots_bounds()
    lowest = math.floor(bounds.epsilon_lower / width)
    highest = math.ceil(bounds.epsilon_upper / width)
    epsilons = width * np.arange(lowest, highest + 1)
    connect_dots = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap
    return connect_dots(width, lowest, highest, _deltas(loss, epsilons, q, sigma))


def _deltas(loss: Any, epsilons: Any, q: float, sigma: float) -> Any:
    """Return the hockey-stick divergence at each epsilon, shape (epsilons,).

    A loss is at least epsilon for noise of at most x, so that the divergence is
    ``P(x) - exp(epsilon) Q(x)``, with the distributions P and Q of the two outcomes.
    """
    x = _noise_of_losses(loss, epsilons, q, sigma)
    within = loss.mu_upper_cdf(x) - np.exp(epsilons + loss.mu_lower_log_cdf(x))
    deltas = np.where(x == math.inf, -np.expm1(epsilons), within)
    if not np.isfinite(deltas).all():
        raise ArithmeticError(f"a divergence is not finite at q = {q:g}, sigma = {sigma:g}")
    return np.clip(deltas, 0.0, 1.0)


def _noise_of_losses(loss: Any, epsilons: Any, q: float, sigma: float) -> Any:
    """Return the largest noise at which the loss is at least each epsilon, shape (epsilons,).

    Without sampling, the loss at noise x is ``(-0.5 - x) / sigma^2`` if the record is removed, and
    ``(0.5 - x) / sigma^2`` if it is added.
    """
    if loss.adjacency_type == privacy_loss_mechanism.AdjacencyType.ADD:
        return 1.0 + (-0.5 + _without_sampling(-epsilons, q) * sigma**2)
    return -0.5 - _without_sampling(epsilons, q) * sigma**2


def _without_sampling(losses: Any, q: float) -> Any:
    """Return ``log(1 + (e^l - 1) / q)`` for each loss l of removing a record, shape (losses,).

    It is -inf for losses of at most ``log(1 - q)``, which every noise has.
    """
    if q == 1.0:
        return losses
    risen = losses + math.log(1 / q)
    lost = np.exp(math.log(1 / q - 1) - risen)
    with np.errstate(divide="ignore"):
        whole = risen + np.log1p(-np.minimum(lost, 1.0))
    least = math.log1p(-q)
    every = (losses <= least) | np.isclose(losses, least, rtol=1e-9, atol=0.0)
    return np.where(every, -math.inf, np.where(losses == 0.0, 0.0, whole))
