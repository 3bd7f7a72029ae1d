"""Regression: numbers in public ranges, one or several per record.

A target y is clipped to the range [low, high], transformed, and scaled to t in [-1, 1]. The output
z of a network predicts t. See :mod:`dpmac_cli.tasks.task`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dpmac_cli.libraries import np
from dpmac_cli.tasks.estimates import Estimates
from dpmac_cli.tasks.target import OF_ONE, R2, Target
from dpmac_cli.tasks.task import EvaluationMetric, Results, Task, TaskFacts, Usage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.tasks.task import Outputs


@dataclass(frozen=True)
class Regression(Task):
    """A number per record. Targets are scaled to [-1, 1], shape (records, targets).

    Attributes:
        targets: what is predicted; several for :class:`SeveralNumbers`.
    """

    targets: tuple[Target, ...]

    kind: ClassVar[str] = "regression"
    of_record: ClassVar[str] = "one number"
    unknown: ClassVar[str] = "no number"
    losses: ClassVar[tuple[str, ...]] = ("mse", "huber", "quantile:Q")
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = OF_ONE
    reported: ClassVar[tuple[str, ...]] = (
        *("rmse", "r2", "at_or_below", "noise", "interval", "mae_interval"),
    )
    target: ClassVar[str] = "float32"
    public: ClassVar[str] = "range of the target"
    weighted: ClassVar[bool] = False
    #: The middle of the range: noise leaves no steps to unlearn random outputs.
    start: ClassVar[float | None] = 0.0

    @staticmethod
    def of(targets: Sequence[Target]) -> Regression:
        """Return the task of one target or several."""
        kind = SeveralNumbers if len(targets) > 1 else Regression
        return kind(tuple(target.name for target in targets), tuple(targets))

    @classmethod
    def of_facts(cls, facts: TaskFacts) -> Task:
        """Return the task with these facts."""
        found = facts["target"] or {}
        return cls.of([Target.of_facts(target) for target in found.get("targets", [found])])

    @property
    def facts(self) -> TaskFacts:
        """Return the facts of the task in a model file."""
        return {"classes": [], "target": self.targets[0].facts}

    @property
    def described(self) -> str:
        """Return the output in words."""
        return f"one number from {self.targets[0].range}"

    @property
    def summary(self) -> str:
        """Return the outputs by name."""
        return ", ".join(f"the target {target.name} from {target.range}" for target in self.targets)

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        row, code = ("target", self.names), self.targets[0].code("{}[:, 0]")
        result = "The result is the predicted number, in the units of the target."
        return Usage("regression model", row, f", {self.described}", "predict", code, result)

    @property
    def width(self) -> float:
        """Largest error of a prediction, in the units of the target."""
        return self.targets[0].width

    def encoded(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return targets as a network learns them, float32, shape (records, targets)."""
        columns = targets.reshape(-1, len(self.names)).T
        parts = zip(self.targets, columns, strict=True)
        return np.stack([target.scaled(column) for target, column in parts], 1)

    def answers(self, outputs: Outputs) -> NDArray[np.float32]:
        """Return predicted numbers, in the units of their targets."""
        return self.decoded(outputs).astype(np.float32)

    def decoded(self, scaled: Outputs) -> NDArray[np.float64]:
        """Return numbers in the units of the targets, in their ranges."""
        parts = zip(self.targets, scaled.T, strict=True)
        return np.stack([target.in_units(column) for target, column in parts], 1)

    def columns(self, answers: NDArray[np.float32]) -> dict[str, Sequence[Any]]:
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
        self, outputs: Outputs, targets: NDArray[Any], owners: NDArray[np.int64] | None = None
    ) -> Results:
        """Compare predicted numbers with targets. One that is NaN is as wrong as possible."""
        truth, guess = self.decoded(targets), self.decoded(outputs)
        low, high = np.array([(target.low, target.high) for target in self.targets]).T
        worst = np.where(truth - low > high - truth, low, high)
        guess = np.where(np.isnan(guess), worst, guess)
        return Estimates(truth, guess, self, self.targets, owners)


@dataclass(frozen=True)
class SeveralNumbers(Regression):
    """Several numbers per record, each in a range of its own.

    Metrics are means over the targets, of errors as shares of the range of their target.
    """

    kind: ClassVar[str] = "several numbers"
    of_record: ClassVar[str] = "several numbers"
    unknown: ClassVar[str] = "no number for some targets"
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (
        EvaluationMetric("nmae", "NMAE", covered=True, share=False, lower=True),
        EvaluationMetric("nrmse", "NRMSE", share=False, lower=True),
        *R2,
    )
    reported: ClassVar[tuple[str, ...]] = (
        *("nrmse", "r2", "at_or_below", "by_target", "noise", "interval", "nmae_interval"),
    )
    public: ClassVar[str] = "ranges of the targets"

    @property
    def facts(self) -> TaskFacts:
        """Return the facts of the task in a model file."""
        targets = [target.facts for target in self.targets]
        return {"classes": [], "target": {"kind": self.kind, "targets": targets}}

    @property
    def described(self) -> str:
        """Return the outputs in words."""
        return f"{len(self.names)} numbers"

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        told = f", numbers from {', '.join(target.range for target in self.targets)}"
        each = ", ".join(target.code(f"z[:, {k}]") for k, target in enumerate(self.targets))
        code = f"(lambda z: torch.stack([{each}], 1))({{}})"
        result = "The result has a column per target, in its units."
        return Usage("regression model", ("targets", self.names), told, "predict", code, result)

    @property
    def width(self) -> float:
        """Largest value of the covered metric, a share of the ranges."""
        return 1.0
