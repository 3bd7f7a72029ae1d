"""Records that a run makes up and then looks for in what it releases: an attack on its own claim.

Each is in the data set or not by a secret coin, and guessing the coins tells how much the training
gives away (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846). :mod:`dpmac_cli.runs.audit` turns
guesses into a lower bound on epsilon. Scores are computed from what is released alone.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.dp.clipping.spikes import Spikes
from dpmac_cli.dp.mechanism import Ellipsoid, PrivateMean
from dpmac_cli.errors import ModelError
from dpmac_cli.randomness.keystream import Derived
from dpmac_cli.randomness.noise import SeededGenerator
from dpmac_cli.randomness.sampling import Batch

#: The reach of every other canary's gradient; that of the clipping is 1.
FAR = 100.0
#: The median of |z| for a standard normal z.
MEDIAN = 0.6744897501960817
#: What a loss that is no number counts as.
WORST = 1e300
#: Below, the noise that is seen counts as this, so that scores stay finite.
LEAST_NOISE = 1e-6


@dataclass(frozen=True)
class Recipe:
    """What canaries of any kind are made from.

    Attributes:
        count: K.
        public: seed of what they are.
        secret: seed of the coins.
        device: of the tensors.
    """

    count: int
    public: np.random.SeedSequence
    secret: np.random.SeedSequence
    device: torch.device


class Canaries(Derived):
    """Canaries of any kind: they are the records from n on.

    Args:
        first: n, the number of the first of them.
        recipe: what they are made from.

    Attributes:
        coins: which are in the data set, bool, shape (K,). Secret while training.
        scores: the higher, the likelier is it that a canary is in; float64, shape (K,).
    """

    def __init__(self, first: int, recipe: Recipe) -> None:
        self.first = first
        source = SeededGenerator(recipe.public)
        super().__init__(source)
        self._generator = source.numpy
        coins = np.random.Generator(np.random.SFC64(recipe.secret)).integers(0, 2, recipe.count)
        self.coins = torch.from_numpy(coins.astype(np.bool_)).to(recipe.device)
        self.scores = torch.zeros(recipe.count, dtype=torch.float64, device=recipe.device)

    def part(self, drawn: Batch) -> tuple[Batch, Batch]:
        """Records of the data set, and numbers from 0 of the canaries that are in, of a draw.

        Leaving out what is not in leaves every other record its own probability.
        """
        records = drawn[drawn < self.first]
        canaries = drawn[drawn >= self.first] - self.first
        return records, canaries[self.coins.cpu().numpy()[canaries]]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name. The coins are secret."""
        return {"canary_coins": self.coins, "canary_scores": self.scores}


class GradientCanaries(Canaries):
    """Canaries that are gradients: along a coordinate of its own each, with a sign of each step.

    The sign is public and drawn anew in every step, so that what the other records add at the
    coordinate, much the same from step to step, averages out of the score; a canary's own part does
    not. Heights are in the scale of the ellipsoid, b_j (1 + ||m/b||): that high, a gradient ends
    about at the bound wherever the centre is. Every other one ends :data:`FAR` times as far, where
    clipping that is left out shows.

    Args:
        parameters: d.
        rate: q.
        first, recipe: as in :class:`Canaries`.

    Raises:
        ModelError: there are fewer coordinates than canaries.
    """

    def __init__(self, parameters: int, rate: float, first: int, recipe: Recipe) -> None:
        super().__init__(first, recipe)
        count = recipe.count
        if count > parameters:
            raise ModelError(
                f"--canaries {count:,}: the model has {parameters:,} parameters, and each canary "
                "takes one of its own. Choose fewer canaries or a larger model."
            )
        chosen = np.sort(self._generator.choice(parameters, count, replace=False))
        self._rate = rate
        self._coordinates = torch.from_numpy(chosen).to(recipe.device)
        self._reach = torch.ones_like(self.scores)
        self._reach[::2] = FAR
        self._added = torch.zeros_like(self.scores)
        self._seen = torch.zeros_like(self.scores)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name. The coins are secret."""
        return {**super().tensors(), "canary_coordinates": self._coordinates}

    def spikes(self, region: Ellipsoid, centre_norm: Tensor) -> Spikes:
        """Their gradients in the next step, given ||m/b||."""
        heads = self._generator.integers(0, 2, len(self.scores))
        signs = torch.from_numpy(2.0 * heads - 1).to(self.scores.device)
        _, b = Spikes(self._coordinates, signs).where(region)
        return Spikes(self._coordinates, signs * b * (self._reach + centre_norm))

    def expect(self, spikes: Spikes, c: Tensor, region: Ellipsoid) -> None:
        """Take note of what each adds to the whitened sum at its coordinate, if it is drawn."""
        m, b = spikes.where(region)
        self._added = c * (spikes.heights - m) / b

    def hear(self, private: PrivateMean, region: Ellipsoid, block: slice, batch: float) -> None:
        """Take note of the whitened noisy sum at the coordinates that lie in a block.

        Args:
            private: of the block.
            region: of the block, as it was clipped to.
            block: of coordinates.
            batch: B.
        """
        ends = torch.tensor([block.start, block.stop], device=self._coordinates.device)
        low, high = torch.searchsorted(self._coordinates, ends).tolist()
        there = Spikes(self._coordinates[low:high] - block.start, self._seen[low:high])
        m, b = there.where(region)
        self._seen[low:high] = (private.value[there.coordinates].double() - m) / b * batch

    def judge(self) -> None:
        """Add the step's log-likelihood ratio of "in" against "out" to the scores.

        The noise is taken to be what it looks like: an attack on too little noise must not believe
        the claim. Of many coordinates the median tells its deviation, whatever the canaries add.
        """
        x, a, q = self._seen, self._added, self._rate
        sigma = x.abs().median().div(MEDIAN).clamp(min=LEAST_NOISE)
        evidence = (x * a - a.square() / 2) / sigma.square()
        out = torch.full_like(evidence, math.log1p(-q))
        self.scores += torch.logaddexp(out, evidence + math.log(q))


class ImageCanaries(Canaries):
    """Canaries that are images of uniform noise with random labels, trained on like any other.

    Args:
        data: that they join; see :attr:`data`.
        levels: the largest value of a pixel.
        classes: how many labels there are.
        recipe: what they are made from.

    Attributes:
        data: the data set with all of them behind its training records.
    """

    def __init__(self, data: Data, levels: int, classes: int, recipe: Recipe) -> None:
        super().__init__(len(data.train), recipe)
        device = recipe.device
        shape = (recipe.count, *data.train.images.shape[1:])
        images = self._generator.integers(0, levels + 1, shape, np.uint8)
        labels: NDArray[np.int64] = self._generator.integers(0, classes, recipe.count)
        self.data = replace(
            data,
            train=Split(
                torch.cat([data.train.images, torch.from_numpy(images).to(device)]),
                torch.cat([data.train.labels, torch.from_numpy(labels).to(device)]),
            ),
        )

    @property
    def split(self) -> Split:
        """The canaries alone; views."""
        train = self.data.train
        return Split(train.images[self.first :], train.labels[self.first :])

    def part(self, drawn: Batch) -> tuple[Batch, Batch]:
        """All records of a draw but the canaries that are not in; none are left to be added."""
        records, canaries = super().part(drawn)
        return np.concatenate([records, canaries + self.first]), canaries[:0]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name. The coins are secret."""
        here = self.split
        return {**super().tensors(), "canary_images": here.images, "canary_labels": here.labels}

    def judge(self, losses: Tensor) -> None:
        """The lower the loss of the trained model, the likelier is a canary in."""
        self.scores.copy_(-losses.double().nan_to_num(nan=WORST, posinf=WORST))
