"""Compare the recipe ``best`` with a random search of 30 settings at the same epsilon.

    pip install --target PACKAGES --no-deps river==0.26.1
    PYTHONPATH=PACKAGES python benchmarks/best_rule.py segment,phishing,layers,bars \
        docs/data/best_rule.jsonl

    python benchmarks/best_rule.py tune docs/data/best_rule_tuned.jsonl

The rule was tuned on other datasets: MNIST, CIFAR-10, digits, breast, wine, penguins and generated
tables of sklearn. `tune` tries a few settings on the small ones. `segment` and
`phishing` are tables in the package river; `layers` (a table) and `bars` (images) are generated.
Each of five repetitions has its own split and seed. A line has the set, epsilon, the settings (none
for the recipe) and the test accuracy in percent by repetition. What is in the file is not run
again. At the end the recipe is printed beside the best of the search, which is chosen by the
accuracies that are printed, and is therefore flattered.
"""

import csv
import gzip
import importlib.util
import io
import json
import random
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product, starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import datasets

from dpmac_cli import resolve
from dpmac_cli.runs.trainer import make_trainer

SEARCHED, REPETITIONS, TUNED, EPSILONS = 30, 5, 2, (1.0, 3.0)
#: Learning rates that are tried, by optimizer.
RATES = {"dp-sgd": (0.03, 30.0), "dp-adam": (3e-4, 0.1), "dp-macadam": (3e-4, 0.1)}
#: Head of the table.
TITLE = (
    "| set | epsilon | recipe | best of the search | recipe - it | chosen on other splits "
    "| recipe - it |\n" + "|---" * 7 + "|\n"
)
Done = dict[str, list[float]]
Table = tuple[NDArray[np.float64], NDArray[np.int64]]


def river(file: str, label: str) -> Table:
    """Return a table of the package river."""
    found = importlib.util.find_spec("river")
    assert found is not None, "pip install river==0.26.1"
    assert found.submodule_search_locations
    packed = Path(found.submodule_search_locations[0], "datasets", file)
    if packed.suffix == ".gz":
        text = gzip.decompress(packed.read_bytes()).decode()
    else:
        with zipfile.ZipFile(packed) as archive:
            [name] = archive.namelist()
            text = archive.read(name).decode()
    rows = [*csv.DictReader(io.StringIO(text))]
    columns = [name for name in rows[0] if name != label]
    x = np.array([[float(row[name]) for name in columns] for row in rows])
    return x, np.unique([row[label] for row in rows], return_inverse=True)[1].astype(np.int64)


def layers() -> Table:
    """Return a generated table: labels of a random network of two layers, a tenth of them wrong."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 12))
    hidden = np.maximum(x @ rng.normal(size=(12, 24)), 0)
    y = (hidden @ rng.normal(size=(24, 4)) * [1, 1, 1, 1]).argmax(1)
    wrong = rng.random(len(y)) < 0.1
    return x.clip(-4, 4), np.where(wrong, rng.integers(0, 4, len(y)), y)


def bars() -> Table:
    """Return generated images of 16 x 16: a bright bar in one of six directions, and noise."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 6, 3000)
    turn = (y + rng.uniform(-0.35, 0.35, len(y))) * np.pi / 6
    grid = np.stack(np.meshgrid(np.arange(16), np.arange(16))) - 7.5
    along = np.einsum("nd,dhw->nhw", np.stack([np.cos(turn), np.sin(turn)], 1), grid)
    across = np.einsum("nd,dhw->nhw", np.stack([-np.sin(turn), np.cos(turn)], 1), grid)
    moved = rng.uniform(-4, 4, (2, len(y), 1, 1))
    bar = (np.abs(across - moved[0]) < 1.2) & (np.abs(along - moved[1]) < 5)
    pixels = 150 * bar + rng.normal(60, 45, bar.shape)
    return pixels.clip(0, 255).round()[:, None], y


def classes(records: int, inputs: int = 16, count: int = 4, clusters: int = 2) -> Table:
    """Return a generated table of sklearn with several clusters in each class."""
    x, y = datasets.make_classification(
        records * 5 // 4,
        inputs,
        n_informative=inputs // 2,
        n_classes=count,
        n_clusters_per_class=clusters,
        class_sep=1.5,
        random_state=1,
    )
    return x.clip(-8, 8), y


def penguins() -> Table:
    """Return the table of the package palmerpenguins without its incomplete rows."""
    found = importlib.util.find_spec("palmerpenguins")
    assert found is not None
    assert found.submodule_search_locations
    file = Path(found.submodule_search_locations[0], "data", "penguins.csv")
    rows = [row for row in csv.DictReader(file.open()) if row["bill_depth_mm"] not in ("", "NA")]
    numbers = ("bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g")
    x = [[*(float(row[name]) for name in numbers), *_of_words(row)] for row in rows]
    return np.array(x), np.unique([row["species"] for row in rows], return_inverse=True)[1]


def _of_words(row: dict[str, str]) -> list[float]:
    return [*(row["island"] == name for name in ("Biscoe", "Dream")), row["sex"] == "male"]


SETS: dict[str, Callable[[], Table]] = {
    "segment": lambda: river("segment.csv.zip", "category"),
    "phishing": lambda: river("phishing.csv.gz", "is_phishing"),
    "layers": layers,
    "bars": bars,
    "breast": lambda: datasets.load_breast_cancer(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "digits": lambda: (
        datasets.load_digits().images[:, None] * 255 / 16,
        datasets.load_digits().target,
    ),
}
SETS |= {f"classes-{records}": partial(classes, records) for records in (1000, 4000)}
SETS |= {
    "classes-24": partial(classes, 2400, 24, 8, 1),
    "classes-12": partial(classes, 9600, 12, 3, 3),
}
SETS["penguins"] = penguins
IMAGES = ("bars", "digits")
#: Settings that were tried to find the rule: steps per epoch, epochs, rate, EMA.
LINEAR, HIDDEN, SCATTER = {"model": "linear"}, {"model": "mlp-small"}, {"features": "scatter"}
FEW, MORE, MANY = (3, 20, 0.03, 0.9), (12, 20, 0.01, 0.95), (12, 80, 0.002, 0.98)
TABLES = ("wine", "penguins", "breast", "classes-1000", "classes-24", "classes-4000", "classes-12")
TRIED: tuple[
    tuple[Sequence[str], dict[str, str], tuple[tuple[int, int, float, float], ...]], ...
] = (
    (("wine", "breast"), LINEAR, ((1, 20, 0.05, 0.9), FEW, MORE)),
    (("wine",), LINEAR, ((12, 20, 0.02, 0.95), (12, 40, 0.005, 0.98), (6, 20, 0.02, 0.9))),
    (("wine",), LINEAR, (MANY, (6, 40, 0.01, 0.95))),
    (("wine",), HIDDEN, (MORE, (12, 20, 0.02, 0.95), (12, 40, 0.005, 0.98))),
    (("digits",), SCATTER, ((12, 20, 0.003, 0.95), MANY, (3, 20, 0.02, 0.9), (6, 20, 0.01, 0.9))),
    (("classes-1000", "classes-4000"), HIDDEN, (FEW, MORE, (1, 20, 0.05, 0.9))),
    (("classes-1000", "classes-4000"), HIDDEN, ((6, 40, 0.01, 0.95),)),
    (("classes-1000", "classes-4000"), LINEAR, (FEW, MORE)),
    (TABLES, HIDDEN, (FEW, (6, 20, 0.04, 0.9), (6, 20, 0.06, 0.9), (12, 20, 0.06, 0.95))),
    (TABLES, LINEAR, (FEW,)),
)


def write(name: str, folder: Path) -> list[Path]:
    """Write each split of a set: four fifths of the records, the same number in each, to train."""
    x, y = SETS[name]()
    paths = []
    for split in range(REPETITIONS):
        order = np.random.default_rng(split).permutation(len(x))
        train, test = np.split(order, [len(x) * 4 // 5])
        arrays: dict[str, Any] = {
            "x": x[train],
            "y": y[train],
            "x_test": x[test],
            "y_test": y[test],
        }
        if name in IMAGES:
            arrays |= {key: arrays[key].astype(np.uint8) for key in ("x", "x_test")}
        else:
            arrays |= {"low": x.min(0), "high": x.max(0)}
        paths.append(folder / f"{name}-{split}.npz")
        np.savez(paths[-1], **arrays)
    return paths


def searched(name: str) -> Iterator[dict[str, Any]]:
    """Yield no settings, and those of the search, which are the same in every run."""
    yield {}
    draw = random.Random(0)  # noqa: S311  (no secret)
    for _ in range(SEARCHED):
        optimizer = draw.choice([*RATES])
        low, high = RATES[optimizer]
        found: dict[str, Any] = {
            "optimizer": optimizer,
            "lr": float(f"{low * (high / low) ** draw.random():.2g}"),
            "share": draw.choice((1, 3, 6, 12, 24)),
            "epochs": draw.choice((5, 10, 20, 40)),
        }
        network = draw.choice(("linear", "mlp-small", "mlp"))
        if name in IMAGES and draw.random() < 0.5:
            found["features"] = "scatter"
        else:
            found["model"] = network
        found["ema"] = draw.choice((0.5, 0.9, 0.95, 0.98))
        if optimizer != "dp-macadam":
            found["clip_norm"] = float(f"{0.1 * 100 ** draw.random():.2g}")
        yield found


def tried() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield sets and settings that were tried to find the rule."""
    for names, network, ways in TRIED:
        for name, (share, epochs, rate, ema) in product(names, ways):
            found = {"optimizer": "dp-adam", "lr": rate, "share": share, "epochs": epochs}
            yield name, {**found, "ema": ema, **network}


def accuracy(path: Path, changed: dict[str, Any], epsilon: float, seed: int) -> float:
    """Return the test accuracy of a run, in percent."""
    flags: dict[str, Any] = {key: value for key, value in changed.items() if key != "share"}
    flags |= {"dataset": str(path), "epsilon": epsilon, "seed": seed, "device": "cpu"}
    if "share" in changed:
        records = resolve({**flags, "epsilon": None, "sigma": 9}).plan.data.facts.train_size
        flags["batch_size"] = -(-records // changed["share"])
    plan = resolve(flags).plan
    trainer = make_trainer(plan)
    for _ in range(plan.privacy.steps):
        trainer.step()
    return round(100 * trainer.evaluate().accuracy, 2)


def run(cases: Sequence[tuple[str, dict[str, Any]]], file: Path, repetitions: int) -> Done:
    """Run the cases that are not in the file, and return the accuracies of all by :func:`_key`."""
    lines = file.read_text().splitlines() if file.exists() else []
    done = {_key(line): line["accuracies"] for line in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: write(name, Path(folder)) for name in dict(cases)}
        for (name, changed), epsilon in product(cases, EPSILONS):
            line = {"set": name, "epsilon": epsilon, "settings": changed}
            if _key(line) in done:
                continue
            splits = enumerate(paths[name][:repetitions])
            done[_key(line)] = [accuracy(path, changed, epsilon, seed) for seed, path in splits]
            with file.open("a") as out:
                print(json.dumps({**line, "accuracies": done[_key(line)]}), file=out)
    return done


def main() -> None:
    """Run what is missing, and print a row for each set and epsilon."""
    names, file = sys.argv[1].split(","), Path(sys.argv[2])
    torch.set_num_threads(1)
    if names == ["tune"]:
        run([*tried()], file, TUNED)
        return
    done = run([(name, changed) for name in names for changed in searched(name)], file, REPETITIONS)
    sys.stdout.write(TITLE + "".join(starmap(partial(_row, done), product(names, EPSILONS))))


def _row(done: Done, name: str, epsilon: float) -> str:
    """Return a row of the table: the recipe, and the search as chosen in two ways."""
    recipe, *found = [
        done[_key({"set": name, "epsilon": epsilon, "settings": changed})]
        for changed in searched(name)
    ]
    runs = np.array(found)
    splits = range(REPETITIONS)
    others = [runs[np.delete(runs, split, 1).mean(1).argmax(), split] for split in splits]
    best = runs[runs.mean(1).argmax()]
    cells = [_difference(recipe, each) for each in (best, others)]
    return f"| `{name}` | {epsilon:g} | {np.mean(recipe):.2f} | {' | '.join(cells)} |\n"


def _difference(recipe: Sequence[float], other: Sequence[float]) -> str:
    """Return a mean accuracy, and how much better the recipe is, with its standard error."""
    gains = np.subtract(recipe, other)
    error = gains.std(ddof=1) / np.sqrt(len(gains))
    return f"{np.mean(other):.2f} | {gains.mean():+.2f} ± {error:.2f}"


def _key(line: dict[str, Any]) -> str:
    return json.dumps([line["set"], line["epsilon"], line["settings"]])


if __name__ == "__main__":
    main()
