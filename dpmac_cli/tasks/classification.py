"""Classification: one class per record.

See :mod:`dpmac_cli.tasks.task`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dpmac_cli.libraries import np, special
from dpmac_cli.tasks.classified import Classified
from dpmac_cli.tasks.task import EvaluationMetric, Results, Task, TaskFacts, Usage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.tasks.task import Outputs


@dataclass(frozen=True)
class Classification(Task):
    """One class per record. Targets are the numbers of classes, shape (records,)."""

    kind: ClassVar[str] = "classification"
    of_record: ClassVar[str] = "one class"
    unknown: ClassVar[str] = "no class"
    losses: ClassVar[tuple[str, ...]] = ("cross-entropy", "focal")
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (
        EvaluationMetric("accuracy", "accuracy", covered=True),
        EvaluationMetric("balanced-accuracy", "balanced accuracy"),
        EvaluationMetric("auroc", "AUROC"),
        EvaluationMetric("average-precision", "average precision"),
        EvaluationMetric("f1", "F1"),
        EvaluationMetric("calibration-error", "calibration error", chosen=False),
    )
    reported: ClassVar[tuple[str, ...]] = (
        *("balanced_accuracy", "f1", "calibration_error", "auroc", "average_precision"),
        *("sensitivity", "specificity", "largest_class", "confusion", "noise", "interval"),
        "accuracy_interval",
    )
    target: ClassVar[str] = "int64"

    @property
    def described(self) -> str:
        """Return the outputs in words."""
        return f"{len(self.names)} classes"

    @property
    def summary(self) -> str:
        """Return the outputs by name."""
        return f"the classes {', '.join(self.names)}"

    @property
    def facts(self) -> TaskFacts:
        """Return the facts of the task in a model file."""
        return {"classes": list(self.names), "target": None}

    @classmethod
    def of_facts(cls, facts: TaskFacts) -> Task:
        """Return the task with these facts."""
        return cls(tuple(facts["classes"]))

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        result = "The result is the index of the class in the list above, from 0."
        row = "classes", self.names
        return Usage("classifier", row, "", "classify", "{}.argmax(1)", result)

    def untested(self, targets: NDArray[Any]) -> tuple[str, ...]:
        """Return classes that no test record has."""
        tested = set(targets.tolist())
        return tuple(name for k, name in enumerate(self.names) if k not in tested)

    def answers(self, outputs: Outputs) -> NDArray[np.float32]:
        """Return probabilities of the classes."""
        # Infinity is the largest number: softmax is not NaN.
        probabilities = special.softmax(np.nan_to_num(outputs).astype(np.float64), 1)
        lost = np.isnan(outputs).any(1, keepdims=True)
        return np.where(lost, np.nan, probabilities).astype(np.float32)

    def columns(self, answers: NDArray[np.float32]) -> dict[str, Sequence[Any]]:
        """Return the most probable class, "" if an output contains NaN, and probabilities."""
        lost = (answers != answers).any(1)  # noqa: PLR0124  (NaN)
        chosen = zip(lost, answers.argmax(1), strict=True)
        predicted = ["" if bad else self.names[place] for bad, place in chosen]
        probabilities = zip(self.names, answers.T, strict=True)
        return {"predicted": predicted, **{f"p_{name}": part for name, part in probabilities}}

    def results(
        self, outputs: Outputs, targets: NDArray[Any], owners: NDArray[np.int64] | None = None
    ) -> Results:
        """Compare outputs with targets. A record whose output contains NaN is wrong."""
        classes, lost = np.arange(self.outputs), np.isnan(outputs).any(1, keepdims=True)
        truth = targets[:, None] == classes
        guess = (outputs.argmax(1)[:, None] == classes) & ~lost
        # Scores that are worse than all others.
        scores = np.where(lost, 2 - 3 * truth.astype(np.float32), self.answers(outputs))
        return Classified(truth, guess, scores, owners, self.names)
