"""ChaCha20 and the Box-Muller method in one kernel for CUDA devices: the draws of ``noise.py``.

A group is 16 pairs of normals. Its radii have two blocks of the key stream, its angles one or two,
and its dither one for each half. Words are those of :class:`dpmac_cli.randomness.keystream.Stretch`
bit for bit; logarithms, sines and cosines may differ from the CPU's in their last bits.

Functions under ``triton.jit`` are compiled for the device. Their tensors are those of one program,
which computes :data:`GROUPS` groups.
"""

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dpmac_cli.randomness.keystream import DITHER, LEAST_U

#: Pairs of normals in a group.
GROUP = tl.constexpr(16)
#: Groups that one program of the kernel computes.
GROUPS = tl.constexpr(64)
_LEAST = tl.constexpr(LEAST_U)
_DITHER = tl.constexpr(DITHER * 2.0**-32)
#: Angles of words, of 32 and of 64 bits, are multiples of these.
_TURN_32 = tl.constexpr(math.tau * 2.0**-32)
_TURN_64 = tl.constexpr(math.tau * 2.0**-64)


@triton.jit
def _quarter(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
) -> tl.tensor:
    """Return the quarter round of RFC 8439, section 2.1, of four words in uint32."""
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _block(
    seed: tl.tensor,
    lane: tl.tensor,
    counter: tl.tensor,
) -> tl.tensor:
    """Return words of blocks side by side, uint32, shape (16 blocks,): RFC 8439, section 2.3.

    Args:
        seed: pointer to the eight words of the key, the two of the step and the first lane.
        lane: number of the lane in its draw.
        counter: numbers of the blocks, uint32, shape (blocks,).
    """
    zero = counter ^ counter
    # The state of 4 x 4 words: constants, the key in two rows, and counter and nonce.
    a0 = zero + 0x61707865
    a1 = zero + 0x3320646E
    a2 = zero + 0x79622D32
    a3 = zero + 0x6B206574
    b0 = _at(seed, 0, zero)
    b1 = _at(seed, 1, zero)
    b2 = _at(seed, 2, zero)
    b3 = _at(seed, 3, zero)
    c0 = _at(seed, 4, zero)
    c1 = _at(seed, 5, zero)
    c2 = _at(seed, 6, zero)
    c3 = _at(seed, 7, zero)
    d0 = counter
    d1 = _at(seed, 8, zero)
    d2 = _at(seed, 9, zero)
    d3 = _at(seed, 10, zero) + lane
    e0, e1, e2, e3 = a0, a1, a2, a3
    f0, f1, f2, f3 = b0, b1, b2, b3
    g0, g1, g2, g3 = c0, c1, c2, c3
    h0, h1, h2, h3 = d0, d1, d2, d3
    for _ in range(10):
        e0, f0, g0, h0 = _quarter(e0, f0, g0, h0)
        e1, f1, g1, h1 = _quarter(e1, f1, g1, h1)
        e2, f2, g2, h2 = _quarter(e2, f2, g2, h2)
        e3, f3, g3, h3 = _quarter(e3, f3, g3, h3)
        e0, f1, g2, h3 = _quarter(e0, f1, g2, h3)
        e1, f2, g3, h0 = _quarter(e1, f2, g3, h0)
        e2, f3, g0, h1 = _quarter(e2, f3, g0, h1)
        e3, f0, g1, h2 = _quarter(e3, f0, g1, h2)
    w0 = _column(e0 + a0, f0 + b0, g0 + c0, h0 + d0)
    w1 = _column(e1 + a1, f1 + b1, g1 + c1, h1 + d1)
    w2 = _column(e2 + a2, f2 + b2, g2 + c2, h2 + d2)
    w3 = _column(e3 + a3, f3 + b3, g3 + c3, h3 + d3)
    even = tl.join(w0, w2)
    odd = tl.join(w1, w3)
    words = tl.join(even, odd)
    size: tl.constexpr = counter.shape[0] * 16
    return tl.reshape(words, (size,))


@triton.jit
def _at(
    seed: tl.tensor,
    place: tl.tensor,
    zero: tl.tensor,
) -> tl.tensor:
    """Return a word of a seed, uint32, as often as ``zero`` has elements."""
    stored = tl.load(seed + place)
    word = stored.to(tl.uint32, bitcast=True)
    return word + zero


@triton.jit
def _column(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
) -> tl.tensor:
    """Return a column of the 4 x 4 words of blocks; shape (blocks, 2, 2)."""
    even = tl.join(a, c)
    odd = tl.join(b, d)
    return tl.join(even, odd)


@triton.jit
def _wide(
    seed: tl.tensor,
    lane: tl.tensor,
    group: tl.tensor,
) -> tl.tensor:
    """Return the 64-bit words of groups, int64, shape (16 groups,), each from two 32-bit words."""
    groups: tl.constexpr = group.shape[0]
    pairs_of_blocks = tl.join(group * 2, group * 2 + 1)
    counter = tl.reshape(pairs_of_blocks, (groups * 2,))
    words_of_blocks = _block(seed, lane, counter)
    halves = tl.reshape(words_of_blocks, (groups * 16, 2))
    low, high = tl.split(halves)
    low_bits = low.to(tl.uint64)
    high_bits = high.to(tl.uint64) << 32
    words = low_bits | high_bits
    return words.to(tl.int64, bitcast=True)


@triton.jit
def _narrow(
    seed: tl.tensor,
    lane: tl.tensor,
    group: tl.tensor,
) -> tl.tensor:
    """Return the 32-bit words of groups, int32, shape (16 groups,)."""
    words = _block(seed, lane, group)
    return words.to(tl.int32, bitcast=True)


@triton.jit
def _fill(
    out: tl.tensor,
    seed: tl.tensor,
    n: tl.tensor,
    WIDE: tl.constexpr,
    SECURE: tl.constexpr,
) -> None:
    """Fill ``out``, whose pairs are its first half and its second.

    Args:
        out: pointer to n float32 or float64 numbers.
        seed: see :func:`_block`.
        n: number of normals.
        WIDE: whether to compute in float64.
        SECURE: whether to add dither.
    """
    pairs = (n + 1) // 2
    first_group = tl.program_id(0) * GROUPS
    group = (first_group + tl.arange(0, GROUPS)).to(tl.uint32)
    radius_words = _wide(seed, 0, group)
    u = radius_words.to(tl.float64) * (2 * _LEAST) + _LEAST
    squared = -tl.log(u * u)
    if WIDE:
        turns = _wide(seed, 1, group)
        angle = turns.to(tl.float64) * _TURN_64
        radius = tl.sqrt(squared)
    else:
        turns = _narrow(seed, 1, group)
        angle = turns.to(tl.float32) * _TURN_32
        radius = tl.sqrt_rn(squared.to(tl.float32))
    first = tl.cos(angle) * radius
    second = tl.sin(angle) * radius
    if SECURE:
        first_dither = _narrow(seed, 2, group)
        first += first_dither.to(tl.float64) * _DITHER
        second_dither = _narrow(seed, 3, group)
        second += second_dither.to(tl.float64) * _DITHER
    first_pair = tl.program_id(0) * GROUPS * GROUP
    pair = first_pair + tl.arange(0, GROUPS * GROUP)
    first = first.to(out.dtype.element_ty)
    tl.store(out + pair, first, mask=pair < pairs)
    second = second.to(out.dtype.element_ty)
    tl.store(out + pairs + pair, second, mask=pairs + pair < n)


def fill_normals(
    out: Tensor,
    key: bytes,
    step: int,
    lane: int,
    *,
    secure: bool = False,
) -> None:
    """Fill a tensor on a CUDA device with draws of N(0, 1), a function of key, step and lane.

    The same arguments give the same draws: call it once with each, see :class:`.Noise`.

    Args:
        out: the tensor, float32 or float64, contiguous, shape (n,).
        key: key of the stream, 32 bytes.
        step: number of the step, from 0, below 2^64.
        lane: number of the first key stream of the draw in its step; it reads up to four of them.
        secure: whether to compute in float64, and to add a uniform number of width
            :data:`.DITHER`: see :class:`.Noise`.
    """
    nonce = step.to_bytes(8, "little") + lane.to_bytes(4, "little")
    seed = np.frombuffer(key + nonce, np.int32)
    # As a tensor, because Triton writes whole numbers into the names of its cached files.
    words = torch.from_numpy(seed.copy())
    words = words.to(out.device, non_blocking=True)
    count = len(out)
    pairs = (count + 1) // 2
    pairs_of_program = GROUPS.value * GROUP.value
    programs = triton.cdiv(pairs, pairs_of_program)
    wide = secure or out.dtype == torch.float64
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        _fill[(programs,)](out, words, count, WIDE=wide, SECURE=secure)
