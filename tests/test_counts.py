"""Private distributions of columns: sensitivity, privacy cost, and the ranges that are found."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import kstest, norm

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import noise_of_share
from dpmac_cli.accounting.events import TrainingEvent, histogram_event
from dpmac_cli.config import plan
from dpmac_cli.dp.histogram import NoisyHistogram
from dpmac_cli.dp.mechanism import GRID, SecureMechanism
from dpmac_cli.features import counts, targets
from dpmac_cli.features.counts import (
    FIRST,
    ROUNDS,
    distributions,
    exact_distributions,
)
from dpmac_cli.features.targets import _moment_sums, target_moments, target_range
from dpmac_cli.randomness.noise import Noise, SeededNormals

Floats = NDArray[np.float64]
Owners = NDArray[np.int64] | None


def rounds_of(mu_squared: float) -> tuple[TrainingEvent, ...]:
    """Events of three rounds, whose mu^2 add up to this."""
    parts = (mu_squared * share for share in (0.2, 0.3, 0.5))
    return tuple(histogram_event(1 / math.sqrt(part)) for part in parts)


#: Events of the columns of a run for epsilon 1 at delta 1e-5, whose mu is 0.267.
EVENTS = rounds_of(0.1 * 0.267**2)
#: Columns, with the bounds in which the ends of their ranges are with 5,000 and 30,000 records, in
#: nine of ten runs and in all: see test_ranges_are_found_from_noisy_counts.
COLUMNS: dict[
    str, tuple[Callable[[np.random.Generator, int], Any], tuple[float, ...], tuple[float, ...]]
] = {
    "year": (
        lambda r, n: r.integers(1990, 2011, n),
        (1960, 1990, 2010, 2060),
        (1975, 1990, 2010, 2040),
    ),
    "degrees": (
        lambda r, n: r.normal(37.2, 0.6, n).round(1),
        (15, 36, 38, 70),
        (28, 35.8, 38.6, 42),
    ),
    "millions": (
        lambda r, n: r.uniform(1e6, 5e6, n),
        (0, 1.1e6, 4.9e6, 1.3e7),
        (0, 1.1e6, 4.9e6, 7e6),
    ),
    "skewed": (lambda r, n: np.exp(r.normal(10, 1.5, n)), (0, 0, 1.5e5, 2e6), (0, 0, 4e5, 2e6)),
    "normal": (lambda r, n: r.normal(0, 1, n), (-7, -2, 2, 7), (-5, -2.3, 2.3, 5)),
    "integers": (lambda r, n: r.integers(0, 5, n), (0, 0, 4, 7), (0, 0, 4, 5.2)),
    "constant": (lambda r, n: np.full(n, 7.0), (6.9, 7, 7, 7.2), (6.99, 7, 7, 7.01)),
    "small": (lambda r, n: r.gamma(2, 1e-4, n), (0, 0, 5e-4, 1.5e-3), (0, 0, 6e-4, 1.2e-3)),
    "rare": (
        lambda r, n: np.where(r.random(n) < 0.95, 0, np.exp(r.normal(7, 1, n))),
        (0, 0, 0, 1e7),
        (0, 0, 2e3, 1e7),
    ),
    "number": (
        lambda r, n: 1e6 + r.integers(0, 10, n),
        (9e5, 1e6, 1e6, 1.1e6),
        (9.9e5, 1e6, 1e6, 1.01e6),
    ),
}
#: The function that reads numbers, where it is not watched.
CELLS_OF = counts._cells
#: Columns of which order is lost: a few numbers far from zero.
UNORDERED = ("number",)


def table(seed: int, records: int) -> Floats:
    """Return the columns of :data:`COLUMNS`, shape (records, columns)."""
    generator = np.random.default_rng(seed)
    return np.stack([of(generator, records) for of, *_ in COLUMNS.values()], 1).astype(float)


def normals(seed: int) -> SeededNormals:
    """Return fresh normals of a seed."""
    return Noise(seed.to_bytes(32, "little"), secure=True).at(1)


@dataclass
class Watched:
    """What :func:`distributions` does, in order, and the released histograms."""

    steps: list[str] = field(default_factory=list)
    partitions: list[list[Floats]] = field(default_factory=list)
    events: list[TrainingEvent] = field(default_factory=list)
    released: list[NoisyHistogram] = field(default_factory=list)

    def forget(self) -> None:
        """Forget all of it."""
        for seen in (self.steps, self.partitions, self.events, self.released):
            seen.clear()

    def begin(self, event: TrainingEvent) -> None:
        """Begin an event."""
        self.steps.append("begin")
        self.events.append(event)

    def release(self, *args: Any) -> NoisyHistogram:
        """Release a histogram."""
        self.steps.append("release")
        self.released.append(NoisyHistogram.release(*args))
        return self.released[-1]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Watch reading, and the release of histograms."""
    seen = Watched()

    def read(values: Floats, partitions: Sequence[Floats]) -> NDArray[np.int64]:
        seen.steps.append("read")
        seen.partitions.append([*partitions])
        return CELLS_OF(values, partitions)

    monkeypatch.setattr(counts, "_cells", read)
    monkeypatch.setattr(counts, "NoisyHistogram", seen)
    return seen


def exact(values: Floats, partitions: list[Floats], owners: Owners = None) -> Floats:
    """Return the counts of all columns without noise."""
    sizes = tuple(map(len, partitions))
    cells = CELLS_OF(values, partitions)
    if owners is not None:
        _, owners = np.unique(owners, return_inverse=True)
    silent = histogram_event(0.0)
    return np.concatenate(NoisyHistogram.release(cells, sizes, silent, normals(0), owners).counts)


@pytest.mark.promise("histogram")
def test_the_events_have_the_stated_privacy_cost_together() -> None:
    """Of mu^2, and so of epsilon: that of one Gaussian mechanism with a tenth of it."""
    shares = (*plan.ROUNDS, *plan.ROUNDS_OF_TARGET, plan.MOMENTS)
    events, none = plan.histograms_of(1.0, 1e-5, TrainingEvent(1.0, 0.0, 80), (shares, ()), 5000)
    assert none == ()
    whole = noise_of_share(1.0, 1e-5, 1.0) ** -2
    signals = [event.noise_multiplier**-2 / whole for event in events]
    assert sum(signals[:3]) == pytest.approx(0.1, rel=1e-4)
    assert sum(signals[3:6]) == pytest.approx(0.03, rel=1e-4)
    assert signals[6] == pytest.approx(0.05, rel=1e-4)
    one = histogram_event(noise_of_share(1.0, 1e-5, 0.1))
    assert total_epsilon(events[:3], 1e-5) == pytest.approx(total_epsilon((one,), 1e-5), rel=1e-3)


#: Values that records to remove have in a table of random ones.
CHOSEN = {
    "one cell": [3.0, 3.0, 3.0],
    "missing": [np.nan, np.nan, np.nan],
    "infinite": [np.inf, -np.inf, np.inf],
    "edges": [float(FIRST[-1]), float(FIRST[40]), 0.0],
    "beyond": [-1e300, 1e300, -0.0],
}


@pytest.mark.promise("histogram")
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("records", [1, 1000])
def test_one_unit_moves_the_counts_of_a_round_by_at_most_their_sensitivity(
    watched: Watched, chosen: str, records: int
) -> None:
    """A unit of one record or of 1,000, which are in one cell of each column, or anywhere."""
    generator = np.random.default_rng(1)
    others = np.exp(generator.normal(0, 4, (2000, 3)))
    values = np.concatenate([others, np.tile(CHOSEN[chosen], (records, 1))])
    owners = np.concatenate([np.arange(2000), np.full(records, 2000)])
    spread = generator.permutation(
        np.concatenate([owners[:-records], np.arange(records) * 0 + 2000])
    )
    for units, most in ((owners, 0.999), (spread, 0.0)):
        distributions(values, EVENTS, normals(1), watched.begin, units, 2001)
        assert len(watched.partitions) == ROUNDS
        for partitions in watched.partitions:
            rest = units != 2000
            without = exact(values[rest], partitions, units[rest])
            move = float(np.linalg.norm(exact(values, partitions, units) - without))
            assert most * math.sqrt(3) < move <= math.sqrt(3)
        # Its noise is that of this sensitivity, whatever the partitions are.
        for event, histogram in zip(EVENTS, watched.released, strict=True):
            assert histogram.noise == pytest.approx(event.noise_multiplier * math.sqrt(3))
        watched.forget()


@pytest.mark.promise("histogram")
def test_persons_are_counted_in_the_rounds(watched: Watched) -> None:
    """A person with 3,000 records counts once in what is released."""
    values = np.concatenate([np.full((3000, 1), 5.0), np.full((10, 1), -5.0)])
    owners = np.concatenate([np.zeros(3000, np.int64), np.arange(1, 11)])
    events = rounds_of(1e4)
    distributions(values, events, normals(1), watched.begin, owners, 11)
    for histogram in watched.released:
        assert histogram.counts[0].sum() == pytest.approx(11, abs=1)


@pytest.mark.promise("histogram")
def test_each_round_has_begun_before_numbers_are_read(watched: Watched) -> None:
    values = table(1, 500)
    distributions(values, EVENTS, normals(1), watched.begin)
    assert watched.steps == ["begin", "read", "release"] * ROUNDS
    assert watched.events == [*EVENTS]

    def refused(event: TrainingEvent) -> None:
        raise RuntimeError

    for use in (
        lambda: distributions(values, EVENTS, normals(1), refused),
        lambda: target_moments(values[:, 0], 0, 1, EVENTS[0], normals(1), refused),
    ):
        with pytest.raises(RuntimeError):
            use()
    assert watched.steps.count("read") == ROUNDS
    with pytest.raises(ValueError, match="not an event of a histogram"):
        target_moments(values[:, 0], 0, 1, TrainingEvent(1.0, 3.0, 1), normals(1), watched.begin)
    assert watched.events == [*EVENTS]


@pytest.mark.promise("histogram")
def test_only_released_counts_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tables without anything in common, and the same noisy counts."""
    monkeypatch.setattr(
        NoisyHistogram,
        "release",
        lambda cells, sizes, event, noise, owners: NoisyHistogram(
            tuple(np.linspace(3, -1, size) * 100 for size in sizes), 40.0
        ),
    )
    one, other = np.full((900, 2), 7.0), np.full((900, 2), np.nan)
    found = [distributions(values, EVENTS, normals(1), lambda _: None) for values in (one, other)]
    assert found[0] == found[1]


@pytest.mark.promise("histogram")
def test_a_record_is_as_hard_to_tell_as_the_events_say(watched: Watched) -> None:
    """The best test for one record, over 60 runs with it and 60 without, has power mu.

    Given what was released before, the best statistic of a round is the part of its noise in the
    direction in which the record moves the counts, over the variance of the noise.
    """
    mu = 2.0
    events = rounds_of(mu**2)
    others = np.random.default_rng(1).normal(0, 1, (60, 3))
    record = np.array([[9.0, 9.0, np.nan]])
    tables = others, np.concatenate([others, record])
    scores = np.zeros((2, 60))
    for k, values in enumerate(tables):
        for run in range(60):
            watched.forget()
            distributions(values, events, normals(1000 * k + run), watched.begin, units=60)
            rounds = zip(events, watched.partitions, watched.released, strict=True)
            for event, partitions, histogram in rounds:
                without, moved = exact(others, partitions), exact(record, partitions)
                released = np.concatenate(histogram.counts) - without
                scores[k, run] += released @ moved / (3 * event.noise_multiplier**2)
    apart = scores[1].mean() - scores[0].mean()
    assert apart == pytest.approx(mu**2, abs=0.01 + 4 * mu * math.sqrt(2 / 60))
    assert scores.std(1) == pytest.approx(mu, rel=0.3)
    assert kstest((scores[0] - scores[0].mean()) / mu, norm.cdf).pvalue > 0.001


@pytest.mark.parametrize(("records", "seeds", "share"), [(5000, 8, 0.75), (30_000, 3, 1)])
def test_ranges_are_found_from_noisy_counts(records: int, seeds: int, share: float) -> None:
    """Ends of ranges and ranks: those bounds held in 200 runs, of 5,000 records in nine of ten."""
    ends = []
    for seed in range(seeds):
        values = table(seed, records)
        found = distributions(values, EVENTS, normals(seed), lambda _: None)
        ends.append([(column.low, column.high) for column in found])
        for name, column, numbers in zip(COLUMNS, found, values.T, strict=True):
            outside = np.mean((numbers < column.low) | (numbers > column.high))
            assert outside < 0.1
            ranked = np.sort(numbers)
            quantiles = ranked[:: records // 20]
            below = np.searchsorted(ranked, quantiles, "left") / records
            above = np.searchsorted(ranked, quantiles, "right") / records
            ranks = column.ranks(quantiles)
            error = np.maximum(below - ranks, ranks - above).max()
            assert error < (0.05 if records > 5000 else 0.2) or name in UNORDERED
            assert (np.diff(ranks) >= 0).all()
    for k, (_, few, many) in enumerate(COLUMNS.values()):
        lowest, low, high, highest = many if records > 5000 else few
        within = [lowest <= run[k][0] <= low and high <= run[k][1] <= highest for run in ends]
        assert np.mean(within) >= share, [*COLUMNS][k]


def test_without_privacy_ranges_and_ranks_are_right() -> None:
    """Quantiles of 1%, a quarter of the width wider on each side, but not across zero."""
    values = table(1, 4000)
    found = exact_distributions(values)
    for name, column, numbers in zip(COLUMNS, found, values.T, strict=True):
        first, last = np.quantile(numbers, [0.01, 0.99])
        assert column.low <= first
        assert column.high >= last
        if name not in ("constant", "number", "rare"):
            assert column.high - column.low < 1.9 * (last - first)
        quantiles = np.quantile(numbers, np.linspace(0.05, 0.95, 7), method="lower")
        below = np.searchsorted(np.sort(numbers), quantiles, "left") / 4000
        above = np.searchsorted(np.sort(numbers), quantiles, "right") / 4000
        ranks = column.ranks(quantiles)
        assert name in UNORDERED or np.maximum(below - ranks, ranks - above).max() < 0.02
    assert exact_distributions(np.zeros((5, 0))) == ()


def test_ranks_are_shares_and_missing_ones_stay_missing() -> None:
    column = exact_distributions(np.arange(1000.0)[:, None])[0]
    ranks = column.ranks(np.array([-np.inf, np.inf, np.nan, 500.0, -1e9]))
    assert ranks[[0, 1, 4]].tolist() == [0, 1, 0]
    assert np.isnan(ranks[2])
    assert ranks[3] == pytest.approx(0.5, abs=0.01)
    assert (column.shares[0], column.shares[-1]) == (0, 1)
    assert (np.diff(column.edges) > 0).all()
    assert (np.diff(column.shares) >= 0).all()


@pytest.mark.parametrize("missing", [0.3, 0.95])
def test_missing_numbers_do_not_change_the_ranks_of_others(missing: float) -> None:
    generator = np.random.default_rng(1)
    values = np.where(generator.random(50_000) < missing, np.nan, generator.uniform(10, 20, 50_000))
    column = distributions(values[:, None], EVENTS, normals(1), lambda _: None)[0]
    assert column.low <= 10
    assert column.high >= 20
    assert column.ranks(np.array([12.5, 15, 17.5])) == pytest.approx([0.25, 0.5, 0.75], abs=0.05)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((0, 2)),
        np.full((30, 1), np.nan),
        np.full((900, 2), np.inf),
        np.full((900, 2), -np.inf),
        np.array([[3.0]]),
        np.array([[1e308], [-1e308]] * 400),
    ],
)
def test_any_table_has_ranges(values: Floats) -> None:
    private = distributions(values, EVENTS, normals(1), lambda _: None)
    for column in (*private, *exact_distributions(values)):
        assert -math.inf < column.low < column.high < math.inf
        assert np.isfinite(column.edges).all()
        assert column.shares[-1] == 1


def test_without_columns_no_event_begins(watched: Watched) -> None:
    assert distributions(np.zeros((9, 0)), EVENTS, normals(1), watched.begin) == ()
    assert not watched.steps


def moment_sums(values: Floats, owners: Owners = None) -> Floats:
    """Return what the moments of a number in [-1, 1] are computed from, without noise."""
    sums = _moment_sums(values, -1.0, 1.0, owners)
    assert (sums / GRID % 1 == 0).all()
    return sums


@pytest.mark.promise("histogram")
@pytest.mark.parametrize("value", [1.0, -1.0, 1e300, -math.inf, math.nan, 0.3, -1 / 3])
@pytest.mark.parametrize("records", [1, 3, 1000])
def test_one_unit_moves_moments_by_at_most_their_sensitivity(value: float, records: int) -> None:
    values = np.concatenate([np.random.default_rng(1).normal(0, 1, 50), np.full(records, value)])
    owners = np.concatenate([np.arange(50), np.full(records, 50)])
    move = moment_sums(values, owners) - moment_sums(values[:50], owners[:50])
    assert np.linalg.norm(move) <= math.sqrt(2)
    assert (abs(move) <= 1).all()
    if abs(value) >= 1:
        assert np.linalg.norm(move) > 0.999 * math.sqrt(2)


@pytest.mark.promise("histogram")
def test_moments_have_the_promised_noise() -> None:
    """Sums over 100 records: they are at the middle of their range, and noise is in both."""
    event, found = histogram_event(4.0), []
    for seed in range(300):
        begun: list[TrainingEvent] = []
        noise = normals(seed)
        mean, spread = target_moments(np.full(10_000, 3.0), 2.0, 4.0, event, noise, begun.append)
        assert begun == [event]
        found.append((mean, spread))
    means = (np.array(found)[:, 0] - 3.0) * 10_000 / (4.0 * math.sqrt(2))
    assert kstest(means, norm.cdf).pvalue > 0.001


@pytest.mark.promise("histogram")
def test_a_target_is_as_hard_to_tell_as_the_events_of_its_range_say(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best test for one record at an end of the range has power mu, with its moments.

    Of mu^2, rounds of counts have three eighths, and the moments five eighths, as in a run.
    """
    sums = list[Floats]()

    class Mechanism(SecureMechanism):
        def release(self, *given: Any) -> Any:
            result = super().release(*given)
            sums.append(result.value.numpy() * 60)
            return result

    monkeypatch.setattr(targets, "SecureMechanism", Mechanism)
    mu = 2.0
    rounds = rounds_of(mu**2 * 3 / 8)
    moments = histogram_event(1 / math.sqrt(mu**2 * 5 / 8))
    others = np.random.default_rng(1).normal(0, 0.2, 60)
    record = np.array([1.0])
    scores = np.zeros((2, 60))
    for k, values in enumerate((others, np.concatenate([others, record]))):
        for run in range(60):
            watched.forget()
            noise = normals(1000 * k + run)
            distributions(values[:, None], rounds, noise, watched.begin, units=60)
            for event, partitions, histogram in zip(
                rounds, watched.partitions, watched.released, strict=True
            ):
                moved = exact(record[:, None], partitions)
                released = np.concatenate(histogram.counts) - exact(others[:, None], partitions)
                scores[k, run] += released @ moved / event.noise_multiplier**2
            target_moments(values, -1.0, 1.0, moments, noise, watched.begin, units=60)
            released = sums.pop() - moment_sums(others)
            moved = moment_sums(record)
            scores[k, run] += released @ moved / (2 * moments.noise_multiplier**2)
    apart = scores[1].mean() - scores[0].mean()
    assert apart == pytest.approx(mu**2, abs=0.01 + 4 * mu * math.sqrt(2 / 60))
    assert scores.std(1) == pytest.approx(mu, rel=0.3)
    assert kstest((scores[0] - scores[0].mean()) / mu, norm.cdf).pvalue > 0.001


def test_moments_of_a_number_to_predict_are_found() -> None:
    """Its range, a half of the width wider, and its mean and spread in it."""
    generator = np.random.default_rng(1)
    values = np.exp(generator.normal(3, 0.5, 20_000))
    rounds = rounds_of(0.03 * 0.267**2)
    event = histogram_event(1 / math.sqrt(0.05 * 0.267**2))
    noise = normals(1)
    column = distributions(values[:, None], rounds, noise, lambda _: None)[0]
    low, high = target_range(column)
    assert low <= values.min()
    assert np.quantile(values, 0.999) <= high < 10 * values.max()
    mean, spread = target_moments(values, low, high, event, noise, lambda _: None)
    assert mean == pytest.approx(values.mean(), rel=0.2)
    assert spread == pytest.approx(values.std(), rel=0.5)
    # Persons with many records, all of one value, count once.
    owners = np.concatenate([np.arange(20_000), np.zeros(50_000, np.int64)])
    more = np.concatenate([values, np.full(50_000, high)])
    again = target_moments(
        more, low, high, histogram_event(0.01), normals(2), lambda _: None, owners, 20_000
    )
    assert again[0] == pytest.approx(values.clip(low, high).mean(), rel=0.01)
    # A constant has a spread all the same.
    assert (
        target_moments(np.full(50, 3.0), 2, 4, histogram_event(0.01), normals(3), lambda _: None)[1]
        > 0
    )


def test_noise_does_not_make_the_spread_of_a_number_far_too_small() -> None:
    """Numbers that fill an eighth of their range, and noise of half of the square of that."""
    generator = np.random.default_rng(1)
    values = generator.normal(0.2, 0.12, 1200)
    event = histogram_event(6.2)
    spreads = [
        target_moments(values, -1.0, 1.0, event, normals(seed), lambda _: None)[1]
        for seed in range(200)
    ]
    assert min(spreads) > 0.06
    assert np.median(spreads) < 0.25
