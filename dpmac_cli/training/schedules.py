"""Training plan, losses, learning rate schedules, weight decay, averaging and augmentation.

None of it has a privacy cost: schedules and weight decay act after the noise, averages are computed
from weights that are published anyway, and augmented views depend on one record each.
Does not import torch.
"""

import math
from dataclasses import dataclass, field

#: Learning rate schedules after the warm-up.
SCHEDULES = ("constant", "cosine", "linear")
#: Ways to augment an image.
AUGMENTS = ("crop+flip", "crop", "flip")


@dataclass(frozen=True)
class LossKind:
    """Loss per sample: see :func:`~dpmac_cli.dp.losses.build_loss`.

    Attributes:
        name: a name in tasks.known.LOSSES, or of a user-supplied function.
        smoothing: label smoothing.
        weights: public class weights; empty for equal weights.
        shares: public shares of the classes; empty if none are declared.
        weighed: where the weights of records come from, if they are a program's; "" for none.
    """

    name: str = "cross-entropy"
    smoothing: float = 0.0
    weights: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    weighed: str = ""

    @property
    def mean_weight(self) -> float:
        """Mean weight of a record, relative to the largest; a public number.

        Of class weights it is the mean over the declared shares, or else over the classes. Of a
        quantile's weights it is that where the predictions are right.
        """
        kind, _, parameter = self.name.partition(":")
        if kind == "quantile":
            level = float(parameter)
            return 2 * level * (1 - level) / max(level, 1 - level)
        if not self.weights:
            return 1.0
        shares = self.shares or (1 / len(self.weights),) * len(self.weights)
        total = sum(share * weight for share, weight in zip(shares, self.weights, strict=True))
        return total / (sum(shares) * max(self.weights))


@dataclass(frozen=True)
class Recipe:
    """Training settings besides the optimizer.

    Weight decay is decoupled (Loshchilov and Hutter 2019, arXiv 1711.05101). The mean gradient over
    an image's augmented views is clipped (De et al. 2022, arXiv 2204.13650).
    """

    schedule: str = "constant"  # learning rate schedule, a name in SCHEDULES
    warmup: int = 0  # steps in which the learning rate rises to its peak
    weight_decay: float = 0.0  # lambda in theta - eta lambda theta
    ema: float = 0.0  # decay of the published moving average; 0 publishes the last weights
    views: int = 1  # augmentation multiplicity K: views per image and step
    augment: str = "none"  # augmentation, a name in AUGMENTS; "none" for unchanged images
    records: int = 1  # records per unit and step, if units of privacy have several
    loss: LossKind = field(default_factory=LossKind)

    @property
    def inputs(self) -> int:
        """Number of network inputs per unit of privacy and step."""
        return self.records * self.views

    @property
    def augmented(self) -> bool:
        """Return whether images are augmented."""
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
        """Return the decay of the moving average in step t, smaller in the first steps."""
        return min(self.ema, (1 + step) / (10 + step))


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Plan of the steps of a run, fixed before the first one."""

    steps: int  # T
    steps_per_epoch: int  # ceil(n/B)
    physical_batch: int  # samples processed at a time; noise is still added once per step
    private: bool = True  # False trains without clipping and noise, as a baseline
    recipe: Recipe = field(default_factory=Recipe)
