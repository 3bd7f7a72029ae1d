"""Gaussian noise that is a function of a key and the step."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpmac_cli.randomness.keystream import SPARE, KeyStream, Stretch

#: The least u, in (0, 1]; 0.5 + LEAST_U is exact in float64.
LEAST_U = 2.0**-53
#: Pairs of normals made at a time, so that what they are made from stays in cache.
NOISE_PAIRS = 1 << 17
#: Normals that make one of :class:`SecureNormals`.
SUMMANDS = 4


class Normals(Protocol):
    """Standard normal draws."""

    def standard_normal(self, like: Tensor) -> Tensor:
        """Return the next independent N(0, 1) draws; shape, dtype and device of ``like``."""
        ...


class Noise:
    """Standard normal draws, a function of the key, the step and the place within the step.

    Args:
        key: of the key stream; secret.
        secure: whether each draw is a sum of normals, see :class:`SecureNormals`.
    """

    def __init__(self, key: bytes, *, secure: bool = False) -> None:
        self._keys, self._secure = KeyStream(key), secure
        self._workspace = _Workspace(0, torch.float32)
        self._last = -1

    def at(self, step: int) -> "SeededNormals":
        """Return the draws of a step.

        Raises:
            ValueError: those of this or a later step were returned before. The same noise must not
                be added to two sums.
        """
        if step <= self._last:
            raise ValueError(f"the noise of step {step} follows that of step {self._last}")
        self._last = step
        kind = SecureNormals if self._secure else SeededNormals
        return kind(self._keys.at(step), self._workspace)


class _Workspace:
    """Memory for a number of pairs of draws, kept because allocating it again is expensive."""

    def __init__(self, pairs: int, dtype: torch.dtype) -> None:
        turn = torch.int64 if dtype == torch.float64 else torch.int32
        self.words = torch.empty(pairs + SPARE // 8, dtype=torch.int64)
        self.turns = torch.empty(pairs + SPARE // turn.itemsize, dtype=turn)
        self.u = torch.empty(pairs, dtype=torch.float64)
        self.radius, self.angle = torch.empty(pairs, dtype=dtype), torch.empty(pairs, dtype=dtype)

    def make_room(self, pairs: int, dtype: torch.dtype) -> None:
        """Allocate again, unless there is room for as many pairs of this type."""
        if len(self.u) < pairs or self.radius.dtype != dtype:
            self.__init__(pairs, dtype)  # type: ignore[misc]


class SeededNormals:
    """Box and Muller's normals from the key stream of a step, none of which is handed out twice.

    A radius sqrt(-2 log u) and an angle make two normals. u has 53 bits, so that the normals end at
    8.57 standard deviations; torch's own, on the CPU in float32, end at 5.77, and its generator
    keeps 32 bits of a seed, so that 4 billion tries recover the noise.

    Args:
        stretch: of the key stream.
        workspace: to make them in.
    """

    def __init__(self, stretch: Stretch, workspace: _Workspace) -> None:
        self._stretch, self._workspace = stretch, workspace

    def standard_normal(self, like: Tensor) -> Tensor:
        """Return the next independent N(0, 1) draws; shape, dtype and device of ``like``."""
        if like.is_cuda:  # where the arithmetic costs nothing
            return SeededNormals.bits(self, like).standard_normal(like).view(like.shape)
        pairs = (like.numel() + 1) // 2
        self._workspace.make_room(min(pairs, NOISE_PAIRS), like.dtype)
        normals = torch.empty(2 * pairs, dtype=like.dtype)
        for begin in range(0, pairs, NOISE_PAIRS):
            self._fill(normals[2 * begin : 2 * (begin + NOISE_PAIRS)])
        return normals[: like.numel()].view(like.shape)

    def bits(self, like: Tensor) -> "Bits":
        """Return what the next draws are made from, all at once; overwritten by the next call."""
        pairs = (like.numel() + 1) // 2
        self._workspace.make_room(pairs, like.dtype)
        self._advance(self._workspace, pairs)
        words, turns = self._workspace.words[:pairs], self._workspace.turns[:pairs]
        return Bits(words.to(like.device), turns.to(like.device))

    def _fill(self, out: Tensor) -> None:
        """Draw in place, shape (2 pairs,)."""
        pairs, work = len(out) // 2, self._workspace
        self._advance(work, pairs)
        u = work.u[:pairs].copy_(work.words[:pairs]).mul_(2.0**-64).add_(0.5 + LEAST_U)
        radius = work.radius[:pairs].copy_(u.log_()).mul_(-2).sqrt_()
        angle = work.angle[:pairs].copy_(work.turns[:pairs])
        angle.mul_(math.tau * 2.0 ** (-8 * work.turns.itemsize))
        torch.cos(angle, out=out[:pairs]).mul_(radius)
        torch.sin(angle, out=out[pairs:]).mul_(radius)

    def _advance(self, work: _Workspace, pairs: int) -> None:
        """Fill in the next bytes of the key stream."""
        for part in (work.words, work.turns):
            self._stretch.fill(part.numpy(), pairs)


@dataclass(frozen=True)
class Bits:
    """Random bits, and the normals that :class:`SeededNormals` makes of them.

    Attributes:
        words: for the radii, int64, shape (pairs,).
        turns: for the angles, int32 or int64, shape (pairs,).
    """

    words: Tensor
    turns: Tensor

    def standard_normal(self, like: Tensor) -> Tensor:
        """Return N(0, 1) draws with the shape and dtype of ``like``; written to be compiled."""
        u = self.words.double() * 2.0**-64 + (0.5 + LEAST_U)
        radius = (u.log().to(like.dtype) * -2).sqrt()
        angle = self.turns.to(like.dtype) * (math.tau * 2.0 ** (-8 * self.turns.itemsize))
        return torch.cat([angle.cos() * radius, angle.sin() * radius])[: like.numel()]


class SecureNormals(SeededNormals):
    """Half the sum of four normals, each from other key stream, in float64.

    One normal gives away, by its last bits, what it was made from. A sum of four takes a search
    over all that three of them may be made from (Holohan and Braghin 2021, arXiv 2107.10138). The
    two normals of a pair are never in one sum: they go to different coordinates.
    """

    def standard_normal(self, like: Tensor) -> Tensor:
        """Return the next independent N(0, 1) draws; shape, dtype and device of ``like``."""
        wide = torch.empty_like(like, dtype=torch.float64)
        total = super().standard_normal(wide)
        for _ in range(SUMMANDS - 1):
            total.add_(super().standard_normal(wide))
        return total.mul_(SUMMANDS**-0.5).to(like.dtype)

    def bits(self, like: Tensor) -> Bits:
        """Raise ValueError: compiled operations would make single normals of the bits."""
        raise ValueError("noise that is a sum of normals has no bits to compile")
