"""Membership inference from the confidences of shadow runs: RMIA and LiRA, and how well they do.

An attacker knows shadow runs and which records each of them had. Of a target run it sees the
confidence phi in the target of each record, and scores how likely that record was trained on.
Arrays have one row per run and one column per record, or unit of privacy: (runs, records).

RMIA: Zarifzadeh, Liu and Shokri 2024 (arXiv 2312.03262), offline. LiRA: Carlini et al. 2022
(arXiv 2112.03570), online, with one variance for both sides.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_expit, logsumexp
from scipy.stats import beta

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
        outputs: outputs of the network, shape (records, outputs).
        targets: as in :class:`~dpmac_cli.models.dataset.Split`.
    """
    if isinstance(task, Regression):
        squared: Floats = -np.square(outputs[:, 0] - targets[:, 0])
        return squared
    places = np.arange(len(targets)), targets
    others = outputs.copy()
    others[places] = -np.inf
    found: Floats = outputs[places] - logsumexp(others, axis=1)
    return found


def log_likelihoods(task: Task, phi: Floats, shadows: Floats) -> Floats:
    """Return log p of targets, of classes their log-probability; shape of ``phi``."""
    if isinstance(task, Regression):
        scaled: Floats = phi / (-2 * shadows.mean())
        return scaled
    found: Floats = log_expit(phi)
    return found


def rmia(log_p: Floats, log_shadows: Floats, coins: Bools) -> Floats:
    """Return the score of each record of target runs: log p over its mean without the record.

    Args:
        log_p: log-likelihoods of target runs.
        log_shadows, coins: those of shadow runs, and whether each had the record.
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
        shadows, coins: those of shadow runs, and whether each had the record.
    """
    (with_it, spread_in), (without, spread_out) = (
        _normal(shadows, side) for side in (coins, ~coins)
    )
    variance = (spread_in + spread_out) / 2
    ratios: Floats = (phi - (with_it + without) / 2) * (with_it - without) / variance
    return ratios


def _normal(shadows: Floats, side: Bools) -> tuple[Floats, Floats]:
    """Return mean and variance of each record over the runs on one side, shape (records,)."""
    count = side.sum(0)
    mean = np.where(side, shadows, 0).sum(0) / np.maximum(count, 1)
    squared = np.where(side, np.square(shadows - mean), 0).sum(0)
    free = np.maximum(count - 1, 0)
    pooled = squared.sum() / max(free.sum(), 1)
    return mean, (squared + POOLED_RUNS * pooled + 1e-12) / (free + POOLED_RUNS)


def auc(scores: Floats, coins: Bools) -> float:
    """Return the area under the ROC curve of some scores: 0.5 for guesses at random."""
    return float(sklearn_metrics.roc_auc_score(coins, scores))


def figures(scores: Floats, coins: Bools) -> dict[str, Any]:
    """Return how well scores of target runs tell who was in, as JSON values.

    Thresholds are chosen on the first half of the runs, and rates measured on the others.
    """
    half = len(scores) // 2
    by_run = [auc(*of) for of in zip(scores, coins, strict=True)]
    return {
        "auc": auc(scores.ravel(), coins.ravel()),
        "auc_deviation": float(np.std(by_run)),
        "rates": [
            _rate(scores[half:], coins[half:], scores[:half][~coins[:half]], rate) for rate in RATES
        ],
    }


def _rate(
    scores: Floats, coins: Bools, others: Floats, rate: float
) -> dict[str, float | list[float] | None]:
    """Return the true positive rate at a threshold that others exceed at a rate."""
    members, rest = scores[coins], scores[~coins]
    if rate * len(rest) < LEAST_ALARMS:
        return {"false_positive_rate": rate, "true_positive_rate": None, "interval": None}
    threshold = np.quantile(others, 1 - rate, method="higher")
    alarms = int((members > threshold).sum())
    return {
        "false_positive_rate": rate,
        "measured_false_positive_rate": float((rest > threshold).mean()),
        "true_positive_rate": alarms / len(members),
        "interval": list(interval(alarms, len(members))),
    }


def interval(count: int, of: int) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a share."""
    tail = (1 - LEVEL) / 2
    low = 0.0 if count == 0 else float(beta.ppf(tail, count, of - count + 1))
    high = 1.0 if count == of else float(beta.ppf(1 - tail, count + 1, of - count))
    return low, high


def by_unit(values: Floats, owners: NDArray[np.int64]) -> Floats:
    """Return the sum of the scores of each unit's records, shape (runs, units)."""
    return np.stack([np.bincount(owners, weights=row) for row in values])


#: Attacks by their names: functions of a task, target runs, shadow runs and the coins of these.
ATTACKS: Mapping[str, Callable[[Task, Floats, Floats, Bools], Floats]] = {
    "rmia": lambda task, phi, shadows, coins: rmia(
        log_likelihoods(task, phi, shadows), log_likelihoods(task, shadows, shadows), coins
    ),
    "lira": lambda task, phi, shadows, coins: lira(phi, shadows, coins),
}


def scored(
    task: Task, phi: Floats, shadows: Floats, coins: Bools, owners: NDArray[np.int64]
) -> dict[str, Floats]:
    """Return the scores of units by each attack, shape (target runs, units).

    Args:
        phi: confidences of target runs by record.
        shadows, coins: confidences of shadow runs by record, and coins by unit.
        owners: unit of each record.
    """
    of_records = coins[:, owners]
    return {
        name: by_unit(attack(task, phi, shadows, of_records), owners)
        for name, attack in ATTACKS.items()
    }


def halves(runs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the shadow runs and the target runs, which have none in common."""
    return runs[: len(runs) // 2], runs[len(runs) // 2 :]
