"""Train a model of another library on a table, in its own environment, for benchmarks/tables.py.

    pip install interpret-core==0.7.8 diffprivlib==0.6.6 "scikit-learn<1.6" pandas

The folder has train.csv, test.csv and table.json: columns by name with their kind, range or
categories, the label, its classes or its range. Probabilities of the classes, or numbers, of the
test records are written to predictions.csv.
"""

import argparse
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.stats import norm

DELTA = 1e-5
#: Settings of DP-EBM; those after the first one are for tuning.
EBM: dict[str, dict[str, Any]] = {
    "dp-ebm": {},
    "dp-ebm-100": {"max_rounds": 100, "learning_rate": 0.05},
    "dp-ebm-30": {"max_rounds": 30, "learning_rate": 0.1},
    "dp-ebm-10": {"max_rounds": 10, "learning_rate": 0.2, "max_leaves": 6},
}


@dataclass(frozen=True)
class Task:
    """A table to learn: frames of training and test records, and what is declared of them."""

    train: pd.DataFrame
    test: pd.DataFrame
    columns: dict[str, dict[str, Any]]
    target: pd.Series
    classes: list[str]  # empty for a number
    range: tuple[float, float]


def read(folder: Path) -> Task:
    """Return the table of a folder. Missing numbers are put in the middle of their range."""
    declared = json.loads((folder / "table.json").read_text())
    columns = declared["columns"]
    numbers = {name: float for name, column in columns.items() if "range" in column}
    kinds = {name: numbers.get(name, str) for name in columns}
    frames = []
    for side in ("train", "test"):
        frame = pd.read_csv(
            folder / f"{side}.csv", dtype=kinds, keep_default_na=False, na_values=[""]
        )
        for name, column in columns.items():
            unknown = sum(column["range"]) / 2 if "range" in column else "missing"
            frame[name] = frame[name].fillna(unknown)
        frames.append(frame)
    label = declared["label"]
    target = frames[0][label].astype(str if declared["classes"] else float)
    inputs = [frame[list(columns)] for frame in frames]
    ends = declared["target_range"] or (0.0, 1.0)
    return Task(inputs[0], inputs[1], columns, target, declared["classes"], tuple(ends))


def encoded(task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers in [-1, 1] and one input for each category, of both sides."""
    sides = []
    for frame in (task.train, task.test):
        inputs = list[np.ndarray]()
        for name, column in task.columns.items():
            if "range" in column:
                low, high = column["range"]
                scaled = (frame[name].to_numpy(float) - low) / ((high - low) or 1) * 2 - 1
                inputs.append(scaled.clip(-1, 1))
            else:
                inputs += [(frame[name] == value).to_numpy(float) for value in column["categories"]]
        sides.append(np.stack(inputs, 1))
    return sides[0], sides[1]


def delta_of(epsilon: float, mu: float) -> float:
    """Return the delta of Gaussian differential privacy at an epsilon."""
    tail = math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)
    return float(norm.cdf(-epsilon / mu + mu / 2) - tail)


def shared(epsilon: float, parts: int) -> float:
    """Return the epsilon of each of some equal Gaussian parts of a budget, at the same delta."""
    mu = brentq(lambda mu: delta_of(epsilon, mu) - DELTA, 1e-6, 50) / math.sqrt(parts)
    return float(brentq(lambda part: delta_of(part, mu) - DELTA, 1e-9, epsilon))


def ebm(task: Task, epsilon: float, seed: int, settings: dict[str, Any]) -> np.ndarray:
    """Return predictions of DP-EBM; of several classes, one model for each, within the budget."""
    from interpret.privacy import (  # noqa: PLC0415  (each contender loads its own library)
        DPExplainableBoostingClassifier,
        DPExplainableBoostingRegressor,
    )

    bounds = {
        name: tuple(column["range"]) for name, column in task.columns.items() if "range" in column
    }
    types = ["continuous" if name in bounds else "nominal" for name in task.columns]
    common = dict(
        feature_types=types,
        privacy_bounds=bounds,
        delta=DELTA,
        random_state=seed,
        n_jobs=1,
        **settings,
    )
    if not task.classes:
        low, high = task.range
        model = DPExplainableBoostingRegressor(
            epsilon=epsilon, privacy_target_min=low, privacy_target_max=high, **common
        )
        numbers: np.ndarray = model.fit(task.train, task.target).predict(task.test)
        return numbers
    of_one = task.classes[1:] if len(task.classes) == 2 else task.classes
    each = epsilon if len(of_one) == 1 else shared(epsilon, len(of_one))
    found = []
    for k, name in enumerate(of_one):
        model = DPExplainableBoostingClassifier(
            epsilon=each, **common | {"random_state": seed * 100 + k}
        )
        is_it = (task.target == name).astype(int)
        found.append(model.fit(task.train, is_it).predict_proba(task.test)[:, 1])
    if len(found) == 1:
        return np.stack([1 - found[0], found[0]], 1)
    together = np.stack(found, 1).clip(1e-9)
    normed: np.ndarray = together / together.sum(1, keepdims=True)
    return normed


def linear(task: Task, epsilon: float, seed: int) -> np.ndarray:
    """Return predictions of the linear models of diffprivlib (pure epsilon; their only ones)."""
    from diffprivlib.models import LinearRegression, LogisticRegression  # noqa: PLC0415  (the same)

    x, new = encoded(task)
    if not task.classes:
        model = LinearRegression(
            epsilon=epsilon, bounds_X=(-1, 1), bounds_y=task.range, random_state=seed
        )
        numbers: np.ndarray = model.fit(x, task.target.clip(*task.range)).predict(new)
        return numbers.clip(*task.range)
    norm_of_rows = math.sqrt(len(task.columns))
    model = LogisticRegression(
        epsilon=epsilon, data_norm=norm_of_rows, max_iter=1000, random_state=seed
    ).fit(x, task.target)
    return by_class(model, model.predict_proba(new), task.classes)


def without_privacy(task: Task, epsilon: float, seed: int, *, boosted: bool) -> np.ndarray:
    """Return predictions of scikit-learn's boosted trees or of a linear model."""
    from sklearn import ensemble, linear_model  # noqa: PLC0415  (the same)

    x, new = encoded(task)
    if not task.classes:
        model = (
            ensemble.HistGradientBoostingRegressor(random_state=seed)
            if boosted
            else linear_model.Ridge()
        )
        numbers: np.ndarray = model.fit(x, task.target).predict(new)
        return numbers
    model = (
        ensemble.HistGradientBoostingClassifier(learning_rate=0.05, random_state=seed)
        if boosted
        else linear_model.LogisticRegression(max_iter=2000)
    )
    model.fit(x, task.target)
    return by_class(model, model.predict_proba(new), task.classes)


def by_class(model: Any, shares: np.ndarray, classes: list[str]) -> np.ndarray:
    """Return probabilities in the order of the classes; 0 for those that the model has not seen."""
    places = {name: k for k, name in enumerate(model.classes_)}
    return np.stack(
        [shares[:, places[name]] if name in places else 0 * shares[:, 0] for name in classes], 1
    )


CONTENDERS: dict[str, Callable[[Task, float, int], np.ndarray]] = {
    **{name: partial(ebm, settings=settings) for name, settings in EBM.items()},
    "diffprivlib": linear,
    "no-privacy-trees": partial(without_privacy, boosted=True),
    "no-privacy-linear": partial(without_privacy, boosted=False),
}


def main() -> None:
    """Train one contender, and write what it predicts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("epsilon", type=float)
    parser.add_argument("seed", type=int)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    task = read(asked.folder)
    predicted = CONTENDERS[asked.contender](task, asked.epsilon, asked.seed)
    names = task.classes or ["prediction"]
    table = pd.DataFrame(predicted.reshape(len(predicted), -1), columns=names)
    table.to_csv(asked.folder / "predictions.csv", index=False)


if __name__ == "__main__":
    main()
