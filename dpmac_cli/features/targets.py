"""Range and moments of a number to predict, of which nothing but that it is a number is declared.

The range follows from the noisy counts of :mod:`dpmac_cli.features.counts`, as post-processing.
Mean and standard deviation are one more Gaussian mechanism, on numbers clipped to that range.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.dp.histogram import WHOLE, weights_of
from dpmac_cli.dp.mechanism import SecureMechanism, ball
from dpmac_cli.features.counts import Distribution, Floats
from dpmac_cli.randomness.noise import SeededNormals

#: Part of its width by which a range is made wider on each side.
MARGIN = 0.5
#: Least spread of a number to predict, as a part of half of its range, and standard deviations of
#: the noise that are added to its square.
LEAST_SPREAD, ABOVE = 0.03, 3.0


def target_range(distribution: Distribution) -> tuple[float, float]:
    """Return the range to clip a number to predict to: wider than that of a column.

    A column beyond its range is one input among many. A target beyond its range is an error that no
    network avoids, so half of ``high - low`` is added on each side, also across zero.

    Args:
        distribution: that of the numbers to predict.

    Returns:
        The low end and the high one.

    >>> target_range(Distribution(low=0.0, high=10.0, edges=(0.0, 4.0, 10.0), shares=(0.0, 0.5, 1)))
    (-5.0, 15.0)
    """
    width = distribution.high - distribution.low
    margin = MARGIN * width
    return distribution.low - margin, distribution.high + margin


def target_moments(
    values: Floats,
    low: float,
    high: float,
    event: TrainingEvent,
    noise: SeededNormals,
    begin: Callable[[TrainingEvent], None],
    owners: NDArray[np.int64] | None = None,
    units: int | None = None,
) -> tuple[float, float]:
    """Return mean and standard deviation of a number to predict, with noise.

    Numbers are clipped to a public range and scaled to t in [-1, 1]. The sum over units of (t, t^2)
    has sensitivity sqrt(2), the sensitivity that the event's noise multiplier is multiplied by.

    Args:
        values: numbers to predict, shape (records,). NaN counts as the middle of the range.
        low, high: ends of the range, which are public: see :func:`target_range`.
        event: event of the moments.
        noise: fresh random numbers, used only here.
        begin: called with the event before the records are read. It may raise.
        owners: index of each record's unit of privacy, shape (records,); None if each record is
            one.
        units: number of units, which is public; by default that of records.

    Returns:
        Mean, within the range, and standard deviation, at least 3% of half of its width. Its square
        is three standard deviations of the noise too large.

    Raises:
        ValueError: the event is not that of a histogram.
    """
    if not event.histogram:
        raise ValueError("not an event of a histogram")
    begin(event)  # before any number is read
    sums = torch.from_numpy(_moment_sums(values, low, high, owners))
    # The grid divides the sums, so rounding to it adds nothing to the sensitivity.
    counted = max(len(values) if units is None else units, 1)
    mechanism = SecureMechanism.of(event, counted, sensitivity=math.sqrt(2))
    first, second = mechanism.release(sums, ball(1.0, sums), noise).value.tolist()
    mean = min(max(first, -1.0), 1.0)
    # Noise must not make it far too small: what is far from the mean is clipped.
    above = ABOVE * mechanism.noise_multiplier / counted
    variance = max(second - mean**2 + above, 0.0)
    spread = min(max(math.sqrt(variance), LEAST_SPREAD), 1.0)
    half = (high - low) / 2
    return low + (mean + 1) * half, spread * half


def _moment_sums(
    values: Floats, low: float, high: float, owners: NDArray[np.int64] | None
) -> Floats:
    """Return the sums over units of t and t^2, exact multiples of 1 / WHOLE, shape (2,).

    t is a number clipped to the range and scaled to [-1, 1]; a missing one is 0. Each record of a
    unit has an equal part of the unit's weight, which is 1.
    """
    known = np.where(np.isnan(values), (low + high) / 2, values)
    share = (known.clip(low, high) - low) / (high - low)
    scaled = (share * 2 - 1).clip(-1.0, 1.0)
    moments = np.stack([scaled, scaled**2], 1)
    weights = weights_of(owners, len(values))
    # No part is above its weight, so those of a unit add up to at most WHOLE.
    parts = np.rint(moments * weights[:, None]).astype(np.int64)
    sums: Floats = parts.sum(0) / WHOLE
    return sums
