"""Units of privacy that hold several records each, such as persons."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """Which records belong to which unit.

    Attributes:
        order: records, those of one unit next to each other, as they come; shape (records,).
        starts: place in ``order`` where each unit begins, and its end; shape (units + 1,).
    """

    order: Numbers
    starts: Numbers

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sha256(self) -> str:
        """Return a checksum of which record belongs to which unit."""
        return hashlib.sha256(self.order.tobytes() + self.starts.tobytes()).hexdigest()

    def records(self, units: Numbers, words: NDArray[np.uint64], count: int) -> Numbers:
        """Return K = ``count`` records of each unit, shape (units, K).

        They are next to each other in the unit's order, as on a ring, from a random place on: each
        of its records equally often, and none twice before all are there.

        Args:
            units: numbers of units.
            words: a uniform 64-bit word of each, shape (units,).
        """
        sizes = self.starts[units + 1] - self.starts[units]
        first = (words % sizes.astype(np.uint64)).astype(np.int64)
        ring = (first[:, None] + np.arange(count)) % sizes[:, None]
        chosen: Numbers = self.order[self.starts[units][:, None] + ring]
        return chosen


def units_of(numbers: ArrayLike) -> Units:
    """Return the units of records, from the number or name of the unit of each."""
    _, which = np.unique(np.asarray(numbers), return_inverse=True)
    # Within a unit as they come: an order that depended on other units would let one of them
    # change what is drawn of this one.
    order = np.argsort(which, kind="stable")
    return Units(order, np.append(0, np.cumsum(np.bincount(which))))
