"""Time the noise of a step of the MLP: 795,010 normals, by wall and by CPU time.

python benchmarks/noise_time.py
python benchmarks/noise_time.py --instructions avx2
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from step_time import INSTRUCTIONS, machine

from dpmac_cli.dp.clipping.layers import blocks
from dpmac_cli.randomness.keystream import KeyStream, make_keys
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.runs.memory import keep_freed_memory

SIZE, ROUNDS = 795_010, 200


def main() -> None:
    """Print the least and the median time of every way to draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--instructions", choices=INSTRUCTIONS, help="leave out the others")
    options = parser.parse_args()
    forced = INSTRUCTIONS.get(options.instructions, {})
    if any(os.environ.get(name) != value for name, value in forced.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **forced})  # noqa: S606
    keep_freed_memory()
    print(machine(torch.device("cpu")))
    counts = [part.stop - part.start for part in blocks(SIZE, torch.device("cpu"))]
    single, double = (
        [torch.empty(n, dtype=d) for n in counts] for d in (torch.float32, torch.float64)
    )
    key = make_keys(0).noise
    ways: dict[str, Callable[[int], object]] = {
        "key stream": lambda step: KeyStream(key).at(step).generate_state(SIZE * 6 // 8, np.int64),
        "float32": lambda step: drawn(Noise(key), step, single),
        "float64": lambda step: drawn(Noise(key), step, double),
        "secure": lambda step: drawn(Noise(key, secure=True), step, double),
        "torch.normal_": lambda _: [like.normal_() for like in single],
    }
    for threads in dict.fromkeys((1, torch.get_num_threads())):
        torch.set_num_threads(threads)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for step in range(1, ROUNDS):
            for name, way in ways.items():
                begin, cpu = time.perf_counter(), time.process_time()
                way(step)
                spent = time.perf_counter() - begin, time.process_time() - cpu
                taken[name].append((1e3 * spent[0], 1e3 * spent[1]))
        for name, pairs in taken.items():
            (wall, cpu), (least, _) = map(median, zip(*pairs, strict=True)), min(pairs)
            print(
                f"{threads} threads, {name}: {wall:.2f} ms, least {least:.2f}, CPU {cpu:.2f}, "
                f"least {min(c for _, c in pairs):.2f}"
            )


def drawn(noise: Noise, step: int, likes: list[torch.Tensor]) -> None:
    """Draw the noise of a step, block by block."""
    source = noise.at(step)
    for like in likes:
        source.standard_normal(like)


if __name__ == "__main__":
    main()
