"""Secret keys of a run, and random bits as a function of a key and the step."""

import os
import secrets
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from dpmac_cli.errors import InputError

#: Bytes of a key, and of a block of the key stream.
KEY_BYTES, BLOCK_BYTES = 32, 64
#: Smallest |u| of the radii of normals, in (0, 1].
LEAST_U = 2.0**-64
#: Width of the uniform numbers that secure noise adds to its normals.
DITHER = 2.0**-16
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
    counts: bytes = b""  # noise of histograms
    counted: bytes = b""  # records that histograms count
    ranges: bytes = b""  # noise of counts before training
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
    """Key stream of ChaCha20, RFC 8439. Raises ValueError unless the key has 32 bytes."""

    def __init__(self, key: bytes) -> None:
        ChaCha20(key, bytes(16))  # raises ValueError
        self.key = key

    def at(self, step: int, lane: int = 0) -> "Stretch":
        """Return the key stream of a lane of a step, 2^32 blocks: the nonce is (step, lane)."""
        nonce = step.to_bytes(8, "little") + lane.to_bytes(4, "little")
        return Stretch(Cipher(ChaCha20(self.key, bytes(4) + nonce), None).encryptor())


class Stretch(ISeedSequence):
    """Key stream of a lane of a step. No byte is returned twice."""

    def __init__(self, cipher: Any) -> None:
        self._cipher = cipher

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Return the next words, in whole blocks: the interface of numpy's seed sequences."""
        size = n_words * np.dtype(dtype).itemsize
        words = np.empty(-(-size // BLOCK_BYTES) * BLOCK_BYTES, np.uint8)
        for begin in range(0, len(words), len(_ZEROS)):
            zeros = memoryview(_ZEROS)[: len(words) - begin]
            self._cipher.update_into(zeros, words[begin:].data)
        drawn: NDArray[Any] = words[:size].view(dtype)
        return drawn

    def generator(self) -> np.random.Generator:
        """Return numpy's SFC64, seeded by the next words."""
        return np.random.Generator(np.random.SFC64(self))  # type: ignore[arg-type]
