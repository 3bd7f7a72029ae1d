"""Compare ways to choose settings, each at the same epsilon for search and model together.

    python benchmarks/tuning.py --out runs/tuning --sets digits,breast,penguins --trials 10
    python benchmarks/tuning.py --out runs/tuning --sets mnist,generated --epsilon 1,3 --trials 10
    python benchmarks/tuning.py --out runs/tuning --sets sms --texts FOLDER --trials 10

- ``defaults``: one run of the best recipe.
- ``tuned``: ``dpmac tune``.
- ``composed``: as many trials as ``dpmac tune`` has on average, each charged in full.
- ``dishonest``: these trials, each with the whole epsilon, and the best by exact test scores. Its
  true epsilon is higher; it shows what a search that is not charged seems to gain.

Each result is a line of results.jsonl: the exact accuracy of the published model on the test
records. What is in the file is not run again. Repeats are paired: a repeat has one split of the
records (except for digits and MNIST), and settings of the last two ways are drawn with the same
public seed. FOLDER has sms.train.csv.xz and sms.test.csv.xz with the columns text and label.
"""

import argparse
import csv
import importlib.util
import io
import json
import lzma
import math
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_breast_cancer, make_classification
from sklearn.feature_extraction.text import HashingVectorizer

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import calibrate_noise
from dpmac_cli.config.data import resolve_data
from dpmac_cli.config.keywords import SettingName
from dpmac_cli.config.plan import ChosenFolder, TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.search_space import SearchSpace, ask_search
from dpmac_cli.data.loaders import load_data
from dpmac_cli.errors import DivergedError
from dpmac_cli.release.run import finish, train
from dpmac_cli.release.scoring import score
from dpmac_cli.storage.paths import data_folder
from dpmac_cli.studies.trial_scores import covered_score
from dpmac_cli.studies.tune import carry_out_search, plan_tune

#: Settings to draw, unless others are given.
SPACE = ("lr=1e-4..1:log", "clip-norm=0.1,1,10", "epochs=5,10,20,40")
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
    finish(train(resolve(given).plan.placed(ChosenFolder(out))))
    return accuracy(out)


def tuned(space: SearchSpace, given: Given, out: Path, seed: int) -> float:
    """Return the accuracy of the result of a search."""
    del given, seed
    # Only trials that count are trained: its end is not observed.
    finish(carry_out_search(plan_tune(space, out, stop_early=True, longest=1.0)))
    return accuracy(out)


def composed(space: SearchSpace, given: Given, out: Path, seed: int) -> float:
    """Return the accuracy of the trial with the best covered score, where all are charged."""
    epsilon = float(given["epsilon"])
    runs = list(_trials(space, out, seed, lambda plan, count: _shared(plan, count, epsilon)))
    best = max(runs, key=lambda run: covered_score(run, space.plans[0].run.metric))
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
        plan = noisy(space.plan_of(setting, stop_early=True), count)
        try:
            finish(train(plan.placed(ChosenFolder(out / str(number)))))
        except DivergedError:
            continue
        yield out / str(number)


WAYS = {"defaults": defaults, "tuned": tuned, "composed": composed, "dishonest": dishonest}
#: Results by set, epsilon, repeat and way.
Found: TypeAlias = dict[tuple[str, float, int, str], float]


def measure(options: argparse.Namespace, file: Path, found: Found) -> None:
    """Run what is not in the file yet, a repeat of all sets at a time."""
    (where := options.out / "data").mkdir(parents=True, exist_ok=True)
    epsilons, spaces = map(float, options.epsilon.split(",")), dict[Any, SearchSpace]()
    for epsilon, repeat, name in product(epsilons, range(options.repeats), options.sets.split(",")):
        if all((name, epsilon, repeat, way) in found for way in WAYS):
            continue
        given = {**SETS[name](where, options.texts, repeat), "epsilon": epsilon, "device": "cpu"}
        if (name, epsilon) not in spaces:  # the noise depends on the number of records only
            own = {"trials": options.trials}
            _, space = ask_search(given, own, options.search or SPACE, None)
            assert isinstance(space, SearchSpace)
            spaces[name, epsilon] = space
        space = spaces[name, epsilon]
        at: dict[SettingName, Any] = {**space.given, "dataset": given["dataset"]}
        data = resolve_data({n: v for n, v in given.items() if n in ("dataset", "schema")})
        space = replace(space, given=at, data=data)
        for way, function in WAYS.items():
            key = (name, epsilon, repeat, way)
            if key not in found:
                shutil.rmtree(out := options.out / "run", ignore_errors=True)
                found[key] = function(space, given, out, repeat)
                with file.open("a") as opened:
                    opened.write(json.dumps([*key, found[key]]) + "\n")


def table(found: Found) -> Iterator[str]:
    """Yield the lines of a table of means in percent, and of paired differences to ``tuned``."""
    yield f"| set | epsilon | repeats | {' | '.join(WAYS)} | tuned - defaults | tuned - composed |"
    yield "|---" * (5 + len(WAYS)) + "|"
    for name, epsilon in dict.fromkeys(key[:2] for key in found):
        repeats = [r for r in range(1_000) if all((name, epsilon, r, way) in found for way in WAYS)]
        if not repeats:
            continue
        of = {way: [100 * found[name, epsilon, r, way] for r in repeats] for way in WAYS}
        cells = [f"{fmean(of[way]):.2f}" for way in WAYS]
        for other in ("defaults", "composed"):
            gains = [one - two for one, two in zip(of["tuned"], of[other], strict=True)]
            error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
            cells.append(f"{fmean(gains):+.2f} ± {error:.2f}")
        yield f"| {name} | {epsilon:g} | {len(repeats)} | {' | '.join(cells)} |"


def main() -> None:
    """Run what is missing, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/tuning"))
    parser.add_argument("--sets", default="digits", help=f"some of {','.join(SETS)}")
    parser.add_argument("--epsilon", default="3", help="one or several, with commas")
    parser.add_argument("--trials", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--texts", type=Path, default=Path("texts"))
    parser.add_argument("--search", action="append", help="as in dpmac tune")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found: Found = {tuple(row[:-1]): row[-1] for row in map(json.loads, lines)}
    measure(options, file, found)
    print(*table(found), sep="\n")


if __name__ == "__main__":
    main()
