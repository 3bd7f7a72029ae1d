"""Private distributions of the columns of a table, of which nothing but their kind is declared.

Three rounds of noisy counts find where the numbers of each column are. The cells of the first one
are powers of 4 of both signs, with one cell for zero, the same for all columns. Those of a later
round follow from the counts of the earlier ones: cells are split where many numbers are, and merged
where few are. Ranges to clip to and ranks are post-processing of all counts.

Each round is one Gaussian mechanism. A record has at most one number in a column, and the cells of
a partition are disjoint, so a record changes the counts of C columns by at most sqrt(C) in the L2
norm, whatever their partitions are, and a unit with m records of weight 1/m each by at most as much
(:mod:`dpmac_cli.dp.histogram`). Partitions depend on released counts only. The rounds therefore
compose: with noise multipliers s_1, s_2, s_3 they are together mu-GDP, mu^2 = sum_r 1 / s_r^2.

What may not be found: a range far from zero whose width is a small part of its numbers, such as
1,000,000 to 1,000,009, and identifiers; values that are rarer than the noise, such as 5% that are
not zero in few records, of which only that they are not zero is found. Their ranks lose order
inside a cell, and a range may be too wide. Nothing of this weakens the guarantee.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from dpmac_cli.accounting.events import TrainingEvent, histogram_event
from dpmac_cli.dp.histogram import NoisyHistogram, count, weights_of
from dpmac_cli.randomness.noise import SeededNormals

Floats = NDArray[np.float64]

#: Number of rounds.
ROUNDS = 3
#: Edges of the cells of the first round. The cell between the two in the middle is zero.
POWERS = 4.0 ** np.arange(-10, 21)
FIRST: Floats = np.concatenate([-POWERS[::-1], POWERS])
#: Ends of the cell of zero.
ZERO = -float(POWERS[0]), float(POWERS[0])
#: Cells with more than 1 / CELLS of the numbers are split after the first round; after later ones
#: with more than the noise allows, as far as these two.
CELLS, FEWEST = 64, 8
#: Deviations of the noise from which cells of the first round are kept, between rounds and at the
#: end, and that the outer ones of several beside each other have at least.
BETWEEN, AT_END, BESIDE = 1.5, 2.0, 1.0
#: Numbers of neighbouring cells of the first round that are kept if they are together.
WINDOWS = (1, 2, 3, 4, 6)
#: Share of the numbers beyond each end of a range, before it is made wider: the least, the most,
#: and in deviations of the noise.
TAIL, MOST_TAIL, TAIL_NOISE = 0.01, 0.25, 2.0
#: Part of its width by which a range is made wider on each side.
MARGIN = 0.25
#: Part of a number that a cell or a range is at least wide.
NARROWEST, NARROWEST_RANGE = 1e-6, 1e-3
#: Deviation of the noise that exact counts are treated as if they had, and number of units that is
#: as good as none.
EXACT = 1e-3


@dataclass(frozen=True)
class Distribution:
    """Distribution of a column, from noisy counts. All of it may be published.

    Attributes:
        low, high: range to clip the numbers of the column to; low < high.
        edges: ends of the pieces of a cumulative distribution that is linear in between, ascending.
        shares: its value at each edge, from 0 to 1, ascending.
    """

    low: float
    high: float
    edges: tuple[float, ...]
    shares: tuple[float, ...]

    def ranks(self, values: Floats) -> Floats:
        """Return the share of numbers below each value, in [0, 1], in the shape of ``values``.

        Args:
            values: numbers of the column, of any shape. Equal values have equal ranks. Infinite
                ones have 0 and 1; NaN stays NaN.

        >>> Distribution(0.0, 10.0, (0.0, 10.0), (0.0, 1.0)).ranks(np.array([2.5, 20.0]))
        array([0.25, 1.  ])
        """
        ranks: Floats = np.interp(values, self.edges, self.shares)
        return ranks


def distributions(
    values: Floats,
    events: Sequence[TrainingEvent],
    noise: SeededNormals,
    begin: Callable[[TrainingEvent], None],
    owners: NDArray[np.int64] | None = None,
    units: int | None = None,
) -> tuple[Distribution, ...]:
    """Return the distribution of each column, with one event per round.

        age, income = distributions(values, plan.ranges, noise, account.begin)
        ranks = age.ranks(values[:, 0])

    Args:
        values: numbers, shape (records, columns). NaN is a missing number, and counts in a cell of
            its own; infinite numbers are in the cells at the ends.
        events: event of each round, with its noise multiplier.
        noise: fresh random numbers, used only here.
        begin: called with the event of a round before its records are read, to count its privacy
            cost. It may raise, which ends the rounds.
        owners: index of each record's unit of privacy, shape (records,); None if each record is
            one.
        units: number of units, which is public; None for the number of records.

    Returns:
        One distribution per column, in their order; () without columns, and then no event begins.

    Raises:
        ValueError: an event is not that of a histogram.
    """

    def counted(event: TrainingEvent, partitions: Sequence[Floats]) -> NoisyHistogram:
        begin(event)  # before any number is read
        sizes = tuple(map(len, partitions))
        return NoisyHistogram.release(_cells(values, partitions), sizes, event, noise, owners)

    records, columns = values.shape
    return _adapted(counted, events, columns, records if units is None else units)


def exact_distributions(values: Floats) -> tuple[Distribution, ...]:
    """Return the distribution of each column from exact counts: without privacy.

    It has no event, so it is for runs with ``--no-dp`` alone, whose report says that ranges are
    facts of the records.

    Args:
        values: as in :func:`distributions`, of which this is the limit for little noise.
    """
    weights = weights_of(None, len(values))

    def counted(event: TrainingEvent, partitions: Sequence[Floats]) -> NoisyHistogram:
        cells = _cells(values, partitions)
        counts = list[Floats]()
        for column, edges in enumerate(partitions):
            counts.append(count(cells[:, column], len(edges), weights))
        return NoisyHistogram(tuple(counts), 0.0)

    silent = (histogram_event(0.0),) * ROUNDS
    return _adapted(counted, silent, values.shape[1], len(values))


def _cells(values: Floats, partitions: Sequence[Floats]) -> NDArray[np.int64]:
    """Return the cell of each number, shape (records, columns).

    A number at an edge is in the cell above. The last cell of a partition is that of missing
    numbers, so there are as many cells as edges.
    """
    cells = np.empty(values.shape, np.int64, order="F")  # counted column by column
    for k, edges in enumerate(partitions):
        column = np.ascontiguousarray(values[:, k])
        cell = np.searchsorted(edges, column, side="right") - 1
        inside = cell.clip(0, len(edges) - 2)
        cells[:, k] = np.where(np.isnan(column), len(edges) - 1, inside)
    return cells


@dataclass(frozen=True)
class _Round:
    """Noisy counts of one column in one round.

    Attributes:
        edges: ends of the cells, shape (cells + 1,), ascending.
        counts: shape (cells + 1,). The last one is that of missing numbers.
        noise: standard deviation of the noise in each.
    """

    edges: Floats
    counts: Floats
    noise: float


@dataclass(frozen=True)
class _Mass:
    """Estimated numbers of units between the edges of all rounds of a column.

    Attributes:
        edges: ends of the pieces, shape (pieces + 1,), ascending.
        units: number of units in each piece, at least 0, shape (pieces,).
        noise: standard deviation of the noise of the smallest cell around each, shape (pieces,).
    """

    edges: Floats
    units: Floats
    noise: Floats

    @property
    def total(self) -> float:
        """Return the number of units with a number."""
        return float(self.units.sum())

    @property
    def zero(self) -> NDArray[np.bool_]:
        """Return which pieces are the cell of zero, shape (pieces,)."""
        begins = self.edges[:-1] == ZERO[0]
        ends = self.edges[1:] == ZERO[1]
        zero: NDArray[np.bool_] = begins & ends
        return zero


def _adapted(
    counted: Callable[[TrainingEvent, Sequence[Floats]], NoisyHistogram],
    events: Sequence[TrainingEvent],
    columns: int,
    units: int,
) -> tuple[Distribution, ...]:
    """Return the distribution of each column from rounds of counts; reads no record itself.

    Args:
        counted: releases the counts of all columns in a partition of each, with an event.
        events: event of each round.
        columns: number of columns. Without any, no event begins.
        units: number of units.
    """
    rounds: list[list[_Round]] = [[] for _ in range(columns)]
    for event in events if columns else ():
        noise = max(event.noise_multiplier * math.sqrt(columns), EXACT)
        partitions = [_next_partition(before, noise, units) for before in rounds]
        histogram = counted(event, partitions)
        for before, edges, counts in zip(rounds, partitions, histogram.counts, strict=True):
            before.append(_Round(edges, counts, noise))
    return tuple(_distribution(before, units) for before in rounds)


def _next_partition(before: Sequence[_Round], noise: float, units: int) -> Floats:
    """Return the edges of the next round of a column, whose counts will have some noise.

    Args:
        before: its earlier rounds. Without any, the edges are FIRST.
        noise: standard deviation of the noise of a count in the next round.
        units: number of units.
    """
    if not before:
        return FIRST
    resolved = CELLS
    if len(before) > 1:
        resolved = int(np.clip(units / (2 * noise), FEWEST, CELLS))
    return _refined(_kept(_fitted(before, units), BETWEEN, before[0].noise), resolved)


def _fitted(rounds: Sequence[_Round], units: int) -> _Mass:
    """Return the numbers of units that fit all rounds best, at least 0 and of a public sum.

    The pieces are those between the edges of all rounds. Missing numbers are fitted, too, and left
    out of the result. Least squares, in which a count weighs as much as its noise lets it.
    """
    edges = np.unique(np.concatenate([each.edges for each in rounds]))
    pieces = len(edges) - 1
    rows, counts = [], []
    noise, width = np.zeros(pieces), np.full(pieces, np.inf)
    for each in rounds:
        cells = np.searchsorted(each.edges, edges[:-1], side="right") - 1  # cell of each piece
        inside = np.zeros((len(each.counts), pieces + 1))
        inside[cells, np.arange(pieces)] = 1
        inside[-1, -1] = 1  # missing numbers
        rows.append(inside / each.noise)
        counts.append(each.counts / each.noise)
        around = np.diff(each.edges)[cells]
        noise = np.where(
            around < width,
            each.noise,
            np.where(around == width, np.minimum(noise, each.noise), noise),
        )
        width = np.minimum(width, around)
    sure = 20 / min(each.noise for each in rounds)
    rows.append(np.full((1, pieces + 1), sure))
    counts.append(np.array([sure * units]))
    fitted, _ = nnls(np.concatenate(rows), np.concatenate(counts), maxiter=30 * (pieces + 1))
    fitted *= units / max(fitted.sum(), EXACT)
    fitted[fitted < EXACT] = 0
    mass = _Mass(edges, fitted[:-1], noise)
    if mass.units.any():
        return mass
    return replace(mass, units=np.where(mass.zero, EXACT, 0.0))


def _kept(mass: _Mass, least: float, noise: float) -> _Mass:
    """Leave out what lies beyond the outermost cells of the first round that are not only noise.

    Args:
        mass: units of a column.
        least: deviations of the noise from which a cell, or several beside each other, are kept.
        noise: standard deviation of the noise of the first round.
    """
    cells = np.searchsorted(FIRST, mass.edges[:-1], side="right") - 1
    size = len(FIRST) - 1
    units = np.bincount(cells, weights=mass.units, minlength=size)
    variance = np.bincount(cells, weights=mass.noise**2, minlength=size).clip(max=noise**2)
    deviation = np.sqrt(variance)
    some = units >= BESIDE * deviation
    # A cell with many units does not vouch for others that are a few cells away.
    limited = np.minimum(units, least * deviation)
    clear = np.zeros(size, bool)
    for window in WINDOWS:
        ones = np.ones(window)
        together = np.convolve(limited, ones, "valid")
        needed = least * np.sqrt(np.convolve(variance, ones, "valid"))
        last = slice(window - 1, None)
        ends_stand_out = some[: len(together)] & some[last]
        stands_out = (together >= needed * (1 - 1e-9)) & ends_stand_out
        clear[: len(together)] |= stands_out
        clear[last] |= stands_out
    if not clear.any():
        clear[units.argmax()] = True
    first, final = np.flatnonzero(clear)[[0, -1]]
    inside = np.where((cells >= first) & (cells <= final), mass.units, 0.0)
    return replace(mass, units=inside * (mass.total / inside.sum()))


def _refined(mass: _Mass, resolved: int) -> Floats:
    """Return the edges of a new partition, in which cells have about 1 / resolved of the units.

    Pieces with more are split into 2^k equal parts, neighbours with less are merged, and zero is
    not split.
    """
    edges, merged = [mass.edges[0]], 0.0  # merged: share of the pieces since the last edge
    parts = mass.units / mass.total * resolved
    for low, high, part, zero in zip(
        mass.edges[:-1], mass.edges[1:], parts, mass.zero, strict=True
    ):
        narrow = high - low <= NARROWEST * max(abs(low), abs(high))
        splits = 1
        if not (zero or narrow) and part >= math.sqrt(2):
            splits = 2 ** round(math.log2(part))
        alone = splits > 1 or (zero and part >= 0.5)
        if edges[-1] < low and (alone or merged + part > 1):
            edges.append(low)
            merged = 0.0
        if alone:
            for k in range(1, splits):
                edges.append(low + (high - low) * k / splits)
            edges.append(high)
            merged = 0.0
            continue
        merged += part
        if merged >= 0.5:
            edges.append(high)
            merged = 0.0
    if edges[-1] < mass.edges[-1]:
        edges.append(mass.edges[-1])
    return np.unique(edges)


def _distribution(rounds: Sequence[_Round], units: int) -> Distribution:
    """Return the distribution of a column from all of its rounds."""
    mass = _kept(_fitted(rounds, units), AT_END, rounds[0].noise)
    shares = np.concatenate([[0.0], np.cumsum(mass.units)])
    shares /= shares[-1]
    low, high = _range(mass, shares, rounds[-1].noise)
    # Only the edges at which the slope changes; it is 0 beyond the ends.
    inner_slopes = np.diff(shares) / np.diff(mass.edges)
    slopes = np.concatenate([[0.0], inner_slopes, [0.0]])
    bends = ~np.isclose(slopes[1:], slopes[:-1], rtol=1e-9, atol=0)
    edges_of_bends = tuple(mass.edges[bends].tolist())
    shares_of_bends = tuple(shares[bends].tolist())
    return Distribution(low, high, edges_of_bends, shares_of_bends)


def _range(mass: _Mass, shares: Floats, noise: float) -> tuple[float, float]:
    """Return the range to clip a column to: quantiles of its distribution, made wider.

    Args:
        mass: units of the column.
        shares: cumulative share of the units at each edge, from 0 to 1.
        noise: standard deviation of the noise in the last round: more of it makes the range wider.
    """

    def quantile(share: float) -> float:
        edge = int(np.searchsorted(shares, share))
        piece = min(max(edge, 1), len(shares) - 1) - 1
        if mass.zero[piece]:
            return 0.0
        width = max(shares[piece + 1] - shares[piece], 1e-300)
        part = (share - shares[piece]) / width
        begin, end = mass.edges[piece], mass.edges[piece + 1]
        return float(begin + part * (end - begin))

    unsure = noise / mass.total
    tail = float(np.clip(TAIL_NOISE * unsure, TAIL, MOST_TAIL))
    low, high = quantile(tail), quantile(1 - tail)
    zero = int(mass.zero.argmax())
    below, above = float(shares[zero]), float(1 - shares[zero + 1])
    if 0.5 < 1 - below - above < 0.995:  # mostly zero: the tails of the rest
        of_rest = float(np.clip(TAIL_NOISE * unsure / (below + above), TAIL, MOST_TAIL))
        clear = 3 * unsure
        low = min(0.0, quantile(of_rest * below) if below > clear else low)
        high = max(0.0, quantile(1 - of_rest * above) if above > clear else high)
    if tail > TAIL:
        low, high = _wider(low, high, tail / (1 - 2 * tail))
    if high <= low:
        high = low + max(abs(low), 1.0) * NARROWEST_RANGE
    return _wider(low, high, MARGIN)


def _wider(low: float, high: float, part: float) -> tuple[float, float]:
    """Return a range that is wider by a part of its width on each side, but not across zero.

    Numbers that are all positive, such as ages and incomes, so have no range below 0.

    >>> _wider(0.0, 10.0, 0.25), _wider(-4.0, 4.0, 0.25)
    ((0.0, 12.5), (-6.0, 6.0))
    """
    margin = (high - low) * part
    lower, higher = low - margin, high + margin
    if low >= 0:
        lower = max(lower, 0.0)
    if high <= 0:
        higher = min(higher, 0.0)
    return lower, higher
