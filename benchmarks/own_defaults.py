"""Compare the defaults for your own data with a random search of 30 settings.

python benchmarks/own_defaults.py breast,wine,digits,mnist,cifar10 docs/data/own_defaults.jsonl

All at the epsilon of the defaults, 3. A line has the set, the settings (none for the defaults) and
the test accuracy in percent by seed; where there are few records each seed has another split. What
is in the file is not run again. At the end the defaults are printed beside the best of the search,
chosen by the accuracies that are printed, which flatters it.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets

from dpmac_cli import finish, load_data, resolve, train

SEARCHED = 30
#: Learning rates that are tried, by optimizer.
RATES = {"dp-sgd": (0.03, 30.0), "dp-adam": (3e-4, 0.1), "dp-macadam": (3e-4, 0.1)}
TABLES = {"breast": "load_breast_cancer", "wine": "load_wine"}
#: Sets that are trained on once a setting.
LARGE = ("mnist", "cifar10")


def write(name: str, folder: Path) -> Path:
    """Write a set as an .npz, a table with the range of each column; return its path."""
    path = folder / f"{name}.npz"
    if name in TABLES:
        found = getattr(datasets, TABLES[name])()
        arrays = {"x": found.data, "y": found.target}
        arrays |= {"low": found.data.min(0), "high": found.data.max(0)}
    else:
        plan = resolve({"dataset": name, "device": "cpu"}).plan
        data = load_data(name, plan.data.folder, torch.device("cpu"))
        arrays = {}
        for split, end in ((data.train, ""), (data.test, "_test")):
            images = split.images.flatten(2).float()
            images = (images - images.min()) * 255 / (images.max() - images.min())
            shape = (len(images), *plan.data.facts.shape)
            pixels = images.round().byte().reshape(shape).numpy()
            arrays |= {f"x{end}": pixels, f"y{end}": split.labels.long().numpy()}
    np.savez(path, **arrays)
    return path


def settings(name: str) -> Iterator[dict[str, Any]]:
    """Yield no settings, and those of the search, which are the same in every run."""
    yield {}
    draw = random.Random(0)  # noqa: S311  (no secret)
    for _ in range(SEARCHED):
        optimizer = draw.choice([*RATES])
        low, high = RATES[optimizer]
        found: dict[str, Any] = {
            "optimizer": optimizer,
            "lr": float(f"{low * (high / low) ** draw.random():.2g}"),
            "share": draw.choice((3, 6, 12, 24, 48)),
            "epochs": draw.choice((5, 10, 20, 40)),
            "model": draw.choice(("linear", "mlp-small", None)),
        }
        found["ema"] = draw.choice((None, 0.95))
        if optimizer != "dp-macadam":
            found["clip_norm"] = float(f"{0.1 * 100 ** draw.random():.2g}")
        yield found


def accuracies(name: str, path: Path, changed: dict[str, Any], folder: Path) -> list[float]:
    """Return the test accuracy of each seed, in percent."""
    found = []
    for seed in (0,) if name in LARGE else (0, 1, 2, 3, 4):
        flags = {key: value for key, value in changed.items() if key != "share"}
        flags |= {"dataset": str(path), "split_seed": seed, "seed": seed, "device": "cpu"}
        if name in LARGE:
            del flags["split_seed"]
        if "share" in changed:
            records = resolve(flags).plan.data.facts.train_size
            flags |= {"epsilon": 3, "batch_size": -(-records // changed["share"])}
        plan = resolve(flags, out=folder / "run", force=True, checkpoint_every="3600s").plan
        report = finish(train(plan)).report
        found.append(round(100 * report["test"]["accuracy"], 2))
    return found


def main() -> None:
    """Run what is missing, and print a row for each set."""
    names, file = sys.argv[1].split(","), Path(sys.argv[2])
    torch.set_num_threads(1)
    lines = file.read_text().splitlines() if file.exists() else []
    done = {(line["set"], str(line["settings"])): line for line in map(json.loads, lines)}
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            path = write(name, folder)
            for changed in settings(name):
                if (name, str(changed)) in done:
                    continue
                reached = accuracies(name, path, changed, folder)
                line = {"set": name, "settings": changed, "accuracies": reached}
                done[name, str(changed)] = line
                with file.open("a") as out:
                    print(json.dumps(line), file=out)
        means = [
            (sum(line["accuracies"]) / len(line["accuracies"]), line["settings"])
            for (of, _), line in done.items()
            if of == name
        ]
        default = next(mean for mean, changed in means if not changed)
        best, changed = max(means, key=lambda pair: pair[0])
        print(f"{name} defaults {default:.2f} best of {len(means)} {best:.2f} {changed}")


if __name__ == "__main__":
    main()
