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

ACCURACY = EvaluationMetric("accuracy", "accuracy", covered=True)
BALANCED = EvaluationMetric(
    "balanced-accuracy", "balanced accuracy", by_class=True, interval="balanced_interval"
)
#: Probability above which a label is predicted.
HALF = 0.5
OTHERS = (
    EvaluationMetric("auroc", "AUROC"),
    EvaluationMetric("average-precision", "average precision"),
    EvaluationMetric("f1", "F1"),
    EvaluationMetric("calibration-error", "calibration error", chosen=False),
)

#: Keys of scores in a report; those of covered scores are null for exact ones.
REPORTED = (
    *("balanced_accuracy", "f1", "calibration_error", "auroc", "average_precision"),
    *("sensitivity", "specificity", "noise", "interval", "balanced_interval"),
    "accuracy_interval",
)


class NamedClasses(Task):
    """Classes or labels, each of which has a name.

    Attributes:
        multilabel: whether a record may have any number of them.
    """

    multilabel: ClassVar[bool]

    @property
    def described(self) -> str:
        """Return the outputs in words."""
        return f"{len(self.names)} classes"

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


@dataclass(frozen=True)
class Classification(NamedClasses):
    """One class per record. Targets are the numbers of classes, shape (records,)."""

    kind: ClassVar[str] = "classification"
    of_record: ClassVar[str] = "one class"
    unknown: ClassVar[str] = "no class"
    losses: ClassVar[tuple[str, ...]] = ("cross-entropy", "focal")
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (
        ACCURACY,
        replace(BALANCED, covered=True),
        *OTHERS,
    )
    reported: ClassVar[tuple[str, ...]] = REPORTED
    target: ClassVar[str] = "int64"
    multilabel: ClassVar[bool] = False

    @property
    def summary(self) -> str:
        """Return the outputs by name."""
        return f"the classes {', '.join(self.names)}"

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        result = "The result is the index of the class in the list above, from 0."
        row = "classes", self.names
        return Usage("classifier", row, "", "classify", "{}.argmax(1)", result)

    def untested(self, targets: "NDArray[Any]") -> tuple[str, ...]:
        """Return classes without a test record."""
        tested = set(targets.tolist())
        return tuple(name for label, name in enumerate(self.names) if label not in tested)

    def examples(self) -> "tuple[Tensor, Tensor]":
        """Return two made-up outputs per class, and their classes."""
        import torch  # noqa: PLC0415  (help is fast)

        outputs = _random_outputs(len(self.names))
        return outputs, torch.arange(len(outputs)) % len(self.names)

    def answers(self, outputs: "Tensor") -> "Tensor":
        """Return probabilities of the classes."""
        return _known(outputs, _finite(outputs).softmax(1))

    def columns(self, answers: "NDArray[np.float32]") -> dict[str, Sequence[Any]]:
        """Return the most probable classes, "" if an output contains NaN, and probabilities."""
        lost = (answers != answers).any(1)  # noqa: PLR0124  (NaN)
        best = zip(answers.argmax(1).tolist(), lost.tolist(), strict=True)
        predicted = ["" if nothing else self.names[place] for place, nothing in best]
        return {"predicted": predicted, **_probabilities(self.names, answers)}

    def results(
        self, outputs: "Tensor", targets: "Tensor", owners: "NDArray[np.int64] | None" = None
    ) -> Results:
        """Compare outputs with classes."""
        from torch.nn.functional import one_hot  # noqa: PLC0415  (help is fast)

        from dpmac_cli.tasks.classified import OneClass  # noqa: PLC0415  (help is fast)
        from dpmac_cli.tasks.metrics import Answers  # noqa: PLC0415  (help is fast)

        lost = outputs.isnan().any(1, keepdim=True)
        truth = one_hot(targets, len(self.names)).bool()
        guess = one_hot(outputs.argmax(1), len(self.names)).bool() & ~lost
        scores = _worst_if_lost(self.answers(outputs), truth, lost).numpy()
        answers = Answers(truth.numpy(), guess.numpy(), scores, exclusive=True, unit_of=owners)
        return OneClass(answers, self.names)


@dataclass(frozen=True)
class SeveralLabels(NamedClasses):
    """Any number of labels per record. Targets are 0 or 1 per label, shape (records, labels)."""

    kind: ClassVar[str] = "several labels"
    of_record: ClassVar[str] = "several labels"
    unknown: ClassVar[str] = "no labels"
    losses: ClassVar[tuple[str, ...]] = ("bce",)
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (ACCURACY, BALANCED, *OTHERS)
    reported: ClassVar[tuple[str, ...]] = REPORTED
    target: ClassVar[str] = "uint8"
    frozen_parts: ClassVar[bool] = False
    audited: ClassVar[bool] = False
    multilabel: ClassVar[bool] = True

    @property
    def summary(self) -> str:
        """Return the outputs by name."""
        return f"the labels {', '.join(self.names)}"

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        result = "The result says which of the labels in the list above each record has."
        row = "labels", self.names
        return Usage("classifier", row, "", "classify", "{} > 0", result)

    def untested(self, targets: "NDArray[Any]") -> tuple[str, ...]:
        """Return labels that no test record has."""
        import numpy as np  # noqa: PLC0415  (help is fast)

        there = np.any(targets, axis=0)
        return tuple(name for name, tested in zip(self.names, there, strict=True) if not tested)

    def examples(self) -> "tuple[Tensor, Tensor]":
        """Return two made-up outputs per label, and their only label."""
        import torch  # noqa: PLC0415  (help is fast)

        labels = torch.eye(len(self.names), dtype=torch.uint8)
        return _random_outputs(len(self.names)), labels.repeat(2, 1)

    def answers(self, outputs: "Tensor") -> "Tensor":
        """Return probabilities of the labels."""
        return _known(outputs, _finite(outputs).sigmoid())

    def columns(self, answers: "NDArray[np.float32]") -> dict[str, Sequence[Any]]:
        """Return the labels above one half, joined by ";", and probabilities."""
        predicted = [
            ";".join(k for k, p in zip(self.names, row, strict=True) if p > HALF) for row in answers
        ]
        return {"predicted": predicted, **_probabilities(self.names, answers)}

    def results(
        self, outputs: "Tensor", targets: "Tensor", owners: "NDArray[np.int64] | None" = None
    ) -> Results:
        """Compare outputs with labels."""
        from dpmac_cli.tasks.classified import EachLabel  # noqa: PLC0415  (help is fast)
        from dpmac_cli.tasks.metrics import Answers  # noqa: PLC0415  (help is fast)

        lost, truth = outputs.isnan().any(1, keepdim=True), targets.bool()
        guess = (outputs > 0).where(~lost, ~truth)
        scores = _worst_if_lost(self.answers(outputs), truth, lost).numpy()
        answers = Answers(truth.numpy(), guess.numpy(), scores, exclusive=False, unit_of=owners)
        return EachLabel(answers, self.names)


def _random_outputs(names: int) -> "Tensor":
    import torch  # noqa: PLC0415  (help is fast)

    return torch.randn(2 * names, names, generator=torch.Generator().manual_seed(0))


def _finite(outputs: "Tensor") -> "Tensor":
    """Return outputs in which infinity is the largest number, so that softmax is not NaN."""
    return outputs.nan_to_num(0.0)


def _known(outputs: "Tensor", answers: "Tensor") -> "Tensor":
    """Return answers as float32, NaN where an output of the record is."""
    return answers.float().masked_fill_(outputs.isnan().any(1, keepdim=True), float("nan"))


def _worst_if_lost(answers: "Tensor", truth: "Tensor", lost: "Tensor") -> "Tensor":
    """Return scores that are worse than all others if a record's output contains NaN."""
    return (2 - 3 * truth.float()).where(lost, answers)


def _probabilities(
    names: tuple[str, ...], answers: "NDArray[np.float32]"
) -> dict[str, Sequence[Any]]:
    return {f"p_{name}": part for name, part in zip(names, answers.T, strict=True)}
