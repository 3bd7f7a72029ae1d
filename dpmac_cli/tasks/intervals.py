"""95% intervals of metrics for records like the test records: by unit.

The interval of a share of the records is that of Clopper and Pearson (1934), and so never of width
zero. For answers that are not independent, and for means of shares, it is theirs for an effective
number of answers (Korn and Graubard 1998, Survey Methodology 24: 193-201)::

    n* = n (m (1 - m) / (n - 1)) / variance(m) * (t_{n-1} / t_{freedom})^2

where t is the 97.5% quantile of Student's distribution, and a unit is a record unless records share
one. The variance is that between units: of a ratio of sums for a share of the records, and by
bootstrap for other metrics. With R resamples, its degrees of freedom are 1 / (1 / (units - 1) + 1 /
(R - 1)), so that few resamples make an interval longer and not too short. n* is at most the number
of answers. Where nothing varies, so that no variance can be estimated, it is at most the
number of units. For a mean over classes both are those of the smallest class, times the number of
classes. No metric has more effective answers than the accuracy, so that few units do not make one
interval narrow beside a wide one.

The interval of a metric that is no share is t standard deviations of the bootstrap to both sides.
There is none where nothing varies, as for a single unit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from dpmac_cli.libraries import np, special
from dpmac_cli.tasks.metrics import Compared, EvaluationMetric, Interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]
#: Minimum and maximum default number of bootstrap resamples, and their largest total size. Metrics
#: take as long for OVERHEAD records as for none.
RESAMPLES, NUMBERS, OVERHEAD = (20, 400), 4_500_000, 4_000
#: Deviation below which a metric does not vary but for rounding, as a share of it.
NOTHING = 1e-12
#: Probability below and above an interval.
TAIL = 0.025
#: Number of standard deviations around the mean that contain 95% of a normal distribution.
REACH = NormalDist().inv_cdf(1 - TAIL)


def intervals(
    of: Compared,
    metrics: Iterable[EvaluationMetric],
    values: Mapping[str, float],
    resamples: int | None = None,
) -> dict[str, Interval]:
    """Return a 95% interval of each metric with a value.

    Args:
        of: predictions beside targets.
        metrics: metrics of the task, of which some have values.
        values: their values by name; nan if they are not defined.
        resamples: number of bootstrap resamples; by default :func:`resamples_for`.
    """
    shares = dict[str, Interval]()
    others = list[EvaluationMetric]()
    most = math.inf
    for metric in metrics:
        if metric.right is not None:
            share, size = share_of(of.owners, metric.right(of))
            shares[metric.name] = clopper_pearson(share, size)
            most = min(most, size)
        elif metric.name in values:
            others.append(metric)
    drawn = resampled(of, others, resamples or resamples_for(*of.scores.shape))
    apart = dict[str, Interval]()
    for metric in others:
        value = values[metric.name]
        seen = drawn[metric.name]
        if metric.share:
            size = min(_effective(of, metric, value, seen), most)
            apart[metric.name] = clopper_pearson(value, size)
        else:
            apart[metric.name] = _around(of, metric, value, seen)
    by_metric = shares | apart
    return {name: by_metric[name] for name in values}


def resamples_for(records: int, classes: int) -> int:
    """Return the default number of resamples, all of which take a second or two.

    >>> resamples_for(100, 2), resamples_for(10_000_000, 10)
    (365, 20)
    """
    return int(np.clip(NUMBERS // ((1 + classes) * (records + OVERHEAD)), *RESAMPLES))


def resampled(
    of: Compared, metrics: Iterable[EvaluationMetric], resamples: int
) -> dict[str, Floats]:
    """Return metrics of bootstrap resamples of the units, by name, shape (resamples,) each.

    The seed is fixed, so equal predictions have equal intervals. A metric that is not defined on a
    resample is nan there.

    Args:
        of: predictions beside targets.
        metrics: metrics to compute.
        resamples: number of resamples.
    """
    generator = np.random.default_rng(0)
    units = _units(of)
    drawn: dict[EvaluationMetric, list[float]] = {metric: [] for metric in metrics}
    if not drawn:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a resample may lack a class
        for _ in range(resamples):
            times = np.bincount(generator.integers(units, size=units), minlength=units)
            some = replace(of, weights=times[of.owners].astype(float))
            for metric, seen in drawn.items():
                seen.append(metric.value(some))
    return {metric.name: np.array(seen) for metric, seen in drawn.items()}


def _spread(of: Compared, drawn: Floats) -> tuple[float, float]:
    """Return the variance of a metric between units, and its degrees of freedom."""
    some = drawn[np.isfinite(drawn)]
    units = _units(of)
    if len(some) < 2 or units < 2:
        return 0.0, 0.0
    variance = float(np.var(some, ddof=1)) * units / (units - 1)
    return variance, 1 / (1 / (units - 1) + 1 / (len(some) - 1))


def _units(of: Compared) -> int:
    """Return the number of units of privacy of the test records."""
    return int(of.owners.max()) + 1


def _around(of: Compared, metric: EvaluationMetric, value: float, drawn: Floats) -> Interval:
    """Return the interval of a metric that is no share; nan if nothing varies between units."""
    variance, freedom = _spread(of, drawn)
    if not math.isfinite(value) or not freedom > 0 or variance <= (NOTHING * value) ** 2:
        return math.nan, math.nan
    half = float(special.stdtrit(freedom, 1 - TAIL)) * math.sqrt(variance)
    low, high = metric.ends
    return max(low, value - half), min(high, value + half)


def _effective(of: Compared, metric: EvaluationMetric, value: float, drawn: Floats) -> float:
    """Return the effective number of answers of a share, or of a mean of shares.

    The variance of a mean of K rates of the same size is that of K^2 / (1/n_1 + ... + 1/n_K)
    answers. All wrong answers may be in one class, whose rate is a K-th of the mean. The variance
    of an AUROC A is at most A (1 - A) over the smaller number of positives and negatives.
    """
    variance, freedom = _spread(of, drawn)
    if metric.groups is None:
        return effective_size(value, variance, len(of.truth), _units(of), freedom)
    groups = metric.groups(of)
    sides = [side for side in groups.reshape(len(of.truth), -1).T if side.any()]
    if not sides:
        return 1.0
    answers = len(sides) ** 2 / sum(1 / int(side.sum()) for side in sides)
    units = groups.shape[2] * min(len(np.unique(of.owners[side])) for side in sides)
    return effective_size(value, variance, answers, units, freedom)


def effective_size(
    value: float, variance: float, answers: float, units: float, freedom: float
) -> float:
    """Return the effective number of answers of a metric, 0 to 1.

    Args:
        value: the metric.
        variance: an estimate from the differences between units.
        answers: the most answers where the metric varies between units.
        units: the most answers where nothing varies, so that no variance can be estimated.
        freedom: degrees of freedom of the variance.
    """
    spread = value * (1 - value)
    if not freedom > 0 or not variance > 0 or not spread > 0:
        return max(1.0, min(answers, units))
    most = max(answers, 2.0)
    few = special.stdtrit(max(most - 1, freedom), 1 - TAIL) / special.stdtrit(freedom, 1 - TAIL)
    return float(min(most, most / (most - 1) * spread / variance * few**2))


def clopper_pearson(share: float, size: float) -> Interval:
    """Return the exact 95% interval of a proportion (Clopper and Pearson 1934).

    Args:
        share: the proportion; nan gives an interval of nan.
        size: number of answers, or an effective one: any number above 0.

    >>> low, high = clopper_pearson(0.5, 10)
    >>> round(low, 3), round(high, 3)
    (0.187, 0.813)
    """
    if math.isnan(share):
        return math.nan, math.nan
    hits = share * size
    misses = (1 - share) * size
    low = special.betaincinv(hits, misses + 1, TAIL) if hits > 0 else 0.0
    high = special.betaincinv(hits + 1, misses, 1 - TAIL) if misses > 0 else 1.0
    return min(float(low), share), max(float(high), share)


def widened(value: float, ends: Interval, noise: float) -> Interval:
    """Return an interval for a value to which normal noise of a standard deviation was added.

    Args:
        value: the value with its noise.
        ends: interval of the value if there were no noise.
        noise: standard deviation of the noise.

    The distances to both ends add up in squares (Zou and Donner 2008).
    """
    low, high = (math.hypot(value - end, REACH * noise) for end in ends)
    return max(0.0, value - low), min(1.0, value + high)


def share_of(owners: NDArray[np.int64], right: NDArray[np.bool_]) -> tuple[float, float]:
    """Return a share of the records, and its effective number of answers, by unit.

    Args:
        owners: index of each record's unit of privacy, from 0, shape (records,).
        right: which records count, bool, shape (records,).

    Returns:
        The share, from 0 to 1, and a number that :func:`clopper_pearson` takes as ``size``: that of
        the records if each is a unit, and fewer if records of a unit are alike.
    """
    hits = np.bincount(owners, right)
    answers = np.bincount(owners)
    return size_of_shares(hits.astype(float), answers.astype(float))


def size_of_shares(right: Floats, answers: Floats) -> tuple[float, float]:
    """Return an accuracy, and its effective number of answers.

    Args:
        right, answers: right answers and all answers of each unit, shape (units,).

    The variance includes two more units of mean size, of which one is right in everything and one
    in nothing: few units with wrong answers say little about how they differ.
    """
    total = float(answers.sum())
    units = len(answers)
    value = float(right.sum()) / total
    size = total / units
    hits = np.append(right, [0.0, size])
    counts = np.append(answers, [size, size])
    share = hits.sum() / counts.sum()
    more = units + 2
    squares = ((hits - share * counts) ** 2).sum() / counts.sum() ** 2 * more / (more - 1)
    variance = float(squares / (share * (1 - share))) * value * (1 - value)
    return value, effective_size(value, variance, total, units, units - 1)
