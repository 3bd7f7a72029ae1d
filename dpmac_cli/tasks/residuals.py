"""Intervals for numbers: quantiles of residuals, from a noisy histogram of the training records.

A residual is a target minus its prediction, both scaled to [-1, 1]. The bins are finest around 0.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from dpmac_cli.libraries import np
from dpmac_cli.tasks.bins import (
    IN_REPORTS,
    MOST_BINS,
    Finite,
    Positive,
    at_least_0,
    cumulative,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]

#: Edges of bins of residuals above 0: the first, the factor between two, and their number.
FIRST, FACTOR, COUNT = 0.02, 1.5, 12
_ABOVE = tuple(itertools.accumulate([FACTOR] * (COUNT - 1), lambda a, b: a * b, initial=FIRST))
EDGES = (*(-edge for edge in reversed(_ABOVE)), 0.0, *_ABOVE)
#: Ends of all bins: no residual is beyond them.
ENDS = (-2.0, *EDGES, 2.0)
#: Share of the targets that an interval has by default.
LEVEL = 0.9


@dataclass(frozen=True)
class Residuals:
    """Noisy histogram of residuals, from which the intervals of predictions follow.

    A residual is a target minus its prediction, both scaled to [-1, 1] (after the transform).
    """

    __pydantic_config__: ClassVar[ConfigDict] = IN_REPORTS

    counts: Annotated[tuple[Finite, ...], Field(max_length=MOST_BINS)]
    """Counts of units of privacy with noise, which may be published. The edges of the bins are 0,
    and 0.02 times 1.5^k to both sides, for k from 0 to 11."""
    noise: Positive
    """Standard deviation of the noise in each count."""

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Return the residuals between which this share of the targets is, as many on each side.

        ``level`` is the share, between 0 and 1. Counts below 0 are noise, and are moved to the
        nearest counts that are not.

        >>> narrow = Residuals((0.0,) * 12 + (100.0, 100.0) + (0.0,) * 12, 1.0)
        >>> low, high = narrow.interval()
        >>> -0.02 < low < 0 < high < 0.02
        True
        """
        places, shares = cumulative(at_least_0(np.array(self.counts)), ENDS)
        low, high = np.interp([(1 - level) / 2, (1 + level) / 2], shares, places)
        return float(low), float(high)


def cells(outputs: Floats, targets: Floats) -> NDArray[np.int64]:
    """Return the bin of the residual of each record, shape (records,); -1 if an output is NaN.

    Args:
        outputs: predictions on the scale of the targets, shape (records, 1).
        targets: targets from -1 to 1, shape (records, 1).
    """
    predicted = outputs.astype(np.float64).clip(-1, 1)
    residuals = (targets.astype(np.float64) - predicted)[:, 0]
    lost = np.isnan(residuals)
    bins = np.searchsorted(EDGES, np.where(lost, 0.0, residuals), side="right")
    return np.where(lost, -1, bins)
