"""Results of a classifier on test records: metrics and their intervals.

Macro averages leave out classes for which a metric is not defined. A metric that is not defined for
any class, such as the AUROC of a test set with a single class, is nan.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpmac_cli.files import finite_or_none
from dpmac_cli.libraries import np
from dpmac_cli.tasks.intervals import (
    Sizes,
    clopper_pearson,
    effective_size,
    resampled,
    size_of_shares,
)
from dpmac_cli.tasks.task import Interval, Remark, Results, Table, percent_or_dash

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.tasks.intervals import Floats

#: Accuracy in a class below which it is almost never predicted.
RARELY = 0.05
#: Deviations above 0.5 from which an AUROC is not that of random scores.
CLEAR = 3.0
#: Largest number of classes whose confusion matrix is in a report.
MOST_COUNTED = 100
#: Number of equal-width bins of the calibration error.
BINS = 15
#: Minimum and maximum default number of bootstrap resamples, and their largest total size.
RESAMPLES, NUMBERS = (100, 1000), 200_000_000
#: Ranking metrics of the scores of one column.
RANKINGS = ("auroc", "average-precision")
#: Means over all answers; the other metrics are means over classes.
OVER_ANSWERS = ("accuracy", "calibration-error")


@dataclass(frozen=True, eq=False)
class Classified(Results):
    """Classes and predictions of test records, one column per class.

    Attributes:
        truth: true classes, bool, shape (records, columns). guess: predictions, like ``truth``.
        scores: probabilities, float32, shape (records, columns). If a record's output contains
            NaN, they are worse than all others: below 0 if ``truth`` is true, otherwise above 1.
        unit_of: index of each record's unit of privacy, shape (records,); None if each record is
            one.
        names: names of the classes.
    """

    truth: NDArray[np.bool_]
    guess: NDArray[np.bool_]
    scores: NDArray[np.float32]
    unit_of: NDArray[np.int64] | None = None
    names: tuple[str, ...] = ()

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

    @property
    def once(self) -> Floats:
        """Weights of 1, shape (records, 1)."""
        return np.ones((len(self.truth), 1))

    @property
    def rates(self) -> list[list[float]]:
        """Sensitivity and specificity per column; nan without positives or negatives."""
        rates = _rates(self.once.sum(0), *self._sums(self.once))
        return [rate[:, 0].tolist() for rate in rates]

    @property
    def per_class(self) -> list[float]:
        """Accuracy in each true class, 0 to 1; nan without records."""
        return self.rates[0]

    def metric(self, name: str) -> float:
        """Return a metric by its name, 0 to 1; nan if it is not defined."""
        found = self._ranked if name in RANKINGS else self._counted
        return float(found(self.once)[name].item())

    def metrics(self) -> dict[str, float]:
        """Return accuracy, balanced accuracy, F1, calibration error, AUROC, average precision."""
        found = self._counted(self.once) | self._ranked(self.once)
        return {name: value.item() for name, value in found.items()}

    def values(self) -> dict[str, Any]:
        """Return all metrics, the accuracy's interval and rates and counts by class as JSON values.

        Counts are left out for more than :data:`MOST_COUNTED` classes.
        """
        metrics = self.metrics().items()
        found = {name.replace("-", "_"): finite_or_none(value) for name, value in metrics}
        interval = list(clopper_pearson(*self._accuracy()))
        counts = self.confusion.tolist() if len(self.names) <= MOST_COUNTED else None
        by_class = {"largest_class": self.largest / len(self.truth), "confusion": counts}
        return found | self._rates_as_values() | by_class | {"accuracy_interval": interval}

    @property
    def largest(self) -> int:
        """Number of records of the most frequent class."""
        return int(self.truth.sum(0).max())

    def _rates_as_values(self) -> dict[str, list[float | None]]:
        rates = zip(("sensitivity", "specificity"), self.rates, strict=True)
        return {name: [*map(finite_or_none, values)] for name, values in rates}

    def details(self) -> dict[str, Any]:
        """Return per-class rates and the confusion matrix as JSON values."""
        rates = self._rates_as_values()
        per_class = dict(zip(self.names, rates["sensitivity"], strict=True))
        return {**rates, "per_class": per_class, "confusion": self.confusion.tolist()}

    def _accuracy(self) -> tuple[float, float]:
        """Return the accuracy, and its effective number of answers."""
        right, owners = self.judged[1], self.owners
        return size_of_shares(*(np.bincount(owners, of).astype(float) for of in (right, None)))

    def intervals(
        self, metrics: Mapping[str, float], resamples: int | None = None
    ) -> dict[str, Interval]:
        """Return a 95% interval of each metric, see :mod:`~dpmac_cli.tasks.intervals`.

        Variances other than that of the accuracy are by bootstrap over units with a fixed seed: by
        default 1,000 resamples, and fewer for large test sets.
        """
        owners = self.owners
        units = int(owners.max()) + 1
        drawn = resampled(
            lambda weights: self._counted(weights) | self._ranked(weights),
            owners,
            resamples or int(np.clip(NUMBERS // self.truth.size, *RESAMPLES)),
        )
        accuracy = self._accuracy()
        found = dict[str, Interval]()
        for name, value in metrics.items():
            some = drawn[name]
            variance = np.var(some[~np.isnan(some)]) if np.isfinite(some).sum() > 1 else 0.0
            variance = float(variance) * units / max(units - 1, 1)
            size = effective_size(value, variance, self._sizes(name))
            found[name] = clopper_pearson(value, min(size, accuracy[1]))
        return found | {"accuracy": clopper_pearson(*accuracy)}

    def _sizes(self, name: str) -> Sizes:
        """Return what limits the precision of a metric.

        The variance of a mean of K rates of the same size is that of K^2 / (1/n_1 + ... + 1/n_K)
        self. All wrong answers may be in one class, whose rate is a K-th of the mean. The variance
        of an AUROC A is at most A (1 - A) over the smaller number of positives and negatives.
        """
        owners, truth = self.owners, self.truth
        units = int(owners.max()) + 1
        if name in OVER_ANSWERS:
            return Sizes(self.judged[1].size, units, units - 1)
        columns = self.ranked if name in RANKINGS else np.flatnonzero(truth.any(0)).tolist()
        sides = truth[:, columns]
        if name in RANKINGS:  # negatives count as well
            sides = np.concatenate([sides, ~sides], 1)
        counts = [(int(side.sum()), len(np.unique(owners[side]))) for side in sides.T if side.any()]
        if not counts:
            return Sizes(1, 1, units - 1)
        records, owned = np.array(counts).T
        return Sizes(len(counts) ** 2 / (1 / records).sum(), len(columns) * owned.min(), units - 1)

    def _sums(self, weights: Floats) -> list[Floats]:
        """Return weights of hits, positives and predictions, each of shape (columns, sets).

        Args:
            weights: weights of the records, shape (records, sets of weights).
        """
        truth, guess = self.truth, self.guess
        parts = (truth & guess, truth, guess)
        return [(part.T.astype(np.float32) @ weights).astype(float) for part in parts]

    def _counted(self, weights: Floats) -> dict[str, Floats]:
        """Return metrics of predictions and confidences, each of shape (sets,)."""
        records, total = len(weights), weights.sum(0, dtype=float)
        hits, true, guessed = sums = self._sums(weights)
        sensitivity, _ = _rates(total, *sums)
        with np.errstate(invalid="ignore"):
            f1 = 2 * hits / (true + guessed)
        confidence, hit = self.judged
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

    def _ranked(self, weights: Floats) -> dict[str, Floats]:
        """Return ranking metrics, each of shape (sets,), as in scikit-learn, for many weights."""
        values = np.full((len(RANKINGS), max(1, len(self.ranked)), weights.shape[1]), np.nan)
        for place, k in enumerate(self.ranked):
            order = np.argsort(-self.scores[:, k], kind="stable")
            truth, scores, chosen = self.truth[order, k], self.scores[order, k], weights[order]
            ties = np.cumsum(
                np.diff(scores, prepend=scores[:1]) != 0
            )  # index of each distinct score
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

    @property
    def confusion(self) -> NDArray[np.int64]:
        """Return int64 counts by true and predicted class, shape (classes, classes).

        Records whose output contains NaN are left out.
        """
        counts: NDArray[np.float64] = self.truth.T.astype(float) @ self.guess.astype(float)
        return counts.astype(np.int64)

    def table(self) -> Table:
        """Return counts with sensitivity and specificity, one row per true class."""
        rates = self.rates
        rows = tuple(
            (name, *map(str, row), *map(percent_or_dash, both))
            for name, row, *both in zip(self.names, self.confusion.tolist(), *rates, strict=True)
        )
        columns = (*self.names, "sens.", "spec.")
        return Table("rows: true class, columns: predicted", columns, rows, bold=columns[-2:])

    def counted(self) -> tuple[NDArray[np.int64], int]:
        """Return 1 for correct records and 0 for wrong ones."""
        return (self.truth & self.guess).sum(1), 1

    def remark(self, loss: str) -> Remark | None:
        """Return a note on a model that is no better than one class, or that omits some."""
        truth, guess = self.truth, self.guess
        right, most, records = int((truth & guess).sum()), self.largest, len(truth)
        if most == records:
            return None
        found = zip(self.names, self.per_class, strict=True)
        rare = [name for name, share in found if share < RARELY]
        if right <= most and self.ranks and not rare:
            return None  # as with class weights, which cost accuracy where one class is frequent
        if right <= most:
            said = (
                f"{right:,} of {records:,} test samples are classified correctly, but the most "
                f"frequent class alone has {most:,}."
            )
            if not self.ranks:
                return Remark(said, untaught=True)
            return Remark(
                f"{said} Its probabilities do tell the classes apart (AUROC "
                f"{percent_or_dash(self.metric('auroc'))}): compare them with a threshold of your "
                "own (dpmac predict), or give rare classes more weight (--class-weights)."
            )
        if not rare:
            return None
        balanced = percent_or_dash(self.metric("balanced-accuracy"))
        return Remark(
            f"almost no test sample of {', '.join(rare)} is classified correctly: balanced "
            f"accuracy {balanced}. --class-weights can give such classes more weight."
        )

    @property
    def ranks(self) -> bool:
        """Return whether scores tell classes apart, by an AUROC that is not random.

        The variance of the AUROC of random scores is (p + n + 1) / (12 p n) for p positives and n
        negatives (Mann and Whitney 1947), here of units. That of a mean is at most the largest.
        """
        owners, largest = self.owners, 0.0
        for k in self.ranked:
            positive, negative = (
                len(np.unique(owners[side])) for side in (self.truth[:, k], ~self.truth[:, k])
            )
            largest = max(largest, (positive + negative + 1) / (12 * positive * negative))
        return self.metric("auroc") > 0.5 + CLEAR * math.sqrt(largest)


def _rates(records: Floats, hits: Floats, true: Floats, guessed: Floats) -> tuple[Floats, Floats]:
    with np.errstate(invalid="ignore"):
        return hits / true, (records - true - guessed + hits) / (records - true)


def _mean(values: Floats) -> Floats:
    """Return means over the first axis, ignoring nan; nan if all values are nan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        means: Floats = np.asarray(np.nanmean(values, 0))
        return means
