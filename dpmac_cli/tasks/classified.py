"""Results of a classifier on test records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.plots import COLOURS, new_figure, write_figure
from dpmac_cli.tasks import metrics
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
    def confusion(self) -> Tensor:
        """Return int64 counts by true and predicted class, shape (classes, classes).

        Records whose output contains NaN are left out. Of several labels, the counts of true and
        false negatives and positives, shape (labels, 2, 2).
        """
        truth, guess = (torch.from_numpy(part) for part in (self.answers.truth, self.answers.guess))
        if self.answers.exclusive:
            return (truth.double().T @ guess.double()).long()
        cells = torch.stack([~truth & ~guess, ~truth & guess, truth & ~guess, truth & guess])
        return cells.sum(1).T.reshape(-1, 2, 2)

    def table(self) -> Table:
        """Return counts with sensitivity and specificity, one row per true class or label."""
        title, columns = "rows: true class, columns: predicted", self.names
        if not self.answers.exclusive:
            title = "rows: labels, columns: true and false negatives and positives"
            columns = ("TN", "FP", "FN", "TP")
        rates = metrics.sensitivity_and_specificity(self.answers)
        rows = tuple(
            (name, *map(str, row), *map(percent_or_dash, both))
            for name, row, *both in zip(
                self.names, self.confusion.flatten(1).tolist(), *rates, strict=True
            )
        )
        return Table(title, (*columns, "sens.", "spec."), rows, bold=("sens.", "spec."))

    def cells(self, *, by_class: bool) -> tuple[NDArray[np.int64], int]:
        """Count correct records or labels; with ``by_class``, correct and wrong ones by class."""
        truth, guess = self.answers.truth, self.answers.guess
        if not self.answers.exclusive:
            assert not by_class, "counts of every label are not covered"  # noqa: S101
            return (truth == guess).sum(1, keepdims=True), truth.shape[1]
        if by_class:
            return np.concatenate([truth & guess, truth & ~guess], 1).astype(np.int64), 1
        return (truth & guess).sum(1, keepdims=True), 1

    @property
    def remark(self) -> str:
        """Return a note on a model that is no better than one class, or that omits some."""
        truth, guess = self.answers.truth, self.answers.guess
        right, most, records = int((truth & guess).sum()), int(truth.sum(0).max()), len(truth)
        if not self.answers.exclusive or most == records:
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


def draw_curves(answers: metrics.Answers, error: float, names: Sequence[str], path: Path) -> None:
    """Draw one ROC curve per class against the others, and a reliability diagram.

    Only as many classes as there are colours are drawn; of two classes only the last. ``error`` is
    the calibration error. Raises OSError if the file cannot be written.
    """
    from sklearn.calibration import CalibrationDisplay  # noqa: PLC0415  (a second to import)
    from sklearn.metrics import RocCurveDisplay  # noqa: PLC0415  (a second to import)

    figure, (roc, reliability) = new_figure(2)
    roc.plot([0, 1], [0, 1], "-", color="#bbbbbb", linewidth=1)
    for k in answers.ranked[: len(COLOURS)]:
        name = names[k].replace("$", r"\$")  # it would begin a formula
        truth, scores = answers.truth[:, k], answers.scores[:, k]
        RocCurveDisplay.from_predictions(truth, scores, name=name, ax=roc)
    roc.set(xlabel="1 - specificity", ylabel="sensitivity")
    confidence, hit = (part.ravel() for part in answers.judged)
    CalibrationDisplay.from_predictions(hit, confidence, n_bins=metrics.BINS, ax=reliability)
    reliability.set(xlabel="confidence", ylabel="accuracy")
    reliability.set_title(f"calibration error {error:.3f}", fontsize="small")
    if (legend := reliability.get_legend()) is not None:
        legend.remove()
    write_figure(figure, path)
