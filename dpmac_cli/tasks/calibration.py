"""Calibration of classes: from a noisy histogram to probabilities that can be believed.

Outputs z of a network become probabilities ``softmax(a z + (0, ..., 0, b))``. Of two classes, cells
are bins of the log-odds of the last one, and its label. Of more classes, b is 0, and cells are bins
of the gap between the two largest outputs, and which of the two classes is right; records of other
classes are in no cell. Both obey the same model: given a bin, the second label of a cell has the
log-odds ``a m + b``, with m the middle of the bin.

The noise of each count is known, so what is known of the true counts is a posterior: over slopes
and intercepts, over the shapes that bins of outputs have, and over the number of records in each
bin around such a shape. The slope and the intercept are those of the largest expected gain over the
network as it was trained, less 1.5 standard deviations, so what the noise hides moves nothing
(docs/calibration.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import ConfigDict, Field

from dpmac_cli.libraries import np, special
from dpmac_cli.tasks.bins import IN_REPORTS, MOST_BINS, Finite, Positive

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]

#: Edges of bins of gaps of outputs, from 0, and the middles of the bins.
EDGES = (1.0, 2.0, 4.0, 8.0)
MIDDLES = (0.5, 1.5, 3.0, 6.0, 12.0)
#: Those of log-odds of two classes, which have a sign.
SIGNED_EDGES = (*(-edge for edge in reversed(EDGES)), 0.0, *EDGES)
SIGNED_MIDDLES = (*(-middle for middle in reversed(MIDDLES)), *MIDDLES)
#: Priors of the logarithm of the slope of two classes and of more, of the intercept, and of the
#: logarithm of the slope times the size of outputs: mean and standard deviation.
SLOPE, SLOPE_OF_MANY, INTERCEPT, STRENGTH = (-0.3, 1.2), (-0.4, 0.7), (0.0, 0.6), (0.65, 0.6)
#: Slopes and intercepts of the posterior, and to choose from: ends of a grid, number of points.
SLOPES, INTERCEPTS = (-3.5, 1.0, 19), (-3.0, 3.0, 21)
CHOSEN_SLOPES, CHOSEN_INTERCEPTS = (-3.5, 1.0, 91), (-3.0, 3.0, 61)
#: Shapes of the outputs: their sizes; shares of the last of two classes; of more classes, shares of
#: the records that are in a cell.
SIZES, SHARES, INSIDE = (1.0, 2.0, 4.0, 8.0, 16.0), (0.15, 0.35, 0.5, 0.65, 0.85), (1.0, 0.8, 0.5)
#: Least share of the records in each bin, and deviation of that share, relative to it.
LEAST, SPREAD = 0.02, 0.5
#: Standard deviations by which an expected gain is reduced.
CLEAR = 1.5
#: Squared deviations per degree of freedom, in multiples of the noise, from which no line fits.
MISFIT = 2.0
#: Least probability of a point of the posterior.
PROBABLE = 1e-5
#: Standard deviations of the noise from which the number of records in a bin is seen, and those of
#: a 95% interval.
SEEN, TWO_SIDED = 2.0, 1.96
#: Largest output: larger ones, and infinite ones, have no difference.
LARGEST = 1e300


class Reliability(NamedTuple):
    """Probabilities of the second label in a bin: what the network says, and what the counts say.

    Attributes:
        trained: probability in the middle of the bin by the network as it was trained.
        calibrated: the same after calibration.
        share: share of the second label by the noisy counts.
        low, high: 95% interval of the share for records like these, because of the noise and of
            the number of records.
    """

    trained: float
    calibrated: float
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Calibration:
    """Calibration: probabilities are softmax(slope z + (0, ..., 0, intercept)) of outputs z.

    It follows from noisy counts of training records in bins: of two classes, by the log-odds of the
    last one, with an edge at 0; of more classes, by the gap between the two largest outputs. Each
    bin has two counts: of two classes their records, of more classes those of the second and of the
    most likely class.
    """

    __pydantic_config__: ClassVar[ConfigDict] = IN_REPORTS

    slope: Positive
    """Factor of the outputs; 1 if they were left as they are."""
    intercept: Finite
    """Added to the output of the last class; 0 for more than two classes."""
    counts: Annotated[tuple[tuple[Finite, Finite], ...], Field(max_length=MOST_BINS)]
    """Counts of units of privacy with noise, which may be published. The edges of the bins are 0,
    1, 2, 4, 8, and of two classes their negatives too."""
    noise: Positive
    """Standard deviation of the noise in each count."""

    @classmethod
    def fitted(cls, counts: NDArray[np.float64], noise: float, records: float) -> Calibration:
        """Return the calibration that follows from noisy counts: post-processing.

        Args:
            counts: counts of each bin and label, shape (bins, 2). The number of bins tells those of
                two classes from those of more.
            noise: standard deviation of the noise in each.
            records: public number of records that were counted, about.
        """
        signed = len(counts) == len(SIGNED_MIDDLES)
        slope, intercept = fitted(counts, noise, records, signed=signed)
        published = tuple((float(first), float(second)) for first, second in counts)
        return cls(slope, intercept, published, noise)

    @property
    def middles(self) -> tuple[float, ...]:
        """Middle of each bin."""
        return SIGNED_MIDDLES if len(self.counts) == len(SIGNED_MIDDLES) else MIDDLES

    def reliability(self) -> list[Reliability]:
        """Return bins whose counts stand out of their noise, in the order of the middles.

        Bins with at most :data:`SEEN` standard deviations of records are left out: their shares
        would be those of the noise.
        """
        bins = list[Reliability]()
        for middle, (first, second) in zip(self.middles, self.counts, strict=True):
            total = first + second
            if total <= SEEN * math.sqrt(2) * self.noise:
                continue
            share = min(max(second / total, 0.0), 1.0)
            noise = self.noise * math.hypot(share, 1 - share) / total
            spread = TWO_SIDED * math.sqrt(noise**2 + share * (1 - share) / total)
            trained = float(special.expit(middle))
            calibrated = float(special.expit(self.slope * middle + self.intercept))
            low = max(share - spread, 0.0)
            high = min(share + spread, 1.0)
            bins.append(Reliability(trained, calibrated, share, low, high))
        return bins

    def applied(self, outputs: Any) -> Any:
        """Return calibrated outputs, of which probabilities are the softmax.

        Args:
            outputs: an array or a tensor, shape (records, classes), which stays as it is.
        """
        calibrated = outputs * self.slope
        calibrated[:, -1] += self.intercept
        return calibrated


def log_odds(outputs: Floats) -> Floats:
    """Return the log-odds of the last of two classes, shape (records,); nan if an output is.

    Args:
        outputs: outputs of the network, shape (records, 2).
    """
    limited = outputs.astype(np.float64).clip(-LARGEST, LARGEST)
    odds: Floats = limited[:, 1] - limited[:, 0]
    return odds


def is_lost(outputs: Floats) -> NDArray[np.bool_]:
    """Return which records have an output that is NaN, bool, shape (records,)."""
    lost: NDArray[np.bool_] = np.logical_or.reduce(np.isnan(outputs), axis=1)
    return lost


def cells(outputs: Floats, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the cell of each record, shape (records,): twice the bin, plus the label of the cell.

    It is -1 for a record that is in none, and depends on no other record.

    Args:
        outputs: outputs of the network, shape (records, classes).
        labels: numbers of the true classes, shape (records,).
    """
    lost = is_lost(outputs)
    known = np.where(lost[:, None], 0.0, outputs)
    if outputs.shape[1] == 2:
        bins = np.searchsorted(SIGNED_EDGES, log_odds(known), side="right")
        return np.where(lost, -1, 2 * bins + labels)
    second, first = np.argsort(known, axis=1, kind="stable")[:, -2:].T
    rows = np.arange(len(known))
    pair = np.stack([known[rows, second], known[rows, first]], 1)
    bins = np.searchsorted(EDGES, log_odds(pair), side="right")
    inside = ~lost & ((labels == first) | (labels == second))
    return np.where(inside, 2 * bins + (labels == first), -1)


def cell_count(classes: int) -> int:
    """Return the number of cells of the histogram of a calibration: two per bin.

    Args:
        classes: number of classes; two have bins of their own.
    """
    return 2 * len(SIGNED_MIDDLES if classes == 2 else MIDDLES)


def fitted(
    counts: NDArray[np.float64], noise: float, records: float, *, signed: bool
) -> tuple[float, float]:
    """Return the slope and the intercept of the largest clear gain; 1 and 0 without one.

    Args:
        counts: noisy counts, shape (bins, 2).
        noise: standard deviation of the noise in each.
        records: public number of records that were counted, about.
        signed: whether the bins are those of two classes, which have an intercept.
    """
    middles = np.array(SIGNED_MIDDLES if signed else MIDDLES)
    slopes, intercepts, by_bin = _choices(CHOSEN_SLOPES, CHOSEN_INTERCEPTS, signed=signed)
    losses = by_bin.reshape(len(slopes), -1)
    as_trained = _losses(middles, np.ones(1), np.zeros(1)).ravel()
    posterior = Posterior.of(counts, noise, records, signed=signed)
    gains, deviations = posterior.gain(as_trained - losses)
    clear = gains - CLEAR * deviations
    best = int(clear.argmax())
    if not clear[best] > 0:
        return 1.0, 0.0
    return float(slopes[best]), float(intercepts[best])


@dataclass(frozen=True)
class Posterior:
    """Mean and covariance of true counts, given noisy ones.

    Attributes:
        mean: expected counts of cells, shape (cells,).
        covariance: their covariance, shape (cells, cells).
    """

    mean: Floats
    covariance: Floats

    @classmethod
    def of(
        cls, counts: NDArray[np.float64], noise: float, records: float, *, signed: bool
    ) -> Posterior:
        """Return mean and covariance over all slopes, intercepts and shapes: see :func:`fitted`.

        In a bin of n records in which a share p has the second label, counts are
        ``n (1 - p, p)`` with noise of variance ``noise^2 + n p (1 - p)``. n is normal around the
        share of the shape, with a deviation of :data:`SPREAD` of it. So n is known in closed form.
        """
        slopes, intercepts, losses = _choices(SLOPES, INTERCEPTS, signed=signed)
        sizes, shapes = _signed_shapes() if signed else _shapes()
        shares = np.exp(-losses)  # (grid, bins, 2)
        squares = np.square(shares).sum(2)[:, None]  # (grid, 1, bins)
        along = (shares * counts).sum(2)[:, None]
        before = records * shapes  # (shapes, bins)
        room = np.square(SPREAD * before) + before
        variance = noise**2 + before * shares.prod(2)[:, None]  # (grid, shapes, bins)
        total = variance + room * squares
        off = along - before * squares
        length = np.square(counts).sum(1) - before * (2 * along - before * squares)
        misfits = ((length - room * np.square(off) / total) / variance).sum(2)
        of_bins = (before + room * off / total).clip(0)
        # Where no line fits, the counts themselves say what the loss is.
        misfit = float(misfits.min()) / (counts.size - 1)
        trusted = 1 - 1 / misfit if misfit > MISFIT else 0.0
        prior = _prior(slopes, intercepts, sizes, signed=signed)
        unlikely = misfits * (1 - trusted) + np.log(variance * total).sum(2) + prior
        weights = special.softmax(-0.5 * unlikely)
        probable = weights > PROBABLE
        weights = weights[probable] / weights[probable].sum()
        lines, _ = np.nonzero(probable)
        by_label = of_bins[probable][..., None] * shares[lines]  # (points, bins, 2)
        by_line = by_label.reshape(len(weights), -1)
        cells = (1 - trusted) * by_line + trusted * counts.clip(0).ravel()
        mean = weights @ cells
        apart = np.sqrt(weights)[:, None] * (cells - mean)
        of_noise = (trusted * noise) ** 2 * np.eye(len(mean))
        return cls(mean, apart.T @ apart + of_noise)

    def gain(self, gains: Floats) -> tuple[Floats, Floats]:
        """Return the expected sum of the gains of all records, and its standard deviation.

        Args:
            gains: gain of a record in each cell, shape (choices, cells).

        Returns:
            Two arrays of shape (choices,).
        """
        squares = ((gains @ self.covariance) * gains).sum(1)
        return gains @ self.mean, np.sqrt(squares)


@functools.cache  # they are the same for all counts
def _choices(
    slopes: tuple[float, float, int], intercepts: tuple[float, float, int], *, signed: bool
) -> tuple[Floats, Floats, Floats]:
    """Return all slopes and intercepts of a grid, shape (grid,) each, and their losses."""
    of_intercepts = np.linspace(*intercepts) if signed else np.zeros(1)
    both = np.meshgrid(np.exp(np.linspace(*slopes)), of_intercepts, indexing="ij")
    chosen = both[0].ravel(), both[1].ravel()
    return *chosen, _losses(np.array(SIGNED_MIDDLES if signed else MIDDLES), *chosen)


def _losses(middles: Floats, slopes: Floats, intercepts: Floats) -> Floats:
    """Return the log losses of both labels in each bin, shape (grid, bins, 2)."""
    odds = slopes[:, None] * middles + intercepts[:, None]
    losses: Floats = np.logaddexp(0, np.stack([odds, -odds], 2))
    return losses


def _signed_shapes() -> tuple[Floats, Floats]:
    """Return sizes and shares of bins, shape (shapes, bins), of shapes of signed log-odds.

    Half of the log-odds, or another share, are around the size, the others around minus the size.
    """
    sizes, shares = _pairs(SIZES, SHARES)
    above = special.expit(2 * (np.array(SIGNED_EDGES) - sizes) / sizes)
    below = special.expit(2 * (np.array(SIGNED_EDGES) + sizes) / sizes)
    return sizes[:, 0], _shares_of_bins(shares * above + (1 - shares) * below) + LEAST


def _shapes() -> tuple[Floats, Floats]:
    """Return sizes and shares of bins, shape (shapes, bins), of shapes of gaps, from 0."""
    sizes, inside = _pairs(SIZES, INSIDE)
    edges = np.array(EDGES)
    below_edge = special.expit(2 * (edges - sizes) / sizes)
    below_its_negative = special.expit(2 * (-edges - sizes) / sizes)
    shares = _shares_of_bins(below_edge - below_its_negative)
    return sizes[:, 0], inside * (shares + LEAST)


def _pairs(first: Sequence[float], second: Sequence[float]) -> tuple[Floats, Floats]:
    """Return all pairs of two lists of numbers, as columns of shape (pairs, 1) each."""
    firsts, seconds = np.meshgrid(first, second, indexing="ij")
    return firsts.reshape(-1, 1), seconds.reshape(-1, 1)


def _shares_of_bins(below: Floats) -> Floats:
    """Return the shares between edges, given those below each, shape (shapes, edges)."""
    return np.diff(below, axis=1, prepend=0.0, append=1.0)


def _prior(slopes: Floats, intercepts: Floats, sizes: Floats, *, signed: bool) -> Floats:
    """Return minus twice the logarithm of the prior, shape (grid, shapes)."""
    if not signed:
        return _squares(np.log(slopes), *SLOPE_OF_MANY)[:, None] + 0 * sizes
    of_line = _squares(np.log(slopes), *SLOPE) + _squares(intercepts, *INTERCEPT)
    return of_line[:, None] + _squares(np.log(slopes[:, None] * sizes), *STRENGTH)


def _squares(values: Floats, mean: float, deviation: float) -> Floats:
    """Return squared distances from a mean in standard deviations."""
    squares: Floats = np.square((values - mean) / deviation)
    return squares
