"""Calibration of classes: from a noisy histogram to probabilities that can be believed.

Outputs z of a network become probabilities ``softmax(a z + (0, ..., 0, b))``. Of two classes, cells
are bins of the log-odds of the last one, and its label. Of more classes, b is 0, and cells are bins
of the gap between the two largest outputs, and which of the two classes is right; records of other
classes are in no cell. Both obey the same model: given a bin, the second label of a cell has the
log-odds ``a m + b``, with m the middle of the bin.

The slope and the intercept are those of the least expected loss, given the noisy counts and a prior
from measured runs, whose networks are too sure of themselves (docs/calibration.md). A network whose
expected loss falls by less than it may be wrong by is left as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpmac_cli.libraries import np, special

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]

#: Edges of bins of gaps of outputs, from 0, and the middles of the bins.
EDGES = (1.0, 2.0, 4.0, 8.0)
MIDDLES = (0.5, 1.5, 3.0, 6.0, 12.0)
#: Those of log-odds of two classes, which have a sign.
SIGNED_EDGES = (*(-edge for edge in reversed(EDGES)), 0.0, *EDGES)
SIGNED_MIDDLES = (*(-middle for middle in reversed(MIDDLES)), *MIDDLES)
#: Prior of the logarithm of the slope, and of the intercept: mean and standard deviation.
SLOPE, INTERCEPT = (-0.7, 0.7), (0.0, 0.4)
#: Slopes and intercepts to choose from: the ends of a grid, and its number of points.
SLOPES, INTERCEPTS = (-3.5, 1.0, 46), (-3.0, 3.0, 61)
#: Expected gain over its standard deviation from which a network is calibrated.
CLEAR = 1.0
#: Squared deviations per bin, in multiples of the noise, from which no line fits the counts.
MISFIT = 2.0
#: Largest output: larger ones, and infinite ones, have no difference.
LARGEST = 1e300


@dataclass(frozen=True)
class Calibration:
    """Slope and intercept of probabilities, and the noisy histogram that they follow from.

    Attributes:
        slope, intercept: a > 0 and b.
        counts: noisy counts of cells, one pair of labels for each bin.
        noise: standard deviation of the noise in each count.
    """

    slope: float
    intercept: float
    counts: tuple[tuple[float, float], ...]
    noise: float

    @classmethod
    def fitted(cls, counts: NDArray[np.float64], noise: float) -> Calibration:
        """Return the calibration that follows from noisy counts, shape (bins, 2)."""
        slope, intercept = fitted(counts, noise, signed=len(counts) == len(SIGNED_MIDDLES))
        return cls(slope, intercept, tuple((float(n), float(p)) for n, p in counts), noise)

    @property
    def middles(self) -> tuple[float, ...]:
        """Middle of each bin."""
        return SIGNED_MIDDLES if len(self.counts) == len(SIGNED_MIDDLES) else MIDDLES

    def applied(self, outputs: Any) -> Any:
        """Return calibrated outputs, of which probabilities are the softmax.

        ``outputs`` are an array or a tensor, shape (records, classes).
        """
        found = outputs * self.slope
        found[:, -1] += self.intercept
        return found


def log_odds(outputs: Floats) -> Floats:
    """Return the log-odds of the last of two classes, shape (records,); nan if an output is."""
    limited = outputs.astype(np.float64).clip(-LARGEST, LARGEST)
    odds: Floats = limited[:, 1] - limited[:, 0]
    return odds


def is_lost(outputs: Floats) -> NDArray[np.bool_]:
    """Return which records have an output that is NaN, shape (records,)."""
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
        found = 2 * np.searchsorted(SIGNED_EDGES, log_odds(known), side="right") + labels
        return np.where(lost, -1, found)
    second, first = np.argsort(known, axis=1, kind="stable")[:, -2:].T
    rows = np.arange(len(known))
    pair = np.stack([known[rows, second], known[rows, first]], 1)
    bins = np.searchsorted(EDGES, log_odds(pair), side="right")
    inside = ~lost & ((labels == first) | (labels == second))
    return np.where(inside, 2 * bins + (labels == first), -1)


def cell_count(classes: int) -> int:
    """Return the number of cells of some classes."""
    return 2 * len(SIGNED_MIDDLES if classes == 2 else MIDDLES)


def fitted(counts: NDArray[np.float64], noise: float, *, signed: bool) -> tuple[float, float]:
    """Return slope and intercept of the least expected loss; 1 and 0 without a clear gain.

    Args:
        counts: noisy counts, shape (bins, 2).
        noise: standard deviation of the noise in each.
        signed: whether the bins are those of two classes, which have an intercept.
    """
    middles = np.array(SIGNED_MIDDLES if signed else MIDDLES)
    slopes, intercepts = _grid(signed=signed)
    odds = slopes[:, None] * middles + intercepts[:, None]  # (grid, bins)
    losses = np.logaddexp(0, np.stack([odds, -odds], 2))  # (grid, bins, 2)
    shares = np.exp(-losses)
    # Records in each bin that fit the counts best, and the log-likelihood of the counts.
    records = ((shares * counts).sum(2) / np.square(shares).sum(2)).clip(0)
    expected = records[..., None] * shares
    variance = noise**2 + records * shares.prod(2)
    squares = (np.square(counts - expected).sum(2) / variance).sum(1)
    # Where no line fits, the counts themselves say what the loss is.
    misfit = float(squares.min()) / len(middles)
    trusted = 1 - 1 / misfit if misfit > MISFIT else 0.0
    prior = _squares(np.log(slopes), *SLOPE) + _squares(intercepts, *INTERCEPT) * signed
    likelihood = squares * (1 - trusted) + np.log(variance).sum(1)
    posterior = special.softmax(-0.5 * (likelihood + prior))
    expected = (1 - trusted) * expected + trusted * counts.clip(0)
    mean = np.tensordot(posterior, expected, 1)
    best = int((losses * mean).sum((1, 2)).argmin())
    saved = np.logaddexp(0, np.stack([middles, -middles], 1)) - losses[best]
    gains = (saved * expected).sum((1, 2))
    gain = float(posterior @ gains)
    spread = float(posterior @ np.square(gains - gain))
    deviation = math.sqrt(spread + (trusted * noise) ** 2 * float(np.square(saved).sum()))
    if not gain > CLEAR * deviation:
        return 1.0, 0.0
    return float(slopes[best]), float(intercepts[best])


def _grid(*, signed: bool) -> tuple[Floats, Floats]:
    """Return all slopes and intercepts to choose from, shape (grid,) each."""
    slopes = np.exp(np.linspace(*SLOPES))
    intercepts = np.linspace(*INTERCEPTS) if signed else np.zeros(1)
    found = np.meshgrid(slopes, intercepts, indexing="ij")
    return found[0].ravel(), found[1].ravel()


def _squares(values: Floats, mean: float, deviation: float) -> Floats:
    """Return squared distances from a mean in standard deviations."""
    squares: Floats = np.square((values - mean) / deviation)
    return squares
