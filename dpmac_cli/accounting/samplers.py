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
        once_an_epoch: whether a record is in one batch of each epoch, which is then priced as one
            Gaussian mechanism without amplification.
    """

    summary: str
    done: str
    once_an_epoch: bool = False


SAMPLERS: Mapping[str, Sampling] = {
    "poisson": Sampling(
        summary="each record is in each step independently with probability B/n",
        done="Poisson-sampled",
    ),
    "balls-in-bins": Sampling(
        summary="each record goes to one of an epoch's batches, independently",
        done="balls-in-bins",
        once_an_epoch=True,
    ),
}
