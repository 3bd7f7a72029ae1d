"""Classification: one class per record. Metrics are those of scikit-learn.

Means over classes leave out those for which a metric is not defined. A metric that is not defined
for any class, such as the AUROC of a test set with a single class, is nan. See
:mod:`dpmac_cli.tasks.task`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpmac_cli.files import finite_or_none
from dpmac_cli.libraries import np, sklearn_metrics, special
from dpmac_cli.tasks.calibration import Calibration, cell_count, cells, is_lost, log_odds
from dpmac_cli.tasks.operating_point import MOST_LIKELY, OperatingPoint, describe
from dpmac_cli.tasks.task import (
    FROM_0,
    Compared,
    EvaluationMetric,
    Task,
    percent_or_dash,
    register_task,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.tasks.task import Outputs

#: Accuracy in a class below which it is almost never predicted.
RARELY = 0.05
#: Deviations above 0.5 from which an AUROC is not that of random scores.
CLEAR = 3.0
#: Number of equal-width bins of the calibration error.
BINS = 15
#: Specificity at which the sensitivity is a metric, with the threshold that the test records need.
SPECIFICITY = 0.95


def right(of: Compared) -> NDArray[np.bool_]:
    """Return which records are classified correctly, bool, shape (records,).

    Args:
        of: predictions for test records beside their targets.
    """
    is_right: NDArray[np.bool_] = np.equal(of.truth, of.guess)
    return is_right


def classes_of(of: Compared) -> NDArray[np.bool_]:
    """Return the records of each true class with records, shape (records, 1, classes).

    Args:
        of: predictions for test records beside their targets.
    """
    is_of: NDArray[np.bool_] = np.equal(of.truth[:, None], np.unique(of.truth))
    return is_of[:, None]


def ranked(of: Compared) -> NDArray[np.bool_]:
    """Return positives and negatives of each class that has both, shape (records, 2, classes).

    Of two classes, only the last one is positive.

    Args:
        of: predictions for test records beside their targets.
    """
    classes = ranked_classes(of)
    positive = np.equal(of.truth[:, None], classes)
    return np.stack([positive, ~positive], 1)


def ranked_classes(of: Compared) -> NDArray[Any]:
    """Return the numbers of the classes with both positives and negatives.

    Of two classes it is only the last one, [1]; it is empty if all records are of one class.

    Args:
        of: predictions for test records beside their targets.
    """
    counted = of.truth if of.weights is None else of.truth[of.weights > 0]
    classes = np.unique(counted)
    if len(classes) < 2:
        return classes[:0]
    return np.array([1]) if of.scores.shape[1] == 2 else classes


def accuracy(of: Compared) -> float:
    """Return the share of records that are classified correctly.

    Args:
        of: predictions for test records beside their targets.
    """
    return float(sklearn_metrics.accuracy_score(of.truth, of.guess, sample_weight=of.weights))


def balanced_accuracy(of: Compared) -> float:
    """Return the mean of the sensitivities of the classes with records.

    With K classes, a model that says one class to all has 1 / K, however frequent that class is.

    Args:
        of: predictions for test records beside their targets.
    """
    sensitivity, _ = rates(of)
    return _mean(sensitivity)


def f1(of: Compared) -> float:
    """Return the mean over classes of the harmonic mean of sensitivity and precision.

    A class that no record has and that is never predicted is left out (``macro`` with nan for a
    division by zero in scikit-learn).

    Args:
        of: predictions for test records beside their targets.
    """
    return float(
        sklearn_metrics.f1_score(
            of.truth,
            of.guess,
            labels=np.arange(of.scores.shape[1]),
            average="macro",
            sample_weight=of.weights,
            zero_division=np.nan,
        )
    )


def auroc(of: Compared) -> float:
    """Return the mean over classes of the area under the curve of sensitivity and specificity.

    It is the probability that a record of the class has a higher score than one of another class,
    with one half for a tie. Of two classes it is that of the last one.

    Args:
        of: predictions for test records beside their targets.
    """
    return _mean([sklearn_metrics.auc(false, true) for false, true in _curves(of)])


def sensitivity_at_specificity(of: Compared) -> float:
    """Return the largest sensitivity at a specificity of :data:`SPECIFICITY` or more.

    It is a mean over classes, at the threshold that suits these test records best.

    Args:
        of: predictions for test records beside their targets.
    """
    most = 1 - SPECIFICITY + 1e-12
    return _mean([float(true[false <= most].max()) for false, true in _curves(of)])


def average_precision(of: Compared) -> float:
    """Return the mean over classes of the average precision.

    It is the sum over thresholds of the precision times the gain in sensitivity, without
    interpolation. Random scores have the share of the class.

    Args:
        of: predictions for test records beside their targets.
    """
    return _mean(_of_rankings(of, sklearn_metrics.average_precision_score))


def log_loss(of: Compared) -> float:
    """Return the mean cross-entropy in nats.

    Probabilities are those after calibration. One of 0 counts as the smallest step of float64, so a
    record costs at most 36.

    Args:
        of: predictions for test records beside their targets.
    """
    shares = of.scores.astype(float).clip(0, 1)
    shares /= shares.sum(1, keepdims=True)
    classes = np.arange(shares.shape[1])
    return float(
        sklearn_metrics.log_loss(of.truth, shares, sample_weight=of.weights, labels=classes)
    )


def calibration_error(of: Compared) -> float:
    """Return the expected calibration error (Guo et al. 2017, arXiv 1706.04599, equation 3).

    Records are in :data:`BINS` bins of equal width by their largest probability. The gap of a bin
    is that between the mean of these and the share of correct records; bins count by their records.

    Args:
        of: predictions for test records beside their targets.
    """
    weights = np.ones(len(of.truth)) if of.weights is None else of.weights
    confidence = of.scores.max(1).clip(0, 1)
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, weights * (right(of) - confidence.astype(float)))
    return float(np.abs(gaps).sum() / weights.sum())


def rates(of: Compared) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sensitivity and specificity by class, shape (classes,) each.

    They are nan for a class without positives, or without negatives. A record whose output contains
    NaN is a wrong answer.

    Args:
        of: predictions for test records beside their targets.
    """
    classes = np.arange(of.scores.shape[1])
    counts = sklearn_metrics.multilabel_confusion_matrix(
        of.truth, of.guess, labels=classes, sample_weight=of.weights
    ).astype(float)
    with np.errstate(invalid="ignore"):
        sensitivity = counts[:, 1, 1] / counts[:, 1].sum(1)
        return sensitivity, counts[:, 0, 0] / counts[:, 0].sum(1)


def confusion_of(of: Compared) -> NDArray[np.int64]:
    """Return int64 counts by true and predicted class, shape (classes, classes).

    Records whose output contains NaN are left out.

    Args:
        of: predictions for test records beside their targets.
    """
    classes = np.arange(of.scores.shape[1])
    answered = of.guess >= 0
    if not answered.any():
        return np.zeros((len(classes), len(classes)), np.int64)
    counts: NDArray[np.int64] = sklearn_metrics.confusion_matrix(
        of.truth[answered], of.guess[answered], labels=classes
    )
    return counts


def _of_rankings(of: Compared, metric: Callable[..., Any]) -> list[Any]:
    """Return a metric of the scores of each ranked class beside its positives."""
    return [
        metric(of.truth == k, of.scores[:, k], sample_weight=of.weights) for k in ranked_classes(of)
    ]


@lru_cache(maxsize=1)  # several metrics of the same weights need them
def _curves(of: Compared) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return 1 - specificity and sensitivity at all thresholds, of each ranked class."""
    curve = partial(sklearn_metrics.roc_curve, drop_intermediate=False)
    return [(false, true) for false, true, _ in _of_rankings(of, curve)]


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the mean of values that are not nan; nan if there is none."""
    some = np.asarray(values, float)
    defined = some[~np.isnan(some)]
    return float(defined.mean()) if len(defined) else math.nan


@register_task("classification")
@dataclass(frozen=True)
class Classification(Task):
    """One class per record. Targets are the numbers of classes, shape (records,).

    Attributes:
        calibration: how outputs become probabilities; None for their softmax. It decides nothing.
        point: what decides between two classes; None for the largest output.

    Equality of tasks sees neither.
    """

    calibration: Calibration | None = field(default=None, compare=False)
    point: OperatingPoint | None = field(default=None, compare=False)

    of_record: ClassVar[str] = "one class"
    noun: ClassVar[str] = "classifier"
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
    reported: ClassVar[tuple[str, ...]] = (
        *("constant_accuracy", "constant_log_loss"),
        *("sensitivity", "specificity", "confusion"),
    )
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

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Return the task with these :attr:`facts`, and a calibration if they have one."""
        task = super().of_facts(facts)
        if (calibration := facts.get("calibration")) is not None:
            task = replace(task, calibration=Calibration(**calibration))
        if (point := facts.get("point")) is not None:
            task = replace(task, point=OperatingPoint(**point))
        return task

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
        return replace(self, point=OperatingPoint.of(threshold, self.calibration))

    def point_facts(self, epsilon: float) -> dict[str, Any] | None:
        """Return the operating point of two classes as JSON values; None without one.

        ``epsilon`` is that of the run. See :func:`~dpmac_cli.tasks.operating_point.describe`.
        """
        if self.outputs != 2 or (self.calibration is None and self.point is None):
            return None
        point = self.point or OperatingPoint(MOST_LIKELY, 0.0)
        return describe(point, self.calibration, self.names, epsilon)

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
        if self.point is None or self.point.log_odds == 0:
            return "{}.argmax(1)"
        return f"{{}}.diff(dim=1).gt({self.point.log_odds!r}).long().squeeze(1)"

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
        lost = np.isnan(outputs).any(1, keepdims=True)
        return np.where(lost, np.nan, probabilities).astype(np.float32)

    def chosen(self, outputs: Outputs) -> NDArray[np.int64]:
        """Return the predicted classes of outputs, shape (records,).

        A calibration does not change them: the point is in log-odds of the network as it was
        trained. Without a point it is the class of the largest output.
        """
        if self.point is not None:
            return (log_odds(outputs) > self.point.log_odds).astype(np.int64)
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
        probabilities = zip(self.names, self.answers(outputs).T, strict=True)
        return {"predicted": predicted, **{f"p_{name}": part for name, part in probabilities}}

    def compared(
        self, outputs: Outputs, targets: NDArray[Any], owners: NDArray[np.int64]
    ) -> Compared:
        """Compare outputs with targets. A record whose output contains NaN is wrong.

        Args:
            outputs: outputs of the network, shape (records, classes).
            targets: numbers of the true classes, shape (records,).
            owners: index of each record's unit of privacy, shape (records,).
        """
        lost = np.isnan(outputs).any(1)
        guess = np.where(lost, -1, self.chosen(outputs))
        truth: NDArray[np.bool_] = np.equal(targets[:, None], np.arange(self.outputs))
        worst = 2 - 3 * truth.astype(np.float32)
        scores = np.where(lost.reshape(-1, 1), worst, self.answers(outputs))
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
        sensitivity, specificity = ([*map(finite_or_none, rate)] for rate in rates(of))
        return {
            "sensitivity": sensitivity,
            "specificity": specificity,
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
        correct, records = int(right(of).sum()), len(of.truth)
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
        return (
            f"almost no test sample of {', '.join(rare)} is classified correctly: balanced "
            f"accuracy {percent_or_dash(balanced_accuracy(of))}. --class-weights can give such "
            f"classes more weight{', and --threshold balanced decides' * self._can_balance}.",
            False,
        )

    @property
    def _can_balance(self) -> bool:
        """Return whether the model can decide at a balanced operating point instead."""
        return self.outputs == 2 and self.calibration is not None


def ranks(of: Compared) -> bool:
    """Return whether scores tell classes apart, by an AUROC that is clearly not random.

    The variance of the AUROC of random scores is (p + n + 1) / (12 p n) for p positives and n
    negatives (Mann and Whitney 1947), here of units. That of a mean is at most the largest.

    Args:
        of: predictions for test records beside their targets.
    """
    largest = 0.0
    for sides in np.moveaxis(ranked(of), 2, 0):
        positive, negative = (len(np.unique(of.owners[side])) for side in sides.T)
        largest = max(largest, (positive + negative + 1) / (12 * positive * negative))
    return auroc(of) > 0.5 + CLEAR * math.sqrt(largest)
