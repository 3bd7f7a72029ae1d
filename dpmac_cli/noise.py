"""Where Gaussian noise comes from, and how one secret becomes several independent streams."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

#: Names of the streams of random numbers in a run. Each has a generator of its own, so that no
#: draw for one purpose can be read off the draws for another.
STREAMS = ("init", "sampler", "noise")


def stream_seeds(seed: int | None, branch: int = 0) -> dict[str, np.random.SeedSequence]:
    """Independent seeds, one a stream.

    Args:
        seed: the person's seed, or None: then every stream gets 256 fresh bits of its own from
            the operating system, and nothing links one stream to another.
        branch: 0 for a run, and a number of its own for each branch: no branch draws what
            another drew.
    """
    if seed is None:
        return {name: np.random.SeedSequence(pool_size=8) for name in STREAMS}
    return {
        name: np.random.SeedSequence(seed, spawn_key=(key, branch))
        for key, name in enumerate(STREAMS)
    }


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """The whole state of an SFC64 generator as JSON values."""
    state = generator.bit_generator.state
    return {**state, "state": [int(word) for word in state["state"]["state"]]}


def restore_generator(generator: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Put an SFC64 generator into a state that :func:`generator_state` gave."""
    words = np.array(state["state"], dtype=np.uint64)
    generator.bit_generator.state = {**state, "state": {"state": words}}


class NoiseSource(Protocol):
    """Standard normal draws, never the same twice."""

    def standard_normal(self, like: Tensor) -> Tensor:
        """Fresh independent N(0, 1) draws with the shape, dtype and device of ``like``."""
        ...

    def state(self) -> dict[str, Any]:
        """The generator's whole state as JSON values, as secret as the noise."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
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
        """The generator's whole state as JSON values, as secret as the noise."""
        return generator_state(self._generator)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        restore_generator(self._generator, state)


def noise_source(seed: np.random.SeedSequence) -> NoiseSource:
    """The source of a run's noise, for any device."""
    return SeededNoise(seed)
