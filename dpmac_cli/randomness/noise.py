"""Gaussian noise as a function of a key and the step."""

import math

import numpy as np
import torch
from torch import Tensor

from dpmac_cli.randomness.keystream import KeyStream, Stretch

#: Smallest u, in (0, 1]; 0.5 + LEAST_U is exact in float64.
LEAST_U = 2.0**-53
#: Pairs of normals to generate at a time on the CPU, to stay in cache.
NOISE_PAIRS = 1 << 17
#: Number of normals per draw of :class:`SecureNormals`.
SUMMANDS = 4


def box_muller(words: Tensor, turns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return two N(0, 1) draws from each radius sqrt(-2 log u) and angle, shape (2 pairs,).

    u has 53 bits, so the normals are at most 8.57 standard deviations; torch's own, on the CPU in
    float32, are at most 5.77.

    ``words``, for the radii, are int64, and ``turns``, for the angles, int32 or int64, (pairs,).
    """
    radius = words.double().mul_(2.0**-64).add_(0.5 + LEAST_U).log_().to(dtype).mul_(-2).sqrt_()
    angle = turns.to(dtype).mul_(math.tau * 2.0 ** (-8 * turns.itemsize))
    return torch.cat([angle.cos().mul_(radius), angle.sin().mul_(radius)])


class SeededNormals:
    """Normals from the key stream of a step. None is returned twice.

    Torch's generator uses only 32 bits of a seed, so 4 billion tries would recover its noise.
    """

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch

    def standard_normal(self, like: Tensor) -> Tensor:
        """Return the next independent N(0, 1) draws; shape, dtype and device of ``like``."""
        whole = like.new_empty(like.numel())
        size = len(whole) or 1 if like.is_cuda else 2 * NOISE_PAIRS
        for part in torch.split(whole, size):
            part.copy_(box_muller(*self._bits(part), part.dtype)[: len(part)])
        return whole.view(like.shape)

    def _bits(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the words and the turns of the next draws."""
        pairs = (like.numel() + 1) // 2
        turn = np.int64 if like.dtype == torch.float64 else np.int32
        drawn = (self._stretch.generate_state(pairs, kind) for kind in (np.int64, turn))
        words, turns = (torch.from_numpy(x).to(like.device, non_blocking=True) for x in drawn)
        return words, turns


class SecureNormals(SeededNormals):
    """Half the sum of four normals from different parts of the key stream, in float64.

    The low bits of a single normal reveal its inputs; for a sum, that needs a search over three of
    the normals (Holohan and Braghin 2021, arXiv 2107.10138). The two normals of a pair are never
    in one sum, but in different coordinates.
    """

    def standard_normal(self, like: Tensor) -> Tensor:
        """Return the next independent N(0, 1) draws; shape, dtype and device of ``like``."""
        wide = torch.empty_like(like, dtype=torch.float64)
        total = super().standard_normal(wide)
        for _ in range(SUMMANDS - 1):
            total.add_(super().standard_normal(wide))
        return total.mul_(SUMMANDS**-0.5).to(like.dtype)


class Noise:
    """Standard normal draws, a function of the secret key, the step and the position in it."""

    def __init__(self, key: bytes, *, secure: bool = False) -> None:
        self._keys, self._last = KeyStream(key), -1
        self._kind = SecureNormals if secure else SeededNormals

    def at(self, step: int) -> SeededNormals:
        """Return the draws of a step.

        Raises ValueError for this or an earlier step: noise must not be added to two sums.
        """
        if step <= self._last:
            raise ValueError(f"step {step} is not after step {self._last}: noise is used only once")
        self._last = step
        return self._kind(self._keys.at(step))
