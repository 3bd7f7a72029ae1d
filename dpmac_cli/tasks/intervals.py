"""95% intervals of metrics for records like the test records: by unit, and never of width zero.

The interval of a proportion is that of Clopper and Pearson (1934). For answers that are not
independent, and for metrics that are no proportion, it is theirs for an effective number of answers
(Korn and Graubard 1998, Survey Methodology 24: 193-201)::

    n* = n (m (1 - m) / (n - 1)) / variance(m) * (t_{n-1} / t_{units-1})^2

where t is the 97.5% quantile of Student's distribution, and a unit is a record unless records share
one. The variance is that between units: of a ratio of sums for the accuracy, and by bootstrap for
other metrics. n* is at most the number of answers. Where nothing varies, so that no variance can be
estimated, it is at most the number of units. For a mean over classes both are those of the smallest
class, times the number of classes. No metric has more effective answers than the accuracy, so that
few units do not make one interval narrow beside a wide one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from dpmac_cli.libraries import np, special
from dpmac_cli.tasks.task import Interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]
#: Largest number of record weights in memory at a time.
AT_A_TIME = 4_000_000
#: Probability below and above an interval.
TAIL = 0.025
#: Number of standard deviations around the mean that contain 95% of a normal distribution.
REACH = NormalDist().inv_cdf(1 - TAIL)


@dataclass(frozen=True)
class Sizes:
    """Upper limits of the effective number of answers.

    Attributes:
        answers: where the metric varies between units.
        units: where nothing varies, so that no variance can be estimated.
        freedom: degrees of freedom of the variance: the number of all units, less one.
    """

    answers: float
    units: float
    freedom: int


def effective_size(value: float, variance: float, sizes: Sizes) -> float:
    """Return the effective number of answers of a metric, 0 to 1.

    ``variance`` is an estimate from the differences between units.
    """
    spread = value * (1 - value)
    if sizes.freedom < 1 or not variance > 0 or not spread > 0:
        return max(1.0, min(sizes.answers, sizes.units))
    most, freedom = max(sizes.answers, 2.0), sizes.freedom
    few = special.stdtrit(max(most - 1, freedom), 1 - TAIL) / special.stdtrit(freedom, 1 - TAIL)
    return float(min(most, most / (most - 1) * spread / variance * few**2))


def clopper_pearson(share: float, size: float) -> Interval:
    """Return the exact interval of a proportion; nan if it is. ``size`` is any number above 0."""
    if math.isnan(share):
        return math.nan, math.nan
    hits, misses = share * size, (1 - share) * size
    low = special.betaincinv(hits, misses + 1, TAIL) if hits > 0 else 0.0
    high = special.betaincinv(hits + 1, misses, 1 - TAIL) if misses > 0 else 1.0
    return min(float(low), share), max(float(high), share)


def widened(value: float, ends: Interval, noise: float) -> Interval:
    """Return an interval for a value to which normal noise of a standard deviation was added.

    The distances to both ends add up in squares (Zou and Donner 2008).
    """
    low, high = (math.hypot(value - end, REACH * noise) for end in ends)
    return max(0.0, value - low), min(1.0, value + high)


def size_of_shares(right: Floats, answers: Floats) -> tuple[float, float]:
    """Return an accuracy, and its effective number of answers.

    Args:
        right, answers: right answers and all answers of each unit, shape (units,).

    The variance includes two more units of mean size, of which one is right in everything and one
    in nothing: few units with wrong answers say little about how they differ.
    """
    total, units = float(answers.sum()), len(answers)
    value, size = float(right.sum()) / total, total / units
    hits, counts = np.append(right, [0.0, size]), np.append(answers, [size, size])
    share, more = hits.sum() / counts.sum(), units + 2
    squares = ((hits - share * counts) ** 2).sum() / counts.sum() ** 2 * more / (more - 1)
    variance = float(squares / (share * (1 - share))) * value * (1 - value)
    return value, effective_size(value, variance, Sizes(total, units, units - 1))


def resampled(
    metrics_of: Callable[[Floats], dict[str, Floats]], owners: NDArray[np.int64], resamples: int
) -> dict[str, Floats]:
    """Return metrics of bootstrap resamples of the units, each of shape (..., resamples).

    Args:
        metrics_of: returns metrics for weights of the records, shape (records, sets).
        owners: index of each record's unit, shape (records,).
    """
    units, generator = int(owners.max()) + 1, np.random.default_rng(0)
    drawn: list[dict[str, Floats]] = []
    while resamples > 0:
        count = min(resamples, max(1, AT_A_TIME // len(owners)))
        resamples -= count
        picked = generator.integers(units, size=(count, units), dtype=np.int32)
        cells = picked * count + np.arange(count)[:, None]
        times = np.bincount(cells.ravel(), minlength=units * count)
        drawn.append(metrics_of(times.reshape(units, count).astype(np.float32)[owners]))
    return {name: np.concatenate([part[name] for part in drawn], -1) for name in drawn[0]}
