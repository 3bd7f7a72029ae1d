"""Fail if a step has become much slower than it was, relative to plain torch in the same process.

    python benchmarks/regression.py            # a minute

Contenders take turns. A ratio is the median over the rounds of CPU time of a step over that of
plain torch, which other programs on the machine change less than wall time. Limits are about 1.5
times the ratios that were measured, so they find passes that were added, not a few percent. If
plain torch itself scatters too much, nothing is concluded: the script says so and ends with 0.
"""

import sys
from statistics import quantiles

import torch
from common import Step, in_turn, parser_of, ratio, spent
from contenders import PLAIN, Size, contenders, random_images, settings_of

#: Largest CPU time of a step, in steps of plain torch; at sizes that take milliseconds. About 1.3
#: times the largest that was measured on a quiet machine: a Xeon with AVX-512.
LIMITS = {
    Size("mlp", 256): {"dp-adam": 2.8, "dp-macadam": 4.5, "dp-adam --secure": 4.5},
    Size("lstm", 64): {"dp-adam": 6.0, "dp-macadam": 7.0},
}
ROUNDS, STEPS, WARM = 9, 4, 40
#: Largest distance of the quartiles of plain torch, in medians, for which ratios mean something.
SCATTER = 0.35


def ratios(size: Size, names: list[str], rounds: int, warm: int) -> tuple[dict[str, float], float]:
    """Return CPU time relative to plain torch by contender, and the scatter of plain torch."""
    data, steps = random_images(size.model, torch.device("cpu")), dict[str, Step]()
    for name, build in contenders(size, peers=False, largest_gib=0).items():
        if name in (PLAIN, *names):
            settings_of(name)
            steps[name] = build(data)
            spent(steps[name], warm)  # oneDNN compiles for each number of rows
    taken = in_turn(steps, dict.fromkeys(steps, STEPS), rounds, settings_of)
    low, middle, high = quantiles([each.cpu for each in taken[PLAIN]], n=4)
    found = {name: ratio(taken[name], taken[PLAIN], "cpu") for name in names}
    return found, (high - low) / middle


def main() -> None:
    """Print every ratio with its limit; exit with 1 if one is above it."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--warm", type=int, default=WARM, help="steps of each before")
    options = parser.parse_args()
    slower = False
    for size, limits in LIMITS.items():
        found, scatter = ratios(size, list(limits), options.rounds, options.warm)
        noisy = scatter > SCATTER
        for name, cost in found.items():
            said = f"{size.model} B={size.batch} {name}: {cost:.2f} times plain, at most "
            sys.stdout.write(f"{said}{limits[name]}\n")
            slower |= cost > limits[name] and not noisy
        if noisy:
            sys.stdout.write(f"skipped: plain torch scatters by {scatter:.0%} on this machine\n")
    raise SystemExit(int(slower))


if __name__ == "__main__":
    main()
