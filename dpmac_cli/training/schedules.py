"""Training plan, learning rate schedules, weight decay, averaging and augmentation.

None of it costs privacy: schedules and weight decay move the weights after the noise, averages are
of weights that are published anyway, and augmented views of a record are of that record alone.
Loads no torch.
"""

import math
from dataclasses import dataclass, field

#: Courses of the learning rate after the warm-up.
SCHEDULES = ("constant", "cosine", "linear")
#: Ways to augment an image.
AUGMENTS = ("crop+flip", "crop", "flip")


@dataclass(frozen=True)
class Recipe:
    """Training practice around an optimizer.

    Attributes:
        schedule: of the learning rate, a name of :data:`SCHEDULES`.
        warmup: steps in which the rate rises to its peak.
        weight_decay: lambda of theta - eta lambda theta, apart from the gradient (Loshchilov and
            Hutter 2019, arXiv 1711.05101).
        ema: decay of the average of weights that is scored and published; 0 for the last ones.
        views: K, of each image in each step: the mean of their gradients is clipped (De et al.
            2022, arXiv 2204.13650).
        augment: how views are drawn, a name of :data:`AUGMENTS`; "none" for images as they are.
    """

    schedule: str = "constant"
    warmup: int = 0
    weight_decay: float = 0.0
    ema: float = 0.0
    views: int = 1
    augment: str = "none"

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
    """Plan of a run, fixed before it begins.

    Attributes:
        steps: T.
        steps_per_epoch: ceil(n/B).
        physical_batch: samples worked on at a time; noise is added once per step all the same.
        private: False trains without clipping and noise, as a baseline.
        compiled: whether torch.compile fuses the operations on vectors.
        recipe: practice around the optimizer.
        isolated: run the network on each sample alone, so that it cannot mix samples.
    """

    steps: int
    steps_per_epoch: int
    physical_batch: int
    private: bool = True
    compiled: bool = False
    recipe: Recipe = field(default_factory=Recipe)
    isolated: bool = False
