"""Fail if a step has become much slower than it was, relative to plain torch in the same process.

    python benchmarks/regression.py            # a minute

Contenders take turns. A ratio is the median over the rounds of CPU time of a step over that of
plain torch, which other programs on the machine change less than wall time. Limits are about 1.5
times the ratios that were measured, so they find passes that were added, not a few percent. If
plain torch itself scatters too much, nothing is concluded: the script says so and ends with 0.
"""

import argparse
import sys
import time
from statistics import median, quantiles

import torch
from contenders import PLAIN, Size, Step, contenders, random_images, settings_of

#: Largest CPU time of a step, in steps of plain torch; at sizes that take milliseconds. About 1.3
#: times the largest that was measured on a quiet machine: a Xeon with AVX-512.
LIMITS = {
    Size("mlp", 256): {"dp-adam": 2.8, "dp-macadam": 4.5, "dp-adam --secure": 4.5},
    Size("lstm", 64): {"dp-adam": 6.0, "dp-macadam": 7.0},
}
ROUNDS, STEPS, WARM = 9, 4, 40
#: Largest distance of the quartiles of plain torch, in medians, for which ratios mean something.
SCATTER = 0.35


def cpu_seconds(step: Step, steps: int) -> float:
    """Return the CPU time of some steps over all threads."""
    begin = time.process_time()
    for _ in range(steps):
        step()
    return time.process_time() - begin


def ratios(size: Size, names: list[str], rounds: int, warm: int) -> tuple[dict[str, float], float]:
    """Return CPU time relative to plain torch by contender, and the scatter of plain torch."""
    data, steps = random_images(size.model, torch.device("cpu")), dict[str, Step]()
    for name, build in contenders(size, peers=False, largest_gib=0).items():
        if name in (PLAIN, *names):
            settings_of(name)
            steps[name] = build(data)
            cpu_seconds(steps[name], warm)  # oneDNN compiles for each number of rows
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            settings_of(name)
            taken[name].append(cpu_seconds(step, STEPS))
    low, middle, high = quantiles(taken[PLAIN], n=4)
    found = {
        name: median(t / p for t, p in zip(taken[name], taken[PLAIN], strict=True))
        for name in names
    }
    return found, (high - low) / middle


def main() -> None:
    """Print every ratio with its limit; exit with 1 if one is above it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--warm", type=int, default=WARM, help="steps of each before")
    options = parser.parse_args()
    slower = False
    for size, limits in LIMITS.items():
        found, scatter = ratios(size, list(limits), options.rounds, options.warm)
        noisy = scatter > SCATTER
        for name, ratio in found.items():
            said = f"{size.model} B={size.batch} {name}: {ratio:.2f} times plain, at most "
            sys.stdout.write(f"{said}{limits[name]}\n")
            slower |= ratio > limits[name] and not noisy
        if noisy:
            sys.stdout.write(f"skipped: plain torch scatters by {scatter:.0%} on this machine\n")
    raise SystemExit(int(slower))


if __name__ == "__main__":
    main()
