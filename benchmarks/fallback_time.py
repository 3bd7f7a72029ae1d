"""Time of a step in float64 with the oldest kernels of MKL, whose rows round others, and without.

    python benchmarks/fallback_time.py

``make_private`` trains an MLP, 64 to 32 to 10, with 64 expected records of digits per step, in one
process with ``MKL_CBWR=COMPATIBLE`` and one without, in turn. It prints the median milliseconds of
a step of each, and their ratio.
"""

import os
import subprocess
import sys
import time
import warnings
from itertools import pairwise
from statistics import median

import torch
from common import parser_of
from torch import nn

from dpmac_cli import make_private

#: Environment variables of the two processes.
KERNELS = {"default": {}, "compatible": {"MKL_CBWR": "COMPATIBLE"}}
WARM = 20


def step_time(steps: int) -> float:
    """Return the median milliseconds of a step in this process."""
    torch.set_num_threads(1)  # several threads share tensors this small badly
    torch.manual_seed(0)
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    network = nn.Sequential(nn.Flatten(), *layers).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes about how the network runs
        private = make_private(
            network, "digits", sigma=2.0, batch_size=64, steps=WARM + steps, device="cpu"
        )
    ends = [time.perf_counter() for _ in private][WARM - 1 :]
    return 1000 * median(end - begin for begin, end in pairwise(ends))


def main() -> None:
    """Time both, in turn."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--here", action="store_true")
    args = parser.parse_args()
    if args.here:
        print(step_time(args.steps))
        return
    command = [sys.executable, __file__, "--here", "--steps", str(args.steps)]
    times: dict[str, list[float]] = {name: [] for name in KERNELS}
    for _ in range(args.rounds):
        for name, variables in KERNELS.items():
            environment = {**os.environ, **variables}
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            times[name].append(float(done.stdout))
    default, compatible = (median(times[name]) for name in KERNELS)
    print(f"default {default:.2f} ms, compatible {compatible:.2f} ms: {compatible / default:.2f}")


if __name__ == "__main__":
    main()
