"""Where Gaussian noise comes from, and how one secret becomes several independent streams."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpmac_cli.randomness.keystream import SPARE, Derived, KeyStream, Stateful

#: Names of the streams of random numbers in a run. Each has a generator of its own, so that no
#: draw for one purpose can be read off the draws for another. A stream's place is part of its seed.
STREAMS = ("init", "sampler", "noise", "canaries", "coins", "layers")
#: The least u, in (0, 1]; 0.5 + LEAST_U is exact in float64.
LEAST_U = 2.0**-53
#: Pairs of normals made at a time, so that what they are made from stays in cache.
NOISE_PAIRS = 1 << 17
#: Normals that make one of :class:`SecureNoise`.
SUMMANDS = 4


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


class SeededGenerator:
    """An SFC64 generator of numpy that can save its state.

    Attributes:
        numpy: the generator.
    """

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self.numpy = np.random.Generator(np.random.SFC64(seed))

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON values."""
        state = self.numpy.bit_generator.state
        return {**state, "state": [int(word) for word in state["state"]["state"]]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        words = np.array(state["state"], dtype=np.uint64)
        self.numpy.bit_generator.state = {**state, "state": {"state": words}}


class Normals(Protocol):
    """Standard normal draws."""

    def standard_normal(self, like: Tensor) -> Tensor:
        """Independent N(0, 1) draws with the shape, dtype and device of ``like``."""
        ...


class NoiseSource(Normals, Stateful, Protocol):
    """Standard normal draws, never the same twice."""

    def bits(self, like: Tensor) -> "Bits":
        """What fresh draws are made from, for operations that are compiled."""
        ...


class SeededNoise(Derived):
    """Box and Muller's normals from the key stream of AES-256 in counter mode.

    A radius sqrt(-2 log u) and an angle make two normals. u has 53 bits, so that the normals end at
    8.57 standard deviations; torch's own, on the CPU in float32, end at 5.77, and its generator
    keeps 32 bits of a seed, so that 4 billion tries recover the noise.

    Args:
        seed: of the key stream.
    """

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._keys = KeyStream(seed)
        super().__init__(self._keys)
        self._workspace = _Workspace(0, torch.float32)

    def standard_normal(self, like: Tensor) -> Tensor:
        """Fresh independent N(0, 1) draws with the shape, dtype and device of ``like``."""
        if like.is_cuda:  # where the arithmetic costs nothing
            return self.bits(like).standard_normal(like).view(like.shape)
        pairs = (like.numel() + 1) // 2
        self._make_room(min(pairs, NOISE_PAIRS), like.dtype)
        normals = torch.empty(2 * pairs, dtype=like.dtype)
        for begin in range(0, pairs, NOISE_PAIRS):
            self._fill(normals[2 * begin : 2 * (begin + NOISE_PAIRS)])
        return normals[: like.numel()].view(like.shape)

    def bits(self, like: Tensor) -> "Bits":
        """What as many fresh draws are made from, all at once; overwritten by the next draw."""
        pairs = (like.numel() + 1) // 2
        self._make_room(pairs, like.dtype)
        self._advance(self._workspace, pairs)
        words, turns = self._workspace.words[:pairs], self._workspace.turns[:pairs]
        return Bits(words.to(like.device), turns.to(like.device))

    def _make_room(self, pairs: int, dtype: torch.dtype) -> None:
        if len(self._workspace.u) < pairs or self._workspace.radius.dtype != dtype:
            self._workspace = _Workspace(pairs, dtype)

    def _fill(self, out: Tensor) -> None:
        """Draws in place, shape (2 pairs,)."""
        pairs, work = len(out) // 2, self._workspace
        self._advance(work, pairs)
        u = work.u[:pairs].copy_(work.words[:pairs]).mul_(2.0**-64).add_(0.5 + LEAST_U)
        radius = work.radius[:pairs].copy_(u.log_()).mul_(-2).sqrt_()
        angle = work.angle[:pairs].copy_(work.turns[:pairs])
        angle.mul_(math.tau * 2.0 ** (-8 * work.turns.itemsize))
        torch.cos(angle, out=out[:pairs]).mul_(radius)
        torch.sin(angle, out=out[pairs:]).mul_(radius)

    def _advance(self, work: "_Workspace", pairs: int) -> None:
        """Fill in the next bytes of the key stream."""
        for part in (work.words, work.turns):
            self._keys.fill(part.numpy(), pairs)


class _Workspace:
    """Memory for a number of pairs of draws, kept because allocating it again is expensive."""

    def __init__(self, pairs: int, dtype: torch.dtype) -> None:
        turn = torch.int64 if dtype == torch.float64 else torch.int32
        self.words = torch.empty(pairs + SPARE // 8, dtype=torch.int64)
        self.turns = torch.empty(pairs + SPARE // turn.itemsize, dtype=turn)
        self.u = torch.empty(pairs, dtype=torch.float64)
        self.radius, self.angle = torch.empty(pairs, dtype=dtype), torch.empty(pairs, dtype=dtype)


@dataclass(frozen=True)
class Bits:
    """Random bits, and the normals that they make: the same as :class:`SeededNoise` makes at once.

    Attributes:
        words: for the radii, int64, shape (pairs,).
        turns: for the angles, int32 or int64, shape (pairs,).
    """

    words: Tensor
    turns: Tensor

    def standard_normal(self, like: Tensor) -> Tensor:
        """N(0, 1) draws with the shape and dtype of ``like``; written to be compiled."""
        u = self.words.double() * 2.0**-64 + (0.5 + LEAST_U)
        radius = (u.log().to(like.dtype) * -2).sqrt()
        angle = self.turns.to(like.dtype) * (math.tau * 2.0 ** (-8 * self.turns.itemsize))
        return torch.cat([angle.cos() * radius, angle.sin() * radius])[: like.numel()]


class SecureNoise(Derived):
    """Half the sum of four normals, each from a stretch of the key stream of its own, in float64.

    One normal gives away, by its last bits, what it was made from. A sum of four takes a search
    over all that three of them may be made from (Holohan and Braghin 2021, arXiv 2107.10138). The
    two normals of a pair are never in one sum: they go to different coordinates.

    Args:
        seed: of the key stream.
    """

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._source = SeededNoise(seed)
        super().__init__(self._source)

    def standard_normal(self, like: Tensor) -> Tensor:
        """Fresh independent N(0, 1) draws with the shape, dtype and device of ``like``."""
        wide = torch.empty_like(like, dtype=torch.float64)
        total = self._source.standard_normal(wide)
        for _ in range(SUMMANDS - 1):
            total.add_(self._source.standard_normal(wide))
        return total.mul_(SUMMANDS**-0.5).to(like.dtype)

    def bits(self, like: Tensor) -> Bits:
        """Refuses: compiled operations would make single normals of them. Raises ValueError."""
        raise ValueError("noise that is a sum of normals has no bits to compile")


def noise_source(seed: np.random.SeedSequence, secure: bool = False) -> NoiseSource:
    """The source of a run's noise, for any device."""
    return SecureNoise(seed) if secure else SeededNoise(seed)
