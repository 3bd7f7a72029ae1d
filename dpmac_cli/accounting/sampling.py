"""Ways to draw the batches of a program's own training, each with its privacy event."""

import math
from dataclasses import dataclass
from typing import ClassVar

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.errors import raise_errors
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
