"""Gaussian noise as a function of a key, the step and the number of the draw in it.

z_t of line 9 of Algorithm 1. Normals come from random words of ChaCha20 by the method of Box and
Muller (1958): two of them from the radius and the angle of a point in the plane.

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
    minus_two_log = logarithm_(u.square_()).to(first.dtype).neg_()
    radius = root_(minus_two_log)
    angle = in_float64(turns) if first.dtype == torch.float64 else turns.to(first.dtype)
    angle.mul_(math.tau * 2.0 ** (-8 * turns.itemsize))
    sines = circle_(angle, first)
    first.mul_(radius)
    count = len(second)
    torch.mul(sines[:count], radius[:count], out=second)


def in_float64(words: Tensor) -> Tensor:
    """Return integers in float64. NumPy takes half as long as torch on the CPU."""
    if words.is_cuda:
        return words.double()
    numbers = words.numpy().astype(np.float64)
    return torch.from_numpy(numbers)


def circle_(angle: Tensor, cosines: Tensor) -> Tensor:
    """Write the cosines of angles to ``cosines``; replace the angles by their sines.

    On the CPU, NumPy takes half the time of torch: in float32, and with AVX-512 in float64, where
    its only fast function of angles is the tangent. With t = tan(x / 2), the cosine is
    (1 - t^2) / (1 + t^2) and the sine 2 t / (1 + t^2), within 3e-16.

    Args:
        angle: angles in radians, float32 or float64, which become sines.
        cosines: result, in the shape and type of ``angle``.

    Returns:
        The sines, in the memory of ``angle`` where that is possible.
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
    """Return whether torch uses AVX-512, as NumPy then does."""
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

    Args:
        keys: key stream of the noise.
        step: number of the step.
        secure: whether to compute in float64, and to add a uniform number: see :class:`Noise`.
    """

    def __init__(self, keys: KeyStream, step: int, *, secure: bool) -> None:
        self._keys = keys
        self._step = step
        self._secure = secure
        self._lane = 0  # first key stream of the next draw

    def standard_normal(self, like: Tensor) -> Tensor:
        """Return the next independent N(0, 1) draws.

        Args:
            like: a tensor with the shape, dtype and device of the result.
        """
        out = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        lane = self._lane
        self._lane = self._lane + LANES
        fill = kernel() if out.is_cuda else None
        if fill:
            fill(out, self._keys.key, self._step, lane, secure=self._secure)
        else:
            wide = self._secure or like.dtype == torch.float64
            self._fill(out, lane, np.int64 if wide else np.int32)
        return out.view(like.shape)

    def _fill(self, out: Tensor, lane: int, turn: Any) -> None:
        """Fill a tensor with draws.

        Args:
            out: shape (n,). Its pairs are its first half and its second, the latter perhaps less.
            lane: first key stream of the draw.
            turn: type of the words of angles.
        """
        used = LANES if self._secure else LANES - 2  # others have no dither
        lanes = [self._keys.at(self._step, lane + number) for number in range(used)]
        first_half, second_half = out.tensor_split([(len(out) + 1) // 2])

        def words(number: int, count: int, kind: Any) -> Tensor:
            state = lanes[number].generate_state(count, kind)
            return torch.from_numpy(state).to(out.device, non_blocking=True)

        for begin in range(0, len(first_half), PAIRS):
            places = first_half[begin : begin + PAIRS], second_half[begin : begin + PAIRS]
            pairs = len(places[0])
            drawn = words(0, pairs, np.int64), words(1, pairs, turn)
            if not self._secure:
                box_muller(*drawn, *places)
                continue
            normals = _float64_like(places[0]), _float64_like(places[1])
            box_muller(*drawn, *normals)
            for number, (place, normal) in enumerate(zip(places, normals, strict=True), 2):
                dither = words(number, len(place), np.int32)  # multiples of 2^-32 of the width
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

    Args:
        key: secret key of the noise, 32 bytes.
        secure: see above.

    Example:
        >>> noise = Noise(bytes(32))  # in practice, secrets.token_bytes(32)
        >>> z = noise.at(1).standard_normal(torch.empty(3))
        >>> z.shape
        torch.Size([3])
    """

    def __init__(self, key: bytes, *, secure: bool = False) -> None:
        super().__init__()
        self._keys = KeyStream(key)
        self._secure = secure
        self._last = -1  # the last step whose noise was handed out

    def at(self, step: int) -> SeededNormals:
        """Return the draws of a step, once.

        Args:
            step: number of the step, above that of all calls before.

        Raises:
            ValueError: the noise of this or a later step was returned before: noise must not be
                added to two sums.
            InputError: this is a fork of the process that created this object.
        """
        self.check_process()
        if step <= self._last:
            raise ValueError(f"step {step} is not after step {self._last}: noise is used only once")
        self._last = step
        return SeededNormals(self._keys, step, secure=self._secure)
