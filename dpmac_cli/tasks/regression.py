"""Regression: numbers in public ranges, one or several per record.

A target y is clipped to the range [low, high], transformed, and scaled to t in [-1, 1]. The output
z of a network predicts t. Imports nothing slow; see :mod:`dpmac_cli.tasks.task`.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from dpmac_cli.tasks.task import EvaluationMetric, Results, Task, TaskFacts, Usage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

#: Transforms of a target, with their inverses; see :class:`Regression`.
Transform = Literal["none", "log1p"]
_R2 = (
    EvaluationMetric("r2", "R2", share=False),
    EvaluationMetric("at-or-below", "targets at or below the prediction", chosen=False),
)
NUMBER_METRICS = (
    EvaluationMetric("mae", "MAE", covered=True, share=False, lower=True),
    EvaluationMetric("rmse", "RMSE", share=False, lower=True),
    *_R2,
)


class NumberTask(Task):
    """Numbers in public ranges. Targets are scaled to [-1, 1], shape (records, targets)."""

    losses: ClassVar[tuple[str, ...]] = ("mse", "huber", "quantile:Q")
    target: ClassVar[str] = "float32"
    weighted: ClassVar[bool] = False
    #: The middle of the range: noise leaves no steps to unlearn random outputs.
    start: ClassVar[float | None] = 0.0

    @abstractmethod
    def each(self) -> "tuple[Regression, ...]":
        """Return the task of each target."""

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
        return {"classes": [], "target": self.target_facts}

    @classmethod
    def of_facts(cls, facts: TaskFacts) -> Task | None:
        """Return the task with these facts; None if they describe another kind."""
        target = facts["target"]
        return None if target is None or target["kind"] != cls.kind else cls.of_target(target)

    @property
    def summary(self) -> str:
        """Return the outputs by name."""
        return ", ".join(f"the target {part.names[0]} from {part.range}" for part in self.each())

    def untested(self, targets: "NDArray[Any]") -> tuple[str, ...]:
        """Return nothing: there are no classes."""
        return ()

    def encoded(self, targets: "NDArray[Any]") -> "NDArray[Any]":
        """Return targets as a network learns them, float32, shape (records, targets)."""
        import numpy as np  # noqa: PLC0415  (help is fast)

        columns = targets.reshape(-1, len(self.names)).T
        return np.stack(
            [part.scaled(column) for part, column in zip(self.each(), columns, strict=True)], 1
        )

    def examples(self) -> "tuple[Tensor, Tensor]":
        """Return made-up outputs and targets."""
        import torch  # noqa: PLC0415  (help is fast)

        outputs = torch.randn(4, len(self.names), generator=torch.Generator().manual_seed(0))
        return outputs, torch.linspace(-1, 1, outputs.numel()).view_as(outputs)

    def answers(self, outputs: "Tensor") -> "Tensor":
        """Return predicted numbers, in the units of their targets."""
        return self.decoded(outputs).float()

    def decoded(self, scaled: "Tensor") -> "Tensor":
        """Return numbers in the units of the targets, in their ranges, float64."""
        import torch  # noqa: PLC0415  (help is fast)

        return torch.stack([part.in_units(scaled[:, k]) for k, part in enumerate(self.each())], 1)

    def columns(self, answers: "NDArray[np.float32]") -> dict[str, Sequence[Any]]:
        """Return predicted numbers; NaN if an output contains NaN.

        Several are joined by ";", "" if one is NaN, and have a column each, too.
        """
        each = [[float(f"{number:.7g}") for number in column] for column in answers.T.tolist()]
        if len(each) == 1:
            return {"predicted": each[0]}
        rows = zip(*each, strict=True)
        joined = ["" if any(map(math.isnan, row)) else ";".join(map(str, row)) for row in rows]
        named = zip(self.names, each, strict=True)
        return {"predicted": joined, **{f"predicted_{name}": found for name, found in named}}

    def results(
        self, outputs: "Tensor", targets: "Tensor", owners: "NDArray[np.int64] | None" = None
    ) -> Results:
        """Compare predicted numbers with targets. One that is NaN is as wrong as possible."""
        import torch  # noqa: PLC0415  (help is fast)

        from dpmac_cli.tasks.estimates import Estimates  # noqa: PLC0415  (help is fast)

        truth, guess = self.decoded(targets), self.decoded(outputs)
        ends = torch.tensor([(part.low, part.high) for part in self.each()], dtype=torch.float64)
        low, high = ends.T
        worst = torch.where(truth - low > high - truth, low, high)
        guess = worst.where(guess.isnan(), guess)
        return Estimates(truth.numpy(), guess.numpy(), self, self.each(), owners)


@dataclass(frozen=True)
class Regression(NumberTask):
    """A number per record.

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

    def each(self) -> "tuple[Regression, ...]":
        """Return the task itself."""
        return (self,)

    @property
    def range(self) -> str:
        """Return the range and the transform in words."""
        return f"{self.low:g} to {self.high:g}" + " (log1p)" * (self.transform == "log1p")

    @property
    def described(self) -> str:
        """Return the output in words."""
        return f"one number from {self.range}"

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        row, told = ("target", self.names), f", {self.described}"
        result = "The result is the predicted number, in the units of the target."
        return Usage("regression model", row, told, "predict", self.code("{}[:, 0]"), result)

    def code(self, output: str) -> str:
        """Return a Python expression for the predicted numbers of an output."""
        low, high = self.ends
        code = f"{low!r} + ({output}.clamp(-1, 1) + 1) / 2 * {high - low!r}"
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

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the range, transformed."""
        if self.transform == "log1p":
            return math.log1p(self.low), math.log1p(self.high)
        return self.low, self.high

    def scaled(self, targets: "NDArray[Any]") -> "NDArray[np.float32]":
        """Return targets scaled to [-1, 1]."""
        import numpy as np  # noqa: PLC0415  (help is fast)

        clipped = np.clip(targets.astype(np.float64), self.low, self.high)
        low, high = self.ends
        moved = np.log1p(clipped) if self.transform == "log1p" else clipped
        return (2 * (moved - low) / (high - low) - 1).clip(-1, 1).astype(np.float32)

    def in_units(self, scaled: "Tensor") -> "Tensor":
        """Return numbers in the units of the target, in its range, float64."""
        low, high = self.ends
        moved = low + (scaled.double() + 1) / 2 * (high - low)
        found = moved.expm1() if self.transform == "log1p" else moved
        return found.clamp(self.low, self.high)


@dataclass(frozen=True)
class SeveralNumbers(NumberTask):
    """Several numbers per record, each in a range of its own.

    Metrics are means over the targets, of errors as shares of the range of their target.

    Attributes:
        parts: the task of each target.
    """

    parts: tuple[Regression, ...]

    kind: ClassVar[str] = "several numbers"
    of_record: ClassVar[str] = "several numbers"
    unknown: ClassVar[str] = "no number for some targets"
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (
        EvaluationMetric("nmae", "NMAE", covered=True, share=False, lower=True),
        EvaluationMetric("nrmse", "NRMSE", share=False, lower=True),
        *_R2,
    )
    reported: ClassVar[tuple[str, ...]] = (
        *("nrmse", "r2", "at_or_below", "by_target", "noise", "interval", "nmae_interval"),
    )
    public: ClassVar[str] = "ranges of the targets"

    @classmethod
    def of(cls, parts: Sequence[Regression]) -> Self:
        """Return the task of several targets."""
        return cls(tuple(part.names[0] for part in parts), tuple(parts))

    def each(self) -> tuple[Regression, ...]:
        """Return the task of each target."""
        return self.parts

    @property
    def described(self) -> str:
        """Return the outputs in words."""
        return f"{len(self.names)} numbers"

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        told = f", numbers from {', '.join(part.range for part in self.parts)}"
        each = ", ".join(part.code(f"z[:, {k}]") for k, part in enumerate(self.parts))
        code = f"(lambda z: torch.stack([{each}], 1))({{}})"
        result = "The result has a column per target, in its units."
        return Usage("regression model", ("targets", self.names), told, "predict", code, result)

    @property
    def target_facts(self) -> Mapping[str, Any]:
        """Return the facts of all targets."""
        return {"kind": self.kind, "targets": [part.target_facts for part in self.parts]}

    @classmethod
    def of_target(cls, target: Mapping[str, Any]) -> Self:
        """Return the task with these facts."""
        return cls.of([Regression.of_target(part) for part in target["targets"]])
