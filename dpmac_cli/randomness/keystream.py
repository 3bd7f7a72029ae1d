"""Secret keys of a run, and random bits as a function of a key and the step."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from dpmac_cli.errors import InputError

KEY_BYTES, AES_BLOCK = 32, 16
#: Message for a copy of a training.
NOT_COPIED = (
    "A private training, and its noise, cannot be copied or pickled: both copies would add the "
    "same noise to two sums, whose difference has none. Create another one, which draws noise of "
    "its own. To save a PrivateStep, use its state_dict()."
)
#: Message for a training in a copy of its process.
FORKED = (
    "This private training was created in another process, of which this one is a copy: both would "
    "add the same noise to two sums, whose difference has none. Create it in the process that "
    "takes its steps."
)
#: What the cipher encrypts: the key stream is its encryption of zeros.
_ZEROS = bytes(1 << 20)
#: Key stream blocks per step, and per part of it, as powers of two. None is in two of them.
STEP_BITS, PART_BITS = 64, 20


class Unshared:
    """Object with secret keys, which only the process that created it can use.

    It cannot be copied or pickled, because a copy has the same keys.
    """

    __slots__ = ("_process",)

    def __init__(self) -> None:
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raise InputError in another process, such as a fork."""
        if os.getpid() != self._process:
            raise InputError(FORKED)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Raise InputError: copies and pickles are made by this method."""
        raise InputError(NOT_COPIED)


@dataclass(frozen=True, kw_only=True, repr=False)
class Keys:
    """Secret keys of a run, or of a part of it: 256 bits per stream of random numbers.

    The random numbers of one stream reveal nothing about those of another. A stream without a key
    (b"") cannot be used. They are never written to disk: a resumed run draws new ones.
    """

    init: bytes = b""  # initial parameters, which no record changes; not secret
    sampler: bytes = b""  # batches
    noise: bytes = b""  # Gaussian noise
    canaries: bytes = b""  # contents of canaries
    coins: bytes = b""  # whether each canary is in the dataset
    layers: bytes = b""  # augmented views and dropout
    scores: bytes = b""  # noise of covered scores
    base: int = 0  # previous steps, from which the epochs of a sampler are counted


#: Names of the streams. A stream's index is part of its seed.
STREAMS = tuple(field.name for field in fields(Keys) if field.name != "base")


def make_keys(seed: int | None, base: int = 0, part: int = 0) -> Keys:
    """Return new keys: from the seed or, for None, from the operating system's random bits.

    Keys of different parts have nothing in common, even for one seed: session k of a run has the
    keys of (seed, k).
    """
    if seed is None:
        return Keys(base=base, **{name: secrets.token_bytes(KEY_BYTES) for name in STREAMS})
    sequences = (np.random.SeedSequence(seed, spawn_key=(i, part)) for i in range(len(STREAMS)))
    words = [each.generate_state(4, np.uint64).astype("<u8") for each in sequences]
    return Keys(base=base, **{n: w.tobytes() for n, w in zip(STREAMS, words, strict=True)})


def generator(key: bytes, step: int = 0) -> np.random.Generator:
    """Return numpy's SFC64, fast but not cryptographic, seeded by the key stream of a step."""
    return KeyStream(key).at(step).generator()


class KeyStream:
    """Key stream of AES-256 in counter mode. Raises ValueError unless the key has 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AES256(key)

    def at(self, step: int, part: int = 0) -> "Stretch":
        """Return the key stream of a step, from the first block of a part of it."""
        counter = ((step << STEP_BITS) + (part << PART_BITS)).to_bytes(AES_BLOCK, "big")
        return Stretch(Cipher(self._cipher, CTR(counter)).encryptor())


class Stretch(ISeedSequence):
    """Key stream of one step. No byte is returned twice."""

    def __init__(self, cipher: Any) -> None:
        self._cipher = cipher

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Return the next words, in whole blocks: the interface of numpy's seed sequences."""
        words: NDArray[Any] = rows_of([self], n_words, dtype)[0]
        return words

    def fill(self, out: NDArray[np.uint8], size: int) -> None:
        """Write the next ``size`` bytes, whole blocks, to an array with room for one more block."""
        for begin in range(0, size, len(_ZEROS)):
            zeros = memoryview(_ZEROS)[: size - begin]
            self._cipher.update_into(zeros, out[begin:].data)

    def generator(self) -> np.random.Generator:
        """Return numpy's SFC64, seeded by the next words."""
        return np.random.Generator(np.random.SFC64(self))  # type: ignore[arg-type]


def rows_of(stretches: Sequence[Stretch], count: int, dtype: Any) -> NDArray[Any]:
    """Return the next words of each key stream, in whole blocks; shape (stretches, count)."""
    size = -(-count * np.dtype(dtype).itemsize // AES_BLOCK) * AES_BLOCK
    rows = np.empty((len(stretches), size + AES_BLOCK), np.uint8)
    for row, stretch in zip(rows, stretches, strict=True):
        stretch.fill(row, size)
    words: NDArray[Any] = rows[:, :size].view(dtype)[:, :count]
    return words
