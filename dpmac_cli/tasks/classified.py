"""Results of a classifier on test records."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.tasks import metrics
from dpmac_cli.tasks.curves import draw_curves
from dpmac_cli.tasks.task import Interval, Results, Table, percent_or_dash

#: Accuracy in a class below which it is almost never predicted.
RARELY = 0.05


@dataclass(frozen=True, eq=False)
class Classified(Results):
    """Predicted and true classes or labels of test records.

    Attributes:
        answers: labels and predictions as arrays. names: names of the classes or labels.
    """

    answers: metrics.Answers
    names: tuple[str, ...]

    def metric(self, name: str) -> float:
        """Return a metric by its name, 0 to 1; nan if it is not defined."""
        return metrics.metric(name, self.answers)

    def metrics(self) -> dict[str, float]:
        """Return all metrics by name, 0 to 1."""
        return metrics.all_metrics(self.answers)

    def intervals(self, values: Mapping[str, float]) -> dict[str, Interval]:
        """Return the 95% interval of each metric."""
        return metrics.intervals(self.answers, values)

    def values(self) -> dict[str, Any]:
        """Return all metrics, the accuracy's interval and per-class rates as JSON values."""
        found = metrics.as_values(self.answers, self.metrics())
        return found | {"accuracy_interval": list(metrics.accuracy_interval(self.answers))}

    def details(self) -> dict[str, Any]:
        """Return per-class rates and the confusion matrix as JSON values."""
        rates = metrics.rates_as_values(self.answers)
        per_class = dict(zip(self.names, rates["sensitivity"], strict=True))
        return {**rates, "per_class": per_class, "confusion": self.confusion.tolist()}

    def draw(self, path: Path) -> None:
        """Draw ROC curves and a reliability diagram."""
        draw_curves(self.answers, self.metric("calibration-error"), self.names, path)

    @property
    def per_class(self) -> list[float]:
        """Accuracy in each true class, or in a label's positives, 0 to 1; nan without records."""
        return metrics.sensitivity_and_specificity(self.answers)[0]

    @property
    @abstractmethod
    def confusion(self) -> Tensor:
        """Counts of records, int64."""

    def _table(self, title: str, columns: tuple[str, ...], counts: Tensor) -> Table:
        rates = metrics.sensitivity_and_specificity(self.answers)
        rows = tuple(
            (name, *map(str, row), *map(percent_or_dash, both))
            for name, row, *both in zip(self.names, counts.tolist(), *rates, strict=True)
        )
        return Table(title, (*columns, "sens.", "spec."), rows, bold=("sens.", "spec."))


class OneClass(Classified):
    """Results of records with one class each."""

    @property
    def confusion(self) -> Tensor:
        """Return int64 counts by true and predicted class, shape (classes, classes).

        Records whose output contains NaN are left out.
        """
        truth, guess = self.answers.truth, self.answers.guess
        known, classes = guess.any(1), truth.shape[1]
        cells = classes * truth[known].argmax(1) + guess[known].argmax(1)
        return torch.from_numpy(np.bincount(cells, minlength=classes**2)).view(classes, classes)

    def table(self) -> Table:
        """Return counts with sensitivity and specificity, one row per true class."""
        return self._table("rows: true class, columns: predicted", self.names, self.confusion)

    def cells(self, *, by_class: bool) -> tuple[NDArray[np.int64], int]:
        """Count correct records; with ``by_class``, correct and then incorrect ones by class."""
        truth, guess = self.answers.truth, self.answers.guess
        if by_class:
            return np.concatenate([truth & guess, truth & ~guess], 1).astype(np.int64), 1
        return (truth & guess).sum(1, keepdims=True), 1

    @property
    def remark(self) -> str:
        """Return a note on a model that is no better than one class, or that omits some."""
        truth, guess = self.answers.truth, self.answers.guess
        right, most, records = int((truth & guess).sum()), int(truth.sum(0).max()), len(truth)
        if right > most:
            found = zip(self.names, self.per_class, strict=True)
            if not (rare := [name for name, share in found if share < RARELY]):
                return ""
            balanced = percent_or_dash(self.metric("balanced-accuracy"))
            return (
                f"almost no test sample of {', '.join(rare)} is classified correctly: balanced "
                f"accuracy {balanced}. --class-weights can give such classes more weight."
            )
        if most == records:
            return ""
        return (
            f"{right:,} of {records:,} test samples are classified correctly, but the most "
            f"frequent class alone has {most:,}. If longer training does not help, the noise "
            "is too large to learn: use a larger --epsilon, more records, or a "
            "smaller network (--model linear)."
        )


class EachLabel(Classified):
    """Results of records with any number of labels."""

    @property
    def confusion(self) -> Tensor:
        """Return int64 counts of true and false negatives and positives, (labels, 2, 2)."""
        cells = 2 * self.answers.truth.astype(np.int64) + self.answers.guess
        counts = np.stack([(cells == n).sum(0) for n in range(4)], 1)
        return torch.from_numpy(counts).view(-1, 2, 2)

    def table(self) -> Table:
        """Return counts with sensitivity and specificity, one row per label."""
        title = "rows: labels, columns: true and false negatives and positives"
        return self._table(title, ("TN", "FP", "FN", "TP"), self.confusion.flatten(1))

    def cells(self, *, by_class: bool) -> tuple[NDArray[np.int64], int]:
        """Count correct labels."""
        assert not by_class, "counts of every label are not covered"  # noqa: S101
        truth, guess = self.answers.truth, self.answers.guess
        return (truth == guess).sum(1, keepdims=True), truth.shape[1]
