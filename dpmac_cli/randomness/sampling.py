"""Who is in step t. The draws are secret: amplification by sampling holds only while they are."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.randomness.keystream import SPARE, Derived, KeyStream, Stateful
from dpmac_cli.randomness.noise import SeededGenerator

#: Indices of a step's records, increasing; shape (drawn,).
Batch = NDArray[np.int64]
#: The batch of each record, counted from 0; shape (n,).
Slots = NDArray[np.int64]


class Sampler(Stateful, Protocol):
    """Draws a batch a step."""

    def draw(self) -> Batch:
        """The next step's records."""
        ...


class SeededDraws(Derived):
    """Choices by numpy's SFC64: fast, but no cipher.

    Args:
        size: n.
        seed: the sampler's own secret, never shared with the noise.
    """

    def __init__(self, size: int, seed: np.random.SeedSequence) -> None:
        self._size = size
        source = SeededGenerator(seed)
        super().__init__(source)
        self._generator = source.numpy

    def independently(self, rate: float) -> Batch:
        """Draw each record with probability ``rate`` in (0, 1], independently of the others.

        How many are drawn is binomial, and which, any so many alike: the same as asking every
        record, at the cost of the batch instead of the data set.
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


class SecureDraws(Derived):
    """Choices by the key stream of a cipher, 64 bits a record.

    Where words leave a choice open, all are drawn again. Which words do so is the same however the
    records are named, so what is left is exactly even.

    Args:
        size: n.
        seed: the sampler's own secret, never shared with the noise.
    """

    def __init__(self, size: int, seed: np.random.SeedSequence) -> None:
        self._size = size
        self._keys = KeyStream(seed)
        super().__init__(self._keys)
        self._words = np.empty(size + SPARE // 8, np.uint64)

    def independently(self, rate: float) -> Batch:
        """Each record with probability ``rate``, rounded down to a multiple of 2^-64."""
        last = int(math.ldexp(rate, 64)) - 1  # that is in: a rate of 1 takes every word there is
        return np.flatnonzero(self._draw() <= np.uint64(last))

    def exactly(self, count: int) -> Batch:
        """The records of the least words."""
        while True:
            words = self._draw()
            chosen = np.flatnonzero(words <= np.partition(words, count - 1)[count - 1])
            if len(chosen) == count:  # else the last of them ties with another
                return chosen

    def bins(self, count: int) -> Slots:
        """The bin of each record's word: each bin is as many words wide."""
        width = np.uint64((2**64 - 1) // count)
        while True:
            slots = (self._draw() // width).astype(np.int64)
            if slots.max() < count:  # else a word is beyond the last bin
                return slots

    def shuffled(self, slots: Slots) -> Slots:
        """The slots in the order of the words."""
        while True:
            words = self._draw()
            order = np.argsort(words)
            ordered = words[order]
            if (ordered[1:] > ordered[:-1]).all():  # else two tie
                return slots[order]

    def _draw(self) -> NDArray[np.uint64]:
        """Fresh words, shape (n,); overwritten by the next."""
        self._keys.fill(self._words, self._size)
        return self._words[: self._size]


Draws = SeededDraws | SecureDraws


class IndependentSampler(Derived):
    """Draws each step's batch afresh.

    Args:
        pick: a batch, by ``draws``.
        draws: the sampler's own.
    """

    def __init__(self, pick: Callable[[], Batch], draws: Draws) -> None:
        super().__init__(draws)
        self._pick = pick

    def draw(self) -> Batch:
        """The next step's records."""
        return self._pick()


class EpochSampler:
    """Deals all records out to the batches of an epoch, and then again.

    Args:
        deal: the batch of each record in 0, 1, ... steps - 1, by ``draws``.
        steps: of an epoch.
        draws: the sampler's own.
    """

    def __init__(self, deal: Callable[[], Slots], steps: int, draws: Draws) -> None:
        self._deal, self._steps, self._draws = deal, steps, draws
        self._begin(0)

    def _begin(self, step: int) -> None:
        """Deal, and go to a step of the epoch."""
        self._before = self._draws.state()
        self._dealt = self._deal()
        self._step = step

    def draw(self) -> Batch:
        """The next step's records."""
        if self._step == self._steps:
            self._begin(0)
        self._step += 1
        return np.flatnonzero(self._dealt == self._step - 1)

    def state(self) -> dict[str, Any]:
        """The generator as it was before the epoch was dealt, and the step reached in it."""
        return {**self._before, "epoch_step": self._step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Deal the same epoch again, and go on in it."""
        generator = {name: value for name, value in state.items() if name != "epoch_step"}
        self._draws.restore(generator)
        self._begin(state["epoch_step"])


def make_sampler(
    name: str,
    size: int,
    batch: int,
    seed: np.random.SeedSequence,
    secure: bool = False,
    rate: float | None = None,
) -> Sampler:
    """A sampler as :data:`dpmac_cli.accounting.samplers.SAMPLERS` prices it.

    Args:
        name: a key of that table.
        size: n, the number of training records.
        batch: B, in [1, n]; the size that is drawn may differ, may be 0, and is private.
        seed: the sampler's own secret.
        secure: whether a cipher draws.
        rate: q of "poisson", in (0, 1]; None for B/n.
    """
    steps = math.ceil(size / batch)
    draws: Draws = SecureDraws(size, seed) if secure else SeededDraws(size, seed)
    match name:
        case "poisson":
            q = batch / size if rate is None else rate
            return IndependentSampler(lambda: draws.independently(q), draws)
        case "fixed-size":
            return IndependentSampler(lambda: draws.exactly(batch), draws)
        case "balls-in-bins":
            return EpochSampler(lambda: draws.bins(steps), steps, draws)
        case "shuffle":
            slots = np.arange(size) // batch
            return EpochSampler(lambda: draws.shuffled(slots), steps, draws)
    raise ValueError(f"there is no sampler {name}")
