"""Batch samplers: line 3 of Algorithm 1. Draws must stay secret.

Privacy amplification by sampling relies on it, so record numbers and sizes of batches are private.
The object that draws is the one whose event is priced: :meth:`BatchSampling.event`.

The paper draws B records in each step. Here B is the expected number: in Poisson sampling (Abadi et
al. 2016, arXiv 1607.00133) the number drawn is binomial, and in random allocation each record is in
one batch of each epoch. Memory: a draw takes 8 bytes per training record.
"""

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
    """Interface of a batch sampler, line 3 of Algorithm 1: draws the records of each step."""

    def draw(self, step: int) -> Indices:
        """Return the records of a step, a function of the sampler's key and of t.

        Args:
            step: t, from 1. Steps may be drawn in any order, and again.

        Returns:
            Increasing record numbers, int64, shape (drawn,); perhaps empty. Private.
        """


class SeededDraws:
    """Random choices among n records for one step or epoch, by NumPy's SFC64.

    Fast, but not cryptographic: :class:`SecureDraws` is. Each call draws again.

    Args:
        size: number n of records.
        stretch: random bits of the step or epoch, which seed the generator.
    """

    def __init__(self, size: int, stretch: Stretch) -> None:
        self._size = size
        self._generator = stretch.generator()

    def independently(self, rate: float) -> Indices:
        """Draw each record with the same probability, independently of the others.

        The number drawn is binomial, and all subsets of that size are equally likely.

        Args:
            rate: probability, in (0, 1].

        Returns:
            Increasing record numbers, int64, shape (drawn,); perhaps empty.
        """
        count = int(self._generator.binomial(self._size, rate))
        records = self._generator.choice(self._size, count, replace=False, shuffle=False)
        return np.sort(records)

    def bins(self, count: int) -> NDArray[np.int64]:
        """Draw a bin for each record, all with the same probability, independently.

        Args:
            count: number of bins, such as the steps of an epoch.

        Returns:
            The bin of each record, from 0 to count - 1, int64, shape (n,).
        """
        return self._generator.integers(0, count, self._size)


class SecureDraws:
    """Random choices like :class:`SeededDraws`, by a cipher's key stream, 64 bits per record.

    Args:
        size: number n of records.
        stretch: random bits of the step or epoch.
    """

    def __init__(self, size: int, stretch: Stretch) -> None:
        self._size = size
        self._stretch = stretch

    def independently(self, rate: float) -> Indices:
        """Draw each record with the same probability, independently of the others.

        Args:
            rate: probability, in (0, 1], which is rounded down to a multiple of 2^-64.

        Returns:
            Increasing record numbers, int64, shape (drawn,); perhaps empty.
        """
        last = int(math.ldexp(rate, 64)) - 1  # the largest word to include; all for rate 1
        return np.flatnonzero(self._draw() <= np.uint64(last))

    def bins(self, count: int) -> NDArray[np.int64]:
        """Draw a bin for each record, all with exactly the same probability, independently.

        All bins have the same number of words. If the word of a record is in none, all words are
        drawn again; that does not depend on the order of the records.

        Args:
            count: number of bins, such as the steps of an epoch.

        Returns:
            The bin of each record, from 0 to count - 1, int64, shape (n,).
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
    """Batch sampler of a privacy event, whose draws are a function of a secret key.

    It draws as the event says that is counted: Poisson, for which each step draws each record with
    the sampling rate; or random allocation, for which each record is in one step of each epoch.
    The size of a batch may be 0, and is private.

    Args:
        event: event of the steps.
        size: number n of training records.
        key: secret key of the sampler, 32 bytes.
        secure: whether to draw by a cipher, see :class:`SecureDraws`.
        base: steps taken before the key was created. Continuing an epoch of another key would use
            a record more often than the once per epoch that its privacy cost covers.
    """

    def __init__(
        self,
        event: TrainingEvent,
        *,
        size: int,
        key: bytes,
        secure: bool = False,
        base: int = 0,
    ) -> None:
        self._event = event
        self._size = size
        self._base = base
        self._keys = KeyStream(key)
        self._kind = SecureDraws if secure else SeededDraws
        self._epoch = -1  # the epoch whose batches are in _bins
        self._bins = np.empty(0, np.int64)

    def draw(self, step: int) -> Indices:
        """Return the records of a step, the same in each call for it.

        Args:
            step: t, from 1, counted over the whole run; above ``base`` for "random-allocation".

        Returns:
            Increasing record numbers, int64, shape (drawn,); perhaps empty. Private.

        Raises:
            ValueError: there is no sampler of the event's name.
        """
        event = self._event
        if event.sampler == "poisson":
            return self._choices(step).independently(event.sampling_rate)
        if event.sampler != "random-allocation":
            raise ValueError(f"there is no sampler {event.sampler}")
        epoch, place = divmod(step - 1 - self._base, event.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._bins = self._choices(epoch).bins(event.steps_per_epoch)
        return np.flatnonzero(self._bins == place)

    def _choices(self, place: int) -> SeededDraws | SecureDraws:
        """Return the random choices of a step or an epoch."""
        return self._kind(self._size, self._keys.at(place))


#: Lane of the key stream of layers that places come from, at the first rank.
PLACES = 1 << 31


class RandomPlaces:
    """Random places of a step's records among the rows that are computed, by key and step.

    A row may be rounded by its place. Random places make that independent of the other records.

    Args:
        key: secret key, such as that of the layers, 32 bytes.
        count: public number of places: see :func:`dpmac_cli.accounting.places.places_of`.
        rank: number of this process among those of a run, from 0; each has places of its own.

    Attributes:
        count: see above.
    """

    def __init__(self, key: bytes, count: int, rank: int = 0) -> None:
        self._keys = KeyStream(key)
        self._lane = PLACES + rank
        self.count = count

    def draw(self, step: int, places: int) -> Indices:
        """Return all places of a step in random order: all orders are equally likely.

        Each place has a random word, and the order is that of the words. If two are equal, all are
        drawn again. The result is the same in each call with the same numbers.

        Args:
            step: t, from 1.
            places: number of places, at least :attr:`count`.

        Returns:
            Numbers from 0 to places - 1, int64, shape (places,).
        """
        stretch = self._keys.at(step, self._lane)
        while True:
            words = stretch.generate_state(places, np.uint64)
            order = np.argsort(words)
            if (np.diff(words[order]) > 0).all():
                return order


@dataclass(frozen=True, kw_only=True)
class BatchSampling:
    """Way to draw batches of about B of n records: base of :class:`Poisson` and others.

    It gives both the privacy event of a training and the sampler that draws its batches.

    Attributes:
        n: number of training records, which is public.
        batch_size: expected batch size B, from 1 to n.

    Raises:
        InputError: lists every invalid number.

    Example:
        >>> sampling = Poisson(n=1000, batch_size=64)
        >>> event = sampling.event(sigma=1.0, steps=160)
        >>> event.sampling_rate, sampling.steps_per_epoch
        (0.064, 16)
        >>> sampler = sampling.draws(key=bytes(32))  # in practice, secrets.token_bytes(32)
        >>> batch = sampler.draw(1)
        >>> bool((batch[1:] > batch[:-1]).all())  # increasing record numbers
        True
    """

    n: int
    batch_size: int
    #: Key of :data:`~dpmac_cli.accounting.events.SAMPLERS`.
    sampler: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        errors = []
        for name, value in (("n", self.n), ("batch_size", self.batch_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                errors.append(f"{name} must be an integer of at least 1, not {value!r}.")
        if not errors and self.batch_size > self.n:
            errors = [f"batch_size ({self.batch_size:,}) must not be above n, {self.n:,}."]
        raise_errors(errors)

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps of an epoch, ceil(n/B): a record is drawn in about one of them."""
        return math.ceil(self.n / self.batch_size)

    def event(self, sigma: float, steps: int) -> TrainingEvent:
        """Return the privacy event of a training with these batches, from which epsilon follows.

        Args:
            sigma: noise multiplier, the noise's standard deviation divided by the sensitivity 1.
            steps: number of steps, each with one batch.
        """
        rate = self.batch_size / self.n
        return TrainingEvent(rate, sigma, steps, self.sampler, self.steps_per_epoch)

    def draws(self, key: bytes, *, secure: bool = False, base: int = 0) -> KeyedSampler:
        """Return the sampler that draws the batch of each step, a function of the key.

        Args:
            key: secret key, 32 bytes, such as ``secrets.token_bytes(32)``.
            secure: whether to draw by a cipher, see :class:`SecureDraws`.
            base: number of steps that were taken before, with another key: see
                :class:`KeyedSampler`.
        """
        event = self.event(sigma=0.0, steps=0)
        return KeyedSampler(event, size=self.n, key=key, secure=secure, base=base)


@dataclass(frozen=True, kw_only=True)
class Poisson(BatchSampling):
    """Each step includes each record independently with probability B/n.

    A batch may be empty, and a record may be in several batches of an epoch, or in none.
    """


@dataclass(frozen=True, kw_only=True)
class RandomAllocation(BatchSampling):
    """Each record is in one batch of each epoch, chosen at random, independently of the others.

    Batches of an epoch are disjoint, and their sizes vary. The epsilon of whole epochs is a few
    percent lower than that of Poisson sampling.
    """

    sampler: ClassVar[str] = "random-allocation"
