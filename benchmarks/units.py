"""Accuracy lost by protecting persons instead of images: MNIST with simulated patients.

    python benchmarks/units.py docs/data/units.jsonl    # 27 runs: a quarter of an hour
    python benchmarks/units.py docs/data/units.jsonl --draw docs/units.png

Every patient has 1 to 40 images, drawn with a fixed seed. Runs that are in the file are not run
again.
"""

import tempfile
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from common import append_line, parser_of, read_lines
from matplotlib import pyplot as plt

from dpmac_cli.data.published import read_published
from dpmac_cli.files import data_folder
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.resolve import resolve

EPSILONS = (1.0, 3.0, 8.0)
SEEDS = (0, 1, 2)
MOST_IMAGES = 40
#: Unit of privacy, records of it in a step (0: each image is a unit), batch and epochs. All take
#: 240 steps, and all but K = 1 the same number of images in each.
ROWS = (("image", 0, 2048, 8), ("patient, K = 1", 1, 256, 20), ("patient, K = 8", 8, 256, 20))


def write(folder: Path) -> tuple[Path, Path]:
    """Write MNIST with and without patients."""
    train, test = read_published("mnist", data_folder(None))
    arrays: dict[str, Any] = {
        "x": train.x[:, 0],
        "y": train.y,
        "x_test": test.x[:, 0],
        "y_test": test.y,
        "classes": np.array([str(digit) for digit in range(10)]),
    }
    draws, records = np.random.default_rng(29), len(arrays["y"])
    sizes = draws.integers(1, MOST_IMAGES + 1, records)
    unit = draws.permutation(np.repeat(np.arange(records), sizes)[:records])
    images, patients = folder / "images.npz", folder / "patients.npz"
    np.savez(images, **arrays)
    np.savez(patients, unit=unit, unit_test=records + np.arange(len(arrays["y_test"])), **arrays)
    return images, patients


def run(
    file: Path, records: int, batch: int, epochs: int, epsilon: float, seed: int, out: Path
) -> dict[str, Any]:
    """Train once and return what a line of results holds."""
    plan = resolve(
        dataset=str(file),
        model="mlp",
        optimizer="dp-adam",
        epsilon=epsilon,
        epochs=epochs,
        batch_size=batch,
        lr=0.003,
        seed=seed,
        out=str(out),
        quiet=True,
        records_per_unit=records or None,
    ).plan
    report = finish(train_plan(plan)).report
    return {
        "units": report["data"]["train_size"],
        "sigma": report["events"][0]["noise_multiplier"],
        "epsilon": report["epsilon"],
        "accuracy": report["scores"]["accuracy"]["value"],
        "seconds": report["environment"]["seconds"],
    }


def measure(results: Path) -> None:
    """Run what is missing."""
    done = {(line["row"], line["target"], line["seed"]) for line in read_lines(results)}
    with tempfile.TemporaryDirectory() as folder:
        images, patients = write(Path(folder))
        for epsilon, (name, records, batch, epochs), seed in product(EPSILONS, ROWS, SEEDS):
            if (name, epsilon, seed) not in done:
                place = Path(folder) / f"{name}-{epsilon}-{seed}"
                file = patients if records else images
                found = run(file, records, batch, epochs, epsilon, seed, place)
                append_line(results, {"row": name, "target": epsilon, "seed": seed, **found})


def draw(results: Path, picture: Path) -> None:
    """Draw accuracy against epsilon, and print the table."""
    lines = read_lines(results)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    print(f"| unit of privacy | {' | '.join(f'epsilon {e:g}' for e in EPSILONS)} |")
    print("|---" * (len(EPSILONS) + 1) + "|")
    for name, *_ in ROWS:
        cells = [
            [100 * x["accuracy"] for x in lines if (x["row"], x["target"]) == (name, epsilon)]
            for epsilon in EPSILONS
        ]
        print(f"| {name} | {' | '.join(f'{fmean(c):.2f} ± {stdev(c):.2f}' for c in cells)} |")
        axes.errorbar(
            EPSILONS, [*map(fmean, cells)], [*map(stdev, cells)], label=name, marker="o", capsize=3
        )
    axes.set(xscale="log", xlabel="epsilon (delta 1e-5)", ylabel="test accuracy, %")
    axes.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(title="unit of privacy")
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--draw", type=Path, metavar="PICTURE", help="only draw what the file has")
    options = parser.parse_args()
    if options.draw:
        draw(options.file, options.draw)
    else:
        measure(options.file)
