"""Balanced accuracy with class weights, and coverage of quantiles, on made-up records.

    OMP_NUM_THREADS=1 python benchmarks/weights.py docs/data/weights.json

A class that 6.7% of 30,000 records have, and a number with skewed errors; a fifth is held out.
Optimizers have the defaults for your own data at epsilon 3 (two minutes on one core).
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli import ArrayData
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.resolve import resolve

RECORDS, TRAINED = 30_000, 24_000
SHARES = "0.94,0.06"
QUANTILES = (0.1, 0.5, 0.9)


def inputs(rng: np.random.Generator) -> NDArray[np.float64]:
    """Return six standard normal numbers per record, cut at 3."""
    return rng.normal(size=(RECORDS, 6)).clip(-3, 3)


def rare() -> ArrayData:
    """Return records of which 6.7% have the class "yes"."""
    rng = np.random.default_rng(0)
    x = inputs(rng)
    score = -3.6 + 1.2 * x[:, 0] - 0.8 * x[:, 1] + 0.6 * x[:, 2] * x[:, 3]
    y = (rng.random(RECORDS) < 1 / (1 + np.exp(-score))).astype(int)
    parts = x[:TRAINED], y[:TRAINED], x[TRAINED:], y[TRAINED:]
    return ArrayData(*parts, low=-3, high=3, classes=["no", "yes"])


def skewed() -> ArrayData:
    """Return records with a number from -10 to 20, whose errors are skewed and of several sizes."""
    rng = np.random.default_rng(0)
    x = inputs(rng)
    errors = 1.5 * rng.gumbel(size=RECORDS) * (1 + 0.3 * np.abs(x[:, 2]))
    y = 2 * x[:, 0] - x[:, 1] + errors
    parts = x[:TRAINED], y[:TRAINED], x[TRAINED:], y[TRAINED:]
    return ArrayData(*parts, low=-3, high=3, target_low=-10, target_high=20)


def tested(data: ArrayData, **settings: Any) -> dict[str, Any]:
    """Return the test scores of a run."""
    with tempfile.TemporaryDirectory() as folder:
        plan = resolve({"dataset": data, "out": Path(folder) / "run", **settings}).plan
        scores: dict[str, Any] = finish(train_plan(plan)).report["scores"]
    return scores


def balanced(**settings: Any) -> float:
    """Return the balanced accuracy with the rare class, in percent."""
    scores = tested(rare(), **settings)
    return round(100 * float(scores["balanced_accuracy"]), 1)


def main(out: Path) -> None:
    """Train, print and write."""
    classes, weighted = {}, {"class_weights": "1,15", "shares": SHARES}
    for name in OPTIMIZERS:
        given = {"optimizer": name, "epsilon": 3}
        classes[name] = {"equal": balanced(**given), "1,15": balanced(**given, **weighted)}
        print(name, classes[name], flush=True)
    classes["without privacy"] = {
        "equal": balanced(no_dp=True),
        "1,15": balanced(no_dp=True, **weighted),
    }
    quantiles: dict[str, dict[str, float]] = {}
    for name in ("dp-adam", "dp-sgd", "dp-adambc", "without privacy"):
        given = {"no_dp": True} if name not in OPTIMIZERS else {"optimizer": name, "epsilon": 3}
        quantiles[name] = {
            f"{level:g}": round(
                100 * tested(skewed(), loss=f"quantile:{level}", **given)["at_or_below"], 1
            )
            for level in QUANTILES
        }
        print(name, quantiles[name], flush=True)
    found = {"balanced accuracy": classes, "coverage": quantiles}
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
