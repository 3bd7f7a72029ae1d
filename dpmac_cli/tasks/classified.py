"""Results of a classifier on test records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.tasks import metrics
from dpmac_cli.tasks.task import Interval, Results, Table, percent_or_dash

#: Accuracy in a class below which it is almost never predicted.
RARELY = 0.05


@dataclass(frozen=True, eq=False)
class Classified(Results):
    """Predicted and true classes of test records.

    Attributes:
        answers: classes and predictions as arrays. names: names of the classes.
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
        found = metrics.as_values(self.metrics()) | metrics.rates_as_values(self.answers)
        return found | {"accuracy_interval": list(metrics.accuracy_interval(self.answers))}

    def details(self) -> dict[str, Any]:
        """Return per-class rates and the confusion matrix as JSON values."""
        rates = metrics.rates_as_values(self.answers)
        per_class = dict(zip(self.names, rates["sensitivity"], strict=True))
        return {**rates, "per_class": per_class, "confusion": self.confusion.tolist()}

    @property
    def per_class(self) -> list[float]:
        """Accuracy in each true class, 0 to 1; nan without records."""
        return metrics.sensitivity_and_specificity(self.answers)[0]

    @property
    def confusion(self) -> Tensor:
        """Return int64 counts by true and predicted class, shape (classes, classes).

        Records whose output contains NaN are left out.
        """
        truth, guess = (torch.from_numpy(part) for part in (self.answers.truth, self.answers.guess))
        return (truth.double().T @ guess.double()).long()

    def table(self) -> Table:
        """Return counts with sensitivity and specificity, one row per true class."""
        rates = metrics.sensitivity_and_specificity(self.answers)
        rows = tuple(
            (name, *map(str, row), *map(percent_or_dash, both))
            for name, row, *both in zip(self.names, self.confusion.tolist(), *rates, strict=True)
        )
        columns = (*self.names, "sens.", "spec.")
        return Table("rows: true class, columns: predicted", columns, rows, bold=columns[-2:])

    def cells(self, *, by_class: bool) -> tuple[NDArray[np.int64], int]:
        """Count correct records; with ``by_class``, correct and wrong ones by class."""
        truth, guess = self.answers.truth, self.answers.guess
        if by_class:
            return np.concatenate([truth & guess, truth & ~guess], 1).astype(np.int64), 1
        return (truth & guess).sum(1, keepdims=True), 1

    @property
    def remark(self) -> str:
        """Return a note on a model that is no better than one class, or that omits some."""
        truth, guess = self.answers.truth, self.answers.guess
        right, most, records = int((truth & guess).sum()), int(truth.sum(0).max()), len(truth)
        if most == records:
            return ""
        if right <= most:
            return (
                f"{right:,} of {records:,} test samples are classified correctly, but the most "
                f"frequent class alone has {most:,}. If longer training does not help, the noise "
                "is too large to learn: use a larger --epsilon, more records, or a "
                "smaller network (--model linear)."
            )
        found = zip(self.names, self.per_class, strict=True)
        if not (rare := [name for name, share in found if share < RARELY]):
            return ""
        balanced = percent_or_dash(self.metric("balanced-accuracy"))
        return (
            f"almost no test sample of {', '.join(rare)} is classified correctly: balanced "
            f"accuracy {balanced}. --class-weights can give such classes more weight."
        )
