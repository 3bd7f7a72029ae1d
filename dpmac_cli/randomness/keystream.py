"""Secret keys of a run, and random bits as a function of a key and the step.

Every random number of a run is a function of a secret key of 256 bits, a step, and a position in
the key stream of ChaCha20 (RFC 8439) at this step. So no bits are used twice, a step can be drawn
again after it failed, and the noise of a run cannot be found by trying seeds.
"""

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
        """Raise InputError in another process than the one that created this, such as a fork."""
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

    Attributes:
        init: initial parameters, which no record changes; not secret.
        sampler: batches, line 3 of Algorithm 1.
        noise: Gaussian noise, line 9.
        canaries: contents of canaries.
        coins: whether each canary is in the dataset.
        layers: augmented views and dropout.
        scores: noise of covered scores.
        counts: noise of histograms.
        counted: records that histograms count.
        ranges: noise of counts before training.
        base: previous steps, from which the epochs of a sampler are counted.
    """

    init: bytes = b""
    sampler: bytes = b""
    noise: bytes = b""
    canaries: bytes = b""
    coins: bytes = b""
    layers: bytes = b""
    scores: bytes = b""
    counts: bytes = b""
    counted: bytes = b""
    ranges: bytes = b""
    base: int = 0


#: Names of the streams. A stream's index is part of its seed.
STREAMS = tuple(field.name for field in fields(Keys) if field.name != "base")


def make_keys(seed: int | None, base: int = 0, part: int = 0) -> Keys:
    """Return new keys: from the seed or, for None, from the operating system's random bits.

    Keys of different parts have nothing in common, even for one seed: session k of a run has the
    keys of (seed, k).

    Args:
        seed: seed, for tests and studies of public data. Who knows it knows the noise.
        base: previous steps, see :class:`Keys`.
        part: number of the part, such as the session of a run.

    Example:
        >>> make_keys(seed=1).noise == make_keys(seed=1).noise
        True
        >>> make_keys(seed=None).noise == make_keys(seed=None).noise
        False
    """
    if seed is None:
        return Keys(base=base, **{name: secrets.token_bytes(KEY_BYTES) for name in STREAMS})
    keys = {}
    for number, name in enumerate(STREAMS):
        sequence = np.random.SeedSequence(seed, spawn_key=(number, part))
        words = sequence.generate_state(4, np.uint64)
        keys[name] = words.astype("<u8").tobytes()
    return Keys(base=base, **keys)


def generator(key: bytes, step: int = 0) -> np.random.Generator:
    """Return numpy's SFC64, fast but not cryptographic, seeded by the key stream of a step.

    Args:
        key: secret key, 32 bytes.
        step: number of the step.
    """
    return KeyStream(key).at(step).generator()


class KeyStream:
    """Key stream of ChaCha20, RFC 8439.

    Args:
        key: secret key, 32 bytes.

    Raises:
        ValueError: the key has another length.

    Example:
        >>> stream = KeyStream(bytes(32))
        >>> first = stream.at(step=1).generate_state(2)
        >>> bool((first == stream.at(step=1).generate_state(2)).all())
        True
        >>> bool((first == stream.at(step=2).generate_state(2)).any())
        False
    """

    def __init__(self, key: bytes) -> None:
        ChaCha20(key, bytes(16))  # raises ValueError
        self.key = key

    def at(self, step: int, lane: int = 0) -> "Stretch":
        """Return the key stream of a lane of a step, 2^32 blocks: the nonce is (step, lane).

        Args:
            step: number of the step, below 2^64.
            lane: number of the stream within the step, below 2^32.
        """
        nonce = step.to_bytes(8, "little") + lane.to_bytes(4, "little")
        return Stretch(Cipher(ChaCha20(self.key, bytes(4) + nonce), None).encryptor())


class Stretch(ISeedSequence):
    """Key stream of a lane of a step. No byte is returned twice."""

    def __init__(self, cipher: Any) -> None:
        self._cipher = cipher

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Return the next words, in whole blocks: the interface of numpy's seed sequences.

        Args:
            n_words: number of words.
            dtype: type of a word.

        Returns:
            Shape (n_words,). What is left of the last block is not used.
        """
        size = n_words * np.dtype(dtype).itemsize
        blocks = -(-size // BLOCK_BYTES)  # rounded up
        words = np.empty(blocks * BLOCK_BYTES, np.uint8)
        for begin in range(0, len(words), len(_ZEROS)):
            zeros = memoryview(_ZEROS)[: len(words) - begin]
            self._cipher.update_into(zeros, words[begin:].data)
        drawn: NDArray[Any] = words[:size].view(dtype)
        return drawn

    def generator(self) -> np.random.Generator:
        """Return numpy's SFC64, seeded by the next words."""
        return np.random.Generator(np.random.SFC64(self))  # type: ignore[arg-type]
