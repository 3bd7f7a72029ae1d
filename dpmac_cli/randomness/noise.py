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
    """Fill ``first`` and ``second`` with two independent N(0, 1) draws per pair of random words.

    The method is that of Box and Muller (1958). The draws are the radius sqrt(-2 log |u|) times the
    cosine and the sine of an angle; words give u, and turns the angle. u is a multiple
    of 2^-64, so the normals are at most 9.42 standard deviations; torch's own, on the CPU in
    float32, are at most 5.77. The radius is computed in float64: in float32, radii below 1 would be
    few, and who knows the rest of a sum could recognise them.

    Args:
        words: random bits of the radii, int64, shape (pairs,).
        turns: random bits of the angles, int32 for draws in float32 and int64 for float64, shape
            (pairs,).
        first: memory for the first draw of each pair, float32 or float64, shape (pairs,).
        second: memory for the second draws, of the same dtype, shape (pairs,) or (pairs - 1,): the
            last pair may have one draw.
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
    """Return integers as float64 numbers, rounded to the nearest, in new memory.

    By NumPy on the CPU, which takes half as long as torch.

    Args:
        words: integers of any dtype and shape.
    """
    if words.is_cuda:
        return words.double()
    numbers = words.numpy().astype(np.float64)
    return torch.from_numpy(numbers)


def circle_(angle: Tensor, cosines: Tensor) -> Tensor:
    """Write the cosines of angles to ``cosines``, and return their sines.

    On the CPU, NumPy takes half the time of torch: in float32, and with AVX-512 in float64, where
    its only fast function of angles is the tangent. With t = tan(x / 2), the cosine is
    (1 - t^2) / (1 + t^2) and the sine 2 t / (1 + t^2), within 3e-16.

    Args:
        angle: angles in radians, float32 or float64, of any shape. Overwritten by the sines.
        cosines: memory for the cosines, in the shape and type of ``angle``.

    Returns:
        The sines: ``angle`` itself.

    Example:
        >>> cosines = torch.empty(2)
        >>> sines = circle_(torch.tensor([0.0, math.pi / 2]), cosines)
        >>> cosines.round(), sines
        (tensor([1., -0.]), tensor([0., 1.]))
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
    """Replace numbers by their square roots, rounded to the nearest; return the same tensor.

    Args:
        numbers: at least 0, float32 or float64. Overwritten.
    """
    if numbers.is_cuda:
        return numbers.sqrt_()
    np.sqrt(numbers.numpy(), out=numbers.numpy())
    return numbers


def _has_avx512() -> bool:
    """Return whether torch uses AVX-512, as NumPy then does."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def logarithm_(numbers: Tensor) -> Tensor:
    """Replace numbers by their natural logarithms, and return the same tensor.

    Args:
        numbers: above 0, float64. Overwritten.
    """
    if numbers.is_cuda or not _has_avx512():
        return numbers.log_()
    np.log(numbers.numpy(), out=numbers.numpy())
    return numbers


class SeededNormals:
    """Source of the normal draws of one step, from :meth:`Noise.at`. None is returned twice.

    They come from key streams of ChaCha20, :data:`LANES` per call: torch's generator uses only 32
    bits of a seed, so 4 billion tries would recover its noise.

    Args:
        keys: key stream of the noise.
        step: number of the step. Two objects with the same keys and step draw the same.
        secure: whether to compute in float64, and to add a uniform number: see :class:`Noise`.
    """

    def __init__(self, keys: KeyStream, step: int, *, secure: bool) -> None:
        self._keys = keys
        self._step = step
        self._secure = secure
        self._lane = 0  # first key stream of the next draw

    def standard_normal(self, like: Tensor) -> Tensor:
        """Return the next independent N(0, 1) draws of the step, in a new tensor.

        Each call returns other draws; in the same order, calls in two runs return the same ones.

        Args:
            like: a tensor with the shape, dtype (float32 or float64) and device of the result. Its
                values are not read.
        """
        out = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        lane = self._lane
        self._lane = self._lane + LANES
        fill = kernel() if out.is_cuda else None
        if fill:
            fill(out, self._keys.key, self._step, lane, secure=self._secure)
        else:
            wide = self._secure or like.dtype == torch.float64
            turn = np.int64 if wide else np.int32
            self._fill(out, lane, turn)
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
            piece = slice(begin, begin + PAIRS)
            first = first_half[piece]
            second = second_half[piece]
            radii = words(0, len(first), np.int64)
            turns = words(1, len(first), turn)
            if not self._secure:
                box_muller(radii, turns, first, second)
                continue
            first_normals = _float64_like(first)
            second_normals = _float64_like(second)
            box_muller(radii, turns, first_normals, second_normals)
            for number, place, normals in (
                (2, first, first_normals),
                (3, second, second_normals),
            ):
                dither = words(number, len(place), np.int32)  # multiples of 2^-32 of the width
                normals.add_(dither, alpha=DITHER * 2.0**-32)
                place.copy_(normals)


def _float64_like(place: Tensor) -> Tensor:
    """Return memory for float64 numbers: that of the place itself, if it has their type."""
    is_wide = place.dtype == torch.float64
    return place if is_wide else torch.empty_like(place, dtype=torch.float64)


@cache
def kernel() -> Callable[..., None] | None:
    """Return the function that fills tensors on CUDA devices with draws; None if it cannot run.

    It is :func:`dpmac_cli.randomness.kernel.fill_normals`, which needs Triton and a C compiler. It
    is tried once in a process, on the first CUDA device; if that fails, one warning tells why.
    """
    try:
        from dpmac_cli.randomness.kernel import fill_normals  # noqa: PLC0415  (needs Triton)

        fill_normals(torch.empty(2, device="cuda"), bytes(KEY_BYTES), 0, 0)
    except Exception as error:  # noqa: BLE001  (Triton and compilers raise many kinds)
        warnings.warn(f"{SLOW_NOISE} ({type(error).__name__}: {error})", stacklevel=2)
        return None
    return fill_normals


class Noise(Unshared):
    """Gaussian noise of a run: N(0, 1) draws, a function of the secret key and the step.

    With ``secure``, each normal is a float64 number plus a uniform one of width :data:`DITHER`,
    which hides the last bits of the normal. That is post-processing of the normal: the privacy cost
    is the same.

    Args:
        key: secret key of the noise, 32 bytes.
        secure: whether to compute in float64 and to add the uniform number.

    Raises:
        InputError: in copies and pickles of it, and in a fork: see :class:`.Unshared`.

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
        """Return the source of a step's draws, once: a second call for the step fails.

        Args:
            step: number of the step, from 0, above that of all calls before. Steps may be left out.

        Raises:
            ValueError: the draws of this or a later step were returned before: the same noise must
                not be added to two sums.
            InputError: this is a fork of the process that created this object.
        """
        self.check_process()
        if step <= self._last:
            raise ValueError(f"step {step} is not after step {self._last}: noise is used only once")
        self._last = step
        return SeededNormals(self._keys, step, secure=self._secure)
