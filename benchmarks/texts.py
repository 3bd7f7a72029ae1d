"""Measure classifiers of texts at the default settings, with encoders and with hashed words.

    python benchmarks/texts.py FOLDER docs/data/texts.jsonl sms,bbc --seeds 0,1,2,3,4 --minutes 30

FOLDER has NAME.train.csv.xz and NAME.test.csv.xz with the columns text and label; or NAME/, one
folder of .txt files per class, of which about one in five is for testing, chosen by the SHA-256 of
the text, so that copies of a text are on one side. An encoder is a value of --backbone, and a part
of it that is trained may follow: minilm:lora.

A line has the set, the features, the limit of tokens, the seed, epsilon (null without privacy),
test accuracy in percent, and the CPU time of the run in seconds. What the file has is not run
again, and features are kept in the cache, so the study can be interrupted at any time. Seeds come
one after the other: each set and each epsilon has its first before any has its second. At the end
a table is printed. It also has the share of the most frequent class.
"""

import argparse
import csv
import hashlib
import io
import itertools
import lzma
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import lines
import numpy as np
import torch
from sklearn.feature_extraction.text import HashingVectorizer

from dpmac_cli import ArrayData, finish, resolve, train

EPSILONS = (1.0, 3.0, 8.0, None)
#: Inputs of hashed words. The hash is public, and so is the number of inputs.
HASHED, WORDS = 1024, "hashed words"
SIDES = ("train", "test")
#: Values of the first byte of a SHA-256 that belong to test texts: a fifth.
TESTED = 51
#: What a line is told apart by.
KEY = ("set", "features", "tokens", "epsilon", "seed")
#: Texts and names of their classes.
Rows = list[tuple[str, str]]


def of_tables(folder: Path, name: str) -> dict[str, Rows]:
    """Return the texts of both sides of a set of two tables."""
    found = {}
    for side in SIDES:
        with lzma.open(folder / f"{name}.{side}.csv.xz") as packed:
            rows = csv.DictReader(io.TextIOWrapper(packed, "utf-8", newline=""))
            found[side] = [(row["text"], row["label"]) for row in rows]
    return found


def of_folder(folder: Path) -> dict[str, Rows]:
    """Return the texts of both sides of a folder of classes, in the order of their checksums."""
    ordered = sorted(
        (hashlib.sha256(content := file.read_bytes()).digest(), content, file.parent.name)
        for file in folder.glob("*/*.txt")
    )
    found: dict[str, Rows] = {side: [] for side in SIDES}
    for checksum, content, label in ordered:
        side = SIDES[checksum[0] < TESTED]
        found[side].append((content.decode("utf-8", "replace"), label))
    return found


@dataclass(frozen=True)
class Study:
    """A set of texts, and how it is read."""

    folder: Path
    name: str
    tokens: int

    @cached_property
    def sides(self) -> dict[str, tuple[list[str], list[int]]]:
        """Texts and labels of both sides. Names of classes are public."""
        own = self.folder / self.name
        rows = of_folder(own) if own.is_dir() else of_tables(self.folder, self.name)
        classes = sorted({label for some in rows.values() for _, label in some})
        return {
            side: ([text for text, _ in some], [classes.index(label) for _, label in some])
            for side, some in rows.items()
        }

    @property
    def majority(self) -> float:
        """Share of the most frequent class of the test texts, in percent."""
        labels = self.sides["test"][1]
        return 100 * float(np.bincount(labels).max()) / len(labels)

    def settings(self, features: str) -> dict[str, Any]:
        """Return the settings of a run with an encoder, or with hashed words."""
        (x, y), (x_test, y_test) = (self.sides[side] for side in SIDES)
        classes = list(map(str, range(1 + max(y + y_test))))
        labels: dict[str, Any] = {"y": y, "y_test": y_test, "classes": classes}
        if features == WORDS:
            words = HashingVectorizer(n_features=HASHED, alternate_sign=True)
            most = HASHED**0.5
            hashed, tested = (words.transform(some).toarray() * most for some in (x, x_test))
            data = ArrayData(x=hashed, x_test=tested, low=-most, high=most, **labels)
            # Inputs are standardised by their range; the rate makes up for that.
            return {"dataset": data, "model": "linear", "lr": 0.005 * most}
        encoder, _, part = features.partition(":")
        data = ArrayData(x=np.array(x, object), x_test=np.array(x_test, object), **labels)
        return {
            "dataset": data,
            "backbone": encoder,
            "train": part or "head",
            "tokens": self.tokens,
        }


def measured(settings: Mapping[str, Any], epsilon: float | None, seed: int) -> dict[str, float]:
    """Train once; return test accuracy in percent and CPU seconds."""
    cost = {"no_dp": True} if epsilon is None else {"epsilon": epsilon}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        out = Path(folder) / "run"
        plan = resolve({**settings, **cost, "seed": seed, "device": "cpu", "out": out}).plan
        accuracy = finish(train(plan)).report["test"]["accuracy"]
    return {"accuracy": 100 * accuracy, "cpu": time.process_time() - begun}


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table with a row per set and features: means and deviations."""
    yield "| texts | features | seeds | epsilon 1 | 3 | 8 | no privacy | most frequent class |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, features in sorted({(line["set"], line["features"]) for line in found}):
        row = [line for line in found if (line["set"], line["features"]) == (name, features)]
        cells, counts = [], []
        for epsilon in EPSILONS:
            reached = [line["accuracy"] for line in row if line["epsilon"] == epsilon]
            spread = f" ± {statistics.stdev(reached):.1f}" if len(reached) > 1 else ""
            cells.append(f"{statistics.mean(reached):.1f}{spread}" if reached else "")
            counts.append(len(reached))
        seeds = f"{min(counts)} to {max(counts)}" if len({*counts}) > 1 else f"{counts[0]}"
        majority = f"{row[0]['majority']:.1f}"
        yield f"| {name} | {features} | {seeds} | {' | '.join(cells)} | {majority} |"


def main() -> None:
    """Measure what the file lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("sets")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--encoders", default="minilm")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    begun, studies = (
        time.monotonic(),
        [Study(given.folder, name, given.tokens) for name in given.sets.split(",")],
    )
    kinds = [WORDS, *given.encoders.split(",")]
    known = {tuple(line[key] for key in KEY) for line in lines.read(given.file)}
    seeds = map(int, given.seeds.split(","))
    for seed, study, features in itertools.product(seeds, studies, kinds):
        for epsilon in EPSILONS:
            key = (study.name, features, study.tokens, epsilon, seed)
            if key in known or time.monotonic() - begun > 60 * given.minutes:
                continue
            found = measured(study.settings(features), epsilon, seed)
            line = dict(zip(KEY, key, strict=True)) | {"majority": study.majority} | found
            lines.append(given.file, line)
    print(*table(lines.read(given.file)), sep="\n")


if __name__ == "__main__":
    main()
