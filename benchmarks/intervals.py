"""Measure how often the 95% intervals of test metrics contain the population's value.

    python benchmarks/intervals.py 1000 docs/data/intervals.jsonl

The argument is the number of simulated test sets of each row. Accuracies are of independent
records, and of units of 1 to 10 records whose rates are beta-distributed with a correlation (ICC)
between the records of a unit. The other metrics are of two classes whose scores are normal, with
means that a unit shifts. Their value in the population is that of a test set of 200,000 units.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dpmac_cli.data.units import units_of
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.intervals import clopper_pearson, intervals, size_of_shares
from dpmac_cli.tasks.metrics import Compared

LARGEST, RESAMPLES = 10, 100


def accuracy(runs: int, units: int, share: float, icc: float | None) -> float:
    """Return the coverage of an accuracy; without ``icc`` each record is a unit."""
    draws, inside = np.random.default_rng(units), 0
    for _ in range(runs):
        if icc is None:
            sizes, rates = np.ones(units, int), np.full(units, share)
        else:
            sizes, scale = draws.integers(1, LARGEST + 1, units), 1 / icc - 1
            rates = draws.beta(share * scale, (1 - share) * scale, units)
        found = size_of_shares(draws.binomial(sizes, rates).astype(float), sizes.astype(float))
        low, high = clopper_pearson(*found)
        inside += low <= share <= high
    return inside / runs


def drawn(draws: np.random.Generator, units: int, positives: float, shift: float) -> Compared:
    """Return answers to two classes; each unit has 1 to 4 records and a shift of its scores."""
    owners = np.repeat(np.arange(units), draws.integers(1, 5, units))
    labels = draws.random(owners.size) < positives
    noise = draws.standard_normal(owners.size) + shift * draws.standard_normal(units)[owners]
    score = 1 / (1 + np.exp(-(noise + np.where(labels, 1.5, -1.5))))
    scores = np.stack([1 - score, score], 1).astype(np.float32)
    guess = (score > 0.5).astype(np.int64)
    return Compared(labels.astype(np.int64), guess, units_of(owners).owners, scores)


def others(
    runs: int, units: int, positives: float, shift: float, resamples: int = RESAMPLES
) -> dict[str, float]:
    """Return the coverage of the other metrics."""
    names = (
        *("balanced-accuracy", "f1", "auroc", "average-precision"),
        *("sensitivity-at-specificity", "log-loss"),
    )
    metrics = [metric for metric in Classification.metrics if metric.name in names]
    population = drawn(np.random.default_rng(0), 200_000, positives, shift)
    true = {metric.name: metric.of(population) for metric in metrics}
    draws, inside = np.random.default_rng(units), dict.fromkeys(names, 0)
    for _ in range(runs):
        answers = drawn(draws, units, positives, shift)
        values = {metric.name: metric.of(answers) for metric in metrics}
        found = intervals(answers, Classification.metrics, values, resamples)
        for name in names:
            # A metric that is not defined is shown without an interval.
            inside[name] += not found[name][0] > true[name] and not found[name][1] < true[name]
    return {name: count / runs for name, count in inside.items()}


def rows(runs: int) -> Iterator[dict[str, object]]:
    """Yield the coverages."""
    for units in (20, 50, 200, 1000):
        for share in (0.5, 0.8, 0.95, 0.99):
            for icc in (None, 0.05, 0.3, 0.7):
                settings = {"units": units, "share": share, "icc": icc}
                yield {**settings, "accuracy": accuracy(runs, units, share, icc)}
    for units in (20, 50, 200):
        for positives in (0.5, 0.1):
            for shift in (0.0, 1.0):
                found = others(runs // 2, units, positives, shift)
                yield {"units": units, "positives": positives, "shift": shift, **found}


def main(runs: int, out: Path) -> None:
    """Write a line of JSON for each row."""
    with out.open("w") as file:
        for row in rows(runs):
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
