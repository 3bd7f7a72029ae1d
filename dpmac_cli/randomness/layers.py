"""Randomness of a forward pass: augmented views, and layers such as dropout.

Networks draw from the global generators of torch, NumPy and Python. In a step, these are seeded by
a secret key, and restored afterwards, so that a step is repeatable and the program around it sees
none of it.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from dpmac_cli.randomness.keystream import KeyStream

#: Number of 32-bit words of torch's generator, mt19937, and where they begin in its saved state,
#: in bytes. Each takes eight.
MT_WORDS, MT_BEGIN = 624, 24


@cache
def devices() -> tuple[int, ...]:
    """Return the accelerators that have a generator. Asking torch takes a twentieth of a ms."""
    if not torch.accelerator.is_available():
        return ()
    count = torch.accelerator.device_count()
    return tuple(range(count))


@contextmanager
def forked(on: Sequence[int] | None = None) -> Iterator[None]:
    """Restore the global generators of torch, NumPy and Python at the end of the block.

    Args:
        on: accelerators whose generators are restored, too; None for all.

    Example:
        >>> with forked():
        ...     seed_all(0)
        ...     first = torch.rand(1)
        >>> with forked():
        ...     seed_all(0)
        ...     again = torch.rand(1)
        >>> first == again
        tensor([True])
    """
    numpy = np.random.get_state()
    python = random.getstate()
    accelerators = devices() if on is None else on
    try:
        with torch.random.fork_rng(devices=accelerators):
            yield
    finally:
        np.random.set_state(numpy)
        random.setstate(python)


def _seed_torch(seed: int, on: Sequence[int]) -> None:
    """Seed the global generators of torch with 64 bits.

    Without accelerators, torch.manual_seed takes 0.4 ms, in which it notes for each kind of them
    who called; it never forgets these notes.
    """
    if on:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_all(seed: int, on: Sequence[int] | None = None) -> None:
    """Seed the global generators of torch, NumPy and Python.

    Args:
        seed: 64 bits.
        on: accelerators whose generators are seeded, too; None for all.
    """
    _seed_torch(seed, devices() if on is None else on)
    np.random.seed([seed % 2**32, seed >> 32])
    random.seed(seed)


class LayerDraws:
    """Random draws of every forward pass, each a function of the secret key and the step.

    Dropout differs between ranks; augmented views do not.

    Args:
        key: secret key of the layers, 32 bytes.
        rank: number of this process among those of a run.
    """

    def __init__(self, key: bytes, rank: int = 0) -> None:
        self._keys = KeyStream(key)
        self._rank = rank

    @contextmanager
    def of(self, step: int, on: Sequence[int] | None = None) -> Iterator[None]:
        """Seed the global generators for a step, and restore them at the end of the block.

        Layers draw in batch order: one record changes the draws of those after it. So the draws
        must be secret. A seed has only 32 bits on the CPU, so the whole state of the generator
        comes from the key; on GPUs a seed has 64. NumPy's and Python's generators are seeded, too,
        because a resumed step must repeat all draws of a network.

        Args:
            step: t, from 1.
            on: accelerators whose generators are seeded, too; None for all.
        """
        stretch = self._keys.at(step, 1 + self._rank)
        on = devices() if on is None else on
        with forked(on):
            _seed_torch(int(stretch.generate_state(1, np.uint64)[0]), on)
            state = torch.get_rng_state()
            words = stretch.generate_state(MT_WORDS, np.uint32).astype(np.int64)
            state[MT_BEGIN:].view(torch.int64)[:MT_WORDS] = torch.from_numpy(words)
            torch.set_rng_state(state)
            np.random.seed(stretch.generate_state(8, np.uint32))
            random.seed(stretch.generate_state(4, np.uint64).tobytes())
            yield

    def words(self, step: int, records: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
        """Return random words for records, a function of key, step and record number.

        A record's words do not depend on the others of its batch.

        Args:
            step: t, from 1.
            records: numbers of the records, shape (records,).
            count: number K of words per record.

        Returns:
            Shape (records, K).
        """
        philox = np.random.Philox(key=self._keys.at(step).generate_state(2, np.uint64))
        state = philox.state
        words = np.empty((len(records), count), np.uint64)
        for row, record in zip(words, records.tolist(), strict=True):
            state["state"]["counter"][1] = record  # each record has 2^64 blocks of four words
            philox.state = state
            row[:] = philox.random_raw(count)
        return words
