"""Operating points of two classes: the log-odds above which a network says the last one.

A point is asked for as "balanced", "sensitivity=0.9" or a probability, such as "0.3". It follows
from the noisy histogram of a calibration, so it costs nothing more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict

from dpmac_cli.libraries import np, special
from dpmac_cli.tasks.bins import IN_REPORTS, Finite, at_least_0, cumulative
from dpmac_cli.tasks.calibration import SIGNED_EDGES, Calibration

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray[np.float64]

#: Names of operating points: that of the network as it was trained, and the best mean of
#: sensitivity and specificity.
MOST_LIKELY, BALANCED_POINT = "most-likely", "balanced"
#: Texts of a probability, and of a sensitivity, between 0 and 1.
PROBABILITY = re.compile(r"0?\.[0-9]*[1-9][0-9]*")
SENSITIVITY = re.compile(rf"sensitivity=({PROBABILITY.pattern})")
#: Edges of all bins, the outer ones with an end.
ENDS = (-2 * SIGNED_EDGES[-1], *SIGNED_EDGES, 2 * SIGNED_EDGES[-1])
#: Shares of the classes are at least this.
LEAST_SHARE = 0.001
#: Standard deviations of a normal number from its mean to the ends of its 95% interval.
NORMAL_95 = 1.96
#: Times that the noise is drawn again for an interval, with a public seed.
DRAWS = 400


def is_point(text: str) -> bool:
    """Return whether a text asks for an operating point besides the named ones.

    >>> is_point("sensitivity=0.9"), is_point("0.3"), is_point("1.2")
    (True, True, False)
    """
    return PROBABILITY.fullmatch(text) is not None or SENSITIVITY.fullmatch(text) is not None


def _known_point(text: str) -> str:
    if text not in (MOST_LIKELY, BALANCED_POINT) and not is_point(text):
        raise ValueError("is not an operating point")
    return text


def needs_histogram(asked: str) -> bool:
    """Return whether an operating point follows from a histogram only.

    ``asked`` is the text of ``--threshold``. A probability and the most likely class need none.
    """
    return not PROBABILITY.fullmatch(asked) and asked != MOST_LIKELY


@dataclass(frozen=True)
class OperatingPoint:
    """Decision between two classes: the last one is said above these log-odds of the network."""

    __pydantic_config__: ClassVar[ConfigDict] = IN_REPORTS

    asked: Annotated[str, AfterValidator(_known_point)]
    """What was asked for (--threshold): most-likely, balanced, a sensitivity or a probability."""
    log_odds: Finite
    """Difference of the outputs of the network, the last minus the first."""

    @classmethod
    def of(cls, asked: str, calibration: Calibration | None) -> OperatingPoint:
        """Return the point that was asked for.

        Args:
            asked: text of ``--threshold``: most-likely, balanced, sensitivity=0.9 or 0.3.
            calibration: noisy counts that it follows from, and the line that probabilities follow
                from; None for a network without.

        Raises:
            ValueError: the point needs a calibration, and there is none.
        """
        if asked == MOST_LIKELY:
            return cls(asked, 0.0)
        if PROBABILITY.fullmatch(asked):
            slope, intercept = _line(calibration)
            return cls(asked, (float(special.logit(float(asked))) - intercept) / slope)
        if calibration is None:
            raise ValueError(f"{asked} needs a calibration")
        match = SENSITIVITY.fullmatch(asked)
        if match is not None:
            return cls(asked, _at_sensitivity(_known(calibration), float(match[1])))
        even = float(special.logit(share_of_last(calibration)))
        return cls(asked, (even - calibration.intercept) / calibration.slope)

    def probability(self, calibration: Calibration | None) -> float:
        """Return the calibrated probability of the last class above which it is said, from 0 to 1.

        ``calibration`` is that of the network; None for probabilities as they were trained.
        """
        slope, intercept = _line(calibration)
        return float(special.expit(slope * self.log_odds + intercept))

    def rates(self, calibration: Calibration) -> tuple[float, float]:
        """Return sensitivity and specificity for the last class, by the noisy histogram.

        Both are shares of training records, from 0 to 1, with the noise of the counts.

        Args:
            calibration: that of the network, with its noisy counts.
        """
        counts = _known(calibration)
        missed = _share_below(counts[:, 1], self.log_odds)
        specificity = _share_below(counts[:, 0], self.log_odds)
        return 1 - missed, specificity

    def interval(self, calibration: Calibration) -> tuple[float, float]:
        """Return a 95% interval of the sensitivity, because of the noise of the histogram.

        A parametric bootstrap with a public seed: noise of the same size is added to the counts
        again. For a sensitivity that was asked for, the point moves and the counts stay; for
        another point, the counts move.

        Args:
            calibration: that of the network, with its noisy counts.
        """
        counts = _known(calibration)
        drawn = np.random.default_rng(0)
        target = SENSITIVITY.fullmatch(self.asked)
        sensitivities = list[float]()
        for _ in range(DRAWS):
            noise = calibration.noise * drawn.standard_normal(counts.shape)
            noisy_counts = _at_least_0(counts + noise)
            if target is None:
                below = _share_below(noisy_counts[:, 1], self.log_odds)
            else:
                point = _at_sensitivity(noisy_counts, float(target[1]))
                below = _share_below(counts[:, 1], point)
            sensitivities.append(1 - below)
        low, high = np.quantile(sensitivities, [0.025, 0.975])
        return float(low), float(high)


def records_of_last(calibration: Calibration) -> float:
    """Return the number of records of the last class by the noisy histogram, at least 0."""
    return float(_known(calibration)[:, 1].sum())


def share_of_last(calibration: Calibration) -> float:
    """Return the share of the last class by the noisy histogram, at least LEAST_SHARE from 0 and 1.

    Args:
        calibration: that of the network, with its noisy counts.
    """
    total = float(_known(calibration).sum())
    share = records_of_last(calibration) / total if total > 0 else 0.5
    return min(max(share, LEAST_SHARE), 1 - LEAST_SHARE)


def interval_of_share(calibration: Calibration) -> tuple[float, float]:
    """Return a 95% interval of the share of the last class, because of the noise of the histogram.

    It has every share r of which the counts n0 and n1 of the classes, each with noise of standard
    deviation s, do not tell: ``|(1 - r) n1 - r n0| <= 1.96 s sqrt((1 - r)^2 + r^2)`` (Fieller).

    Args:
        calibration: that of the network, with its noisy counts.
    """
    counts = np.array(calibration.counts)
    first, last = counts.sum(0)
    deviation = calibration.noise * len(counts) ** 0.5
    shares = np.linspace(0, 1, 1001)
    rests = 1 - shares
    distance = np.abs(rests * last - shares * first)
    inside = shares[distance <= NORMAL_95 * deviation * np.hypot(rests, shares)]
    return (float(inside.min()), float(inside.max())) if len(inside) else (0.0, 1.0)


def _line(calibration: Calibration | None) -> tuple[float, float]:
    """Return slope and intercept; 1 and 0 without a calibration."""
    return (1.0, 0.0) if calibration is None else (calibration.slope, calibration.intercept)


def _known(calibration: Calibration) -> Counts:
    """Return counts of records, none of which is negative, shape (bins, 2)."""
    return _at_least_0(np.array(calibration.counts))


def _at_least_0(counts: Counts) -> Counts:
    """Return the nearest counts of each label that are at least 0 and have the same sum."""
    return np.stack([at_least_0(counts[:, 0]), at_least_0(counts[:, 1])], 1)


def _share_below(counts: Counts, odds: float) -> float:
    """Return the share of records, counts of shape (bins,), at or below log-odds."""
    places, shares = cumulative(counts, ENDS)
    return float(np.interp(odds, places, shares))


def _at_sensitivity(counts: Counts, sensitivity: float) -> float:
    """Return the log-odds above which this share of the last class is."""
    places, shares = cumulative(counts[:, 1], ENDS)
    return float(np.interp(1 - sensitivity, shares, places))
