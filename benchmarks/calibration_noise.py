"""Measure what the noise of calibration does: log loss of trained networks over many draws of it.

    python benchmarks/calibration_noise.py PACKAGES RUNS docs/data/calibration-noise.jsonl

Each network is trained once, with the noise that leaves a share for the histogram, and its outputs
are kept in RUNS. Then its training records are counted, noise is added as often as asked for, and
each noisy histogram is fitted and scored on the test records. Data are those of
benchmarks/calibration.py; tables that no rule was chosen on are KEPT_BACK.
"""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from calibration import TEXTS, dataset_of
from common import append_line, parser_of, read_lines
from scipy.special import logsumexp
from sklearn.datasets import load_digits

import dpmac_cli
from dpmac_cli import finish, resolve, train
from dpmac_cli.tasks.calibration import Calibration, cell_count, cells

#: Tables and texts that the constants of the fit were chosen on.
CHOSEN_ON = (
    *("german", "pima", "wdbc", "titanic", "loanapp", "hr", "phoneme", "spambase", "banana"),
    *("magic", "ring", "digits", "sms", "film", "banking"),
)
#: Tables that they were not chosen on.
KEPT_BACK = (
    *("australian", "bupa", "contraceptive", "crx", "heart", "ionosphere", "mammographic"),
    *("saheart", "satimage", "segment", "tic-tac-toe", "twonorm", "vehicle", "wisconsin"),
)


def outputs_of(packages: Path, runs: Path, texts: Path, run: tuple[str, float, int]) -> Any:
    """Return outputs and labels of training and test records, and the noise of the histogram."""
    name, epsilon, seed = run
    file = runs / f"{name}-{epsilon:g}-{seed}.npz"
    if not file.exists():
        data = dataset_of(packages, texts, name, seed)
        more: dict[str, Any] = {"backbone": "minilm"} if name in TEXTS else {}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            plan = resolve(dataset=data, epsilon=epsilon, seed=seed, out=out, **more)
            report = finish(train(plan)).report
            (x, y), (new, truth) = records_of(data, report["classes"])
            found = [dpmac_cli.predict(out, records).outputs for records in (x, new)]
        noise = report["calibration"]["noise"]
        labels = np.array(y, int), np.array(truth, int)
        np.savez(file, z=found[0], y=labels[0], new=found[1], truth=labels[1], noise=noise)
    return np.load(file)  # noqa: TID251  (as it was written above)


def records_of(data: Any, classes: list[str]) -> Any:
    """Return training and test records, with the numbers of their classes."""
    if data == "digits":
        bunch = load_digits()
        order = np.random.RandomState(0).permutation(len(bunch.target))
        x, y = bunch.images.astype(np.uint8)[order, None], bunch.target[order]
        return (x[360:], y[360:]), (x[:360], y[:360])
    numbers = {name: place for place, name in enumerate(classes)}
    both = [[data.arrays[f"{name}{end}"] for name in "xy"] for end in ("", "_test")]
    return [
        (list(x) if x.dtype.kind in "UO" else x, [numbers.get(str(label), label) for label in y])
        for x, y in both
    ]


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
    fits = [(1.0, 0.0)]
    for _ in range(draws):
        noisy = counts + noise * random.standard_normal(counts.shape)
        found = Calibration.fitted(noisy, noise, len(y))
        fits.append((found.slope, found.intercept))
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
    rounded = {name: round(value, 4) for name, value in values.items()}
    return {"records": len(y), "noise": round(noise, 2), **rounded}


def main() -> None:
    """Measure what is not yet in the file, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path, default=Path())
    parser.add_argument("--sets", default=",".join((*CHOSEN_ON, *KEPT_BACK)))
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
