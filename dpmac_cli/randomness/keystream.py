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
    """Base of objects with secret keys, which only the process that created them can use.

    They cannot be copied or pickled: InputError, because a copy would have the same keys. A fork of
    the process has a copy, so methods that draw begin with :meth:`check_process`.
    """

    __slots__ = ("_process",)

    def __init__(self) -> None:
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raise InputError in another process than the one that created this object: a fork."""
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
        count_layers: random layers of the network whose outputs a histogram counts.
        score_layers: random layers of the network whose outputs a covered score counts.
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
    count_layers: bytes = b""
    score_layers: bytes = b""
    base: int = 0


#: Names of the streams. A stream's index is part of its seed.
STREAMS = tuple(field.name for field in fields(Keys) if field.name != "base")


def make_keys(seed: int | None, base: int = 0, part: int = 0) -> Keys:
    """Return the secret keys of a run, or of a part of it: 32 bytes for each of :data:`STREAMS`.

    Args:
        seed: a number of at least 0, of which the keys are a function, for tests and studies of
            public data: who knows it knows the noise. None to draw them from the operating system.
        base: number of previous steps, which the result holds: see :class:`Keys`.
        part: number of the part, such as the session of a run that was resumed. Keys of one seed
            and different parts have nothing in common. Not used without a seed.

    Example:
        >>> make_keys(seed=1).noise == make_keys(seed=1).noise
        True
        >>> make_keys(seed=None).noise == make_keys(seed=None).noise
        False
    """
    keys = {}
    if seed is None:
        for name in STREAMS:
            keys[name] = secrets.token_bytes(KEY_BYTES)
        return Keys(base=base, **keys)
    for number, name in enumerate(STREAMS):
        sequence = np.random.SeedSequence(seed, spawn_key=(number, part))
        words = sequence.generate_state(4, np.uint64)
        keys[name] = words.astype("<u8").tobytes()
    return Keys(base=base, **keys)


def generator(key: bytes, step: int = 0) -> np.random.Generator:
    """Return a NumPy generator for draws of a step: SFC64, fast but not cryptographic.

    It is seeded by the key stream, so the same key and step give the same draws.

    Args:
        key: secret key, 32 bytes.
        step: number of the step, from 0.

    Raises:
        ValueError: the key has another length.

    Example:
        >>> generator(bytes(32), step=1).random() == generator(bytes(32), step=1).random()
        True
    """
    return KeyStream(key).at(step).generator()


class KeyStream:
    """Random bits of ChaCha20 (RFC 8439), a function of a secret key, a step and a lane.

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
        """Return the key stream of a lane of a step, from its beginning: the nonce is (step, lane).

        A second call with the same numbers returns the same bits again.

        Args:
            step: number of the step, from 0, below 2^64.
            lane: number of the stream within the step, from 0, below 2^32.

        Returns:
            2^32 blocks of 64 bytes, which are handed out in order.

        Raises:
            OverflowError: a number is out of range.
        """
        nonce = step.to_bytes(8, "little") + lane.to_bytes(4, "little")
        return Stretch(Cipher(ChaCha20(self.key, bytes(4) + nonce), None).encryptor())


class Stretch(ISeedSequence):
    """Key stream of a lane of a step, see :meth:`KeyStream.at`. No byte is returned twice.

    Args:
        cipher: encryptor whose encryption of zeros it is, of the package cryptography.
    """

    def __init__(self, cipher: Any) -> None:
        self._cipher = cipher

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Return the next random words: the interface of NumPy's seed sequences.

        Each call begins at a block of 64 bytes; what a call leaves of its last block is not used.

        Args:
            n_words: number of words.
            dtype: NumPy type of a word, such as ``np.uint64``.

        Returns:
            Words of that type, little-endian, shape (n_words,).
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
        """Return NumPy's SFC64, seeded by the next words; fast, but not cryptographic."""
        return np.random.Generator(np.random.SFC64(self))  # type: ignore[arg-type]
