"""Classification: one class per record. See :mod:`dpmac_cli.tasks.task`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpmac_cli.files import finite_or_none
from dpmac_cli.libraries import np, special
from dpmac_cli.tasks.calibration import Calibration, cell_count, cells, is_lost, log_odds
from dpmac_cli.tasks.class_metrics import (
    SPECIFICITY,
    accuracy,
    auroc,
    average_precision,
    balanced_accuracy,
    calibration_error,
    classes_of,
    confusion_of,
    f1,
    log_loss,
    ranked,
    ranks,
    rates,
    right,
    sensitivity_at_specificity,
)
from dpmac_cli.tasks.metrics import FROM_0, Compared, EvaluationMetric, percent_or_dash
from dpmac_cli.tasks.operating_point import MOST_LIKELY, OperatingPoint
from dpmac_cli.tasks.task import Task, register_task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.tasks.task import Outputs

#: Accuracy in a class below which it is almost never predicted.
RARELY = 0.05


@register_task("classification")
@dataclass(frozen=True)
class Classification(Task):
    """One class per record. Targets are the numbers of classes, shape (records,).

    Attributes:
        calibration: how outputs become probabilities; None for their softmax. It decides nothing.
        operating_point: what decides between two classes; None for the largest output.

    Equality of tasks sees neither.
    """

    calibration: Calibration | None = field(default=None, compare=False)
    operating_point: OperatingPoint | None = field(default=None, compare=False)

    of_record: ClassVar[str] = "one class"
    listed: ClassVar[str] = "classes"
    result: ClassVar[str] = "The result is the index of the class in the list above, from 0."
    losses: ClassVar[tuple[str, ...]] = ("cross-entropy", "focal")
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (
        EvaluationMetric("accuracy", "accuracy", accuracy, right, covered=True),
        EvaluationMetric(
            "balanced-accuracy", "balanced accuracy", balanced_accuracy, groups=classes_of
        ),
        EvaluationMetric("auroc", "AUROC", auroc, groups=ranked),
        EvaluationMetric(
            "average-precision", "average precision", average_precision, groups=ranked
        ),
        EvaluationMetric(
            "sensitivity-at-specificity",
            f"sensitivity at {SPECIFICITY:.0%} specificity",
            sensitivity_at_specificity,
            groups=ranked,
        ),
        EvaluationMetric("f1", "F1", f1, groups=classes_of),
        EvaluationMetric("log-loss", "log loss", log_loss, lower=True, ends=FROM_0),
        EvaluationMetric("calibration-error", "calibration error", calibration_error, lower=True),
    )
    reported: ClassVar[tuple[str, ...]] = ("sensitivity", "specificity", "confusion")
    target: ClassVar[str] = "int64"
    asked: ClassVar[bool] = False

    @property
    def described(self) -> str:
        """Return the outputs in words, such as "10 classes"."""
        return f"{len(self.names)} classes"

    @property
    def summary(self) -> str:
        """Return the outputs by name, such as "the classes cat, dog"."""
        return f"the classes {', '.join(self.names)}"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts of the task in a model file; those of a subclass have its kind."""
        return super().facts | ({} if self.asked else {"target": None})

    @property
    def counted_facts(self) -> Mapping[str, Any]:
        """Calibration and operating point by their names.

        With a calibration, two classes always have a point: that of the largest output by default.
        """
        point = self.operating_point
        if point is None and self.calibration is not None and self.outputs == 2:
            point = OperatingPoint(MOST_LIKELY, 0.0)
        return {"calibration": self.calibration, "operating_point": point}

    @property
    def calibrates(self) -> bool:
        """Return whether it is not a task of a program."""
        return type(self) is Classification

    @property
    def cell_count(self) -> int:
        """Number of cells of the histogram of a calibration."""
        return cell_count(self.outputs)

    def cells(self, outputs: Outputs, targets: NDArray[Any]) -> NDArray[np.int64]:
        """Return the cell of each record in the histogram of a calibration.

        Args:
            outputs: outputs of the network, shape (records, classes).
            targets: numbers of the true classes, shape (records,).

        Returns:
            int64, shape (records,); -1 for a record that is in no cell.
        """
        return cells(outputs, targets)

    def calibrated(self, counts: NDArray[np.float64], noise: float, records: float) -> Self:
        """Return the task with the calibration that follows from noisy counts.

        Args:
            counts: counts of all cells, shape (cells,).
            noise: standard deviation of the noise in each.
            records: public number of records that were counted, about.
        """
        pairs = counts.reshape(-1, 2)
        return replace(self, calibration=Calibration.fitted(pairs, noise, records))

    def at(self, threshold: str) -> Self:
        """Return the task with an operating point.

        Args:
            threshold: balanced, sensitivity=0.9, a probability such as 0.3, or most-likely.

        Raises:
            ValueError: there are not two classes, or the point needs a calibration and there is
                none.
        """
        if self.outputs != 2:
            raise ValueError(f"a threshold is for two classes, not {self.outputs}")
        return replace(self, operating_point=OperatingPoint.of(threshold, self.calibration))

    def adjusted(self, outputs: Any) -> Any:
        """Return calibrated outputs, of which probabilities are the softmax.

        Args:
            outputs: an array or a tensor, shape (records, classes). Without a calibration it is
                returned as it is.
        """
        return outputs if self.calibration is None else self.calibration.applied(outputs)

    @property
    def code(self) -> str:
        """Python expression for the class that is decided on.

        It has ``{}`` for the network's outputs; see :attr:`Task.code`.
        """
        point = self.operating_point
        if point is None or point.log_odds == 0:
            return "{}.argmax(1)"
        return f"{{}}.diff(dim=1).gt({point.log_odds!r}).long().squeeze(1)"

    @property
    def probabilities_code(self) -> str:
        """Python expression for calibrated probabilities of ``outputs``; "" without any."""
        if self.calibration is None:
            return ""
        shift = [0.0] * (self.outputs - 1) + [self.calibration.intercept]
        added = f" + torch.tensor({shift})" if any(shift) else ""
        return f"({self.calibration.slope!r} * outputs{added}).softmax(1)"

    def untested(self, targets: NDArray[Any]) -> tuple[str, ...]:
        """Return the names of the classes that no test record has; () if each has one.

        ``targets`` are the numbers of the classes of the test records, shape (records,).
        """
        tested = set(targets.tolist())
        return tuple(name for k, name in enumerate(self.names) if k not in tested)

    def answers(self, outputs: Outputs) -> NDArray[np.float32]:
        """Return calibrated probabilities, float32, shape (records, classes).

        Args:
            outputs: outputs of the network, shape (records, classes). A row with NaN becomes NaN.
        """
        # Infinity is the largest number: softmax is not NaN.
        known = self.adjusted(np.nan_to_num(outputs).astype(np.float64))
        probabilities = special.softmax(known, 1)
        lost = is_lost(outputs)[:, None]
        return np.where(lost, np.nan, probabilities).astype(np.float32)

    def chosen(self, outputs: Outputs) -> NDArray[np.int64]:
        """Return the predicted classes of outputs, shape (records,).

        A calibration does not change them: the point is in log-odds of the network as it was
        trained. Without a point it is the class of the largest output.
        """
        if self.operating_point is not None:
            return (log_odds(outputs) > self.operating_point.log_odds).astype(np.int64)
        places: NDArray[np.int64] = outputs.argmax(1)
        return places

    def columns(self, outputs: Outputs) -> dict[str, Sequence[Any]]:
        """Return the predicted class, "" if an output contains NaN, and probabilities.

        Args:
            outputs: outputs of the network, shape (records, classes).
        """
        lost = is_lost(outputs)
        chosen = zip(lost, self.chosen(outputs), strict=True)
        predicted = ["" if bad else self.names[place] for bad, place in chosen]
        columns: dict[str, Sequence[Any]] = {"predicted": predicted}
        for name, probabilities in zip(self.names, self.answers(outputs).T, strict=True):
            columns[f"p_{name}"] = probabilities
        return columns

    def compared(
        self, outputs: Outputs, targets: NDArray[Any], owners: NDArray[np.int64]
    ) -> Compared:
        """Compare outputs with targets. A record whose output contains NaN is wrong.

        Args:
            outputs: outputs of the network, shape (records, classes).
            targets: numbers of the true classes, shape (records,).
            owners: index of each record's unit of privacy, shape (records,).
        """
        lost = is_lost(outputs)
        guess = np.where(lost, -1, self.chosen(outputs))
        truth: NDArray[np.bool_] = np.equal(targets[:, None], np.arange(self.outputs))
        worst = 2 - 3 * truth.astype(np.float32)
        scores = np.where(lost[:, None], worst, self.answers(outputs))
        return Compared(targets, guess, owners, scores)

    def counted(self, of: Compared) -> tuple[NDArray[np.int64], int]:
        """Return 1 for correct records and 0 for wrong ones, and the most, which is 1.

        Counts are int64, shape (records,); see :meth:`Task.counted`.
        """
        return right(of).astype(np.int64), 1

    def constant(self, of: Compared) -> dict[str, float]:
        """Return the share of the largest class, and the entropy of the shares in nats.

        The latter is the log loss of a model that says the shares for each record.

        Args:
            of: predictions for test records beside their targets.
        """
        shares = np.bincount(of.truth) / len(of.truth)
        return {"accuracy": float(shares.max()), "log-loss": float(special.entr(shares).sum())}

    def details(self, of: Compared) -> dict[str, Any]:
        """Return sensitivity, specificity and the confusion matrix by class.

        Args:
            of: predictions for test records beside their targets.
        """
        sensitivity, specificity = rates(of)
        return {
            "sensitivity": list(map(finite_or_none, sensitivity)),
            "specificity": list(map(finite_or_none, specificity)),
            "confusion": confusion_of(of).tolist(),
        }

    def remark(self, of: Compared, loss: str) -> tuple[str, bool] | None:
        """Return a note on a model that is no better than one class, or that omits some.

        Args:
            of: predictions for test records beside their targets.
            loss: see :meth:`Task.remark`; the note is the same for every loss.

        Returns:
            Sentences, and whether the outputs tell nothing; None if there is nothing to note.
        """
        correct = int(right(of).sum())
        records = len(of.truth)
        most = int(np.bincount(of.truth).max())
        if most == records:
            return None
        sensitivity, _ = rates(of)
        by_class = zip(self.names, sensitivity, strict=True)
        rare = [name for name, share in by_class if share < RARELY]
        if correct <= most and ranks(of) and not rare:
            return None  # as with class weights, which cost accuracy where one class is frequent
        if correct <= most:
            comparison = (
                f"{correct:,} of {records:,} test samples are classified correctly, but the most "
                f"frequent class alone has {most:,}."
            )
            if not ranks(of):
                return comparison, True
            way = "compare them with your own threshold (dpmac predict)"
            if self._can_balance:
                way = "decide between them with dpmac predict --threshold balanced"
            return (
                f"{comparison} Its probabilities do tell the classes apart (AUROC "
                f"{percent_or_dash(auroc(of))}): {way}, or give rare classes more weight "
                "(--class-weights).",
                False,
            )
        if not rare:
            return None
        quoted = ", ".join(map(repr, rare))
        return (
            f"almost no test sample of {quoted} is classified correctly: balanced "
            f"accuracy {percent_or_dash(balanced_accuracy(of))}. --class-weights can give such "
            f"classes more weight{', and --threshold balanced decides' * self._can_balance}.",
            False,
        )

    @property
    def _can_balance(self) -> bool:
        """Return whether the model can decide at a balanced operating point instead."""
        return self.outputs == 2 and self.calibration is not None
