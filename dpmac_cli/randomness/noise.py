"""Gaussian noise as a function of a key and the step."""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.randomness.keystream import KeyStream, Stretch

#: Smallest u, in (0, 1]; 0.5 + LEAST_U is exact in float64.
LEAST_U = 2.0**-53
#: Pairs of normals in a part of a draw. Each has a key stream of its own and stays in cache.
PAIRS = 1 << 15
#: Parts from which on threads draw them. For fewer they do not pay beside torch's own threads.
MANY_PARTS = 64
#: Number of normals per draw of secure noise.
SUMMANDS = 4


def box_muller(stretch: Stretch, out: NDArray[Any]) -> None:
    """Fill ``out`` with N(0, 1) draws, two from each radius sqrt(-2 log u) and angle.

    u has 53 bits, so the normals are at most 8.57 standard deviations; torch's own, on the CPU in
    float32, are at most 5.77. The two normals of a pair are in different halves of ``out``.
    """
    wide, pairs = out.dtype == np.float64, (len(out) + 1) // 2
    u = stretch.generate_state(pairs, np.int64).astype(np.float64)
    u *= 2.0**-64
    u += 0.5 + LEAST_U
    radius = np.log(u, out=u).astype(out.dtype, copy=False)
    radius *= -2
    np.sqrt(radius, out=radius)
    turns = stretch.generate_state(pairs, np.int64 if wide else np.int32)
    angle = turns.astype(out.dtype)
    angle *= out.dtype.type((math.pi if wide else math.tau) * 2.0 ** (-8 * turns.itemsize))
    first, second = out[:pairs], out[pairs:]
    if wide:  # numpy's sine and cosine are slow in float64; its tangent, of half the angle, is fast
        tan = np.tan(angle, out=angle)
        both = tan * tan
        both += 1
        np.divide(2 * radius, both, out=both)  # radius (1 + cos)
        np.subtract(both, radius, out=first)
        np.multiply(both[: len(second)], tan[: len(second)], out=second)
    else:
        np.multiply(np.cos(angle), radius, out=first)
        np.multiply(np.sin(angle)[: len(second)], radius[: len(second)], out=second)


def secure_normals(stretch: Stretch, out: NDArray[Any]) -> None:
    """Fill ``out`` with half the sum of four normals each, in float64.

    The low bits of a single normal reveal its inputs; for a sum, that needs a search over three of
    the normals (Holohan and Braghin 2021, arXiv 2107.10138). The two normals of a pair are never
    in one sum, but in different coordinates.
    """
    total, normals = np.zeros(len(out)), np.empty(len(out))
    for _ in range(SUMMANDS):
        box_muller(stretch, normals)
        total += normals
    np.multiply(total, SUMMANDS**-0.5, out=out, casting="same_kind")


def pairs_on_device(
    streams: Sequence[Stretch], pairs: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the draws of :func:`box_muller` from each stream, computed on a device.

    Only the words of the key streams are copied: 6 bytes per normal in float32, 8 in float64.

    Returns:
        2 ``pairs`` normals per stream, flat, in the order of :func:`box_muller`.
    """
    turn = np.int64 if dtype == torch.float64 else np.int32
    words, turns = (_words(streams, pairs, kind, device) for kind in (np.int64, turn))
    u = words.double().mul_(2.0**-64).add_(0.5 + LEAST_U)
    radius = u.log_().to(dtype).mul_(-2).sqrt_()
    angle = turns.to(dtype).mul_(math.tau * 2.0 ** (-8 * turns.itemsize))
    return torch.stack([angle.cos().mul_(radius), angle.sin().mul_(radius)], 1).flatten()


def _words(streams: Sequence[Stretch], count: int, kind: Any, device: torch.device) -> Tensor:
    """Return the next words of each stream on a device, shape (streams, count)."""
    words = np.empty((len(streams), count), kind)
    for row, stream in zip(words, streams, strict=True):
        row[:] = stream.generate_state(count, kind)
    return torch.from_numpy(words).to(device, non_blocking=True)


class SeededNormals:
    """Normals from the key stream of a step. None is returned twice.

    Torch's generator uses only 32 bits of a seed, so 4 billion tries would recover its noise.
    """

    def __init__(self, keys: KeyStream, step: int, *, secure: bool) -> None:
        self._keys, self._step = keys, step
        self._fill = secure_normals if secure else box_muller
        self._part = 0

    def standard_normal(self, like: Tensor) -> Tensor:
        """Return the next independent N(0, 1) draws; shape, dtype and device of ``like``."""
        if like.device.type != "cpu":
            return self.on_device(like)
        drawn = np.empty(like.numel(), np.float64 if like.dtype == torch.float64 else np.float32)
        parts = [drawn[begin : begin + 2 * PAIRS] for begin in range(0, len(drawn), 2 * PAIRS)]
        numbers = range(self._part, self._part + len(parts))
        self._part += len(parts)
        apply = _threads().map if len(parts) >= MANY_PARTS else map
        list(apply(self._draw, numbers, parts))
        return torch.from_numpy(drawn).view(like.shape)

    def on_device(self, like: Tensor) -> Tensor:
        """Return the draws of :meth:`standard_normal`, computed on the device of ``like``.

        They equal those of the CPU up to the rounding of logarithm, sine and cosine.
        """
        out = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        whole, left = divmod(len(out), 2 * PAIRS)
        groups = [(min(MANY_PARTS, whole - at), PAIRS) for at in range(0, whole, MANY_PARTS)]
        if left:
            groups.append((1, (left + 1) // 2))
        begin = 0
        for parts, pairs in groups:  # one after another, so that their temporaries stay small
            drawn = self._group(parts, pairs, like)[: len(out) - begin]
            out[begin : begin + len(drawn)] = drawn
            begin += len(drawn)
        return out.view(like.shape)

    def _group(self, parts: int, pairs: int, like: Tensor) -> Tensor:
        """Return the normals of the next parts, of ``pairs`` pairs each."""
        numbers = range(self._part, self._part + parts)
        self._part += parts
        streams = [self._keys.at(self._step, number) for number in numbers]
        if self._fill is box_muller:
            return pairs_on_device(streams, pairs, like.dtype, like.device)
        total = pairs_on_device(streams, pairs, torch.float64, like.device)
        for _ in range(SUMMANDS - 1):
            total += pairs_on_device(streams, pairs, torch.float64, like.device)
        return total.mul_(SUMMANDS**-0.5)

    def _draw(self, part: int, out: NDArray[Any]) -> None:
        self._fill(self._keys.at(self._step, part), out)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "noise")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a fork has none of the threads


class Noise:
    """Standard normal draws, a function of the secret key, the step and the position in it."""

    def __init__(self, key: bytes, *, secure: bool = False) -> None:
        self._keys, self._secure, self._last = KeyStream(key), secure, -1

    def at(self, step: int) -> SeededNormals:
        """Return the draws of a step.

        Raises ValueError for this or an earlier step: noise must not be added to two sums.
        """
        if step <= self._last:
            raise ValueError(f"step {step} is not after step {self._last}: noise is used only once")
        self._last = step
        return SeededNormals(self._keys, step, secure=self._secure)
