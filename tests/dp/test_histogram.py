"""Noisy histograms: what one unit moves, the noise, and what the weights of records are."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import kstest, norm

from dpmac_cli.accounting.events import TrainingEvent, histogram_event
from dpmac_cli.dp.histogram import WHOLE, NoisyHistogram, weights_of
from dpmac_cli.dp.mechanism import GRID
from dpmac_cli.randomness.noise import Noise

#: Records of each unit, and the number of cells of each partition.
SIZES, CELLS = (1, 2, 3, 7, 1000, 1, 30), 5
EVENT = histogram_event(3.0)


def owners_of(*, grouped: bool) -> NDArray[np.int64]:
    """The unit of each record: of :data:`SIZES` records, in any order, or of one."""
    owners = np.random.default_rng(1).permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    return owners if grouped else np.arange(len(owners))


def exact(
    cells: NDArray[np.int64], owners: NDArray[np.int64], *, grouped: bool
) -> NDArray[np.float64]:
    """The counts of all partitions without noise."""
    _, owners = np.unique(owners, return_inverse=True)
    noise = Noise(bytes(32), secure=True).at(1)
    sizes = (CELLS,) * cells.shape[1]
    silent = histogram_event(0.0)
    found = NoisyHistogram.release(cells, sizes, silent, noise, owners if grouped else None)
    return np.concatenate(found.counts)


@pytest.mark.promise("histogram")
@pytest.mark.parametrize("kind", ["one cell", "spread", "in none"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("partitions", [1, 4])
def test_one_unit_moves_all_counts_by_at_most_their_sensitivity(
    partitions: int, grouped: bool, kind: str
) -> None:
    """Removed in turn, units of 1 to 1,000 records, all in one cell or in any."""
    owners = owners_of(grouped=grouped)
    drawn = np.random.default_rng(2).integers(-1, CELLS, (len(owners), partitions))
    cells = {"one cell": 0 * drawn, "spread": drawn, "in none": 0 * drawn - 1}[kind]
    whole = exact(cells, owners, grouped=grouped)
    units = np.unique(owners)[:40]
    moves = [
        float(
            np.linalg.norm(
                whole - exact(cells[owners != unit], owners[owners != unit], grouped=grouped)
            )
        )
        for unit in units
    ]
    assert max(moves) <= math.sqrt(partitions)
    if kind == "one cell":
        assert min(moves) > 0.999 * math.sqrt(partitions)


@pytest.mark.promise("histogram")
def test_the_weights_of_a_unit_are_its_own_and_at_most_one_together() -> None:
    owners = owners_of(grouped=True)
    weights = weights_of(owners, len(owners))
    assert set(weights_of(None, 3)) == {WHOLE}
    for unit, size in enumerate(SIZES):
        mine = weights[owners == unit]
        assert set(mine) == {WHOLE // size}
        assert WHOLE * 0.999 < mine.sum() <= WHOLE


@pytest.mark.promise("histogram")
@pytest.mark.parametrize("partitions", [1, 4])
def test_the_noise_has_the_promised_distribution_and_is_on_the_grid(partitions: int) -> None:
    cells = np.random.default_rng(3).integers(0, CELLS, (400, partitions))
    truth = exact(cells, np.arange(400), grouped=False)
    noise, found = Noise(bytes(32), secure=True), []
    for step in range(1, 501):
        histogram = NoisyHistogram.release(cells, (CELLS,) * partitions, EVENT, noise.at(step))
        assert histogram.noise == 3.0 * math.sqrt(partitions)
        found.append(np.concatenate(histogram.counts))
    errors = (np.array(found) - truth) / (3.0 * math.sqrt(partitions))
    assert kstest(errors.ravel(), norm.cdf).pvalue > 0.001
    assert abs(np.corrcoef(errors.T) - np.eye(len(truth))).max() < 0.25
    assert (np.array(found) / GRID % 1 == 0).all()


def test_an_event_of_something_else_is_refused() -> None:
    cells, noise = np.zeros((3, 1), np.int64), Noise(bytes(32)).at(1)
    with pytest.raises(ValueError, match="not an event of a histogram"):
        NoisyHistogram.release(cells, (2,), TrainingEvent(1.0, 3.0, 1), noise)
    with pytest.raises(ValueError, match="there are 2 cells"):
        NoisyHistogram.release(cells + 2, (2,), EVENT, noise)
