"""Randomness of a forward pass: augmented views, and layers such as dropout."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from dpmac_cli.randomness.keystream import KeyStream

#: Number of 32-bit words of torch's generator, mt19937, and where they begin in its saved state,
#: in bytes. Each takes eight.
MT_WORDS, MT_BEGIN = 624, 24


class LayerDraws:
    """Random draws of every forward pass, each a function of the secret key and the step.

    Dropout differs between ranks; augmented views do not.
    """

    def __init__(self, key: bytes, rank: int = 0) -> None:
        self._keys, self._rank = KeyStream(key), rank

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Seed torch's global generators for a step, and restore them afterwards.

        Layers draw in batch order: one record changes the draws of those after it. So the draws
        must be secret. A seed has only 32 bits on the CPU, so the whole state of the generator
        comes from the key; on GPUs a seed has 64.
        """
        stretch = self._keys.at(step, 1 + self._rank)
        with torch.random.fork_rng():
            torch.manual_seed(int(stretch.generate_state(1, np.uint64)[0]))
            state = torch.get_rng_state()
            words = stretch.generate_state(MT_WORDS, np.uint32).astype(np.int64)
            state[MT_BEGIN:].view(torch.int64)[:MT_WORDS] = torch.from_numpy(words)
            torch.set_rng_state(state)
            yield

    def words(self, step: int, records: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
        """Return random words, shape (records, K): a function of key, step and record number."""
        philox = np.random.Philox(key=self._keys.at(step).generate_state(2, np.uint64))
        state, words = philox.state, np.empty((len(records), count), np.uint64)
        for row, record in zip(words, records.tolist(), strict=True):
            state["state"]["counter"][1] = record  # each record has 2^64 blocks of four words
            philox.state = state
            row[:] = philox.random_raw(count)
        return words
