"""Who is in step t. The draws are secret: amplification by sampling holds only while they are."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.noise import generator_state, restore_generator

#: Indices of a step's records, increasing; shape (drawn,).
Batch = NDArray[np.int64]


class Sampler(Protocol):
    """Draws a batch a step."""

    def draw(self) -> Batch:
        """The next step's records."""
        ...

    def state(self) -> dict[str, Any]:
        """All it takes to go on, as JSON values, as secret as the draws."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        ...


class IndependentSampler:
    """Draws each step's batch afresh.

    Args:
        pick: a batch from a generator.
        seed: the sampler's own secret, never shared with the noise.
    """

    def __init__(
        self, pick: Callable[[np.random.Generator], Batch], seed: np.random.SeedSequence
    ) -> None:
        self._pick = pick
        self._generator = np.random.Generator(np.random.SFC64(seed))

    def draw(self) -> Batch:
        """The next step's records."""
        return self._pick(self._generator)

    def state(self) -> dict[str, Any]:
        """The generator's whole state."""
        return generator_state(self._generator)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        restore_generator(self._generator, state)


class EpochSampler:
    """Deals all records out to the batches of an epoch, and then again.

    Args:
        deal: the batch of each record in 0, 1, ... steps - 1, from a generator; shape (n,).
        steps: of an epoch.
        seed: the sampler's own secret, never shared with the noise.
    """

    def __init__(
        self,
        deal: Callable[[np.random.Generator], NDArray[np.int64]],
        steps: int,
        seed: np.random.SeedSequence,
    ) -> None:
        self._deal, self._steps = deal, steps
        self._generator = np.random.Generator(np.random.SFC64(seed))
        self._begin(0)

    def _begin(self, step: int) -> None:
        """Deal, and go to a step of the epoch."""
        self._before = generator_state(self._generator)
        self._dealt = self._deal(self._generator)
        self._step = step

    def draw(self) -> Batch:
        """The next step's records."""
        if self._step == self._steps:
            self._begin(0)
        self._step += 1
        return np.flatnonzero(self._dealt == self._step - 1)

    def state(self) -> dict[str, Any]:
        """The generator as it was before the epoch was dealt, and the step reached in it."""
        return {**self._before, "epoch_step": self._step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Deal the same epoch again, and go on in it."""
        generator = {name: value for name, value in state.items() if name != "epoch_step"}
        restore_generator(self._generator, generator)
        self._begin(state["epoch_step"])


def make_sampler(name: str, size: int, batch: int, seed: np.random.SeedSequence) -> Sampler:
    """A sampler as :data:`dpmac_cli.accounting.SAMPLERS` prices it.

    Args:
        name: a key of that table.
        size: n, the number of training records.
        batch: B, in [1, n]; the size that is drawn may differ, may be 0, and is private.
        seed: the sampler's own secret.
    """
    steps = math.ceil(size / batch)
    match name:
        case "poisson":
            # How many are drawn is binomial, and which, any so many alike: the same as asking every
            # record, at the cost of the batch instead of the data set.
            rate = batch / size
            return IndependentSampler(lambda g: _any(g, size, g.binomial(size, rate)), seed)
        case "fixed-size":
            return IndependentSampler(lambda g: _any(g, size, batch), seed)
        case "balls-in-bins":
            return EpochSampler(lambda g: g.integers(0, steps, size), steps, seed)
        case "shuffle":
            slots = np.arange(size) // batch
            return EpochSampler(lambda g: g.permutation(slots), steps, seed)
    raise ValueError(f"there is no sampler {name}")


def _any(generator: np.random.Generator, size: int, count: int) -> Batch:
    """So many different records, every choice as likely as any other."""
    return np.sort(generator.choice(size, count, replace=False, shuffle=False))
