"""A score released with noise, which protects test records as well.

A unit of privacy adds at most 1 to the released sum, divided equally among its test records. Adding
or removing one unit changes the sum by at most 1, so noise of standard deviation sigma is a
Gaussian mechanism with noise multiplier sigma.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.dp.mechanism import GRID
from dpmac_cli.dp.torch_errors import code_of_task
from dpmac_cli.randomness.noise import SeededNormals
from dpmac_cli.tasks.intervals import REACH, clopper_pearson, widened
from dpmac_cli.tasks.metrics import Interval
from dpmac_cli.tasks.task import Task
from dpmac_cli.training.evaluation import Evaluation


@dataclass(frozen=True)
class PrivateScore:
    """Noisy score on the test records. Anything computed from it has no further privacy cost.

    :func:`release_score` makes it. Without a released score, every number but ``samples`` is nan.

    Attributes:
        task: task whose headline metric was released, and the width of its values.
        share: mean of what units add to the counts, 0 to 1; nan if no score was released.
        samples: number of test units, which is public.
        noise_of_share: standard deviation of the noise in ``share``.
    """

    #: Nan, because it is not released.
    loss = math.nan

    task: Task
    share: float
    samples: int
    noise_of_share: float = math.nan

    @property
    def accuracy(self) -> float:
        """Accuracy of a classifier; nan if no score was released.

        Raises:
            KeyError: the accuracy is not what was to be released.
        """
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
        """Return the headline metric by its name; nan if no score was released.

        Args:
            name: name of the metric.

        Raises:
            KeyError: it is another one, which is not released.
        """
        if name not in self.task.covered:
            raise KeyError(name)
        return self.score

    @property
    def interval(self) -> Interval:
        """Return the 95% interval of the score on these test records, from the noise alone.

        Returns:
            The lower and the upper end, within what the score can be; nan if no score was released.
        """
        reach = REACH * self.noise_of_share
        return self._scaled((max(0.0, self.share - reach), min(1.0, self.share + reach)))

    @property
    def score_interval(self) -> Interval:
        """Return the 95% interval of the score on records like these, from noise and sampling.

        What a unit adds is from 0 to 1, so it varies at most like a right or wrong answer.

        Returns:
            The lower and the upper end.
        """
        exact = clopper_pearson(self.share, self.samples)
        return self._scaled(widened(self.share, exact, self.noise_of_share))

    def values(self) -> dict[str, Any]:
        """Return the entries of a line of metrics.jsonl besides the score, as JSON values.

        Keys are "test_noise", "test_interval" and that of the headline metric with "_interval".
        Values are None if no score was released.
        """
        names = ("test_noise", "test_interval", f"{self.task.headline.logged}_interval")
        if math.isnan(self.share):
            return dict.fromkeys(names)
        values = (self.noise, list(self.interval), list(self.score_interval))
        return dict(zip(names, values, strict=True))

    def _scaled(self, shares: Interval) -> Interval:
        """Return an interval of the score, by that of the share."""
        low, high = shares
        return low * self.task.width, high * self.task.width


def counts(result: Evaluation) -> NDArray[np.int64]:
    """Return what each unit adds to the score, in multiples of :data:`GRID`, shape (units,).

    It is from 0 to 1 / GRID, rounded down: see :meth:`~dpmac_cli.tasks.task.Task.counted`. Of a
    unit with several records it is their mean.

    Args:
        result: evaluation on the test records. What is returned is private.
    """
    counted, most = _counted(result)
    sizes = np.ones(len(counted), np.int64)
    if (units := result.units) is not None:
        counted = np.add.reduceat(counted[units.order], units.starts[:-1])
        sizes = np.diff(units.starts)
    # Integers, rounded down: a unit adds at most 1 / GRID, and the sum is exact.
    common = math.gcd(round(1 / GRID), most)  # products must not overflow
    shares: NDArray[np.int64] = counted * (round(1 / GRID) // common) // (sizes * (most // common))
    return shares


@code_of_task()
def _counted(result: Evaluation) -> tuple[NDArray[np.int64], int]:
    """Return what each record adds to the score, shape (records,), and the most that it can add.

    A task of a program sees one record at a time, so it cannot mix them, and made-up ones for the
    most. What it says of a record is kept within that.
    """
    task, outputs, targets = result.task, result.logits.numpy(), result.labels.numpy()
    if type(task).__module__.startswith("dpmac_cli."):
        return task.counted(result.compared)
    made_up, of_made_up = task.examples()
    _, most = task.counted(task.compared(made_up, of_made_up, np.arange(len(made_up))))
    counted = np.empty(len(targets), np.int64)
    for row in range(len(targets)):
        of = task.compared(outputs[row : row + 1], targets[row : row + 1], np.arange(1))
        added, _ = task.counted(of)
        counted[row] = min(max(int(added.item()), 0), most)
    return counted, most


def release_score(result: Evaluation, event: TrainingEvent, noise: SeededNormals) -> PrivateScore:
    """Return the score with fresh Gaussian noise. Call it once for an event that has begun.

    Args:
        result: evaluation on the test records.
        event: event of the score, see :func:`~dpmac_cli.accounting.events.score_event`.
        noise: fresh random numbers, used only here.

    Returns:
        The noisy score of units, of which each adds its mean over its records.
    """
    counted, sigma = counts(result), event.noise_multiplier
    z = noise.standard_normal(torch.empty(1, dtype=torch.float64)).item()
    added = round(z * (sigma / GRID))
    noisy_sum = (int(counted.sum()) + added) * GRID
    share = min(max(noisy_sum / len(counted), 0.0), 1.0)
    return PrivateScore(result.task, share, len(counted), sigma / len(counted))
