"""Membership inference from the confidences of shadow runs: RMIA and LiRA, and how well they do.

An attacker knows shadow runs and which records each of them had. Of a target run it sees the
confidence phi in the target of each record, and scores how likely that record was trained on.
Arrays have one row per run and one column per record, or unit of privacy: (runs, records).

RMIA: Zarifzadeh, Liu and Shokri 2024 (arXiv 2312.03262), offline. LiRA: Carlini et al. 2022
(arXiv 2112.03570), online, with one variance for both sides.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_expit, logsumexp
from scipy.stats import binomtest

from dpmac_cli.libraries import sklearn_metrics
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import Task

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
#: False positive rates of the figures.
RATES = (0.01, 0.001)
#: Fewest expected false alarms at a rate for which its figure is shown.
LEAST_ALARMS = 10
#: RMIA: how much of the gap between a mean confidence without a record and 1 training on it closes.
CLOSED = 0.3
#: LiRA: number of runs that the variance over all records counts as, beside those of a record.
POOLED_RUNS = 8.0
#: Confidence of the intervals of rates.
LEVEL = 0.95


def confidences(task: Task, outputs: Floats, targets: NDArray[Any]) -> Floats:
    """Return the confidence of one run in the targets of records, shape (records,).

    Of classes the log-odds of the true one; of a number minus the squared error.

    Args:
        task: what is predicted.
        outputs: outputs of the network, shape (records, outputs).
        targets: as in :class:`~dpmac_cli.models.dataset.Split`.
    """
    if isinstance(task, Regression):
        squared: Floats = -np.square(outputs[:, 0] - targets[:, 0])
        return squared
    true = np.arange(len(targets)), targets
    others = outputs.copy()
    others[true] = -np.inf
    log_odds: Floats = outputs[true] - logsumexp(others, axis=1)
    return log_odds


def log_likelihoods(task: Task, phi: Floats, shadows: Floats) -> Floats:
    """Return log p of targets, of classes their log-probability; shape of ``phi``.

    Of numbers it is that of a normal error, whose variance is the mean one of the shadow runs.
    """
    if isinstance(task, Regression):
        scaled: Floats = phi / (-2 * shadows.mean())
        return scaled
    log_p: Floats = log_expit(phi)
    return log_p


def rmia(log_p: Floats, log_shadows: Floats, coins: Bools) -> Floats:
    """Return the score of each record of target runs: log p over its mean without the record.

    Args:
        log_p: log-likelihoods of target runs.
        log_shadows: log-likelihoods of shadow runs.
        coins: whether each shadow run had the record.

    Returns:
        scores, shape of ``log_p``, each relative to the median of its run.
    """
    without = np.where(coins, 0.0, np.exp(log_shadows)).sum(0) / np.maximum((~coins).sum(0), 1)
    expected = 0.5 * ((1 + CLOSED) * without + 1 - CLOSED)
    ratios = log_p - np.log(expected)
    relative: Floats = ratios - np.median(ratios, axis=1, keepdims=True)
    return relative


def lira(phi: Floats, shadows: Floats, coins: Bools) -> Floats:
    """Return the score of each record of target runs: its log-likelihood ratio of normals.

    Args:
        phi: confidences of target runs.
        shadows: confidences of shadow runs.
        coins: whether each shadow run had the record.

    Returns:
        scores, shape of ``phi``.
    """
    mean_in, variance_in = _normal(shadows, coins)
    mean_out, variance_out = _normal(shadows, ~coins)
    variance = (variance_in + variance_out) / 2
    middle = (mean_in + mean_out) / 2
    ratios: Floats = (phi - middle) * (mean_in - mean_out) / variance
    return ratios


def _normal(shadows: Floats, side: Bools) -> tuple[Floats, Floats]:
    """Return mean and variance of each record over the runs on one side, shape (records,).

    The variance leans on that of all records, because few shadow runs estimate it badly.
    """
    count = side.sum(0)
    mean = np.where(side, shadows, 0).sum(0) / np.maximum(count, 1)
    squared = np.where(side, np.square(shadows - mean), 0).sum(0)
    free = np.maximum(count - 1, 0)
    pooled = squared.sum() / max(free.sum(), 1)
    return mean, (squared + POOLED_RUNS * pooled + 1e-12) / (free + POOLED_RUNS)


def auc(scores: Floats, coins: Bools) -> float:
    """Return the area under the ROC curve of some scores: 0.5 for guesses, 1 without error.

    Args:
        scores: how sure an attack is that each unit was in, of any scale, shape (n,).
        coins: whether each was in, shape (n,); some were and some were not.

    >>> auc(np.array([0.1, 0.4, 0.3, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    return float(sklearn_metrics.roc_auc_score(coins, scores))


def figures(scores: Floats, coins: Bools) -> dict[str, Any]:
    """Return how well scores of target runs tell who was in, as JSON values.

    Thresholds are chosen on the first half of the runs, and rates measured on the others.

    Args:
        scores: scores, shape (runs, units).
        coins: whether each unit was in.
    """
    half = len(scores) // 2
    non_members = scores[:half][~coins[:half]]
    by_run = [auc(scores[run], coins[run]) for run in range(len(scores))]
    return {
        "auc": auc(scores.ravel(), coins.ravel()),
        "auc_deviation": float(np.std(by_run)),
        "rates": [_rate(scores[half:], coins[half:], non_members, rate) for rate in RATES],
    }


def _rate(scores: Floats, coins: Bools, non_members: Floats, rate: float) -> dict[str, Any]:
    """Return the true positive rate at a threshold, as JSON values.

    Args:
        scores, coins: scores of runs that the threshold does not depend on, and their coins.
        non_members: scores of other runs, which exceed the threshold at ``rate``.
        rate: false positive rate.
    """
    members = scores[coins]
    rest = scores[~coins]
    if rate * len(rest) < LEAST_ALARMS:
        return {"false_positive_rate": rate, "true_positive_rate": None, "interval": None}
    threshold = np.quantile(non_members, 1 - rate, method="higher")
    alarms = int((members > threshold).sum())
    interval = binomtest(alarms, len(members)).proportion_ci(LEVEL)  # Clopper-Pearson
    return {
        "false_positive_rate": rate,
        "measured_false_positive_rate": float((rest > threshold).mean()),
        "true_positive_rate": alarms / len(members),
        "interval": [float(interval.low), float(interval.high)],
    }


def by_unit(values: Floats, owners: NDArray[np.int64]) -> Floats:
    """Return the sum of the scores of each unit's records, shape (runs, units).

    Args:
        values: scores of the records in each run, shape (runs, records).
        owners: number of the unit of each record, from 0, int64, shape (records,). Without units it
            counts the records themselves.

    >>> by_unit(np.array([[1.0, 2.0, 4.0]]), np.array([0, 1, 0]))
    array([[5., 2.]])
    """
    return np.stack([np.bincount(owners, weights=row) for row in values])


def scored(
    task: Task, phi: Floats, shadows: Floats, coins: Bools, owners: NDArray[np.int64]
) -> dict[str, Floats]:
    """Return the scores of units by each attack, shape (target runs, units).

    Args:
        task: what is predicted.
        phi: confidences of target runs by record.
        shadows, coins: confidences of shadow runs by record, and coins by unit.
        owners: unit of each record.
    """
    of_records = coins[:, owners]
    log_p = log_likelihoods(task, phi, shadows)
    log_shadows = log_likelihoods(task, shadows, shadows)
    return {
        "rmia": by_unit(rmia(log_p, log_shadows, of_records), owners),
        "lira": by_unit(lira(phi, shadows, of_records), owners),
    }


def halves(runs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the shadow runs and the target runs, which have none in common.

    Args:
        runs: the runs of an attack in the order of their numbers. The first half, rounded down, are
            shadow runs, by which the scores are computed; the others are attacked.

    >>> halves([1, 2, 3, 4, 5])
    ([1, 2], [3, 4, 5])
    """
    return runs[: len(runs) // 2], runs[len(runs) // 2 :]
