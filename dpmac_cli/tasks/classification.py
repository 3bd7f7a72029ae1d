"""Classification: one class per record.

Imports nothing slow; see :mod:`dpmac_cli.tasks.task`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dpmac_cli.tasks.task import EvaluationMetric, Results, Task, TaskFacts, Usage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

BALANCED = EvaluationMetric(
    "balanced-accuracy",
    "balanced accuracy",
    covered=True,
    by_class=True,
)


@dataclass(frozen=True)
class Classification(Task):
    """One class per record. Targets are the numbers of classes, shape (records,)."""

    kind: ClassVar[str] = "classification"
    of_record: ClassVar[str] = "one class"
    unknown: ClassVar[str] = "no class"
    losses: ClassVar[tuple[str, ...]] = ("cross-entropy", "focal")
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (
        EvaluationMetric("accuracy", "accuracy", covered=True),
        BALANCED,
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

    def untested(self, targets: "NDArray[Any]") -> tuple[str, ...]:
        """Return classes that no test record has."""
        tested = set(targets.tolist())
        return tuple(name for k, name in enumerate(self.names) if k not in tested)

    def answers(self, outputs: "Tensor") -> "Tensor":
        """Return probabilities of the classes."""
        # Infinity is the largest number: softmax is not NaN.
        found = outputs.nan_to_num(0.0).softmax(1).float()
        return found.masked_fill_(outputs.isnan().any(1, keepdim=True), float("nan"))

    def columns(self, answers: "NDArray[np.float32]") -> dict[str, Sequence[Any]]:
        """Return the most probable class, "" if an output contains NaN, and probabilities."""
        lost = (answers != answers).any(1)  # noqa: PLR0124  (NaN)
        chosen = zip(lost, answers.argmax(1), strict=True)
        predicted = ["" if bad else self.names[place] for bad, place in chosen]
        probabilities = zip(self.names, answers.T, strict=True)
        return {"predicted": predicted, **{f"p_{name}": part for name, part in probabilities}}

    def results(
        self, outputs: "Tensor", targets: "Tensor", owners: "NDArray[np.int64] | None" = None
    ) -> Results:
        """Compare outputs with targets. A record whose output contains NaN is wrong."""
        from torch.nn.functional import one_hot  # noqa: PLC0415  (help is fast)

        from dpmac_cli.tasks.classified import Classified  # noqa: PLC0415  (help is fast)

        lost = outputs.isnan().any(1, keepdim=True)
        truth = one_hot(targets, self.outputs).bool()
        guess = one_hot(outputs.argmax(1), self.outputs).bool() & ~lost
        # Scores that are worse than all others.
        scores = (2 - 3 * truth.float()).where(lost, self.answers(outputs))
        return Classified(truth.numpy(), guess.numpy(), scores.numpy(), owners, self.names)
