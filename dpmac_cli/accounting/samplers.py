"""Ways to draw batches, and the adjacency that both are priced under."""

from collections.abc import Mapping
from dataclasses import dataclass

#: Adjacency of every privacy cost: neighbours differ by one record.
ADJACENCY = "add-or-remove-one"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A way to draw batches, and how it is priced.

    Attributes:
        summary: one line for help.
        done: what its steps are called.
        once_an_epoch: whether a record is in exactly one batch of each epoch. An epoch that has
            begun is then priced as a whole.
    """

    summary: str
    done: str
    once_an_epoch: bool = False


SAMPLERS: Mapping[str, Sampling] = {
    "poisson": Sampling(
        summary="each record is in each step independently with probability B/n",
        done="Poisson-sampled",
    ),
    "random-allocation": Sampling(
        summary="each record goes to one of an epoch's batches, independently",
        done="randomly allocated",
        once_an_epoch=True,
    ),
}

#: Earlier names, which are still read.
ALIASES: Mapping[str, str] = {"balls-in-bins": "random-allocation"}
