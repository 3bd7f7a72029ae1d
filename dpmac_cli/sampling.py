"""Who is in step t. The draws are secret: amplification by sampling holds only while they are."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.noise import generator_state, restore_generator


class PoissonSampler:
    """Each record is in each step independently with probability ``rate``.

    The size of a batch is random, may be 0, and is private.

    Args:
        size: n, the number of training records.
        rate: q in (0, 1].
        seed: the sampler's own secret, never shared with the noise.
    """

    def __init__(self, size: int, rate: float, seed: np.random.SeedSequence) -> None:
        self._size = size
        self._rate = rate
        self._generator = np.random.Generator(np.random.SFC64(seed))

    def draw(self) -> NDArray[np.int64]:
        """The indices of one step's records, increasing; shape (drawn,), perhaps (0,)."""
        return np.flatnonzero(self._generator.random(self._size) < self._rate)

    def state(self) -> dict[str, Any]:
        """The generator's whole state as JSON values, as secret as the draws."""
        return generator_state(self._generator)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        restore_generator(self._generator, state)
