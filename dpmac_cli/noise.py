"""Where Gaussian noise comes from, and how one secret becomes several independent streams."""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

#: Names of the streams of random numbers in a run. Each has a generator of its own, so that no
#: draw for one purpose can be read off the draws for another.
STREAMS = ("init", "sampler", "noise")


def stream_seeds(seed: int | None) -> dict[str, np.random.SeedSequence]:
    """Independent seeds, one a stream.

    Args:
        seed: the person's seed, or None: then every stream gets 256 fresh bits of its own from
            the operating system, and nothing links one stream to another.
    """
    if seed is None:
        return {name: np.random.SeedSequence(pool_size=8) for name in STREAMS}
    return {
        name: np.random.SeedSequence(seed, spawn_key=(key,)) for key, name in enumerate(STREAMS)
    }


class NoiseSource(Protocol):
    """Standard normal draws, never the same twice."""

    def standard_normal(self, like: Tensor) -> Tensor:
        """Fresh independent N(0, 1) draws with the shape, dtype and device of ``like``."""
        ...

    def state(self) -> dict[str, Any]:
        """The generator's whole state, as secret as the noise."""
        ...


class SeededNoise:
    """Noise drawn on the CPU from SFC64, whose 192 bits of state are filled from the seed.

    torch's own CPU generator is not used: it keeps only the low 32 bits of a seed, so that 4
    billion tries recover the noise, and its normals end at 5.77 standard deviations. These end
    past 8.
    """

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._generator = np.random.Generator(np.random.SFC64(seed))

    def standard_normal(self, like: Tensor) -> Tensor:
        """Fresh independent N(0, 1) draws with the shape, dtype and device of ``like``."""
        dtype = np.float64 if like.dtype == torch.float64 else np.float32
        drawn = self._generator.standard_normal(like.shape, dtype=dtype)
        return torch.from_numpy(drawn).to(like.device)

    def state(self) -> dict[str, Any]:
        """The generator's whole state, as secret as the noise."""
        return dict(self._generator.bit_generator.state)


def noise_source(seed: np.random.SeedSequence) -> NoiseSource:
    """The source of a run's noise, for any device."""
    return SeededNoise(seed)
