"""Batch samplers. Draws must stay secret: privacy amplification by sampling relies on it."""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.errors import raise_errors
from dpmac_cli.randomness.keystream import KeyStream, Stretch

#: Increasing indices of a step's records; shape (drawn,).
Indices = NDArray[np.int64]


class Sampler(Protocol):
    """Interface that draws one batch per step."""

    def draw(self, step: int) -> Indices:
        """Return the records of step t = 1, 2, ..., a function of the key and t."""


class SeededDraws:
    """Random choices among n records for one step or epoch, with numpy's generator."""

    def __init__(self, size: int, stretch: Stretch) -> None:
        self._size, self._generator = size, stretch.generator()

    def independently(self, rate: float) -> Indices:
        """Draw each record with probability ``rate`` in (0, 1], independently of the others.

        The number drawn is binomial, and all subsets of that size are equally likely.
        """
        count = int(self._generator.binomial(self._size, rate))
        return np.sort(self._generator.choice(self._size, count, replace=False, shuffle=False))

    def bins(self, count: int) -> NDArray[np.int64]:
        """Draw one of ``count`` bins, from 0, for each record, independently; shape (n,)."""
        return self._generator.integers(0, count, self._size)


class SecureDraws:
    """Random choices like :class:`SeededDraws`, with a cipher's key stream, 64 bits per record."""

    def __init__(self, size: int, stretch: Stretch) -> None:
        self._size, self._stretch = size, stretch

    def independently(self, rate: float) -> Indices:
        """Draw each record with probability ``rate``, rounded down to a multiple of 2^-64."""
        last = int(math.ldexp(rate, 64)) - 1  # the largest word to include; all for rate 1
        return np.flatnonzero(self._draw() <= np.uint64(last))

    def bins(self, count: int) -> NDArray[np.int64]:
        """Return the bin of each record's word; all bins have the same number of words.

        If any word is in no bin, all words are drawn again. That does not depend on the order of
        the records, so the result is exactly uniform.
        """
        width = np.uint64((2**64 - 1) // count)
        while True:
            slots = (self._draw() // width).astype(np.int64)
            if slots.max() < count:
                return slots

    def _draw(self) -> NDArray[np.uint64]:
        """Return the next words, shape (n,)."""
        return self._stretch.generate_state(self._size, np.uint64)


class KeyedSampler:
    """Sampler whose privacy cost is defined by :data:`dpmac_cli.accounting.events.SAMPLERS`.

    Args:
        name: a key of that table.
        size: number n of training records.
        rate: q of "poisson", in (0, 1]. The size of a batch may be 0, and is private.
        steps: number of steps of an epoch, whose batches are disjoint for "random-allocation".
        key: secret key of the sampler.
        secure: whether to use a cipher for draws.
        base: steps taken before the key was created. Continuing an epoch of another key would use
            a record more often than the once per epoch that its privacy cost covers.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int,
        rate: float,
        steps: int,
        key: bytes,
        secure: bool = False,
        base: int = 0,
    ) -> None:
        self._name, self._size, self._base = name, size, base
        self._rate, self._steps = rate, steps
        self._keys, self._kind = KeyStream(key), SecureDraws if secure else SeededDraws
        self._epoch, self._dealt = -1, np.empty(0, np.int64)

    def draw(self, step: int) -> Indices:
        """Return the records of step t."""
        if self._name == "poisson":
            return self._choices(step).independently(self._rate)
        if self._name != "random-allocation":
            raise ValueError(f"there is no sampler {self._name}")
        epoch, place = divmod(step - 1 - self._base, self._steps)
        if epoch != self._epoch:
            self._epoch, self._dealt = epoch, self._choices(epoch).bins(self._steps)
        return np.flatnonzero(self._dealt == place)

    def _choices(self, place: int) -> SeededDraws | SecureDraws:
        return self._kind(self._size, self._keys.at(place))


#: Lane of the key stream of layers that places come from, at the first rank.
PLACES = 1 << 31


class RandomPlaces:
    """Places of a step's records, drawn without replacement, a function of the key and the step.

    Args:
        key: secret key, such as that of the layers.
        count: public number of places: see :func:`dpmac_cli.accounting.places.places_of`.
        rank: rank of this process, which has places of its own.
    """

    def __init__(self, key: bytes, count: int, rank: int = 0) -> None:
        self._keys, self._lane, self.count = KeyStream(key), PLACES + rank, count

    def draw(self, step: int, places: int) -> Indices:
        """Return all of a number of places in random order; shape (places,).

        Any record could have any of the others' places: if two words are equal, all are drawn
        again.
        """
        stretch = self._keys.at(step, self._lane)
        while True:
            words = stretch.generate_state(places, np.uint64)
            order = np.argsort(words)
            if (np.diff(words[order]) > 0).all():
                return order


@dataclass(frozen=True, kw_only=True)
class BatchSampling:
    """Batches of about B of n records: the base of :class:`Poisson` and others.

    Attributes:
        n: number of training records, which is public.
        batch_size: expected batch size B, from 1 to n.

    Raises:
        InputError: lists every invalid number.
    """

    n: int
    batch_size: int
    #: Key of :data:`~dpmac_cli.accounting.events.SAMPLERS`.
    sampler: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        counts = {"n": self.n, "batch_size": self.batch_size}
        errors = [
            f"{name} must be an integer of at least 1, not {value!r}."
            for name, value in counts.items()
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        if not errors and self.batch_size > self.n:
            errors = [f"batch_size ({self.batch_size:,}) must not be above n, {self.n:,}."]
        raise_errors(errors)

    @property
    def steps_per_epoch(self) -> int:
        """Return ceil(n/B)."""
        return math.ceil(self.n / self.batch_size)

    def event(self, sigma: float, steps: int) -> TrainingEvent:
        """Return the privacy event of a number of steps with noise multiplier sigma."""
        rate = self.batch_size / self.n
        return TrainingEvent(rate, sigma, steps, self.sampler, self.steps_per_epoch)

    def draws(self, key: bytes, *, secure: bool = False, base: int = 0) -> KeyedSampler:
        """Return the batches of each step as increasing record numbers, a function of the key.

        Args:
            key: secret key, 32 bytes, such as ``secrets.token_bytes(32)``.
            secure: draw with a cipher.
            base: steps that were taken before, with another key.
        """
        priced = self.event(sigma=0.0, steps=0)
        return KeyedSampler(
            priced.sampler,
            size=self.n,
            rate=priced.sampling_rate,
            steps=priced.steps_per_epoch,
            key=key,
            secure=secure,
            base=base,
        )


@dataclass(frozen=True, kw_only=True)
class Poisson(BatchSampling):
    """Each step includes each record independently with probability B/n."""


@dataclass(frozen=True, kw_only=True)
class RandomAllocation(BatchSampling):
    """Each record is in one batch of each epoch, chosen at random, independently of the others."""

    sampler: ClassVar[str] = "random-allocation"
