"""Metrics of classes, which are those of scikit-learn.

Means over classes leave out those for which a metric is not defined. A metric that is not defined
for any class, such as the AUROC of a test set with a single class, is nan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from dpmac_cli.libraries import np, sklearn_metrics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.tasks.metrics import Compared

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
    values = list[Any]()
    for k in ranked_classes(of):
        values.append(metric(of.truth == k, of.scores[:, k], sample_weight=of.weights))
    return values


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


def ranks(of: Compared) -> bool:
    """Return whether scores tell classes apart, by an AUROC that is clearly not random.

    The variance of the AUROC of random scores is (p + n + 1) / (12 p n) for p positives and n
    negatives (Mann and Whitney 1947), here of units. That of a mean is at most the largest.

    Args:
        of: predictions for test records beside their targets.
    """
    largest = 0.0
    for sides in np.moveaxis(ranked(of), 2, 0):
        positive = len(np.unique(of.owners[sides[:, 0]]))
        negative = len(np.unique(of.owners[sides[:, 1]]))
        largest = max(largest, (positive + negative + 1) / (12 * positive * negative))
    return auroc(of) > 0.5 + CLEAR * math.sqrt(largest)
