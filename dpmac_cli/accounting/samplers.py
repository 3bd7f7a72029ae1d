"""Ways to draw batches, and the adjacency that each is priced under."""

from collections.abc import Mapping
from dataclasses import dataclass

ADD_OR_REMOVE, ZERO_OUT, REPLACE = "add-or-remove-one", "zero-out", "replace-one"
#: What each adjacency compares, in plain words.
NEIGHBOURS: Mapping[str, str] = {
    ADD_OR_REMOVE: "Leaving out or adding any one training record",
    ZERO_OUT: "Replacing any one training record by a blank that takes its place in every batch",
    REPLACE: "Replacing any one training record by any other",
}


@dataclass(frozen=True)
class Sampling:
    """A way to draw batches, and how it is priced.

    Attributes:
        adjacency: under which its privacy cost holds. Costs under different ones do not compare.
        summary: one line for help.
        done: what its steps are called.
        accountants: that support it, the default first.
        once_an_epoch: whether a record is in one batch of each epoch. A batch's sum is then all
            that an epoch says of it: one Gaussian, with no amplification.
        sensitivity: how far one change between neighbours moves the sum of a batch, in clipping
            norms.
    """

    adjacency: str
    summary: str
    done: str
    accountants: tuple[str, ...] = ("pld", "rdp")
    once_an_epoch: bool = False
    sensitivity: float = 1


SAMPLERS: Mapping[str, Sampling] = {
    "poisson": Sampling(
        ADD_OR_REMOVE,
        "each record is in each step independently with probability B/n",
        "Poisson-sampled",
    ),
    "balls-in-bins": Sampling(
        ADD_OR_REMOVE,
        "each record goes to one of an epoch's batches, independently",
        "balls-in-bins",
        once_an_epoch=True,
    ),
    # Taking out a record would shift the others to other batches: fixed slots need zero-out.
    "shuffle": Sampling(
        ZERO_OUT,
        "each epoch deals all records out in random order",
        "shuffled",
        once_an_epoch=True,
    ),
    # Replacing one sample by another moves the sum by 2.
    "fixed-size": Sampling(
        REPLACE,
        "each step takes B different records",
        "fixed-size",
        accountants=("rdp",),
        sensitivity=2,
    ),
}
