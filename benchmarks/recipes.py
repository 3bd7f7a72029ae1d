"""Compare the ingredients of a recipe at one epsilon: one comparison per line, and a table.

    python benchmarks/recipes.py cnn runs/recipes-cnn --seeds 0,1
    python benchmarks/recipes.py scatter runs/recipes-scatter --seeds 0,1,2

`cnn` changes one thing at a time in the paper's network on CIFAR-10; `scatter` puts each of the six
optimizers on fixed features, and `longer` trains the best of them for longer. `batch` gives each of
the six optimizers the batch that is best at each epsilon, on the networks of the paper. Each line
is `dpmac compare` with the flags shown; finished runs are used as they are, so the study may take
several sittings, and `benchmarks/study.py` packs it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EPSILON = "--epsilon 2.435"
CNN = (
    f"--dataset cifar10 --recipe paper {EPSILON} --optimizers dp-macadam --kappa tracked "
    "--phi paper"
)
SCATTER = (
    f"--dataset cifar10 --recipe paper --features scatter --model linear {EPSILON} "
    "--batch-size 8192 "
    "--kappa paper --phi paper"
)

#: Learning rates that are tried with large batches, by optimizer.
RATES = {
    "dp-adam": "0.01,0.02,0.03",
    "dp-macadam": "0.01,0.02,0.03",
    "dp-adambc": "0.003,0.006,0.01",
    "dp-macadambc": "0.003,0.006,0.01",
    "dp-sgd": "1,3,6",
    "adaclip": "0.3,1,3",
}
#: Those on CIFAR-10, where they differ.
SMALLER = {
    "dp-adam": "0.002,0.004,0.008",
    "dp-macadam": "0.002,0.004,0.008",
    "dp-adambc": "0.0005,0.001,0.002",
    "dp-macadambc": "0.0005,0.001,0.002",
}
#: Dataset, epsilon and batch of the study of batches.
CELLS = (
    ("mnist", "2.3158", 7500),
    ("mnist", "7.4793", 3750),
    ("mnist", "0.785", 7500),
    ("cifar10", "2.435", 1250),
)


def batch_lines() -> dict[str, str]:
    """Return a line for each cell and optimizer of the study of batches."""
    return {
        f"{dataset} {epsilon} {optimizer}": f"--dataset {dataset} --epsilon {epsilon} "
        f"--batch-size {batch} --optimizers {optimizer} "
        f"--lr {rates if dataset == 'mnist' else SMALLER.get(optimizer, rates)}"
        for dataset, epsilon, batch in CELLS
        for optimizer, rates in RATES.items()
    }


#: What a study holds the same, and what each of its lines adds.
STUDIES: dict[str, tuple[str, dict[str, str]]] = {
    "cnn": (
        CNN,
        {
            "the paper's": "",
            "averaged weights": "--ema 0.98",
            "averaged for longer": "--ema 0.99",
            "cosine schedule": "--lr-schedule cosine",
            "cosine, twice the rate": "--lr-schedule cosine --lr 0.002",
            "weight decay": "--weight-decay 0.1",
            "twice the epochs": "--epochs 10",
            "twice the epochs and batch": "--epochs 10 --batch-size 1024",
            "and twice the rate": "--epochs 10 --batch-size 1024 --lr 0.002",
            "two views": "--augmentations 2",
            "four views": "--augmentations 4",
            "two views, mirrored alone": "--augmentations 2 --augment flip",
            "warm-up": "--warmup-steps 100",
            "four times the epochs and batch": "--epochs 20 --batch-size 2048 --lr 0.002",
        },
    ),
    "scatter": (
        f"{SCATTER} --epochs 10",
        {
            "dp-sgd": "--optimizers dp-sgd --clip-norm 0.1 --lr 10,20,40",
            "dp-adam": "--optimizers dp-adam --lr 0.0003,0.001,0.003",
            "dp-macadam": "--optimizers dp-macadam --kappa tracked --lr 0.0003,0.001,0.003",
            "dp-adambc": "--optimizers dp-adambc --lr 0.0003,0.001,0.003",
            "dp-macadambc": "--optimizers dp-macadambc --kappa tracked --lr 0.0003,0.001,0.003",
            "adaclip": "--optimizers adaclip --lr 0.1,0.3,1",
        },
    ),
    "batch": ("--recipe paper --epochs 5", batch_lines()),
    "longer": (
        SCATTER,
        {
            "20 epochs, averaged": "--optimizers dp-adam --epochs 20 --lr 0.003 --ema 0.95",
            "30 epochs, averaged": "--optimizers dp-adam --epochs 30 --lr 0.003 --ema 0.97",
            "twice the rate": "--optimizers dp-adam --epochs 20 --lr 0.006 --ema 0.95",
            "a falling rate": "--optimizers dp-adam --epochs 20 --lr 0.005 --lr-schedule cosine",
            "hardly clipped": "--optimizers dp-adam --epochs 20 --lr 0.003 --ema 0.95 "
            "--clip-norm 100",
            "dp-adambc": "--optimizers dp-adambc --epochs 20 --lr 0.001 --ema 0.95",
        },
    ),
}


def study(name: str, out: Path, seeds: str, only: Sequence[str]) -> list[dict[str, Any]]:
    """Run a study's lines, or those named; a row for each value of what a line varies."""
    same, lines = STUDIES[name]
    rows = []
    for label, flags in lines.items():
        if only and label not in only:
            continue
        command = ["compare", *same.split(), *flags.split(), "--seeds", seeds]
        command += ["--jobs", "1", "--quiet", "--out", str(out)]
        subprocess.run([sys.executable, "-m", "dpmac_cli", *command], check=True)
        comparison = json.loads((out / "compare.json").read_text())
        for row in comparison["rows"]:
            varied = {axis: row[axis] for axis in comparison["axes"] if axis != "optimizer"}
            rows.append({"label": label, "flags": flags, "varied": varied, **row})
        print(as_markdown(rows), flush=True)
    return rows


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A line a row, with what it gains over the first on the seeds that both have."""
    table = ["| | flags | accuracy | gain | seeds | minutes |", "|---|---|---|---|---|---|"]
    first = rows[0]["values"]
    for row in rows:
        varied = " ".join(f"{axis} {value}" for axis, value in row["varied"].items())
        both = [seed for seed in row["values"] if seed in first]
        gains = [100 * (row["values"][seed] - first[seed]) for seed in both]
        gain = f"{sum(gains) / len(gains):+.2f}" if gains else "–"
        spread = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
        accuracy = f"{100 * row['mean']:.2f}{spread}"
        cells = [row["label"], f"`{row['flags']}` {varied}".strip(), accuracy, gain]
        cells += [str(row["seeds"]), f"{row['training_seconds'] / 60:.1f}"]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def main() -> None:
    """Run a study and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--only", nargs="*", default=[], help="labels of lines")
    options = parser.parse_args()
    rows = study(options.study, options.out, options.seeds, options.only)
    (options.out / "recipes.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
