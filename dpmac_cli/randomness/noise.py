"""Gaussian noise as a function of a key, the step and the number of the draw in it.

On the CPU, logarithm, sine, cosine and roots are those of NumPy where it takes at most two thirds
of the time of torch on one thread, and otherwise those of torch, which use all threads. Both are
vectorised and return the same floats for any number of threads. On a CUDA device one kernel
computes the key stream and the normals; where it cannot be built, the key stream is copied there.
"""

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpmac_cli.randomness.keystream import DITHER, KEY_BYTES, LEAST_U, KeyStream, Unshared

#: Pairs of normals that are computed at a time: those of a block of coordinates (BLOCK of
#: dp/clipping/layers.py), which stay in the cache of a processor.
PAIRS = 1 << 18
#: Key streams of a draw: words of its radii, of its angles, and of the dither of the first normal
#: and of the second normal of each pair.
LANES = 4
#: Warning where the kernel cannot be built.
SLOW_NOISE = (
    "Noise is computed by the processor and copied to the GPU, which is slower and draws the same. "
    "Install triton and a C compiler to compute it there."
)


def box_muller(words: Tensor, turns: Tensor, first: Tensor, second: Tensor) -> None:
    """Fill ``first`` and ``second`` with the two N(0, 1) draws of each pair.

    They are the radius sqrt(-2 log |u|) times the cosine and the sine of an angle. u is a multiple
    of 2^-64, so the normals are at most 9.42 standard deviations; torch's own, on the CPU in
    float32, are at most 5.77. The radius is computed in float64: in float32, radii below 1 would be
    few, and who knows the rest of a sum could recognise them.

    Args:
        words: random bits of the radii, int64, shape (pairs,).
        turns: random bits of the angles, int32 for float32 and int64 for float64, same shape.
        first: draws, shape (pairs,).
        second: draws, same shape or one less.
    """
    least = torch.full((), LEAST_U, dtype=torch.float64, device=words.device)
    u = in_float64(words)
    torch.add(least, u, alpha=2.0**-63, out=u)  # in [-1, 1], never 0
    radius = root_(logarithm_(u.square_()).to(first.dtype).neg_())
    angle = in_float64(turns) if first.dtype == torch.float64 else turns.to(first.dtype)
    angle.mul_(math.tau * 2.0 ** (-8 * turns.itemsize))
    sines = circle_(angle, first)
    first.mul_(radius)
    rest = len(second)
    torch.mul(sines[:rest], radius[:rest], out=second)


def in_float64(words: Tensor) -> Tensor:
    """Return integers in float64. NumPy takes half as long as torch on the CPU."""
    return words.double() if words.is_cuda else torch.from_numpy(words.numpy().astype(np.float64))


def circle_(angle: Tensor, cosines: Tensor) -> Tensor:
    """Write the cosines of angles to ``cosines``; replace the angles by their sines.

    On the CPU, NumPy takes half the time of torch: in float32, and with AVX-512 in float64, where
    its only fast function of angles is the tangent. With t = tan(x / 2), the cosine is
    (1 - t^2) / (1 + t^2) and the sine 2 t / (1 + t^2), within 3e-16.
    """
    is_wide = angle.dtype == torch.float64
    if angle.is_cuda or (is_wide and not _has_avx512()):
        torch.cos(angle, out=cosines)
        return angle.sin_()
    if not is_wide:
        np.cos(angle.numpy(), out=cosines.numpy())
        np.sin(angle.numpy(), out=angle.numpy())
        return angle
    t = angle.mul_(0.5)
    np.tan(t.numpy(), out=t.numpy())
    torch.square(t, out=cosines)
    share = (cosines + 1).reciprocal_()
    cosines.neg_().add_(1).mul_(share)
    return t.mul_(share).mul_(2)


def root_(numbers: Tensor) -> Tensor:
    """Replace numbers of at least 0 by their square roots, which are rounded to the nearest."""
    if numbers.is_cuda:
        return numbers.sqrt_()
    np.sqrt(numbers.numpy(), out=numbers.numpy())
    return numbers


def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def logarithm_(numbers: Tensor) -> Tensor:
    """Replace positive numbers, float64, by their logarithms."""
    if numbers.is_cuda or not _has_avx512():
        return numbers.log_()
    np.log(numbers.numpy(), out=numbers.numpy())
    return numbers


class SeededNormals:
    """Normals from the key streams of a step. None is returned twice.

    Torch's generator uses only 32 bits of a seed, so 4 billion tries would recover its noise.
    """

    def __init__(self, keys: KeyStream, step: int, *, secure: bool) -> None:
        self._keys, self._step, self._secure, self._lane = keys, step, secure, 0

    def standard_normal(self, like: Tensor) -> Tensor:
        """Return the next independent N(0, 1) draws; shape, dtype and device of ``like``."""
        wide = self._secure or like.dtype == torch.float64
        out = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        lane, self._lane = self._lane, self._lane + LANES
        fill = kernel() if out.is_cuda else None
        if fill:
            fill(out, self._keys.key, self._step, lane, secure=self._secure)
        else:
            self._fill(out, lane, np.int64 if wide else np.int32)
        return out.view(like.shape)

    def _fill(self, out: Tensor, lane: int, turn: Any) -> None:
        """Fill ``out``, whose pairs are its first half and its second, the latter perhaps less."""
        used = LANES if self._secure else LANES - 2  # others have no dither
        lanes = [self._keys.at(self._step, lane + number) for number in range(used)]
        halves = out.tensor_split([(len(out) + 1) // 2])

        def words(number: int, count: int, kind: Any) -> Tensor:
            drawn = torch.from_numpy(lanes[number].generate_state(count, kind))
            return drawn.to(out.device, non_blocking=True)

        for begin in range(0, len(halves[0]), PAIRS):
            places = [half[begin : begin + PAIRS] for half in halves]
            drawn = words(0, len(places[0]), np.int64), words(1, len(places[0]), turn)
            if not self._secure:
                box_muller(*drawn, *places)
                continue
            normals = [_float64_like(place) for place in places]
            box_muller(*drawn, *normals)
            for number, (place, normal) in enumerate(zip(places, normals, strict=True), 2):
                dither = words(number, len(place), np.int32)
                place.copy_(normal.add_(dither, alpha=DITHER * 2.0**-32))


def _float64_like(place: Tensor) -> Tensor:
    """Return memory for float64 numbers: that of the place itself, if it has their type."""
    is_wide = place.dtype == torch.float64
    return place if is_wide else torch.empty_like(place, dtype=torch.float64)


@cache
def kernel() -> Callable[..., None] | None:
    """Return the kernel of CUDA devices; None where Triton or a C compiler for it is missing."""
    try:
        from dpmac_cli.randomness.kernel import fill_normals  # noqa: PLC0415  (needs Triton)

        fill_normals(torch.empty(2, device="cuda"), bytes(KEY_BYTES), 0, 0)
    except Exception as error:  # noqa: BLE001  (Triton and compilers raise many kinds)
        warnings.warn(f"{SLOW_NOISE} ({type(error).__name__}: {error})", stacklevel=2)
        return None
    return fill_normals


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
