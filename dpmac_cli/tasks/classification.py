"""Classification: one class per record, or any number of labels.

Imports nothing slow; see :mod:`dpmac_cli.tasks.task`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    interval="balanced_interval",
)
#: Probability above which a label is predicted.
HALF = 0.5


class NamedClasses(Task):
    """Classes or labels, each of which has a name.

    Attributes:
        multilabel: whether a record may have any number of them.
    """

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
        *("sensitivity", "specificity", "noise", "interval", "balanced_interval"),
        "accuracy_interval",
    )
    multilabel: ClassVar[bool] = False

    @property
    def described(self) -> str:
        """Return the outputs in words."""
        return f"{len(self.names)} classes"

    @property
    def summary(self) -> str:
        """Return the outputs by name."""
        return f"the {self.usage.row[0]} {', '.join(self.names)}"

    @property
    def facts(self) -> TaskFacts:
        """Return the facts of the task in a model file."""
        return {"classes": list(self.names), "multilabel": self.multilabel, "target": None}

    @classmethod
    def of_facts(cls, facts: TaskFacts) -> Task | None:
        """Return the task with these facts; None if they describe another kind."""
        if facts["target"] is not None or facts["multilabel"] != cls.multilabel:
            return None
        return cls(tuple(facts["classes"]))

    def untested(self, targets: "NDArray[Any]") -> tuple[str, ...]:
        """Return classes or labels that no test record has."""
        import numpy as np  # noqa: PLC0415  (help is fast)

        tested = np.flatnonzero(targets.any(0)) if self.multilabel else np.unique(targets)
        return tuple(name for k, name in enumerate(self.names) if k not in tested)

    def examples(self) -> "tuple[Tensor, Tensor]":
        """Return two made-up outputs per class or label, and their only one."""
        import torch  # noqa: PLC0415  (help is fast)

        labels = torch.eye(len(self.names), dtype=torch.uint8).repeat(2, 1)
        outputs = torch.randn(labels.shape, generator=torch.Generator().manual_seed(0))
        return outputs, labels if self.multilabel else labels.argmax(1)

    def answers(self, outputs: "Tensor") -> "Tensor":
        """Return probabilities of the classes or labels."""
        finite = outputs.nan_to_num(0.0)  # infinity is the largest number: softmax is not NaN
        found = finite.sigmoid() if self.multilabel else finite.softmax(1)
        return found.float().masked_fill_(outputs.isnan().any(1, keepdim=True), float("nan"))

    def columns(self, answers: "NDArray[np.float32]") -> dict[str, Sequence[Any]]:
        """Return the prediction, "" if an output contains NaN, and probabilities.

        It is the most probable class, or the labels above one half, joined by ";".
        """
        lost = (answers != answers).any(1)  # noqa: PLR0124  (NaN)
        if self.multilabel:
            chosen = [
                ";".join(k for k, p in zip(self.names, row, strict=True) if p > HALF)
                for row in answers
            ]
        else:
            chosen = [self.names[place] for place in answers.argmax(1)]
        predicted = ["" if bad else text for bad, text in zip(lost, chosen, strict=True)]
        probabilities = zip(self.names, answers.T, strict=True)
        return {"predicted": predicted, **{f"p_{name}": part for name, part in probabilities}}

    def results(
        self, outputs: "Tensor", targets: "Tensor", owners: "NDArray[np.int64] | None" = None
    ) -> Results:
        """Compare outputs with targets. A record whose output contains NaN is wrong."""
        from torch.nn.functional import one_hot  # noqa: PLC0415  (help is fast)

        from dpmac_cli.tasks.classified import Classified  # noqa: PLC0415  (help is fast)
        from dpmac_cli.tasks.metrics import Answers  # noqa: PLC0415  (help is fast)

        lost, one = outputs.isnan().any(1, keepdim=True), not self.multilabel
        truth = (one_hot(targets, self.outputs) if one else targets).bool()
        guess = one_hot(outputs.argmax(1), self.outputs).bool() if one else outputs > 0
        guess = guess.where(~lost, ~truth & (not one))
        # Scores that are worse than all others.
        scores = (2 - 3 * truth.float()).where(lost, self.answers(outputs))
        answers = Answers(truth.numpy(), guess.numpy(), scores.numpy(), one, owners)
        return Classified(answers, self.names)


@dataclass(frozen=True)
class Classification(NamedClasses):
    """One class per record. Targets are the numbers of classes, shape (records,)."""

    kind: ClassVar[str] = "classification"
    of_record: ClassVar[str] = "one class"
    unknown: ClassVar[str] = "no class"
    losses: ClassVar[tuple[str, ...]] = ("cross-entropy", "focal")
    target: ClassVar[str] = "int64"

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        result = "The result is the index of the class in the list above, from 0."
        row = "classes", self.names
        return Usage("classifier", row, "", "classify", "{}.argmax(1)", result)


@dataclass(frozen=True)
class SeveralLabels(NamedClasses):
    """Any number of labels per record. Targets are 0 or 1 per label, shape (records, labels)."""

    kind: ClassVar[str] = "several labels"
    of_record: ClassVar[str] = "several labels"
    unknown: ClassVar[str] = "no labels"
    losses: ClassVar[tuple[str, ...]] = ("bce",)
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = tuple(
        replace(metric, covered=metric.name == "accuracy") for metric in NamedClasses.metrics
    )
    target: ClassVar[str] = "uint8"
    frozen_parts: ClassVar[bool] = False
    audited: ClassVar[bool] = False
    multilabel: ClassVar[bool] = True

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        result = "The result says which of the labels in the list above each record has."
        row = "labels", self.names
        return Usage("classifier", row, "", "classify", "{} > 0", result)
