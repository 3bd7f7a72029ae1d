"""Cost of several augmented views of each image: the time of a step by K, in one process.

    python benchmarks/views.py
    python benchmarks/views.py --model wrn-16-4 --batch 16 --views 16    # beside K plain steps

With ``--model``, the table compares a step on K views with K steps of plain torch with Adam on as
many images. The physical batch is the default for K views. Every draw has exactly B of them: a
Poisson draw of a small batch varies too much to be timed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from contenders import DEEP, IMAGES, FixedSize, Size, plain, settings_of

from dpmac_cli.config.resolve import resolve
from dpmac_cli.runs.trainer import Trainer, make_trainer

VIEWS = (1, 2, 4, 8)
OPTIMIZERS = ("dp-adam", "dp-macadam")


class Taken(NamedTuple):
    """Seconds of a step by the wall clock and of CPU time."""

    wall: float
    cpu: float


def build(optimizer: str, views: int, size: Size | None = None) -> Trainer:
    """Return a trainer of the paper's network for CIFAR-10, or of a network at a size."""
    settings = {"dataset": "cifar10", "optimizer": optimizer, "sigma": 0.8, "seed": 0}
    if views > 1:
        settings["augmentations"] = views
    if size is not None:
        at = {"dataset": IMAGES[size.model], "model": size.model, "batch_size": size.batch}
        settings |= at
    trainer = make_trainer(resolve(settings).plan, device=torch.device("cpu"))
    if size is not None:
        fixed = FixedSize(size.batch)
        trainer.sampler = fixed
    return trainer


def timed(step: Callable[[], None]) -> Taken:
    """Return the time of a step."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def by_views(rounds: int) -> None:
    """Print the time of a step of the paper's network by the number of views."""
    print(f"| seconds a step | {' | '.join(f'K = {views}' for views in VIEWS)} |")
    print("|---" * (len(VIEWS) + 1) + "|")
    for optimizer in OPTIMIZERS:
        trainers = [build(optimizer, views) for views in VIEWS]
        times: list[list[float]] = [[] for _ in VIEWS]
        for trainer in trainers:
            trainer.step()
        for _ in range(rounds):
            for trainer, taken in zip(trainers, times, strict=True):
                taken.append(timed(trainer.step).wall)
        cells = (f"{statistics.median(taken):.2f}" for taken in times)
        print(f"| `{optimizer}` | {' | '.join(cells)} |")


def beside_plain(size: Size, views: int, rounds: int) -> None:
    """Print the time of a step on K views, and its ratio to K plain steps."""
    trainers = {name: build(name, views, size) for name in OPTIMIZERS}
    data = next(iter(trainers.values())).data
    steps: dict[str, Callable[[], None]] = {"plain-adam": plain(size, data, fused=False)}
    steps |= {name: trainer.step for name, trainer in trainers.items()}
    taken: dict[str, list[Taken]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            settings_of(name)
            step()  # memory settles
            runs = [timed(step) for _ in range(views if name == "plain-adam" else 1)]
            taken[name].append(Taken(*(sum(clock) for clock in zip(*runs, strict=True))))
    print(f"{size.model}, B = {size.batch}, K = {views}")
    print("\n| optimizer | s (CPU, s) | times K plain steps | by CPU time |\n|---|---|---|---|")
    for name, times in taken.items():
        pairs = list(zip(times, taken["plain-adam"], strict=True))
        wall, cpu = (statistics.median(t[i] for t in times) for i in (0, 1))
        by_wall, by_cpu = (statistics.median(t[i] / base[i] for t, base in pairs) for i in (0, 1))
        label = f"{name}, {views} steps" if name == "plain-adam" else name
        print(f"| {label} | {wall:.2f} ({cpu:.2f}) | {by_wall:.2f} | {by_cpu:.2f} |")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    built_in = [model for model in DEEP if model != "vit-tiny"]
    parser.add_argument("--model", choices=["cnn", *built_in], help="compare with plain steps")
    parser.add_argument("--batch", type=int, default=16, help="B, with --model (16)")
    parser.add_argument("--views", type=int, default=16, help="K, with --model (16)")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.model is None:
        by_views(options.rounds)
    else:
        beside_plain(Size(options.model, options.batch), options.views, options.rounds)


if __name__ == "__main__":
    main()
