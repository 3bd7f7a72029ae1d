"""Training plan, losses, learning rate schedules, weight decay, averaging and augmentation.

None of it costs privacy: schedules and weight decay move the weights after the noise, averages are
of weights that are published anyway, and augmented views of a record are of that record alone.
Loads no torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dpmac_cli.accounting.events import Scores

#: Courses of the learning rate after the warm-up.
SCHEDULES = ("constant", "cosine", "linear")
#: Losses by name: see :func:`~dpmac_cli.dp.losses.build_loss`.
LOSSES = ("cross-entropy", "focal", "bce")
#: Ways to augment an image.
AUGMENTS = ("crop+flip", "crop", "flip")


@dataclass(frozen=True)
class LossKind:
    """Loss of a sample: see :func:`~dpmac_cli.dp.losses.build_loss`."""

    name: str = "cross-entropy"  # of LOSSES, or of a function that a program gives
    smoothing: float = 0.0  # of labels
    weights: tuple[float, ...] = ()  # factors of the losses of each class; none for ones


@dataclass(frozen=True)
class Recipe:
    """Training practice around an optimizer.

    Weight decay is apart from the gradient (Loshchilov and Hutter 2019, arXiv 1711.05101). Of the
    augmented views of an image the mean gradient is clipped (De et al. 2022, arXiv 2204.13650).
    """

    schedule: str = "constant"  # of the learning rate, a name of SCHEDULES
    warmup: int = 0  # steps in which the rate rises to its peak
    weight_decay: float = 0.0  # lambda of theta - eta lambda theta
    ema: float = 0.0  # decay of the weights' average that is published; 0 for the last weights
    views: int = 1  # K, of each image in each step
    augment: str = "none"  # how views are drawn, a name of AUGMENTS; "none" for images as they are
    records: int = 1  # of each unit in each step, where units of privacy hold several
    loss: LossKind = field(default_factory=LossKind)

    @property
    def inputs(self) -> int:
        """Inputs of the network from each unit of privacy in a step."""
        return self.records * self.views

    @property
    def augmented(self) -> bool:
        """Whether images are augmented."""
        return self.augment != "none"

    def rate(self, step: int, steps: int) -> float:
        """Return the fraction of the peak learning rate in step t = 1 ... T, in (0, 1]."""
        if step <= self.warmup:
            return step / self.warmup
        done = (step - 1 - self.warmup) / max(1, steps - self.warmup)
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        return 1 - done if self.schedule == "linear" else 1.0

    def decay(self, step: int) -> float:
        """Weight that the average keeps of itself in step t, less in the first steps."""
        return min(self.ema, (1 + step) / (10 + step))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a run, fixed before it begins."""

    steps: int  # T
    steps_per_epoch: int  # ceil(n/B)
    physical_batch: int  # samples worked on at a time; noise is added once per step all the same
    private: bool = True  # False trains without clipping and noise, as a baseline
    recipe: Recipe = field(default_factory=Recipe)
    loss: Callable[[Any, Any], Any] | None = None  # a program's own, in place of the recipe's
    scores: Scores | None = None  # of test records with noise; None for exact ones, every epoch
    isolated: bool = False  # run the network on each sample alone, so that it cannot mix samples
