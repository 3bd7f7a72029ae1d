"""Batch samplers. The draws are secret: amplification by sampling holds only while they are."""

import math
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
    """Random choices among n records, of one step or epoch, by numpy's generator."""

    def __init__(self, size: int, stretch: Stretch) -> None:
        self._size, self._generator = size, stretch.generator()

    def independently(self, rate: float) -> Batch:
        """Draw each record with probability ``rate`` in (0, 1], independently of the others.

        The number drawn is binomial, and all subsets of that size are equally likely.
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
    """The same choices by the key stream of a cipher, 64 bits per record.

    Where words leave a choice open, all are drawn again. Which words do so does not depend on how
    the records are named, so what is left is exactly even.
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


class KeyedSampler:
    """A sampler as :data:`dpmac_cli.accounting.samplers.SAMPLERS` prices it.

    Args:
        name: a key of that table.
        size: n, the number of training records.
        batch: B, in [1, n]; the size that is drawn may differ, may be 0, and is private.
        key: the sampler's own secret.
        secure: whether a cipher draws.
        rate: q of "poisson", in (0, 1]; None for B/n.
        base: steps taken before the key was made. Steps that continued an epoch of another key
            would show a record more often than once per epoch that it is charged for.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int,
        batch: int,
        key: bytes,
        secure: bool = False,
        rate: float | None = None,
        base: int = 0,
    ) -> None:
        self._name, self._size, self._batch, self._base = name, size, batch, base
        self._rate = batch / size if rate is None else rate
        self._keys, self._kind = KeyStream(key), SecureDraws if secure else SeededDraws
        self._steps = math.ceil(size / batch)
        self._epoch, self._dealt = -1, np.empty(0, np.int64)

    def draw(self, step: int) -> Batch:
        """Return the records of step t."""
        match self._name:
            case "poisson":
                return self._choices(step).independently(self._rate)
            case "fixed-size":
                return self._choices(step).exactly(self._batch)
        epoch, place = divmod(step - 1 - self._base, self._steps)
        if epoch != self._epoch:
            self._epoch, self._dealt = epoch, self._deal(epoch)
        return np.flatnonzero(self._dealt == place)

    def _deal(self, epoch: int) -> Slots:
        """Return the batch of each record in an epoch."""
        match self._name:
            case "balls-in-bins":
                return self._choices(epoch).bins(self._steps)
            case "shuffle":
                return self._choices(epoch).shuffled(np.arange(self._size) // self._batch)
        raise ValueError(f"there is no sampler {self._name}")

    def _choices(self, place: int) -> SeededDraws | SecureDraws:
        return self._kind(self._size, self._keys.at(place))
