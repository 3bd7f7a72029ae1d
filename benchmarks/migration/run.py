"""Opacus's MNIST and CIFAR-10 examples, beside the same in dpmac.

python benchmarks/migration/run.py mnist 3 0,1,2 docs/data/migration.jsonl

Network and settings are those of pytorch/opacus, examples/mnist.py and examples/cifar10.py; data
loaders read in this process, as do dpmac's. Runs alternate, each from fresh weights. A line has the
accuracy, epsilon at delta 1e-5, and seconds per step, with loading and scoring.
"""

import importlib
import json
import sys
import time
import warnings
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev

import torch
from torch import nn

from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.files import data_folder

BATCHES = {"mnist": 64, "cifar10": 2000}
SIDES = ("opacus", "dpmac")


def network(dataset: str) -> nn.Module:
    """Return the network of Opacus's example."""
    if dataset == "mnist":
        return nn.Sequential(
            nn.Conv2d(1, 16, 8, 2, padding=3),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, 2),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )
    widths, layers = (3, 32, 64, 64, 128), list[nn.Module]()
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def main(dataset: str, epochs: int, seeds: list[int], out: Path) -> None:
    """Run what is not in the file yet, and print means of all that is."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(x["dataset"], x["epochs"], x["side"], x["seed"]) for x in lines}
    steps = epochs * -(-DATASETS[dataset].train_size // BATCHES[dataset])
    for seed in seeds:
        for side in SIDES:
            if (dataset, epochs, side, seed) in done:
                continue
            module = importlib.import_module(f"{dataset}_{side}")
            torch.manual_seed(seed)
            net, began = network(dataset), time.perf_counter()
            accuracy, epsilon = module.run(net, str(data_folder(None)), epochs)
            line = {"dataset": dataset, "epochs": epochs, "side": side, "seed": seed}
            line |= {"accuracy": accuracy, "epsilon": float(epsilon)}
            line |= {"seconds_per_step": (time.perf_counter() - began) / steps}
            lines.append(line)
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)
    found = defaultdict(list)
    for line in lines:
        if (line["dataset"], line["epochs"]) == (dataset, epochs):
            found[line["side"]].append(line)
    for side, some in found.items():
        right = [100 * line["accuracy"] for line in some]
        spread = stdev(right) if len(right) > 1 else float("nan")
        seconds = median(line["seconds_per_step"] for line in some)
        print(f"{side}: {mean(right):.2f} +- {spread:.2f}, {seconds:.4f} s a step")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1], int(sys.argv[2]), list(map(int, sys.argv[3].split(","))), Path(sys.argv[4]))
