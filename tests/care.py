"""Made-up years of care of persons: a table of costs and days in hospital, and what units move."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import kstest, norm

from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.table_schema import read_schema
from dpmac_cli.data.units import units_of
from dpmac_cli.dp.mechanism import GRID
from dpmac_cli.training.evaluation import Evaluation
from dpmac_cli.training.private_scores import PrivateScore, counts
from tests.helpers import declared


def rows(persons: int, *targets: str) -> list[dict[str, Any]]:
    """Four years of each person, with targets that grow with age: "cost" and "days" in hospital.

    Smokers cost more than twice as much.
    """
    rng, of_days, found = np.random.default_rng(0), np.random.default_rng(1), []
    for person in range(persons):
        age, smoker = rng.uniform(20, 90), rng.random() < 0.4
        for year in range(4):
            cost = math.exp(4 + 0.04 * (age + year) + smoker + 0.3 * rng.standard_normal())
            days = max(0, 0.3 * age + 2 * of_days.standard_normal())
            known = {"cost": round(cost, 2), "days": round(days, 1)}
            words = {"person": person, "smoker": "yes" if smoker else "no"}
            inputs = {**words, "age": round(age + year, 1)}
            found.append({**inputs, **{target: known[target] for target in targets}})
    return found


def write_table(where: Path, records: list[dict[str, Any]], schema: str) -> Path:
    """Write care.csv and care.yaml, and return the path of the table."""
    with (where / "care.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*records[0]])
        writer.writeheader()
        writer.writerows(records)
    (where / "care.yaml").write_text(schema)
    return where / "care.csv"


def source(where: Path, **options: Any) -> Declaration:
    """The dataset that :func:`write_table` wrote."""
    return declared(where / "care.csv", schema=read_schema(where / "care.yaml"), **options)


#: Records of each unit.
SIZES = (1, 2, 3, 7, 20, 1, 5)


def owners_of(*, grouped: bool) -> NDArray[np.int64]:
    """The unit of each record: of :data:`SIZES` records, in any order, or of one."""
    owners = np.random.default_rng(1).permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    return owners if grouped else np.arange(len(owners))


def moved_by_units(
    result: Evaluation, owners: NDArray[np.int64], *, grouped: bool
) -> tuple[float, list[float]]:
    """The covered sum, and how much each unit moves it, by brute force: without each in turn."""

    def total(kept: Any) -> float:
        units = units_of(owners[kept]) if grouped else None
        some = replace(result, logits=result.logits[kept], labels=result.labels[kept], units=units)
        counted = counts(some)
        assert counted.shape == (len(set(owners[kept])),)
        assert counted.min() >= 0
        return float(counted.sum() * GRID)

    whole = total(np.ones(len(owners), bool))
    moves = [abs(whole - total(owners != unit)) for unit in set(owners)]
    return whole, moves


def assert_noise_of(
    found: list[PrivateScore], values: list[float], truth: float, deviation: float
) -> None:
    """Covered scores are normal about the exact one, and as often within their intervals as stated.

    The values are those of the metric that has the interval.
    """
    assert found[0].noise == pytest.approx(deviation)
    assert kstest((np.array(values) - truth) / deviation, norm.cdf).pvalue > 0.001
    inside = [score.interval[0] <= truth <= score.interval[1] for score in found]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)
