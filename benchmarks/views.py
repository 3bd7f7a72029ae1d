"""What several views of each image cost: the time of a step by K, interleaved in one process.

python benchmarks/views.py
"""

import statistics
import time

import torch

from dpmac_cli.config.resolve import resolve
from dpmac_cli.runs.setup import make_trainer
from dpmac_cli.training.trainer import Trainer

VIEWS = (1, 2, 4, 8)
ROUNDS = 7


def build(optimizer: str, views: int) -> Trainer:
    """A trainer of the paper's network for CIFAR-10."""
    settings = {"dataset": "cifar10", "optimizer": optimizer, "sigma": 0.8, "seed": 0}
    more = {"augmentations": views} if views > 1 else {}
    config = resolve({**settings, **more}).plan
    return make_trainer(config, device=torch.device("cpu"))


def main() -> None:
    """Print a table."""
    print(f"| seconds a step | {' | '.join(f'K = {views}' for views in VIEWS)} |")
    print("|---" * (len(VIEWS) + 1) + "|")
    for optimizer in ("dp-adam", "dp-macadam"):
        trainers = [build(optimizer, views) for views in VIEWS]
        times: list[list[float]] = [[] for _ in VIEWS]
        for trainer in trainers:
            trainer.step()
        for _ in range(ROUNDS):
            for trainer, taken in zip(trainers, times, strict=True):
                began = time.perf_counter()
                trainer.step()
                taken.append(time.perf_counter() - began)
        cells = (f"{statistics.median(taken):.2f}" for taken in times)
        print(f"| `{optimizer}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
