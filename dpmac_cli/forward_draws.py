"""What a forward pass draws: views of images, and layers such as dropout.

It tells nothing of the records, but a run must repeat it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class LayerDraws:
    """Seeds torch's global generators for each step, and gives them back as they were.

    Args:
        seed: of the run's layers.
        rank: of this process among those of the run, which see other records.
    """

    def __init__(self, seed: np.random.SeedSequence, rank: int = 0) -> None:
        self._rank = rank
        self._base = int(seed.generate_state(1, np.uint64)[0])

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """The draws of a step; the same for the same run and step."""
        key = [self._base, step] + [self._rank] * (self._rank > 0)
        word = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
        with torch.random.fork_rng():
            torch.manual_seed(int(word))
            yield

    def state(self) -> dict[str, Any]:
        """What all draws come from, as JSON values."""
        return {"base": self._base}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Draw as a saved run would."""
        self._base = int(state["base"])
