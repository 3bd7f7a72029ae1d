"""Privacy loss of the Gaussian mechanism on a Poisson sample, on the grid of Connect-the-Dots.

The distribution is that of dp-accounting's ``from_gaussian_mechanism``, number by number. The
outputs at which the losses of the grid are reached are computed for the whole grid at once, where
the library calls a function of Python at each of up to a hundred thousand points.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from dpmac_cli.libraries import np, pld_pmf, privacy_loss_distribution, privacy_loss_mechanism

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64Array = NDArray[np.float64]

#: Relative distance from the extreme loss at which a loss counts as that one.
CLOSE = 1e-9


@functools.lru_cache(maxsize=4)
def sampled_gaussian(sampling_rate: float, noise_multiplier: float, width: float) -> Any:
    """Return the pessimistic privacy loss distribution of one Gaussian mechanism on a sample.

    Args:
        sampling_rate: probability q of each record, above 0 and at most 1.
        noise_multiplier: sigma > 0.
        width: width of the loss grid of Connect-the-Dots; an upper bound for every width.

    Returns:
        An object of dp-accounting, for a record that is removed and for one that is added.
    """
    connect_dots = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap
    kinds = privacy_loss_mechanism.AdjacencyType
    # On all records, the distributions of the two are the same.
    adjacencies = (kinds.REMOVE, kinds.ADD) if sampling_rate < 1 else (kinds.REMOVE,)
    distributions = []
    for adjacency in adjacencies:
        mechanism = privacy_loss_mechanism.GaussianPrivacyLoss(
            noise_multiplier, sampling_prob=sampling_rate, adjacency_type=adjacency
        )
        bounds = mechanism.connect_dots_bounds()
        least = math.floor(bounds.epsilon_lower / width)
        most = math.ceil(bounds.epsilon_upper / width)
        deltas = deltas_of(mechanism, width * np.arange(least, most + 1))
        distributions.append(connect_dots(width, least, most, deltas))
    return privacy_loss_distribution.PrivacyLossDistribution(*distributions)


def deltas_of(mechanism: Any, epsilons: Float64Array) -> Float64Array:
    """Return delta of a mechanism at each epsilon, as its ``get_delta_for_epsilon`` does.

    Args:
        mechanism: dp-accounting's ``GaussianPrivacyLoss`` of a record that is removed or added.
        epsilons: of either sign, shape (epsilons,), which is that of the result.
    """
    if _is_of_removal(mechanism):
        reached = epsilons > _extreme_loss(mechanism)
        deltas = -np.expm1(epsilons)  # elsewhere, every output has a larger loss
    else:
        reached = epsilons < -_extreme_loss(mechanism)
        deltas = np.zeros_like(epsilons)  # elsewhere, no output has the loss
    within = epsilons[reached]
    outputs = outputs_at(mechanism, within)
    likely = mechanism.mu_upper_cdf(outputs)
    deltas[reached] = likely - np.exp(within + mechanism.mu_lower_log_cdf(outputs))
    return np.clip(deltas, 0.0, 1.0)


def outputs_at(mechanism: Any, losses: Float64Array) -> Float64Array:
    """Return the largest outputs whose privacy loss is at least each of some losses.

    The loss L on a sample is L' on all records: for a record that is removed,
    ``exp(L) = 1 - q + q exp(L')``, and for one that is added, the same of -L and -L'. L' is linear
    in the output.

    Args:
        mechanism: as for :func:`deltas_of`.
        losses: losses that outputs have, shape (losses,), which is that of the result.
    """
    rate, variance = mechanism.sampling_prob, mechanism._standard_deviation**2
    removed = _is_of_removal(mechanism)
    signed = losses if removed else -losses
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = signed + np.log(1 / rate)
        whole = scaled + np.log1p(-np.exp(np.log(1 / rate - 1) - scaled))
    whole[signed == 0] = 0.0
    whole[np.isclose(signed, _extreme_loss(mechanism), rtol=CLOSE, atol=0.0)] = -math.inf
    outputs: Float64Array = -0.5 - whole * variance if removed else 1 + (-0.5 + whole * variance)
    return outputs


def _is_of_removal(mechanism: Any) -> bool:
    """Return whether a mechanism compares records with all but one of them."""
    return bool(mechanism.adjacency_type == privacy_loss_mechanism.AdjacencyType.REMOVE)


def _extreme_loss(mechanism: Any) -> float:
    """Return the least loss of a record that is removed, log(1 - q)."""
    rate = mechanism.sampling_prob
    return math.log1p(-rate) if rate < 1 else -math.inf
