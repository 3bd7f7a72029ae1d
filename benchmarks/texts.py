"""Measure classifiers of texts at the default settings, with an encoder and with hashed words.

    python benchmarks/texts.py FOLDER docs/data/texts.jsonl banking77,sms,medical --seeds 0,1,2

FOLDER has NAME.train.csv.xz and NAME.test.csv.xz with the columns text and label. Features are
computed once and kept in the cache. A line has the set, the features, epsilon (null without
privacy), the seed, test accuracy in percent, and the CPU time of the run in seconds. What is in the
file is not run again. At the end a table is printed.
"""

import argparse
import csv
import io
import json
import lzma
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import HashingVectorizer

from dpmac_cli import ArrayData, finish, resolve, train

EPSILONS = (1.0, 3.0, 8.0, None)
#: Inputs of hashed words. The hash is public, and so is the number of inputs.
HASHED = 1024
SIDES = ("train", "test")


def read(folder: Path, name: str) -> dict[str, tuple[list[str], list[int]]]:
    """Return texts and labels of both sides of a set; names of classes are public."""
    rows = {}
    for side in SIDES:
        with lzma.open(folder / f"{name}.{side}.csv.xz") as packed:
            rows[side] = [*csv.DictReader(io.TextIOWrapper(packed, "utf-8", newline=""))]
    classes = sorted({row["label"] for side in SIDES for row in rows[side]})
    return {
        side: ([row["text"] for row in some], [classes.index(row["label"]) for row in some])
        for side, some in rows.items()
    }


def datasets(
    sides: dict[str, tuple[list[str], list[int]]], encoders: list[str], tokens: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield features by name, and the settings that use them."""
    (x, y), (x_test, y_test) = (sides[side] for side in SIDES)
    classes = list(map(str, range(1 + max(y + y_test))))
    labels: dict[str, Any] = {"y": y, "y_test": y_test, "classes": classes}
    for encoder in encoders:
        data = ArrayData(x=np.array(x, object), x_test=np.array(x_test, object), **labels)
        yield encoder, {"dataset": data, "backbone": encoder, "tokens": tokens}
    words = HashingVectorizer(n_features=HASHED, alternate_sign=True)
    hashed, hashed_test = (words.transform(some).toarray() * HASHED**0.5 for some in (x, x_test))
    most = HASHED**0.5
    data = ArrayData(x=hashed, x_test=hashed_test, low=-most, high=most, **labels)
    # Inputs are standardised by their range; the rate makes up for that.
    yield "hashed words", {"dataset": data, "model": "linear", "lr": 0.005 * most}


def measured(settings: dict[str, Any], epsilon: float | None, seed: int) -> dict[str, float]:
    """Train once; return test accuracy in percent and CPU seconds."""
    cost = {"no_dp": True} if epsilon is None else {"epsilon": epsilon}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        out = Path(folder) / "run"
        plan = resolve({**settings, **cost, "seed": seed, "device": "cpu", "out": out}).plan
        accuracy = finish(train(plan)).report["test"]["accuracy"]
    return {"accuracy": 100 * accuracy, "cpu": time.process_time() - begun}


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table with a row per set and features."""
    yield "| texts | features | epsilon 1 | 3 | 8 | no privacy | most frequent class |"
    yield "|---|---|---|---|---|---|---|"
    for name, features in dict.fromkeys((line["set"], line["features"]) for line in lines):
        row = [line for line in lines if (line["set"], line["features"]) == (name, features)]
        cells = []
        for epsilon in EPSILONS:
            found = [line["accuracy"] for line in row if line["epsilon"] == epsilon]
            spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
            cells.append(f"{statistics.mean(found):.1f}{spread}" if found else "")
        yield f"| {name} | {features} | {' | '.join(cells)} | {row[0]['majority']:.1f} |"


def main() -> None:
    """Measure what the file lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("sets")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--encoders", default="minilm")
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    before = given.file.read_text() if given.file.exists() else ""
    lines = [json.loads(line) for line in before.splitlines()]
    known = {(n["set"], n["features"], n["epsilon"], n["seed"]) for n in lines}
    for name in given.sets.split(","):
        sides = read(given.folder, name)
        majority = 100 * np.bincount(sides["test"][1]).max() / len(sides["test"][1])
        for features, settings in datasets(sides, given.encoders.split(","), given.tokens):
            for seed in map(int, given.seeds.split(",")):
                for epsilon in EPSILONS:
                    if (name, features, epsilon, seed) in known:
                        continue
                    of = {"set": name, "features": features, "epsilon": epsilon, "seed": seed}
                    of |= {"majority": majority, **measured(settings, epsilon, seed)}
                    lines.append(of)
                    with given.file.open("a") as file:
                        file.write(json.dumps(of) + "\n")
    print(*table(lines), sep="\n")


if __name__ == "__main__":
    main()
