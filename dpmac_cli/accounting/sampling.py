"""Ways to draw the batches of a program's own training, each with its privacy event."""

import math
from dataclasses import dataclass
from typing import ClassVar

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.randomness.sampling import KeyedSampler


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
    #: What a statement of the guarantee adds on who is responsible for the sampling.
    caveat: ClassVar[str] = ""

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
        return KeyedSampler(
            self.sampler,
            size=self.n,
            batch=self.batch_size,
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


@dataclass(frozen=True, kw_only=True)
class Cyclic(BatchSampling):
    """Each record is in one batch, chosen at random, and the same one in every epoch.

    An epoch costs as much as one step on all records: :class:`RandomAllocation` costs less.
    """

    sampler: ClassVar[str] = "cyclic"


@dataclass(frozen=True)
class OwnLoader:
    """Batches of your own loader, which you state to be drawn in a certain way.

    Epsilon is right only if the statement is: a loader that shuffles the records and cuts them into
    batches of one size, as ``DataLoader(shuffle=True)`` does, draws like none of
    :class:`Poisson`, :class:`RandomAllocation` and :class:`Cyclic`, and is refused. So is what a
    batch consists of: one row for each record.

    Args:
        drawn_as: how the loader draws.
    """

    drawn_as: BatchSampling
    #: See :class:`BatchSampling`.
    caveat: ClassVar[str] = (
        " The batches came from a loader of the program, which states that it draws them in this "
        "way; dpmac did not draw them and cannot check it."
    )

    @property
    def n(self) -> int:
        """Return the number of training records."""
        return self.drawn_as.n

    @property
    def batch_size(self) -> int:
        """Return the expected batch size B."""
        return self.drawn_as.batch_size

    @property
    def sampler(self) -> str:
        """Return the key of :data:`~dpmac_cli.accounting.events.SAMPLERS`."""
        return self.drawn_as.sampler

    def event(self, sigma: float, steps: int) -> TrainingEvent:
        """Return the privacy event that is stated."""
        return self.drawn_as.event(sigma, steps)


class StatedSizes:
    """Batch sizes of a program's own loader, compared with the way in which it states to draw.

    However it draws, sizes differ from batch to batch. A bet that half of all batches have the size
    of the one before is fair or worse if they are drawn as stated, so it grows a billion times with
    probability at most 1e-9 (Ville's inequality).
    """

    def __init__(self, stated: OwnLoader) -> None:
        spread = stated.batch_size * (1 - stated.batch_size / stated.n)  # variance of a size
        self._same = min(1.0, 0.5 / math.sqrt(max(spread, 0.25)))  # bounds how often one repeats
        self._n, self._last, self._odds = stated.n, -1, 1.0
        cyclic = isinstance(stated.drawn_as, Cyclic)  # later epochs repeat the sizes of the first
        self._bets = stated.drawn_as.steps_per_epoch if cyclic else math.inf

    def check(self, rows: int) -> None:
        """Raise InputError for a batch that was not drawn as stated."""
        if rows > self._n:
            raise InputError(
                f"The batch has more rows than there are records, n={self._n:,}, so a record is in "
                "it more than once, and moves the step by more than epsilon covers. Draw each "
                "record at most once."
            )
        if self._last >= 0 and self._same < 1 / 2 and self._bets > 1:
            self._odds *= 0.5 / (self._same if rows == self._last else 1 - self._same)
            self._bets -= 1
        self._last = rows
        if self._odds > 1e9:
            raise InputError(
                "Almost all batches have one size, so they were not drawn as stated, and epsilon "
                "would be too small: loaders such as DataLoader(shuffle=True) cut shuffled records "
                "into batches of one size. Let dpmac draw them: sampling=Poisson(n=..., "
                "batch_size=...) and step.loader(dataset, collate_fn, workers=...)."
            )
