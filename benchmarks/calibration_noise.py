"""Measure what the noise of calibration does: log loss of trained networks over many draws of it.

    python benchmarks/calibration_noise.py PACKAGES RUNS docs/data/calibration-noise.jsonl

Each network is trained once, with the noise that leaves a share for the histogram, and is kept in
RUNS with its outputs. Then its training records are counted, noise is added as often as asked, and
each noisy histogram is fitted and scored on the test records: the log loss, and of two classes the
sensitivity of the point --threshold sensitivity=0.9. Data are those of benchmarks/calibration.py.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tables
from calibration import KEEL, records_of, trained
from common import append_line, parser_of, read_lines
from scipy.special import logsumexp

import dpmac_cli
from dpmac_cli.tasks.calibration import Calibration, cell_count, cells, log_odds
from dpmac_cli.tasks.operating_point import OperatingPoint

SETS = ("digits", *(name for name in tables.TABLES if name not in tables.NUMBERS), *KEEL)


def outputs_of(packages: Path, runs: Path, texts: Path, run: tuple[str, float, int]) -> Any:
    """Return outputs and labels of training and test records, and the noise of the histogram."""
    name, epsilon, seed = run
    file = runs / f"{name}-{epsilon:g}-{seed}.npz"
    if not file.exists():
        data = records_of(packages, texts, name, seed)
        out = trained(data.dataset, runs, run)
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        released = dpmac_cli.load(out)
        outputs = [released.predict(part).outputs for part in (data.train, data.test)]
        places = {name: place for place, name in enumerate(report["data"]["classes"])}
        labels = [np.array([places[name] for name in of]) for of in (data.labels, data.test_labels)]
        noise = report["network"]["calibration"]["noise"]
        np.savez(file, z=outputs[0], y=labels[0], new=outputs[1], truth=labels[1], noise=noise)
    return np.load(file)  # noqa: TID251  (as it was written above)


def log_losses(outputs: np.ndarray, labels: np.ndarray, fits: np.ndarray) -> np.ndarray:
    """Return the mean log loss of outputs by each slope and intercept, shape (fits, 2)."""
    rows = np.arange(len(labels))
    different, place = np.unique(fits, axis=0, return_inverse=True)
    losses = []
    for slope, intercept in different:
        z = outputs * slope
        z[:, -1] += intercept
        losses.append(float((logsumexp(z, 1) - z[rows, labels]).mean()))
    return np.array(losses)[place.ravel()]


def measure(kept: Any, draws: int) -> dict[str, Any]:
    """Return log losses of a network before calibration, and after, over draws of noise."""
    z, y, new, truth = (kept[name] for name in ("z", "y", "new", "truth"))
    z, new, classes, noise = z.astype(float), new.astype(float), z.shape[1], float(kept["noise"])
    of = cells(z, y)
    counts = np.bincount(of[of >= 0], minlength=cell_count(classes)).reshape(-1, 2)
    random = np.random.default_rng(0)
    fits, found_of_last = [(1.0, 0.0)], list[float]()
    for _ in range(draws):
        noisy = counts + noise * random.standard_normal(counts.shape)
        found = Calibration.fitted(noisy, noise, len(y))
        fits.append((found.slope, found.intercept))
        if classes == 2:
            point = OperatingPoint.of("sensitivity=0.9", found)
            found_of_last.append(float((log_odds(new[truth == 1]) > point.log_odds).mean()))
    raw, *after = log_losses(new, truth, np.array(fits))
    shares = np.bincount(y, minlength=classes) / len(y)
    constant = float(-np.log(shares.clip(1e-9))[truth].mean())
    harm = np.array(after) - raw
    values = {
        "raw": raw,
        "constant": constant,
        "mean": float(np.mean(after)),
        "worst": float(np.max(after)),
        "harmed": float((harm > 0.02).mean()),
        "left": float(np.mean([fit == (1.0, 0.0) for fit in fits[1:]])),
        "slope": float(np.median([slope for slope, _ in fits[1:]])),
    }
    if found_of_last:
        near = np.abs(np.array(found_of_last) - 0.9) <= 0.05
        values |= {"sensitivity": float(np.mean(found_of_last)), "near": float(near.mean())}
    rounded = {name: round(value, 4) for name, value in values.items()}
    positives = {"positives": int((y == 1).sum())} if classes == 2 else {}
    return {"records": len(y), **positives, "noise": round(noise, 2), **rounded}


def main() -> None:
    """Measure what is not yet in the file, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path, default=Path())
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--epsilons", default="0.5,1,3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--draws", type=int, default=1000)
    asked = parser.parse_args()
    asked.runs.mkdir(parents=True, exist_ok=True)
    done = {(line["set"], line["epsilon"], line["seed"]) for line in read_lines(asked.out)}
    seeds, epsilons = map(int, asked.seeds.split(",")), map(float, asked.epsilons.split(","))
    for seed, epsilon, name in itertools.product(seeds, [*epsilons], asked.sets.split(",")):
        run = (name, epsilon, seed)
        if run not in done:
            kept = outputs_of(asked.packages, asked.runs, asked.texts, run)
            line = {"set": name, "epsilon": epsilon, "seed": seed}
            append_line(asked.out, line | measure(kept, asked.draws))
    lines = pd.DataFrame(read_lines(asked.out)).drop(columns="seed")
    print(lines.groupby(["set", "epsilon"]).mean().round(3).to_string())


if __name__ == "__main__":
    main()
