"""Compare ways to choose settings, each at the same epsilon for search and model together.

    python benchmarks/tuning.py docs/data/tuning.jsonl --texts FOLDER --epsilons 3,1 --jobs 2

- ``defaults``: one run of the best recipe.
- ``tuned``: ``dpmac tune``.
- ``composed``: as many trials as ``dpmac tune`` has on average, each charged in full.
- ``dishonest``: these trials, each with the whole epsilon, and the best by exact test scores. Its
  true epsilon is higher; it shows what a search that is not charged seems to gain.

A search draws from a space: ``near``, what ``dpmac tune`` draws by default, or ``wide``, several
settings over the ranges that one tries without knowing more.

Each result is a line of FILE: the exact accuracy of the published model on the test records. What
is in the file is not run again. Repeats are paired: a repeat has one split of the records (except
for digits and MNIST), and settings of the last two ways are drawn with the same public seed. FOLDER
has sms.train.csv.xz and sms.test.csv.xz with the columns text and label.
"""

import argparse
import csv
import importlib.util
import io
import json
import lzma
import math
import multiprocessing
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

import lines
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_breast_cancer, make_classification
from sklearn.feature_extraction.text import HashingVectorizer

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import calibrate_noise
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.loaders import load_data
from dpmac_cli.errors import DivergedError
from dpmac_cli.release.run import finish, train
from dpmac_cli.release.scoring import score
from dpmac_cli.runs.folder import REPORT
from dpmac_cli.storage.paths import data_folder
from dpmac_cli.studies.search import SearchSpace, plan_search
from dpmac_cli.studies.tune import carry_out_search, covered_score

#: Settings to draw, by name of a search space.
SPACES: dict[str, dict[str, str]] = {
    "near": {},
    "wide": {"lr": "1e-4:1", "clip_norm": "0.1,1,10", "epochs": "5,10,20,40"},
}
#: Training and test images of the part of MNIST.
IMAGES = (6_000, 2_000)
#: Settings of a dataset.
Given: TypeAlias = dict[str, Any]


def digits(_: Path, __: Path, ___: int) -> Given:
    """scikit-learn's digits: 1,437 training records, 10 classes, one split."""
    return {"dataset": "digits"}


def breast(where: Path, _: Path, repeat: int) -> Given:
    """Breast cancer: 569 records, 30 numbers with published ranges, 2 classes."""
    x, y = load_breast_cancer(return_X_y=True)
    low, high = x.min(0), x.max(0)  # the documentation of scikit-learn lists them
    return _split(where / f"breast-{repeat}.npz", x, y, repeat, low=low, high=high)


def penguins(where: Path, _: Path, repeat: int) -> Given:
    """Penguins: 344 records, 3 classes, with the schema of docs/own-tables.md."""
    page = Path(__file__).parents[1] / "docs" / "own-tables.md"
    (schema,) = re.findall(r"```yaml\n(label:\n.*?)```", page.read_text(), re.DOTALL)
    (where / "schema.yaml").write_text(f"{schema}test: {{column: side, values: [test]}}\n")
    spec = importlib.util.find_spec("palmerpenguins")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    table = Path(spec.submodule_search_locations[0], "data", "penguins.csv")
    header, *rows = table.read_text().splitlines()
    random.Random(repeat).shuffle(rows)  # noqa: S311  (splits of public data)
    tested = len(rows) // 5
    sides = [f"{row},{'test' if n < tested else 'train'}" for n, row in enumerate(rows)]
    file = where / f"penguins-{repeat}.csv"
    file.write_text("\n".join([f"{header},side", *sides, ""]))
    return {"dataset": str(file), "schema": str(where / "schema.yaml")}


def mnist(where: Path, _: Path, __: int) -> Given:
    """First images of MNIST, as files in folders, one split."""
    data = load_data("mnist", data_folder(None), torch.device("cpu"))
    sides = zip(("train", "test"), (data.train, data.test), IMAGES, strict=True)
    for side, split, count in sides:
        for number, (x, y) in enumerate(zip(split.images[:count], split.labels, strict=False)):
            place = where / "mnist" / side / str(int(y))
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x[0].numpy()).save(place / f"{number}.png")
    return {"dataset": str(where / "mnist")}


def sms(where: Path, texts: Path, repeat: int) -> Given:
    """SMS spam as 1,024 hashed words: 5,574 records, 2 classes."""
    rows = list[dict[str, str]]()
    for side in ("train", "test"):
        with lzma.open(texts / f"sms.{side}.csv.xz") as packed:
            rows += csv.DictReader(io.TextIOWrapper(packed, "utf-8", newline=""))
    words = HashingVectorizer(n_features=1_024, alternate_sign=True)
    x = words.transform([row["text"] for row in rows]).toarray()
    y = np.array([row["label"] == "spam" for row in rows], np.int64)
    return _split(where / f"sms-{repeat}.npz", x, y, repeat, low=-0.5, high=0.5)


def generated(where: Path, _: Path, repeat: int) -> Given:
    """Five classes of 3,000 generated records with 20 numbers."""
    x, y = make_classification(3_000, 20, n_informative=8, n_classes=5, random_state=0)
    return _split(where / f"generated-{repeat}.npz", x, y, repeat, low=-10.0, high=10.0)


def _split(file: Path, x: Any, y: Any, repeat: int, **ends: Any) -> Given:
    """Write records with a random fifth of them as test records; sizes are the same for all."""
    order = np.random.default_rng(repeat).permutation(len(x))
    test, train = np.split(order, [len(x) // 5])
    x = x.astype(np.float32)
    np.savez(file, x=x[train], y=y[train], x_test=x[test], y_test=y[test], **ends)
    return {"dataset": str(file)}


SETS = {"digits": digits, "breast": breast, "penguins": penguins}
SETS |= {"mnist": mnist, "sms": sms, "generated": generated}


def accuracy(run: Path) -> float:
    """Return the exact test accuracy of a published model."""
    return score(run, device="cpu").result.accuracy


def defaults(space: SearchSpace, given: Given, out: Path, seed: int) -> float:
    """Return the accuracy of one run of the best recipe."""
    del space, seed
    finish(train(resolve(given).plan.placed(out)))
    return accuracy(out)


def tuned(space: SearchSpace, given: Given, out: Path, seed: int) -> float:
    """Return the accuracy of the result of a search."""
    del given, seed
    finish(carry_out_search(replace(space, out=out)))
    return accuracy(out)


def composed(space: SearchSpace, given: Given, out: Path, seed: int) -> float:
    """Return the accuracy of the trial with the best covered score, where all are charged."""
    epsilon = float(given["epsilon"])
    runs = list(_trials(space, out, seed, lambda plan, count: _shared(plan, count, epsilon)))
    metric = space.plans[0].settings.metric
    best = max(runs, key=lambda run: covered_score(json.loads((run / REPORT).read_bytes()), metric))
    return accuracy(best)


def dishonest(space: SearchSpace, given: Given, out: Path, seed: int) -> float:
    """Return the accuracy of the best trial by exact test scores, each with the whole epsilon."""
    epsilon = float(given["epsilon"])
    return max(map(accuracy, _trials(space, out, seed, lambda plan, _: _shared(plan, 1, epsilon))))


def _shared(plan: TrainPlan, count: int, epsilon: float) -> TrainPlan:
    """Return a trial of which ``count`` cost epsilon together, training and scores alike."""
    privacy, delta = plan.privacy, plan.privacy.delta
    assert privacy.scores is not None
    repeated = replace(privacy.event, steps=count * privacy.steps)
    sigma = calibrate_noise(repeated, delta, epsilon)
    spent = total_epsilon((replace(repeated, noise_multiplier=sigma),), delta)
    score = replace(privacy.scores.event(privacy.steps, privacy.steps), steps=count)
    scores = replace(privacy.scores, noise_multiplier=calibrate_noise(score, delta, spent))
    event = replace(privacy.event, noise_multiplier=sigma)
    return replace(plan, search=None, privacy=replace(privacy, event=event, scores=scores))


def _trials(
    space: SearchSpace, out: Path, seed: int, noisy: Callable[[TrainPlan, int], TrainPlan]
) -> Iterator[Path]:
    """Train as many trials as a search has on average, and yield the folders of those that end."""
    source = random.Random(seed)  # noqa: S311  (its draws are repeated, and protect nothing)
    count = round(space.search.trials.mean)
    for number in range(count):
        setting = {each.name: each.draw(source) for each in space.dimensions}
        plan = noisy(space.plan_of(setting), count)
        try:
            finish(train(plan.placed(out / str(number))))
        except DivergedError:
            continue
        yield out / str(number)


WAYS = {"defaults": defaults, "tuned": tuned, "composed": composed, "dishonest": dishonest}
#: What a line is told apart by.
KEY = ("space", "trials", "set", "epsilon", "repeat", "way")


@dataclass(frozen=True)
class Case:
    """One split of the records of a set, and a search.

    Attributes:
        space: name of the search space. trials: mean number of trials.
        texts: folder of texts.
    """

    space: str
    trials: float
    set: str
    epsilon: float
    repeat: int
    texts: Path

    def key(self, way: str) -> dict[str, Any]:
        """Return what the line of a way is told apart by."""
        own = (self.space, self.trials, self.set, self.epsilon, self.repeat)
        return dict(zip(KEY, (*own, way), strict=True))

    def measured(self, ways: Sequence[str]) -> list[dict[str, Any]]:
        """Train in each of these ways; return their lines."""
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            (where := Path(folder, "data")).mkdir()
            own = SETS[self.set](where, self.texts, self.repeat)
            given = {**own, "epsilon": self.epsilon, "device": "cpu"}
            space = self._space(given)
            return [
                {
                    **self.key(way),
                    "accuracy": WAYS[way](space, given, Path(folder, way), self.repeat),
                }
                for way in ways
            ]

    def _space(self, given: Given) -> SearchSpace:
        """Return the search space for these settings."""
        return plan_search({**given, "trials": self.trials, **SPACES[self.space]})


def measure(cases: Sequence[Case], file: Path, jobs: int) -> None:
    """Run what is not in the file yet, as many cases at a time as there are jobs."""
    known = [{name: line[name] for name in KEY} for line in lines.read(file)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, max_tasks_per_child=1) as pool:
        running = [
            pool.submit(case.measured, left)
            for case in cases
            if (left := [way for way in WAYS if case.key(way) not in known])
        ]
        for case in as_completed(running):
            for line in case.result():
                lines.append(file, line)


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of means in percent, and of paired differences to ``tuned``."""
    yield (
        f"| set | epsilon | search | repeats | {' | '.join(WAYS)} "
        "| tuned - defaults | tuned - composed |"
    )
    yield "|---" * (6 + len(WAYS)) + "|"
    accuracy = {tuple(line[name] for name in KEY): 100 * line["accuracy"] for line in found}
    for kind in dict.fromkeys(key[:4] for key in sorted(accuracy, key=_order)):
        space, trials, name, epsilon = kind
        repeats = {key[4] for key in accuracy if key[:4] == kind}
        whole = [r for r in sorted(repeats) if all((*kind, r, way) in accuracy for way in WAYS)]
        if not whole:
            continue
        of = {way: [accuracy[*kind, r, way] for r in whole] for way in WAYS}
        cells = [f"{fmean(of[way]):.2f}" for way in WAYS]
        for other in ("defaults", "composed"):
            gains = [one - two for one, two in zip(of["tuned"], of[other], strict=True)]
            error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
            cells.append(f"{fmean(gains):+.2f} ± {error:.2f}")
        yield f"| {name} | {epsilon:g} | {space}, {trials:g} | {len(whole)} | {' | '.join(cells)} |"


def _order(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the place of a line in the table: by set, epsilon and space."""
    space, trials, name, epsilon, repeat, way = key
    return [*SETS].index(name), -epsilon, space, trials, repeat, way


def main() -> None:
    """Run what is missing, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--epsilons", default="3", help="one or several, with commas")
    parser.add_argument("--searches", default="near:4,wide:8", help="SPACE:TRIALS, ...")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--texts", type=Path, default=Path("texts"))
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    searches = [each.split(":") for each in options.searches.split(",")]
    cases = [
        Case(space, float(trials), name, epsilon, repeat, options.texts)
        for (space, trials), epsilon, repeat, name in product(
            searches,
            map(float, options.epsilons.split(",")),
            range(options.repeats),
            options.sets.split(","),
        )
    ]
    measure(cases, options.file, options.jobs)
    print(*table(lines.read(options.file)), sep="\n")


if __name__ == "__main__":
    main()
