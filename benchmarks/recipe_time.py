"""Time of a large-batch recipe, extrapolated from a few chunks of one step.

    python benchmarks/recipe_time.py sample_configs/cifar10-de2022.yaml --physical-batch 2 4 8
    python benchmarks/recipe_time.py FILE --quick       # one round of one chunk size: does it work?

The trainer is the one that ``dpmac train --config FILE`` builds. It takes steps whose draw has a
fixed size instead of a Poisson one: one chunk, and three. Their difference is the time of two
chunks, and the rest of a step does not depend on the batch. Images are noise in the shape of the
real ones, so no data set is needed.
"""

import argparse
import resource
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
from contenders import FixedSize, noise_images

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.runs.memory import keep_freed_memory
from dpmac_cli.runs.trainer import Trainer, make_trainer

#: Chunks of the longer of the two steps that are timed.
CHUNKS = 3


class Timed(NamedTuple):
    """Seconds by the wall clock and of CPU time."""

    wall: float
    cpu: float


def timed_step(trainer: Trainer, records: int) -> Timed:
    """Return the time of one step on ``records`` records."""
    trainer.sampler = FixedSize(records)
    wall, cpu = time.perf_counter(), time.process_time()
    trainer.step()
    if trainer.state.theta.is_cuda:
        torch.cuda.synchronize()
    return Timed(time.perf_counter() - wall, time.process_time() - cpu)


def measure(plan: TrainPlan, trainer: Trainer, rounds: int) -> tuple[Timed, Timed]:
    """Return the medians of a chunk and of a whole step at the plan's batch size."""
    chunk = plan.settings.physical_batch
    timed_step(trainer, chunk)
    chunks, steps = [], []
    for _ in range(rounds):
        short, long = (timed_step(trainer, n * chunk) for n in (1, CHUNKS))
        each = [(b - a) / (CHUNKS - 1) for a, b in zip(short, long, strict=True)]
        more = plan.privacy.batch_size / chunk - 1
        chunks.append(Timed(*each))
        steps.append(Timed(*(a + more * e for a, e in zip(short, each, strict=True))))
    return median(chunks), median(steps)


def median(times: list[Timed]) -> Timed:
    """Return the medians of both clocks."""
    return Timed(*(statistics.median(t) for t in zip(*times, strict=True)))


def main() -> None:
    """Print a table with a row per chunk size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="YAML file of the recipe")
    parser.add_argument("--physical-batch", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one round of the first chunk size")
    options = parser.parse_args()
    device = torch.device(options.device)
    keep_freed_memory()  # as dpmac train does
    sizes = options.physical_batch[:1] if options.quick else options.physical_batch
    print("| physical batch | views | chunk, s | step, s (CPU, s) | run, hours | resident, MiB |")
    print("|---" * 6 + "|")
    for size in sizes:
        plan = resolve(file=options.config, physical_batch=size).plan
        if not isinstance(plan.data.source, str):
            parser.error("the recipe must name a built-in data set")
        data = noise_images(DATASETS[plan.data.source], device)
        trainer = make_trainer(plan, device=device, data=data)
        chunk, step = measure(plan, trainer, 1 if options.quick else options.rounds)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| {size} | {plan.recipe.views} | {chunk.wall:.2f} | {step.wall:.0f} ({step.cpu:.0f}) "
            f"| {step.wall * plan.privacy.steps / 3600:.1f} | {resident:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
