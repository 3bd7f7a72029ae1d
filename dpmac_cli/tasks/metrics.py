"""Metrics of a classifier on test records, and their intervals.

Macro averages leave out classes for which a metric is not defined. A metric that is not defined for
any class, such as the AUROC of a test set with a single class, is nan.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.storage.files import finite_or_none
from dpmac_cli.tasks.intervals import (
    Floats,
    Sizes,
    clopper_pearson,
    effective_size,
    resampled,
    size_of_shares,
)
from dpmac_cli.tasks.task import Interval

#: Number of equal-width bins of the calibration error.
BINS = 15
#: Minimum and maximum default number of bootstrap resamples, and their largest total size.
RESAMPLES, NUMBERS = (100, 1000), 200_000_000
#: Ranking metrics of the scores of one column.
RANKINGS = ("auroc", "average-precision")
#: Means over all answers; the other metrics are means over classes.
OVER_ANSWERS = ("accuracy", "calibration-error")


@dataclass(frozen=True, eq=False)
class Answers:
    """Classes and predictions of test records, one column per class.

    Attributes:
        truth: true classes, bool, shape (records, columns). guess: predictions, like ``truth``.
        scores: probabilities, float32, shape (records, columns). If a record's output contains
            NaN, they are worse than all others: below 0 if ``truth`` is true, otherwise above 1.
        unit_of: index of each record's unit of privacy, shape (records,); None if each record is
            one.
    """

    truth: NDArray[np.bool_]
    guess: NDArray[np.bool_]
    scores: NDArray[np.float32]
    unit_of: NDArray[np.int64] | None = None

    @property
    def owners(self) -> NDArray[np.int64]:
        """Index of each record's unit, shape (records,)."""
        return np.arange(len(self.truth)) if self.unit_of is None else self.unit_of

    @property
    def ranked(self) -> list[int]:
        """Columns with both positives and negatives; only the last one of two classes."""
        both = np.flatnonzero(self.truth.any(0) & ~self.truth.all(0)).tolist()
        return both[-1:] if self.truth.shape[1] == 2 else both

    @property
    def judged(self) -> tuple[Floats, NDArray[np.bool_]]:
        """Confidence in the predicted class, and whether it is correct, shape (records,)."""
        return self.scores.max(1).clip(0, 1), np.logical_or.reduce(self.truth & self.guess, 1)


def metric(name: str, answers: Answers) -> float:
    """Return a metric by its name, 0 to 1."""
    found = _ranked if name in RANKINGS else _counted
    return found(answers, _once(answers))[name].item()


def all_metrics(answers: Answers) -> dict[str, float]:
    """Return accuracy, balanced accuracy, F1, calibration error, AUROC and average precision."""
    once = _once(answers)
    found = _counted(answers, once) | _ranked(answers, once)
    return {name: value.item() for name, value in found.items()}


def sensitivity_and_specificity(answers: Answers) -> list[list[float]]:
    """Return sensitivity and specificity per column; nan without positives or negatives."""
    once = _once(answers)
    rates = _rates(once.sum(0), *_sums(answers, once))
    return [rate[:, 0].tolist() for rate in rates]


def as_values(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return :func:`all_metrics` as JSON values; null if undefined."""
    return {name.replace("-", "_"): finite_or_none(value) for name, value in metrics.items()}


def rates_as_values(answers: Answers) -> dict[str, list[float | None]]:
    """Return sensitivity and specificity per column as JSON values; null if undefined."""
    rates = zip(("sensitivity", "specificity"), sensitivity_and_specificity(answers), strict=True)
    return {name: [*map(finite_or_none, values)] for name, values in rates}


def accuracy_interval(answers: Answers) -> Interval:
    """Return the 95% interval of the accuracy, see :mod:`~dpmac_cli.tasks.intervals`."""
    return clopper_pearson(*_accuracy(answers))


def _accuracy(answers: Answers) -> tuple[float, float]:
    """Return the accuracy, and its effective number of answers."""
    right, owners = answers.judged[1], answers.owners
    return size_of_shares(*(np.bincount(owners, of).astype(float) for of in (right, None)))


def intervals(
    answers: Answers, metrics: Mapping[str, float], resamples: int | None = None
) -> dict[str, Interval]:
    """Return a 95% interval of each metric, see :mod:`~dpmac_cli.tasks.intervals`.

    Variances other than that of the accuracy are by bootstrap over units with a fixed seed: by
    default 1,000 resamples, and fewer for large test sets.
    """
    owners = answers.owners
    units = int(owners.max()) + 1
    drawn = resampled(
        lambda weights: _counted(answers, weights) | _ranked(answers, weights),
        owners,
        resamples or int(np.clip(NUMBERS // answers.truth.size, *RESAMPLES)),
    )
    found, (_, most) = {}, _accuracy(answers)
    for name, value in metrics.items():
        some = drawn[name]
        variance = np.var(some[~np.isnan(some)]) if np.isfinite(some).sum() > 1 else 0.0
        sizes = _sizes(answers, name, owners)
        size = effective_size(value, float(variance) * units / max(units - 1, 1), sizes)
        found[name] = clopper_pearson(value, min(size, most))
    return found | {"accuracy": accuracy_interval(answers)}


def _sizes(answers: Answers, name: str, owners: NDArray[np.int64]) -> Sizes:
    """Return what limits the precision of a metric.

    The variance of a mean of K rates of the same size is that of K^2 / (1/n_1 + ... + 1/n_K)
    answers. All wrong answers may be in one class, whose rate is a K-th of the mean. The variance
    of an AUROC A is at most A (1 - A) over the smaller number of positives and negatives.
    """
    truth, units = answers.truth, int(owners.max()) + 1
    if name in OVER_ANSWERS:
        return Sizes(answers.judged[1].size, units, units - 1)
    columns = answers.ranked if name in RANKINGS else np.flatnonzero(truth.any(0)).tolist()
    sides = truth[:, columns]
    if name in RANKINGS:  # negatives count as well
        sides = np.concatenate([sides, ~sides], 1)
    counts = [(int(side.sum()), len(np.unique(owners[side]))) for side in sides.T if side.any()]
    if not counts:
        return Sizes(1, 1, units - 1)
    records, owned = np.array(counts).T
    return Sizes(len(counts) ** 2 / (1 / records).sum(), len(columns) * owned.min(), units - 1)


def _once(answers: Answers) -> Floats:
    return np.ones((len(answers.truth), 1))


def _sums(answers: Answers, weights: Floats) -> list[Floats]:
    """Return weights of hits, positives and predictions, each of shape (columns, sets).

    Args:
        weights: weights of the records, shape (records, sets of weights).
    """
    truth, guess = answers.truth, answers.guess
    parts = (truth & guess, truth, guess)
    return [(part.T.astype(np.float32) @ weights).astype(float) for part in parts]


def _rates(records: Floats, hits: Floats, true: Floats, guessed: Floats) -> tuple[Floats, Floats]:
    with np.errstate(invalid="ignore"):
        return hits / true, (records - true - guessed + hits) / (records - true)


def _counted(answers: Answers, weights: Floats) -> dict[str, Floats]:
    """Return metrics of predictions and confidences, each of shape (sets,)."""
    records, total = len(weights), weights.sum(0, dtype=float)
    hits, true, guessed = sums = _sums(answers, weights)
    sensitivity, _ = _rates(total, *sums)
    with np.errstate(invalid="ignore"):
        f1 = 2 * hits / (true + guessed)
    confidence, hit = answers.judged
    gaps = np.zeros((records, BINS))
    place = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    gaps[np.arange(records), place] = hit - confidence.astype(float)
    error = np.abs(gaps.T @ weights).sum(0) / total
    return {
        "accuracy": hits.sum(0) / total,
        "balanced-accuracy": _mean(sensitivity),
        "f1": _mean(f1),
        "calibration-error": error,
    }


def _ranked(answers: Answers, weights: Floats) -> dict[str, Floats]:
    """Return ranking metrics, each of shape (sets,), like scikit-learn's but for many weights."""
    values = np.full((len(RANKINGS), max(1, len(answers.ranked)), weights.shape[1]), np.nan)
    for place, k in enumerate(answers.ranked):
        order = np.argsort(-answers.scores[:, k], kind="stable")
        truth, scores, chosen = answers.truth[order, k], answers.scores[order, k], weights[order]
        ties = np.cumsum(np.diff(scores, prepend=scores[:1]) != 0)  # index of each distinct score
        which, begin = np.unique(ties[truth], return_index=True)  # distinct scores of positives
        first, last = np.searchsorted(ties, which), np.searchsorted(ties, which, "right") - 1
        seen = np.cumsum(chosen, 0)
        found = np.add.reduceat(chosen[truth], begin, axis=0)
        hits = np.cumsum(found, 0)
        missed = seen[last] - seen[first] + chosen[first] - found
        negatives = seen[-1] - hits[-1]
        below = negatives - (seen[last] - hits) + missed / 2
        with np.errstate(invalid="ignore"):
            values[0, place] = (found * below).sum(0) / (hits[-1] * negatives)
            values[1, place] = (found * hits / np.maximum(seen[last], 1)).sum(0) / hits[-1]
    return dict(zip(RANKINGS, map(_mean, values), strict=True))


def _mean(values: Floats) -> Floats:
    """Return means over the first axis, ignoring nan; nan if all values are nan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        means: Floats = np.asarray(np.nanmean(values, 0))
        return means
