"""Measure classifiers of texts by epsilon, with an encoder and with vectors without a transformer.

    python benchmarks/text_sets.py PACKAGES FOLDER    # BBC News, film reviews and GloVe
    python benchmarks/texts.py FOLDER docs/data/texts.jsonl sms,bbc:256 --minutes 30

FOLDER has NAME.train.csv.xz and NAME.test.csv.xz with the columns text and label; or NAME/, one
folder of .txt files per class, of which about one in five is for testing, chosen by the SHA-256 of
the text, so that copies of a text are on one side. A set is NAME, NAME:TOKENS or
NAME:TOKENS:TEXTS, with a limit of tokens per text and of training texts.

Features are a value of --backbone, and a part of it that is trained may follow: minilm:lora. Or
they are hashed words, or the mean of the words' vectors in FOLDER/glove.npy ("glove"). All are
trained as texts are by default.

A line has the set, the features, the limit of tokens, the training texts, the seed, epsilon (null
without privacy), test accuracy in percent, and the CPU time of the run in seconds. What the file
has is not run again, and features are kept in the cache, so the study can be interrupted at any
time. Seeds come one after the other: each set and each epsilon has its first before any has its
second. At the end a table is printed. It also has the share of the most frequent class.
"""

import argparse
import csv
import hashlib
import io
import itertools
import lzma
import math
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import lines
import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.feature_extraction.text import HashingVectorizer

from dpmac_cli import ArrayData, finish, resolve, train
from dpmac_cli.config.best import TEXTS

EPSILONS = (1.0, 3.0, 8.0, None)
#: Inputs of hashed words. The hash is public, and so is the number of inputs.
HASHED, WORDS, GLOVE = 1024, "hashed words", "glove"
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


@cache
def word_vectors(folder: Path) -> tuple[Mapping[str, int], NDArray[np.float32]]:
    """Return the places of words, and their vectors, shape (words, size)."""
    words = (folder / "glove.txt").read_text(encoding="utf-8").split("\n")
    with (folder / "glove.npy").open("rb") as file:
        vectors = np.lib.format.read_array(file, allow_pickle=False)
    return {word: place for place, word in enumerate(words)}, vectors


def mean_vectors(texts: Sequence[str], folder: Path) -> NDArray[np.float32]:
    """Return the means of the vectors of each text's words, of norm 1; 0 if none is known."""
    places, vectors = word_vectors(folder)
    found = np.zeros((len(texts), vectors.shape[1]), np.float32)
    for row, text in enumerate(texts):
        words = re.findall(r"\w+|[^\w\s]", text.lower())
        found[row] = vectors[[places[word] for word in words if word in places]].sum(0)
    norms = np.linalg.norm(found, axis=1, keepdims=True)
    unit: NDArray[np.float32] = found / norms.clip(1e-12)
    return unit


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
        if features in (WORDS, GLOVE):
            vectors, tested = (self._vectors(features, some) for some in (x, x_test))
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

    def _vectors(self, features: str, texts: Sequence[str]) -> NDArray[Any]:
        """Return vectors of norm 1, shape (texts, size)."""
        if features == GLOVE:
            return mean_vectors(texts, self.folder)
        hashed = HashingVectorizer(n_features=HASHED, alternate_sign=True).transform(texts)
        return np.asarray(hashed.toarray())


def measured(
    settings: Mapping[str, Any], epsilon: float | None, seed: int, device: str
) -> dict[str, Any]:
    """Train once; return test accuracy in percent, CPU seconds, and a device other than the CPU."""
    cost = {"no_dp": True} if epsilon is None else {"epsilon": epsilon}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        out = Path(folder) / "run"
        plan = resolve({**settings, **cost, "seed": seed, "device": device, "out": out}).plan
        accuracy = finish(train(plan)).report["test"]["accuracy"]
    found = {"accuracy": 100 * accuracy, "cpu": time.process_time() - begun}
    return found if device == "cpu" else found | {"device": device}


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table with a row per set and features: means and deviations."""
    yield "| texts | features | seeds | epsilon 1 | 3 | 8 | no privacy | CPU | largest class |"
    yield "|---|---|---|---|---|---|---|---|---|"
    kinds = KEY[: KEY.index("epsilon")]
    for kind in sorted({tuple(line[key] for key in kinds) for line in found}):
        row = [line for line in found if tuple(line[key] for key in kinds) == kind]
        cells, counts = [], []
        for epsilon in EPSILONS:
            reached = [line["accuracy"] for line in row if line["epsilon"] == epsilon]
            spread = f" ± {statistics.stdev(reached):.1f}" if len(reached) > 1 else ""
            cells.append(f"{statistics.mean(reached):.1f}{spread}" if reached else "")
            counts.append(len(reached))
        seeds = f"{min(counts)} to {max(counts)}" if len({*counts}) > 1 else f"{counts[0]}"
        name, features, tokens, texts, epochs, rate = kind
        features += f", {epochs} epochs, {rate:g}" * ((epochs, rate) != (TEXTS.epochs, TEXTS.rate))
        times = sorted(line["cpu"] for line in row)
        cells += [
            f"{statistics.median(times):.0f} s, {times[-1]:.0f} s",
            f"{row[0]['majority']:.1f}",
        ]
        yield f"| {name}, {texts:,} x {tokens} | {features} | {seeds} | {' | '.join(cells)} |"


def parser_of(about: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all studies of texts have."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("sets")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser


def main() -> None:
    """Measure what the file lacks, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--features", default=f"minilm,{WORDS},{GLOVE}")
    parser.add_argument("--epsilons", default="1,3,8,none")
    parser.add_argument("--epochs", type=int, default=TEXTS.epochs)
    parser.add_argument("--rate", type=float, default=TEXTS.rate)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    begun, last = time.monotonic(), 60 * given.minutes
    studies = [Study.of(given.folder, described) for described in given.sets.split(",")]
    epsilons = [None if part == "none" else float(part) for part in given.epsilons.split(",")]
    known = [{name: line[name] for name in KEY} for line in lines.read(given.file)]
    kinds, seeds = given.features.split(","), map(int, given.seeds.split(","))
    for seed, study, features, epsilon in itertools.product(seeds, studies, kinds, epsilons):
        key = study.key(features, given.epochs, given.rate, epsilon, seed)
        if key not in known and time.monotonic() - begun <= last:
            more = {"epochs": given.epochs, "lr": given.rate}
            found = measured({**study.settings(features), **more}, epsilon, seed, given.device)
            lines.append(given.file, key | {"majority": study.majority} | found)
    print(*table(lines.read(given.file)), sep="\n")


if __name__ == "__main__":
    main()
