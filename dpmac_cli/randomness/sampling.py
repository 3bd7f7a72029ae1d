"""Batch samplers. The draws are secret: amplification by sampling holds only while they are."""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.randomness.keystream import SPARE, KeyStream, Stretch

#: Indices of a step's records, increasing; shape (drawn,).
Batch = NDArray[np.int64]
#: The batch of each record, counted from 0; shape (n,).
Slots = NDArray[np.int64]


class Sampler(Protocol):
    """Draws one batch per step."""

    def draw(self, step: int) -> Batch:
        """Return the records of step t = 1, 2, ..., a function of the key and t."""
        ...


class SeededDraws:
    """Random choices of one step or epoch by numpy's generator.

    Args:
        size: n.
        draws: the generator, of the sampler's own key.
    """

    def __init__(self, size: int, draws: np.random.Generator) -> None:
        self._size, self._generator = size, draws

    def independently(self, rate: float) -> Batch:
        """Draw each record with probability ``rate`` in (0, 1], independently of the others.

        The number drawn is binomial, and all subsets of that size are equally likely: the same as
        asking every record, at the cost of the batch instead of the data set.
        """
        return self.exactly(int(self._generator.binomial(self._size, rate)))

    def exactly(self, count: int) -> Batch:
        """Draw ``count`` different records; all subsets are equally likely."""
        return np.sort(self._generator.choice(self._size, count, replace=False, shuffle=False))

    def bins(self, count: int) -> Slots:
        """Draw one of ``count`` bins for each record, independently of the others."""
        return self._generator.integers(0, count, self._size)

    def shuffled(self, slots: Slots) -> Slots:
        """Return the slots in random order; all orders are equally likely."""
        return self._generator.permutation(slots)


class SecureDraws:
    """Random choices of one step or epoch by the key stream of a cipher, 64 bits per record.

    Where words leave a choice open, all are drawn again. Which words do so does not depend on how
    the records are named, so what is left is exactly even.

    Args:
        size: n.
        stretch: of the key stream, of the sampler's own key.
    """

    def __init__(self, size: int, stretch: Stretch) -> None:
        self._size, self._stretch = size, stretch
        self._words = np.empty(size + SPARE // 8, np.uint64)

    def independently(self, rate: float) -> Batch:
        """Draw each record with probability ``rate``, rounded down to a multiple of 2^-64."""
        last = int(math.ldexp(rate, 64)) - 1  # that is in: a rate of 1 takes every word there is
        return np.flatnonzero(self._draw() <= np.uint64(last))

    def exactly(self, count: int) -> Batch:
        """Return the records of the least words."""
        while True:
            words = self._draw()
            chosen = np.flatnonzero(words <= np.partition(words, count - 1)[count - 1])
            if len(chosen) == count:  # else the last of them ties with another
                return chosen

    def bins(self, count: int) -> Slots:
        """Return the bin of each record's word; all bins are equally many words wide."""
        width = np.uint64((2**64 - 1) // count)
        while True:
            slots = (self._draw() // width).astype(np.int64)
            if slots.max() < count:  # else a word is beyond the last bin
                return slots

    def shuffled(self, slots: Slots) -> Slots:
        """Return the slots in the order of the words."""
        while True:
            words = self._draw()
            order = np.argsort(words)
            ordered = words[order]
            if (ordered[1:] > ordered[:-1]).all():  # else two tie
                return slots[order]

    def _draw(self) -> NDArray[np.uint64]:
        """Return the next words, shape (n,); overwritten by the next call."""
        self._stretch.fill(self._words, self._size)
        return self._words[: self._size]


Draws = SeededDraws | SecureDraws


class IndependentSampler:
    """Draws each step's batch from scratch.

    Args:
        draws: the random choices of a step.
        pick: a batch, by those.
    """

    def __init__(self, draws: Callable[[int], Draws], pick: Callable[[Draws], Batch]) -> None:
        self._draws, self._pick = draws, pick

    def draw(self, step: int) -> Batch:
        """Return the records of step t."""
        return self._pick(self._draws(step))


class EpochSampler:
    """Deals all records out to the batches of each epoch.

    Args:
        draws: the random choices of an epoch.
        deal: the batch of each record in 0, 1, ... steps - 1, by those.
        steps: of an epoch.
        base: steps before the first epoch. Steps that continued an epoch of another key would
            show a record more often than once per epoch that it is charged for.
    """

    def __init__(
        self, draws: Callable[[int], Draws], deal: Callable[[Draws], Slots], steps: int, base: int
    ) -> None:
        self._draws, self._deal, self._steps, self._base = draws, deal, steps, base
        self._epoch, self._dealt = -1, np.empty(0, np.int64)

    def draw(self, step: int) -> Batch:
        """Return the records of step t."""
        epoch, place = divmod(step - 1 - self._base, self._steps)
        if epoch != self._epoch:
            self._epoch, self._dealt = epoch, self._deal(self._draws(epoch))
        return np.flatnonzero(self._dealt == place)


def make_sampler(
    name: str,
    *,
    size: int,
    batch: int,
    key: bytes,
    secure: bool = False,
    rate: float | None = None,
    base: int = 0,
) -> Sampler:
    """Return a sampler as :data:`dpmac_cli.accounting.samplers.SAMPLERS` prices it.

    Args:
        name: a key of that table.
        size: n, the number of training records.
        batch: B, in [1, n]; the size that is drawn may differ, may be 0, and is private.
        key: the sampler's own secret.
        secure: whether a cipher draws.
        rate: q of "poisson", in (0, 1]; None for B/n.
        base: steps taken before the key was made.
    """
    steps = math.ceil(size / batch)
    keys = KeyStream(key)

    def draws(place: int) -> Draws:
        if secure:
            return SecureDraws(size, keys.at(place))
        return SeededDraws(size, keys.at(place).generator())

    match name:
        case "poisson":
            q = batch / size if rate is None else rate
            return IndependentSampler(draws, lambda d: d.independently(q))
        case "fixed-size":
            return IndependentSampler(draws, lambda d: d.exactly(batch))
        case "balls-in-bins":
            return EpochSampler(draws, lambda d: d.bins(steps), steps, base)
        case "shuffle":
            slots = np.arange(size) // batch
            return EpochSampler(draws, lambda d: d.shuffled(slots), steps, base)
    raise ValueError(f"there is no sampler {name}")
