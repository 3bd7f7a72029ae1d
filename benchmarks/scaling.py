"""Measure the speed-up of several processes on one run, with one thread each.

For each network and batch: milliseconds per step by one process and by several, the speed-up, and
the efficiency, which is the speed-up over the number of processes. Rounds alternate between the
numbers of processes; figures are medians over the rounds.

    python benchmarks/scaling.py --json docs/data/scaling.json
"""

import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from common import parser_of, write_json
from contenders import Size, ours, random_images
from torch._C._distributed_c10d import TCPStore

from dpmac_cli.training.distributed import Ranks

SIZES = (Size("mlp", 256), Size("mlp", 4096), Size("cnn", 512))
NAMES = ("dp-adam", "dp-macadam")
#: Steps before the clock runs, and the seconds that it runs for at least.
WARM, SECONDS = 2, 4.0


def measure(size: Size, name: str, count: int) -> float:
    """Return milliseconds per step with ``count`` processes."""
    context = processes.get_context("spawn")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    answers = context.SimpleQueue()
    children = [
        context.Process(target=_work, args=(rank, count, store.port, size, name, answers))
        for rank in range(count)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    found: float = answers.get()
    return found


def _work(rank: int, count: int, port: int, size: Size, name: str, answers: Any) -> None:
    torch.set_num_threads(1)
    ranks = None
    if count > 1:
        store = TCPStore("localhost", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        ranks = Ranks(rank, count)
    step = ours(size, random_images(size.model, torch.device("cpu")), name=name, ranks=ranks)
    for _ in range(WARM):
        step()
    begin, steps, enough = time.perf_counter(), 0, False
    while not enough:
        step()
        steps += 1
        enough = time.perf_counter() - begin > SECONDS
        if ranks is not None:  # rank 0's clock says when to end, for all
            enough = bool(ranks.brief({"enough": enough} if ranks.leads else None)["enough"])
    if rank == 0:
        answers.put((time.perf_counter() - begin) / steps * 1e3)
    if ranks is not None:
        ranks.leave()


def main() -> None:
    """Time, print a row each, and write JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="networks with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    for size, name in product((size for size in SIZES if options.only in size.model), NAMES):
        rounds = [
            [measure(size, name, count) for count in options.processes]
            for _ in range(options.rounds)
        ]
        for column, count in enumerate(options.processes):
            speedup = median(times[0] / times[column] for times in rounds)
            rows.append(
                {
                    **{"model": size.model, "batch": size.batch, "optimizer": name},
                    "processes": count,
                    "step_ms": round(median(times[column] for times in rounds), 2),
                    "speed_up": round(speedup, 3),
                    "efficiency": round(speedup * options.processes[0] / count, 3),
                }
            )
            print(rows[-1], flush=True)
    write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
