"""A noisy histogram: one Gaussian mechanism on counts of records in the cells of a partition.

Ranges, calibration, operating points and intervals follow from it by post-processing. It is here,
beside the mechanism, because features and training both use it.

A record is in at most one cell of each partition, so adding or removing one changes the counts of C
partitions by at most sqrt(C) in the L2 norm. A unit with m records has weights 1/m, rounded down:
together at most 1 in each partition, whether or not they are in one cell, and so again at most
sqrt(C). ``1/sqrt(m)`` would not do: m records in one cell would count sqrt(m).

Where the event has a sampling rate, each record, or each unit with all of its records, is counted
with that probability, independently of the others and in secret. Counts are divided by it after
the noise is added.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.dp.mechanism import SecureMechanism, ball
from dpmac_cli.randomness.noise import SeededNormals

#: Weights are multiples of one over this, so that the counts of 2^29 units are exact in float64.
WHOLE = 1 << 24


@dataclass(frozen=True)
class NoisyHistogram:
    """Counts of units of privacy in cells, with Gaussian noise: made by :meth:`release`.

    Nothing computed from it has a further privacy cost.

    Attributes:
        counts: counts of all records with noise, float64, one array of shape (cells,) per
            partition; estimates if some were drawn.
        noise: standard deviation of the noise in each count.

    Example:
        >>> from dpmac_cli.accounting.events import histogram_event
        >>> from dpmac_cli.randomness.keystream import make_keys
        >>> from dpmac_cli.randomness.noise import Noise
        >>> event = histogram_event(2.0)  # an account begins it before the records are read
        >>> cells = np.array([[0], [2], [2], [1]])  # one partition: each record is in one cell
        >>> draws = Noise(make_keys(seed=0).counts, secure=True).at(1)
        >>> histogram = NoisyHistogram.release(cells, (3,), event, draws)
        >>> histogram.counts[0].shape, histogram.noise
        ((3,), 2.0)
    """

    counts: tuple[NDArray[np.float64], ...]
    noise: float

    @classmethod
    def release(
        cls,
        cells: NDArray[np.int64],
        sizes: tuple[int, ...],
        event: TrainingEvent,
        noise: SeededNormals,
        owners: NDArray[np.int64] | None = None,
    ) -> "NoisyHistogram":
        """Count records in the cells of some partitions, and add noise: :class:`.SecureMechanism`.

        The noise of each count has standard deviation sigma sqrt(C) / q, for C partitions and the
        sampling rate q of the event.

        Args:
            cells: cell of each record in each partition, from 0, shape (records, partitions); -1 if
                it is in none. Where the event has a sampling rate, of the records that were drawn.
            sizes: number of cells of each partition, which is public.
            event: event of the histogram, which has sigma: see
                :func:`~dpmac_cli.accounting.events.histogram_event`. An account has begun it.
            noise: fresh random numbers, used only here.
            owners: index of each record's unit of privacy, shape (records,); None if each record is
                one.

        Returns:
            The histogram, which is public.

        Raises:
            ValueError: the event is not that of a histogram, or there is no such cell.
        """
        if not event.histogram or cells.shape[1:] != (len(sizes),):
            raise ValueError("not an event of a histogram, or not a cell for each partition")
        weights = weights_of(owners, len(cells))
        exact = [count(cells[:, k], size, weights) for k, size in enumerate(sizes)]
        counts = torch.from_numpy(np.concatenate(exact))
        # The grid divides the counts, so rounding to it adds nothing to the sensitivity.
        mechanism = SecureMechanism.of(event, 1, sensitivity=math.sqrt(len(sizes)))
        released = mechanism.release(counts, ball(1.0, counts), noise)
        rate = event.sampling_rate
        noisy = released.value.numpy() / rate
        ends = np.cumsum(sizes)
        by_partition = np.split(noisy, ends[:-1])
        return cls(tuple(by_partition), released.noise_ratio / rate)


def weights_of(owners: NDArray[np.int64] | None, records: int) -> NDArray[np.int64]:
    """Return the weight of each record of a histogram as a multiple of 1 / WHOLE, shape (records,).

    A record of a unit with m records has the weight 1/m, rounded down, so those of a unit add up to
    at most WHOLE. A weight depends on the unit's own records only.

    Args:
        owners: index of each record's unit, shape (records,); None if each record is one.
        records: number of records.

    Example:
        >>> weights_of(np.array([0, 1, 1, 1]), 4) / WHOLE  # thirds are rounded down
        array([1.        , 0.33333331, 0.33333331, 0.33333331])
    """
    if owners is None:
        return np.full(records, WHOLE)
    sizes: NDArray[np.int64] = np.bincount(owners)[owners]
    return WHOLE // sizes


def count(cells: NDArray[np.int64], size: int, weights: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sum of the weights of the records in each cell, float64, exact, shape (size,).

    It has no noise, so it is private: see :meth:`NoisyHistogram.release`.

    Args:
        cells: cell of each record, shape (records,); -1 if it is in none.
        size: number of cells.
        weights: weights of the records in multiples of 1 / WHOLE, int64, shape (records,).

    Raises:
        ValueError: a record is in a cell that there is not.

    Example:
        >>> count(np.array([0, 2, -1, 2]), 3, np.full(4, WHOLE))
        array([1., 0., 2.])
    """
    if (cells >= size).any():
        raise ValueError(f"there are {size} cells, from 0")
    inside = cells >= 0
    counts = np.zeros(size, np.int64)
    np.add.at(counts, cells[inside], weights[inside])
    return counts / WHOLE
