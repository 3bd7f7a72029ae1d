"""Regression: a number per record, in a public range.

A target y is clipped to the range [low, high], transformed, and scaled to t in [-1, 1]. The output
z of a network predicts t. See :mod:`dpmac_cli.tasks.task`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dpmac_cli.libraries import np
from dpmac_cli.tasks.estimates import Estimates
from dpmac_cli.tasks.target import Target
from dpmac_cli.tasks.task import EvaluationMetric, Results, Task, TaskFacts, Usage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.tasks.task import Outputs


@dataclass(frozen=True)
class Regression(Task):
    """A number per record. Targets are scaled to [-1, 1], shape (records, 1).

    Attributes:
        number: what is predicted.
    """

    number: Target

    kind: ClassVar[str] = "regression"
    of_record: ClassVar[str] = "one number"
    unknown: ClassVar[str] = "no number"
    losses: ClassVar[tuple[str, ...]] = ("mse", "huber", "quantile:Q")
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (
        EvaluationMetric("mae", "MAE", covered=True, share=False, lower=True),
        EvaluationMetric("rmse", "RMSE", share=False, lower=True),
        EvaluationMetric("r2", "R2", share=False),
        EvaluationMetric("at-or-below", "targets at or below the prediction", chosen=False),
    )
    reported: ClassVar[tuple[str, ...]] = (
        *("rmse", "r2", "at_or_below", "noise", "interval", "mae_interval"),
    )
    target: ClassVar[str] = "float32"
    public: ClassVar[str] = "range of the target"
    weighted: ClassVar[bool] = False
    #: The middle of the range: noise leaves no steps to unlearn random outputs.
    start: ClassVar[float | None] = 0.0

    @staticmethod
    def of(number: Target) -> Regression:
        """Return the task of a number to predict."""
        return Regression((number.name,), number)

    @classmethod
    def of_facts(cls, facts: TaskFacts) -> Task:
        """Return the task with these facts."""
        return cls.of(Target.of_facts(facts["target"] or {}))

    @property
    def facts(self) -> TaskFacts:
        """Return the facts of the task in a model file."""
        return {"classes": [], "target": self.number.facts}

    @property
    def described(self) -> str:
        """Return the output in words."""
        return f"one number from {self.number.range}"

    @property
    def summary(self) -> str:
        """Return the output by name."""
        return f"the target {self.number.name} from {self.number.range}"

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        row, code = ("target", self.names), self.number.code("{}[:, 0]")
        result = "The result is the predicted number, on the scale of the target."
        return Usage("regression model", row, f", {self.described}", "predict", code, result)

    @property
    def width(self) -> float:
        """Largest error of a prediction, on the scale of the target."""
        return self.number.width

    def encoded(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return targets as a network learns them, float32, shape (records, 1)."""
        return self.number.scaled(targets.reshape(-1, 1))

    def answers(self, outputs: Outputs) -> NDArray[np.float32]:
        """Return predicted numbers, on the scale of the target."""
        return self.decoded(outputs).astype(np.float32)

    def decoded(self, scaled: Outputs) -> NDArray[np.float64]:
        """Return numbers on the scale of the target, in its range."""
        return self.number.in_units(scaled)

    def columns(self, answers: NDArray[np.float32]) -> dict[str, Sequence[Any]]:
        """Return predicted numbers; NaN if an output is."""
        return {"predicted": [float(f"{number:.7g}") for number in answers[:, 0].tolist()]}

    def results(
        self, outputs: Outputs, targets: NDArray[Any], owners: NDArray[np.int64] | None = None
    ) -> Results:
        """Compare predicted numbers with targets. One that is NaN is as wrong as possible."""
        truth, guess = self.decoded(targets)[:, 0], self.decoded(outputs)[:, 0]
        low, high = self.number.low, self.number.high
        worst = np.where(truth - low > high - truth, low, high)
        guess = np.where(np.isnan(guess), worst, guess)
        return Estimates(truth, guess, self, owners)
