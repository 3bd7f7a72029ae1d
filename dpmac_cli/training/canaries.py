"""Canaries: records that an audit adds to the data and then looks for in what is released.

Each is in the data set or not by a secret coin, and guessing the coins tells how much the training
gives away (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846). :mod:`dpmac_cli.runs.audit` turns
guesses into a lower bound on epsilon. Scores are computed from what is released alone.
"""

import math

import numpy as np
import torch
from torch import Tensor

from dpmac_cli.dp.clipping.clipped_sum import ClippedSum
from dpmac_cli.dp.clipping.norms import Metric
from dpmac_cli.dp.mechanism import Ellipsoid, PrivateMean
from dpmac_cli.errors import ModelError
from dpmac_cli.randomness.keystream import Keys, generator
from dpmac_cli.randomness.sampling import Batch

#: The reach of every other canary's gradient; that of the clipping is 1.
FAR = 100.0
#: The median of |z| for a standard normal z.
MEDIAN = 0.6744897501960817
#: Below, the noise that is seen counts as this, so that scores stay finite.
LEAST_NOISE = 1e-6


class Canaries:
    """The K = ``count`` records from n = ``first`` on, whose gradients are along one coordinate.

    Each canary has a coordinate of its own, with a sign for each step. The sign is public and drawn
    again in every step, so that what the other records add at the coordinate, much the same from
    step to step, averages out of the score; a canary's own part does not. Heights are in the scale
    of the ellipsoid, b_j (1 + ||m/b||): that high, a gradient ends about at the bound wherever the
    centre is. Every other one ends :data:`FAR` times as far, where clipping that is left out shows.

    Attributes:
        coins: which are in the data set, bool, shape (K,). Secret while training.
        scores: the higher, the likelier is it that a canary is in; float64, shape (K,).

    ``parameters``, ``rate`` and ``batch`` are d, q and B; ``inputs`` of each canary are drawn in a
    step, like the records of a unit of privacy; ``keys`` are those of coins and signs. Raises
    ModelError if there are fewer coordinates than canaries.
    """

    def __init__(
        self,
        *,
        parameters: int,
        rate: float,
        batch: float,
        first: int,
        count: int,
        inputs: int,
        keys: Keys,
        device: torch.device,
    ) -> None:
        if count > parameters:
            raise ModelError(
                f"--canaries {count:,}: the model has {parameters:,} parameters, and each canary "
                "takes one of its own. Choose fewer canaries or a larger model."
            )
        self._first, self._key = first, keys.canaries
        coins = generator(keys.coins).integers(0, 2, count)
        self.coins = torch.from_numpy(coins.astype(np.bool_)).to(device)
        self.scores = torch.zeros(count, dtype=torch.float64, device=device)
        chosen = np.sort(generator(self._key).choice(parameters, count, replace=False))
        self._rate, self._batch, self._inputs = rate, batch, inputs
        self._coordinates = torch.from_numpy(chosen).to(device)
        self._reach = torch.ones_like(self.scores)
        self._reach[::2] = FAR
        self._added, self._seen = torch.zeros_like(self.scores), torch.zeros_like(self.scores)
        self._met = np.empty(0, np.int64)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name. The coins are secret."""
        return {
            "canary_coins": self.coins,
            "canary_scores": self.scores,
            "canary_coordinates": self._coordinates,
        }

    def records(self, drawn: Batch) -> Batch:
        """Return the records of a draw; the canaries are for :meth:`add`."""
        # Leaving out what is not in leaves every other record its own probability.
        canaries = drawn[drawn >= self._first] - self._first
        self._met = canaries[self.coins.cpu().numpy()[canaries]]
        return drawn[drawn < self._first]

    def heights(self, step: int, region: Ellipsoid, centre_norm: Tensor) -> Tensor:
        """Return R of their gradients R e_j in a step, float64, shape (K,), given ||m/b||."""
        heads = generator(self._key, step).integers(0, 2, len(self.scores))
        signs = torch.from_numpy(2.0 * heads - 1).to(self.scores.device)
        return signs * _place(region, self._coordinates)[1] * (self._reach + centre_norm)

    def squared_norms(self, heights: Tensor, region: Ellipsoid, centre_norm: Tensor) -> Tensor:
        """Return ((R - m_j)^2 - m_j^2) / b_j^2 + ||m/b||^2, given ||m/b||; shape (K,)."""
        m, b = _place(region, self._coordinates)
        return ((heights - m).square() - m.square()) / b.square() + centre_norm.square()

    def add(self, step: int, clipped: Tensor, clipped_sum: ClippedSum, metric: Metric) -> Tensor:
        """Add the clipped, centred gradients of the canaries that were drawn."""
        region, centre_norm = metric.region, metric.centre_norm(clipped_sum.layers)
        heights = self.heights(step, region, centre_norm)
        c = clipped_sum.weights(self.squared_norms(heights, region, centre_norm))
        c = c * (self._inputs / clipped_sum.views)  # as often as its inputs are clipped: once
        m, b = _place(region, self._coordinates)
        self._added = c * (heights - m) / b
        if len(self._met) == 0:
            return clipped
        # In float64: the margin of the clipping is for the rounding of the other samples' sum.
        total, which = clipped.double(), torch.from_numpy(self._met).to(clipped.device)
        total.index_add_(0, self._coordinates[which], (c * heights)[which])
        if not region.is_ball:
            total.addcmul_(region.centre.double(), -c[which].sum())
        return total

    def hear(self, private: PrivateMean, region: Ellipsoid, block: slice) -> None:
        """Note the whitened noisy sum at the coordinates that lie in a block."""
        ends = torch.tensor([block.start, block.stop], device=self._coordinates.device)
        low, high = torch.searchsorted(self._coordinates, ends).tolist()
        there = self._coordinates[low:high] - block.start
        m, b = _place(region, there)
        value = private.value[there].double()
        self._seen[low:high] = (value - m) / b * self._batch

    def end(self) -> None:
        """Add the step's log-likelihood ratio of "in" against "out" to the scores.

        The noise is taken to be what it looks like: an attack on too little noise must not believe
        the claim. Of many coordinates the median tells its deviation, whatever the canaries add.
        """
        x, a, q = self._seen, self._added, self._rate
        sigma = x.abs().median().div(MEDIAN).clamp(min=LEAST_NOISE)
        evidence = (x * a - a.square() / 2) / sigma.square()
        out = torch.full_like(evidence, math.log1p(-q))
        self.scores += torch.logaddexp(out, evidence + math.log(q))


def _place(region: Ellipsoid, coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """Return m_j and b_j, float64, shape of ``coordinates``, or () for a ball."""
    j = ... if region.is_ball else coordinates
    factor = region.factor.double()
    return region.centre[j].double(), (factor / region.inverse[j].double()).sqrt()
