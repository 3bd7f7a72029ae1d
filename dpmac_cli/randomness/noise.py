"""Gaussian noise as a function of a key and the step.

Normals are computed by torch, on the CPU as on a GPU. Its logarithm, sine and cosine are vectorised
for every processor, use all threads, and return the same floats for any number of threads.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpmac_cli.randomness.keystream import KeyStream, Stretch, Unshared, rows_of

#: Smallest |u|, in (0, 1].
LEAST_U = 2.0**-64
#: Pairs of normals in a part of a draw. Each part has a key stream of its own.
PAIRS = 1 << 17
#: Number of parts that a GPU computes at a time; with fewer, launching operations takes longer.
PARTS_ON_DEVICE = 16
#: Width of the uniform numbers that secure noise adds to its normals.
DITHER = 2.0**-16


def box_muller(words: Tensor, turns: Tensor, out: Tensor) -> None:
    """Fill ``out`` with N(0, 1) draws, two from each radius sqrt(-2 log |u|) and angle.

    u is a multiple of 2^-64, so the normals are at most 9.42 standard deviations; torch's own, on
    the CPU in float32, are at most 5.77. The radius is computed in float64: in float32, radii below
    1 would be few, and who knows the rest of a sum could recognise them.

    Args:
        words: random bits of the radii, int64, shape (parts, pairs).
        turns: random bits of the angles, int32 for float32 and int64 for float64, same shape.
        out: draws, shape (parts, count), for 2 ``pairs`` or one less. The two normals of a pair are
            in different halves of a row.
    """
    pairs, rest = words.shape[1], out.shape[1] - words.shape[1]
    least = torch.full((), LEAST_U, dtype=torch.float64, device=words.device)
    u = torch.add(least, words.double(), alpha=2.0**-63)  # in [-1, 1], never 0
    radius = u.square_().log_().to(out.dtype).neg_().sqrt_()
    angle = turns.to(out.dtype).mul_(math.tau * 2.0 ** (-8 * turns.itemsize))
    torch.mul(angle.cos(), radius, out=out[:, :pairs])
    torch.mul(angle.sin_()[:, :rest], radius[:, :rest], out=out[:, pairs:])


class SeededNormals:
    """Normals from the key stream of a step. None is returned twice.

    Torch's generator uses only 32 bits of a seed, so 4 billion tries would recover its noise.
    """

    def __init__(self, keys: KeyStream, step: int, *, secure: bool) -> None:
        self._keys, self._step, self._secure, self._part = keys, step, secure, 0

    def standard_normal(self, like: Tensor, at_once: int | None = None) -> Tensor:
        """Return the next independent N(0, 1) draws; shape, dtype and device of ``like``.

        ``at_once`` is the number of parts to compute at a time, which does not change the draws;
        by default 1 on the CPU, where they then stay in its cache.
        """
        out = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        at_once = at_once or (1 if like.device.type == "cpu" else PARTS_ON_DEVICE)
        begin = 0
        while begin < len(out):
            count = min(2 * PAIRS, len(out) - begin)
            parts = min(at_once, (len(out) - begin) // count)
            self._fill(out[begin : begin + parts * count].view(parts, count))
            begin += parts * count
        return out.view(like.shape)

    def _fill(self, out: Tensor) -> None:
        """Fill ``out`` with the draws of the next parts, shape (parts, count)."""
        numbers = range(self._part, self._part + len(out))
        self._part += len(out)
        streams = [self._keys.at(self._step, number) for number in numbers]
        count, wide = out.shape[1], self._secure or out.dtype == torch.float64
        turn, pairs = np.int64 if wide else np.int32, (count + 1) // 2
        words, turns = (_words(streams, pairs, kind, out.device) for kind in (np.int64, turn))
        if not self._secure:
            return box_muller(words, turns, out)
        normals = torch.empty_like(out, dtype=torch.float64)
        box_muller(words, turns, normals)
        dither = _words(streams, count, np.int32, out.device).double()
        out.copy_(normals.add_(dither, alpha=DITHER * 2.0**-32))


def _words(streams: Sequence[Stretch], count: int, kind: Any, device: torch.device) -> Tensor:
    """Return the next words of each stream on a device, shape (streams, count)."""
    return torch.from_numpy(rows_of(streams, count, kind)).to(device, non_blocking=True)


class Noise(Unshared):
    """Standard normal draws, a function of the secret key, the step and the position in it.

    With ``secure``, each normal is a float64 number plus a uniform one of width :data:`DITHER`,
    which hides the last bits of the normal. That is post-processing of the normal: the privacy cost
    is the same.
    """

    def __init__(self, key: bytes, *, secure: bool = False) -> None:
        super().__init__()
        self._keys, self._secure, self._last = KeyStream(key), secure, -1

    def at(self, step: int) -> SeededNormals:
        """Return the draws of a step.

        Raises ValueError for this or an earlier step, and InputError in a fork of the process that
        created this object: noise must not be added to two sums.
        """
        self.check_process()
        if step <= self._last:
            raise ValueError(f"step {step} is not after step {self._last}: noise is used only once")
        self._last = step
        return SeededNormals(self._keys, step, secure=self._secure)
