"""Scores released with noise, which protect test records as well.

A unit of privacy adds at most 1 to the released counts, divided equally among its test records.
Adding or removing one unit changes the counts by at most 1 in the L2 norm, so noise of standard
deviation sigma is a Gaussian mechanism with noise multiplier sigma.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpmac_cli.accounting.events import Scores
from dpmac_cli.data.units import Units
from dpmac_cli.dp.mechanism import GRID
from dpmac_cli.randomness.noise import SeededNormals
from dpmac_cli.tasks.intervals import REACH, clopper_pearson, widened
from dpmac_cli.tasks.task import Interval, Task
from dpmac_cli.training.evaluation import Evaluation


@dataclass(frozen=True)
class PrivateScore:
    """Noisy score on the test records. Anything computed from it has no further privacy cost.

    Attributes:
        task: task whose headline metric was released, and the width of its values.
        share: mean of what units add to the counts, 0 to 1; nan if no score was released.
        samples: number of test units, which is public.
        noise_of_share: standard deviation of the noise in ``share``.
        sensitivity: sensitivity of each class, 0 to 1; empty if it was not requested.
        loss: nan, because it is not released.
    """

    task: Task
    share: float
    samples: int
    noise_of_share: float = math.nan
    sensitivity: tuple[float, ...] = field(default=())
    loss: float = math.nan

    @property
    def accuracy(self) -> float:
        """Accuracy of a classifier; nan if no score was released."""
        return self.metric("accuracy")

    @property
    def score(self) -> float:
        """Headline metric, such as the accuracy; nan if no score was released."""
        return self.share * self.task.width

    @property
    def noise(self) -> float:
        """Standard deviation of the noise in :attr:`score`."""
        return self.noise_of_share * self.task.width

    def metric(self, name: str) -> float:
        """Return the headline metric, or balanced accuracy; nan if no score was released."""
        if name == "balanced-accuracy" and self.sensitivity:
            return float(np.mean(self.sensitivity))
        if name not in self.task.covered:
            raise KeyError(name)
        return self.score

    @property
    def interval(self) -> Interval:
        """Return the 95% interval of the score on these test records, from the noise alone."""
        reach = REACH * self.noise_of_share
        return self._scaled((max(0.0, self.share - reach), min(1.0, self.share + reach)))

    @property
    def score_interval(self) -> Interval:
        """Return the 95% interval of the score on records like these.

        What a unit adds is from 0 to 1, so it varies at most like a right or wrong answer.
        """
        exact = clopper_pearson(self.share, self.samples)
        return self._scaled(widened(self.share, exact, self.noise_of_share))

    def values(self) -> dict[str, Any]:
        """Return the entries of a line of metrics.jsonl besides the score, as JSON values."""
        released = not math.isnan(self.share)
        return {
            "test_sensitivity": list(self.sensitivity) if released and self.sensitivity else None,
            "test_noise": self.noise if released else None,
            "test_interval": list(self.interval) if released else None,
            f"{self.task.headline.logged}_interval": list(self.score_interval)
            if released
            else None,
        }

    def _scaled(self, shares: Interval) -> Interval:
        return shares[0] * self.task.width, shares[1] * self.task.width


def counts(result: Evaluation, units: Units | None, *, by_class: bool) -> NDArray[np.int64]:
    """Return the contribution of each unit to the counts, in multiples of :data:`GRID`.

    The shape is (units, cells). Cells are at least 0 and add up to at most 1 / GRID per unit: see
    :meth:`~dpmac_cli.tasks.task.Results.cells`.

    Args:
        result: evaluation on the test records.
        units: units of the test records; None if each record is one.
    """
    cells, most = result.results.cells(by_class=by_class)
    sizes = np.ones((len(cells), 1), np.int64)
    if units is not None:
        cells = np.add.reduceat(cells[units.order], units.starts[:-1])
        sizes = np.diff(units.starts)[:, None]
    # Integers, rounded down: a unit adds at most 1 / GRID, and the sum is exact.
    common = math.gcd(round(1 / GRID), most)  # products must not overflow
    shares: NDArray[np.int64] = cells * (round(1 / GRID) // common) // (sizes * (most // common))
    return shares


def release_score(
    result: Evaluation, units: Units | None, scores: Scores, noise: SeededNormals
) -> PrivateScore:
    """Return the score with fresh Gaussian noise.

    Args:
        result, units: see :func:`counts`.
        scores: sigma > 0, and whether each class has a score.
        noise: fresh random numbers, used only here.
    """
    sigma, by_class = scores.noise_multiplier, scores.by_class
    cells = counts(result, units, by_class=by_class)
    z = noise.standard_normal(torch.empty(cells.shape[1], dtype=torch.float64)).numpy()
    added = np.rint(z * (sigma / GRID)).astype(np.int64)
    found = (cells.sum(0) + added) * GRID
    right, wrong = (found[:1], ()) if not by_class else np.split(found, 2)
    share = float(np.clip(right.sum() / len(cells), 0.0, 1.0))
    deviation = sigma * math.sqrt(len(right)) / len(cells)
    if not by_class:
        return PrivateScore(result.task, share, len(cells), deviation)
    rates = np.clip(right / np.maximum(right + wrong, 1.0), 0.0, 1.0)
    return PrivateScore(result.task, share, len(cells), deviation, tuple(rates.tolist()))
