"""What privacy costs: step time and memory of our six beside plain torch and Opacus.

All of them run in this one process, a few steps at a time in turn, so that whatever else the
machine does hits them alike. A ratio is the median over the rounds of a contender's time over that
of plain torch with Adam in the same round.

    python benchmarks/step_time.py --quick                  # the headline sizes
    python benchmarks/step_time.py --json docs/data/step_time.json
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from contenders import PLAIN, Build, Size, Step, arithmetic_of, contenders, random_images
from torch.profiler import ProfilerActivity, profile

from dpmac_cli.data.dataset import Data

HEADLINE = (Size("mlp", 256), Size("cnn", 512))
SWEEP = (
    *(Size("mlp", batch) for batch in (64, 1024, 4096)),
    *(Size("mlp", 256, width) for width in (250, 4000)),
    Size("mlp", 512, 63_000),  # 50 million parameters
    *(Size("cnn", batch) for batch in (64, 2048)),
)
#: Seconds that a contender's turn should take at least.
TURN = 0.25
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One contender at one size.

    Attributes:
        model, batch: see :class:`contenders.Size`. width: of the hidden layer, where not the
            paper's.
        optimizer: who. step_ms: median over the rounds; low_ms and high_ms its quartiles.
        ratio: to plain torch with Adam; ratio_low and ratio_high its quartiles.
        peak_mib: the most memory that its tensors took at a time, weights and state included
            and the data set left out.
        sweep: outside the headline sizes.
    """

    model: str
    batch: int
    width: int | None
    optimizer: str
    step_ms: float
    low_ms: float
    high_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    peak_mib: float
    sweep: bool


def peak_memory(build: Build, data: Data) -> float:
    """The most MiB of tensors that a contender holds at a time in its first three steps."""
    gc.collect()
    if data.gain.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _run(build(data), 3, data)
        return (torch.cuda.max_memory_allocated() - before) / MIB
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _run(build(data), 3, data)
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / MIB


def _run(step: Step, times: int, data: Data) -> float:
    """Seconds of some steps."""
    begin = time.perf_counter()
    for _ in range(times):
        step()
    if data.gain.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(size: Size, data: Data, rounds: int, names: str | None, peers: bool) -> list[Row]:
    """Time everybody at one size, in turn."""
    chosen = {
        name: build
        for name, build in contenders(size, peers=peers, largest_gib=8).items()
        if names is None or name == PLAIN or name in names.split(",")
    }
    peaks = {name: peak_memory(build, data) for name, build in chosen.items()}
    steps = {name: build(data) for name, build in chosen.items()}
    turns = {name: max(1, round(TURN / (_run(step, 3, data) / 3))) for name, step in steps.items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            arithmetic_of(name)
            taken[name].append(1e3 * _run(step, turns[name], data) / turns[name])
    rows = []
    for name, times in taken.items():
        ratios = [mine / base for mine, base in zip(times, taken[PLAIN], strict=True)]
        low, _, high = quantiles(times, n=4)
        ratio_low, _, ratio_high = quantiles(ratios, n=4)
        numbers = (median(times), low, high, median(ratios), ratio_low, ratio_high, peaks[name])
        where = (size.model, size.batch, size.width, name)
        rows.append(Row(*where, *(round(n, 3) for n in numbers), sweep=size not in HEADLINE))
    return rows


def table(rows: Iterable[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| network | batch | optimizer | step, ms | times plain | peak, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        network = row.model if row.width is None else f"{row.model}, {row.width} wide"
        lines.append(
            f"| {network} | {row.batch} | {row.optimizer} | "
            f"{row.step_ms:.1f} ({row.low_ms:.1f}–{row.high_ms:.1f}) | "
            f"{row.ratio:.2f} ({row.ratio_low:.2f}–{row.ratio_high:.2f}) | {row.peak_mib:.0f} |"
        )
    return "\n".join(lines)


def machine(device: torch.device) -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave the sweep out")
    parser.add_argument("--model", choices=("mlp", "cnn"), help="only this network")
    parser.add_argument("--only", metavar="NAMES", help="only these, separated by commas")
    parser.add_argument("--no-peers", action="store_true", help="leave Opacus out")
    parser.add_argument("--rounds", type=int, default=7, help="turns of everybody (7)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    device = torch.device(options.device)
    sizes = HEADLINE if options.quick else HEADLINE + SWEEP
    rows: list[Row] = []
    for model in ("mlp", "cnn"):
        if options.model in (None, model):
            data = random_images(model, device)
            for size in (size for size in sizes if size.model == model):
                sys.stderr.write(f"{size} ...\n")
                rows += measure(size, data, options.rounds, options.only, not options.no_peers)
    sys.stdout.write(table(rows) + "\n")
    if options.json:
        text = json.dumps({"machine": machine(device), "rows": [asdict(r) for r in rows]}, indent=1)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
