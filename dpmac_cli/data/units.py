"""Units of privacy that hold several records each, such as persons."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """Units that records belong to.

    Attributes:
        order: records grouped by unit, each group in its original order; shape (records,).
        starts: index in ``order`` where each unit begins, and the end; shape (units + 1,).
    """

    order: Numbers
    starts: Numbers

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def owners(self) -> Numbers:
        """Index of each record's unit, shape (records,)."""
        owners = np.empty(len(self.order), np.int64)
        owners[self.order] = np.repeat(np.arange(len(self)), np.diff(self.starts))
        return owners

    def sha256(self) -> str:
        """Return a checksum of the assignment of records to units."""
        return hashlib.sha256(self.order.tobytes() + self.starts.tobytes()).hexdigest()

    def records(self, units: Numbers, words: NDArray[np.uint64], count: int) -> Numbers:
        """Return K = ``count`` records of each unit, shape (units, K).

        They are consecutive in the unit's order, cyclically, from a random start. Every record of
        the unit is equally likely, and none is repeated before all have been used.

        Args:
            units: indices of units.
            words: one uniform 64-bit word per unit, shape (units,).
        """
        sizes = self.starts[units + 1] - self.starts[units]
        first = (words % sizes.astype(np.uint64)).astype(np.int64)
        ring = (first[:, None] + np.arange(count)) % sizes[:, None]
        chosen: Numbers = self.order[self.starts[units][:, None] + ring]
        return chosen


def units_of(numbers: ArrayLike) -> Units:
    """Return units, given the number or name of each record's unit."""
    _, which = np.unique(np.asarray(numbers), return_inverse=True)
    # Keep the original order within a unit. An order that depended on other units would let one
    # of them change which records are drawn from this one.
    order = np.argsort(which, kind="stable")
    return Units(order, np.append(0, np.cumsum(np.bincount(which))))
