"""Training practice around an optimizer: all of it public beforehand, or made of private means.

So none of it has a price: schedules and weight decay move the weights after the noise, averages of
weights are made of what is published anyway, and views of a record are of that record alone. Loads
no torch.
"""

import math
from dataclasses import dataclass, field

#: How the learning rate goes from its peak, which follows the warm-up.
SCHEDULES = ("constant", "cosine", "linear")
#: How views of an image are drawn.
AUGMENTS = ("crop+flip", "crop", "flip")


@dataclass(frozen=True)
class Recipe:
    """What a run does besides its optimizer's steps.

    Attributes:
        schedule: of the learning rate, a name of :data:`SCHEDULES`.
        warmup: steps in which the rate rises to its peak.
        weight_decay: lambda of theta - eta lambda theta, apart from the gradient (Loshchilov and
            Hutter 2019, arXiv 1711.05101).
        ema: decay of the average of weights that is scored and published; None for the last ones.
        views: K, of each image in each step: the mean of their gradients is clipped (De et al.
            2022, arXiv 2204.13650).
        augment: how views are drawn, a name of :data:`AUGMENTS`; None for images as they are.
    """

    schedule: str = "constant"
    warmup: int = 0
    weight_decay: float = 0.0
    ema: float | None = None
    views: int = 1
    augment: str | None = None

    def rate(self, step: int, steps: int) -> float:
        """Share of the peak learning rate in step t = 1 ... T, in (0, 1]."""
        if step <= self.warmup:
            return step / self.warmup
        done = (step - 1 - self.warmup) / max(1, steps - self.warmup)
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        return 1 - done if self.schedule == "linear" else 1.0

    def decay(self, step: int) -> float:
        """What the average keeps of itself in step t: less at first, when it knows little."""
        assert self.ema is not None, "there is no average"  # noqa: S101
        return min(self.ema, (1 + step) / (10 + step))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will do, fixed before it begins.

    Attributes:
        steps: T.
        steps_per_epoch: ceil(n/B).
        physical_batch: samples worked on at a time; noise is added once per step all the same.
        private: False trains without clipping and noise, as a baseline.
        compiled: whether torch.compile fuses the operations on vectors.
        recipe: what it does besides its optimizer's steps.
        isolated: run the network on each sample alone, so that it cannot mix samples.
    """

    steps: int
    steps_per_epoch: int
    physical_batch: int
    private: bool = True
    compiled: bool = False
    recipe: Recipe = field(default_factory=Recipe)
    isolated: bool = False
