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


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A way to draw batches, and how it is priced.

    Attributes:
        adjacency: under which its privacy cost holds. Costs under different ones do not compare.
        summary: one line for help.
        done: what its steps are called.
        accountants: that support it, the default first.
        once_an_epoch: whether a record is in one batch of each epoch, which is then priced as one
            Gaussian mechanism without amplification.
        sensitivity: distance that the sum of a batch moves between neighbours, in clipping norms.
    """

    adjacency: str
    summary: str
    done: str
    accountants: tuple[str, ...] = ("pld", "rdp")
    once_an_epoch: bool = False
    sensitivity: float = 1


SAMPLERS: Mapping[str, Sampling] = {
    "poisson": Sampling(
        adjacency=ADD_OR_REMOVE,
        summary="each record is in each step independently with probability B/n",
        done="Poisson-sampled",
    ),
    "balls-in-bins": Sampling(
        adjacency=ADD_OR_REMOVE,
        summary="each record goes to one of an epoch's batches, independently",
        done="balls-in-bins",
        once_an_epoch=True,
    ),
    # Removing a record would move the others to other batches: fixed slots need zero-out.
    "shuffle": Sampling(
        adjacency=ZERO_OUT,
        summary="each epoch deals all records out in random order",
        done="shuffled",
        once_an_epoch=True,
    ),
    # Replacing one sample by another moves the sum by 2.
    "fixed-size": Sampling(
        adjacency=REPLACE,
        summary="each step takes B different records",
        done="fixed-size",
        accountants=("rdp",),
        sensitivity=2,
    ),
}
