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
    """Return the numbers of the accelerators, which have a generator each; () without any.

    They are asked for once in a process: asking torch takes a twentieth of a millisecond.
    """
    if not torch.accelerator.is_available():
        return ()
    count = torch.accelerator.device_count()
    return tuple(range(count))


@contextmanager
def forked(on: Sequence[int] | None = None) -> Iterator[None]:
    """Restore the global generators of torch, NumPy and Python at the end of a ``with`` block.

    Inside, they begin in the state that they are in; :func:`seed_all` seeds them.

    Args:
        on: numbers of the accelerators whose generators are restored, too; None for all.

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
        seed: a number from 0, below 2^64.
        on: numbers of the accelerators whose generators are seeded, too; None for all.
    """
    accelerators = devices() if on is None else on
    _seed_torch(seed, accelerators)
    low_word = seed % 2**32
    high_word = seed >> 32
    np.random.seed([low_word, high_word])
    random.seed(seed)


class LayerDraws:
    """Random draws of a network's forward passes, and of augmented views, by key and step.

    A step that is repeated draws the same again. Processes of one run have the same key: dropout
    (:meth:`of`) differs between their ranks, words of augmented views (:meth:`words`) do not.

    Args:
        key: secret key of the layers, 32 bytes.
        rank: number of this process among those of a run, from 0.

    Example:
        >>> draws = LayerDraws(bytes(32))  # in practice, secrets.token_bytes(32)
        >>> with draws.of(step=1):
        ...     first = torch.rand(1)
        >>> with draws.of(step=1):
        ...     again = torch.rand(1)
        >>> first == again
        tensor([True])
    """

    def __init__(self, key: bytes, rank: int = 0) -> None:
        self._keys = KeyStream(key)
        self._rank = rank

    @contextmanager
    def of(self, step: int, on: Sequence[int] | None = None) -> Iterator[None]:
        """Seed the global generators for a step, and restore them at the end of a ``with`` block.

        Layers draw in batch order: one record changes the draws of those after it. So the draws
        must be secret. A seed has only 32 bits on the CPU, so the whole state of the generator
        comes from the key; on GPUs a seed has 64. NumPy's and Python's generators are seeded, too,
        because a resumed step must repeat all draws of a network.

        Args:
            step: t, from 1.
            on: numbers of the accelerators whose generators are seeded, too; None for all.
        """
        stretch = self._keys.at(step, 1 + self._rank)
        accelerators = devices() if on is None else on
        with forked(accelerators):
            [seed] = stretch.generate_state(1, np.uint64)
            _seed_torch(int(seed), accelerators)
            state = torch.get_rng_state()
            words_of_state = state[MT_BEGIN:].view(torch.int64)
            words = stretch.generate_state(MT_WORDS, np.uint32)
            words_of_state[:MT_WORDS] = torch.from_numpy(words.astype(np.int64))
            torch.set_rng_state(state)
            np.random.seed(stretch.generate_state(8, np.uint32))
            words_of_python = stretch.generate_state(4, np.uint64)
            random.seed(words_of_python.tobytes())
            yield

    def words(self, step: int, records: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
        """Return 64-bit random words for each record, such as for its augmented views.

        They are a function of the key, the step and the record's number, so a record's words do not
        depend on the others of its batch.

        Args:
            step: t, from 1.
            records: numbers of the records in the dataset, int64, shape (records,).
            count: number K of words per record.

        Returns:
            Words, uint64, shape (records, K).
        """
        key_of_step = self._keys.at(step).generate_state(2, np.uint64)
        philox = np.random.Philox(key=key_of_step)
        state = philox.state
        words = np.empty((len(records), count), np.uint64)
        for row, record in zip(words, records.tolist(), strict=True):
            state["state"]["counter"][1] = record  # each record has 2^64 blocks of four words
            philox.state = state
            row[:] = philox.random_raw(count)
        return words
