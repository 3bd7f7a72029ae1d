"""Randomness of a forward pass: augmented views, and layers such as dropout."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class LayerDraws:
    """Randomness of every forward pass of a branch, which a resumed run repeats.

    Args:
        seed: of the branch; secret.
        rank: of this process. Dropout differs between ranks; augmented views do not.
    """

    def __init__(self, seed: np.random.SeedSequence, rank: int = 0) -> None:
        self._rank = rank
        self._base = int(seed.generate_state(1, np.uint64)[0])

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Seed torch's global generators for a step, and restore them afterwards.

        Layers draw in the order of the batch: one record changes the draws of those behind it.
        """
        key = [self._base, step] + [self._rank] * (self._rank > 0)
        word = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
        with torch.random.fork_rng():
            torch.manual_seed(int(word))
            yield

    def words(self, step: int, records: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
        """Return random words for records, shape (records, K).

        Each row is a function of the seed, the step and the record's index in the training set.
        """
        philox = np.random.Philox(key=np.array([self._base, step], np.uint64))
        state, words = philox.state, np.empty((len(records), count), np.uint64)
        for row, record in zip(words, records.tolist(), strict=True):
            state["state"]["counter"][1] = record  # each has 2^64 blocks of four words
            philox.state = state
            row[:] = philox.random_raw(count)
        return words

    def state(self) -> dict[str, Any]:
        """Return the seed as JSON values; secret."""
        return {"base": self._base}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the seed of a saved run."""
        self._base = int(state["base"])
