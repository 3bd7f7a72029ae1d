"""Distributions from noisy counts of bins.

Negative counts, which the noise makes, are removed without moving the total: the counts are
projected to those that are at least 0 and have the same sum. So empty bins do not add up to a tail.
Within a bin, the cumulative share is between a straight line and a monotone cubic (Fritsch and
Carlson 1980): in an outer bin, most records are nearer to the middle than to the far end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from dpmac_cli.libraries import interpolate, np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]

#: Largest number, and largest number of bins, in a report.
MOST_NUMBER, MOST_BINS = 1e300, 1000
Finite = Annotated[float, Field(ge=-MOST_NUMBER, le=MOST_NUMBER)]
Positive = Annotated[float, Field(gt=0, le=MOST_NUMBER)]
#: How classes that a report has are read from it.
IN_REPORTS = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

#: Points in each bin at which the cumulative share is computed, and weight of the cubic in it.
POINTS, CURVED = 32, 0.6


def at_least_0(counts: Floats) -> Floats:
    """Return the nearest counts that are at least 0 and have the same sum, or 1 if that is less.

    The projection on a simplex (Duchi et al. 2008, figure 1), which is post-processing of noisy
    counts, shape (cells,).

    >>> at_least_0(np.array([5.0, -1.0, 2.0]))
    array([4.5, 0. , 1.5])
    """
    total = max(float(counts.sum()), 1.0)
    falling = np.sort(counts)[::-1]
    excess = (np.cumsum(falling) - total) / np.arange(1, len(counts) + 1)
    last = int(np.flatnonzero(falling > excess)[-1])
    nearest: Floats = (counts - excess[last]).clip(0)
    return nearest


def cumulative(counts: Floats, ends: Sequence[float]) -> tuple[Floats, Floats]:
    """Return places from the first of the ends of bins to the last, and the shares below them.

    Args:
        counts: counts of bins, at least 0, with a positive sum, shape (bins,).
        ends: ends of the bins, ascending, one more than bins.

    Returns:
        Two arrays of :data:`POINTS` places per bin and one more, both ascending. Between the ends
        the share is a mean of a line and a monotone cubic.
    """
    below = np.append(0.0, np.cumsum(counts)) / counts.sum()
    inside = np.arange(POINTS * len(counts) + 1) / POINTS
    places = np.interp(inside, np.arange(len(ends)), ends)
    straight = np.interp(places, ends, below)
    curve = interpolate.PchipInterpolator(ends, below)
    shares: Floats = (1 - CURVED) * straight + CURVED * curve(places)
    return places, shares.clip(0.0, 1.0)  # rounding may leave more than 1
