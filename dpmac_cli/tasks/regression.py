"""Regression: a number per record, in a public range.

A target y is clipped to the range [low, high], transformed, and scaled to t in [-1, 1]. The output
z of a network predicts t; of counts, exp(z) predicts the share y / high. Imports nothing slow; see
:mod:`dpmac_cli.tasks.task`.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from dpmac_cli.tasks.task import EvaluationMetric, Task, TaskFacts, Usage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from dpmac_cli.tasks.estimates import Estimates

#: Transforms of a target, with their inverses; see :class:`Regression`.
Transform = Literal["none", "log1p"]
MAE = EvaluationMetric("mae", "MAE", covered=True, share=False, lower=True)
NUMBER_METRICS = (
    MAE,
    EvaluationMetric("rmse", "RMSE", share=False, lower=True),
    EvaluationMetric("r2", "R2", share=False),
    EvaluationMetric("at-or-below", "targets at or below the prediction", chosen=False),
)


class NumberTask(Task):
    """Numbers in public ranges, one or several per record."""

    losses: ClassVar[tuple[str, ...]] = ("mse", "huber", "quantile:Q")
    target: ClassVar[str] = "float32"
    weighted: ClassVar[bool] = False
    #: The middle of the range: noise leaves no steps to unlearn random outputs.
    start: ClassVar[float | None] = 0.0

    @property
    @abstractmethod
    def target_facts(self) -> Mapping[str, Any]:
        """Return the facts of the target, or of all targets; their "kind" is that of the task."""

    @classmethod
    @abstractmethod
    def of_target(cls, target: Mapping[str, Any]) -> Self:
        """Return the task with these :attr:`target_facts`."""

    @property
    def facts(self) -> TaskFacts:
        """Return the facts of the task in a model file."""
        return {"classes": [], "multilabel": False, "target": self.target_facts}

    @classmethod
    def of_facts(cls, facts: TaskFacts) -> Task | None:
        """Return the task with these facts; None if they describe another kind."""
        target = facts["target"]
        return None if target is None or target["kind"] != cls.kind else cls.of_target(target)

    @property
    def declared(self) -> dict[str, Any]:
        """Return the facts that must be unchanged to resume a run."""
        return {"target": self.target_facts}

    def untested(self, targets: "NDArray[Any]") -> tuple[str, ...]:
        """Return nothing: there are no classes."""
        return ()


@dataclass(frozen=True)
class Regression(NumberTask):
    """A number per record. Targets are scaled to [-1, 1], shape (records, 1).

    Attributes:
        low, high: public range that targets are clipped to; low < high.
        transform: "log1p" predicts log(1 + y), for targets above -1 of very different sizes.
    """

    low: float
    high: float
    transform: Transform = "none"

    kind: ClassVar[str] = "regression"
    of_record: ClassVar[str] = "one number"
    unknown: ClassVar[str] = "no number"
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = NUMBER_METRICS
    reported: ClassVar[tuple[str, ...]] = (
        *("rmse", "r2", "at_or_below", "noise", "interval", "mae_interval"),
    )
    public: ClassVar[str] = "range of the target"

    @property
    def described(self) -> str:
        """Return the output in words."""
        return f"one number from {self.low:g} to {self.high:g}"

    @property
    def summary(self) -> str:
        """Return the output by name."""
        transformed = "" if self.transform == "none" else f" ({self.transform})"
        return f"the target {self.names[0]} from {self.low:g} to {self.high:g}{transformed}"

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        row = "target", self.names
        told = f", {self.described}" + f" ({self.transform})" * (self.transform != "none")
        result = "The result is the predicted number, in the units of the target."
        return Usage("regression model", row, told, "predict", self._code, result)

    @property
    def _code(self) -> str:
        low, high = self.ends
        code = f"{low!r} + ({{}}[:, 0].clamp(-1, 1) + 1) / 2 * {high - low!r}"
        return f"({code}).expm1()" if self.transform == "log1p" else code

    @property
    def target_facts(self) -> Mapping[str, Any]:
        """Return the facts of the target."""
        ends = {"low": self.low, "high": self.high}
        return {"name": self.names[0], "kind": self.kind, **ends, "transform": self.transform}

    @classmethod
    def of_target(cls, target: Mapping[str, Any]) -> Self:
        """Return the task with these facts."""
        return cls((target["name"],), target["low"], target["high"], target["transform"])

    @property
    def width(self) -> float:
        """Largest error of a prediction, in the units of the target."""
        return self.high - self.low

    def encoded(self, targets: "NDArray[Any]") -> "NDArray[Any]":
        """Return targets as a network learns them, float32, shape (records, 1)."""
        import numpy as np  # noqa: PLC0415  (help is fast)

        clipped = np.clip(targets.astype(np.float64), self.low, self.high)
        low, high = self.ends
        moved = np.log1p(clipped) if self.transform == "log1p" else clipped
        scaled = (2 * (moved - low) / (high - low) - 1).clip(-1, 1)
        return scaled.astype(np.float32)[:, None]

    def decoded(self, scaled: "Tensor") -> "Tensor":
        """Return numbers in the units of the target, in its range, float64."""
        low, high = self.ends
        moved = low + (scaled.double() + 1) / 2 * (high - low)
        found = moved.expm1() if self.transform == "log1p" else moved
        return found.clamp(self.low, self.high)

    def examples(self) -> "tuple[Tensor, Tensor]":
        """Return made-up outputs and targets."""
        import torch  # noqa: PLC0415  (help is fast)

        outputs = torch.randn(4, 1, generator=torch.Generator().manual_seed(0))
        return outputs, torch.tensor([[-1.0], [-0.25], [0.5], [1.0]])

    def answers(self, outputs: "Tensor") -> "Tensor":
        """Return predicted numbers, in the units of the target."""
        return self.decoded(self.scaled(outputs)).float()

    def scaled(self, outputs: "Tensor") -> "Tensor":
        """Return the targets that outputs predict, scaled to [-1, 1]."""
        return outputs

    def columns(self, answers: "NDArray[np.float32]") -> dict[str, Sequence[Any]]:
        """Return predicted numbers; NaN if an output contains NaN."""
        return {"predicted": [float(f"{number:.7g}") for number in answers[:, 0].tolist()]}

    def results(
        self, outputs: "Tensor", targets: "Tensor", owners: "NDArray[np.int64] | None" = None
    ) -> "Estimates":
        """Compare predicted numbers with targets. One that is NaN is as wrong as possible."""
        truth = self.decoded(targets)
        guess = self.decoded(self.scaled(outputs))
        worst = (truth - self.low > self.high - truth).double()
        guess = (self.high - worst * self.width).where(guess.isnan(), guess)
        kind = self._kind_of_results()
        return kind(truth.numpy()[:, 0], guess.numpy()[:, 0], self, (self.low, self.high), owners)

    def _kind_of_results(self) -> "type[Estimates]":
        from dpmac_cli.tasks.estimates import Estimates  # noqa: PLC0415  (help is fast)

        return Estimates

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the range, transformed."""
        if self.transform == "log1p":
            return math.log1p(self.low), math.log1p(self.high)
        return self.low, self.high


@dataclass(frozen=True)
class Counts(Regression):
    """A count per record, from 0 to ``high``, whose mean has a log link: y is about high exp(z)."""

    kind: ClassVar[str] = "counts"
    of_record: ClassVar[str] = "one count"
    unknown: ClassVar[str] = "no count"
    losses: ClassVar[tuple[str, ...]] = ("poisson",)
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (
        *NUMBER_METRICS,
        EvaluationMetric("deviance", "Poisson deviance", share=False, lower=True),
    )
    reported: ClassVar[tuple[str, ...]] = (*Regression.reported, "deviance")
    #: A tenth of the largest count.
    start: ClassVar[float | None] = math.log(0.1)

    @property
    def _code(self) -> str:
        return f"{self.high!r} * {{}}[:, 0].clamp(max=0).exp()"

    def _kind_of_results(self) -> "type[Estimates]":
        from dpmac_cli.tasks.estimates import CountEstimates  # noqa: PLC0415  (help is fast)

        return CountEstimates

    def scaled(self, outputs: "Tensor") -> "Tensor":
        """Return the targets that outputs predict, scaled to [-1, 1]."""
        return 2 * outputs.double().clamp(max=0).exp() - 1
