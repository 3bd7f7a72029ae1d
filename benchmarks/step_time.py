"""Compare step time and memory of the six optimizers of the paper with plain torch and Opacus.

All of them run in this one process, a few steps at a time in turn, so that whatever else the
machine does hits them alike. A ratio is the median over the rounds of a contender's time over that
of plain torch with Adam in the same round, with glibc's settings or with freed memory kept as
``dpmac train`` keeps it, whichever is faster.

    python benchmarks/step_time.py --quick                  # the headline sizes
    python benchmarks/step_time.py --json docs/data/step_time.json
    python benchmarks/step_time.py --model wrn-16-4 resnet18 vit-tiny --json step_time_deep.json
    python benchmarks/step_time.py --class-table --instructions avx2 --json step_time_avx2.json

Our optimizers work on the data set's physical batch at a time, 32 images of CIFAR-10.
"""

import argparse
import gc
import json
import os
import platform
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from contenders import (
    IMAGES,
    KEEPING,
    PLAIN,
    Build,
    Size,
    Step,
    contenders,
    random_images,
    settings_of,
)
from torch.profiler import ProfilerActivity, profile

from dpmac_cli.data.dataset import Data

HEADLINE = (Size("mlp", 256), Size("cnn", 512))
SWEEP = (
    *(Size("mlp", batch) for batch in (64, 1024, 4096)),
    *(Size("mlp", 256, width) for width in (250, 4000)),
    Size("mlp", 512, 63_000),  # 50 million parameters
    *(Size("cnn", batch) for batch in (64, 2048)),
)
#: Sizes that are timed only where ``--model`` names them.
DEEP_SIZES = (
    *(Size("wrn-16-4", batch) for batch in (64, 256)),
    *(Size("resnet18", batch) for batch in (32, 128)),
    *(Size(f"vit-{kind}", 64) for kind in ("tiny", "timm", "torchvision")),
    Size("convnext-torchvision", 64),
    *(Size(kind, 64) for kind in ("lstm", "gru")),
)
#: Sizes of the table that docs/performance.md has for each class of processors, and the contenders
#: that are left out where a size has many.
CLASS_SIZES = (
    *(Size("mlp", batch) for batch in (64, 256)),
    Size("cnn", 512),
    *(Size(model, 64) for model in ("lstm", "gru", "wrn-16-4", "vit-tiny")),
    Size("resnet18", 32),
)
#: Environment variables that make every library leave out instructions of the processor.
INSTRUCTIONS = {
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    },
}
#: Seconds that a contender's turn should take at least, one step if a step takes longer.
TURN = 0.25
#: Seconds that it runs before: oneDNN compiles its kernels again for each size of a batch.
WARM = 3.0
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One contender at one size.

    Attributes:
        model, batch: see :class:`contenders.Size`. width: of the hidden layer, where not the
            paper's.
        optimizer: who. step_ms: median over the rounds; low_ms and high_ms its quartiles.
        ratio: to the faster of plain torch with Adam, with and without kept memory; ratio_low and
            ratio_high its quartiles.
        cpu_ms: CPU time of a step over all threads, median; cpu_ratio as ``ratio``.
        page_faults: minor page faults of a step, median.
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
    cpu_ms: float
    cpu_ratio: float
    page_faults: float
    peak_mib: float
    sweep: bool


class Taken(NamedTuple):
    """Cost of a step: wall and CPU time in milliseconds, and minor page faults."""

    wall: float
    cpu: float
    faults: float


def peak_memory(build: Build, data: Data) -> float:
    """The most MiB of tensors that a contender holds at a time in its first three steps."""
    gc.collect()
    if data.gain.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _run(build(data), 3, data)
        return (torch.cuda.max_memory_allocated() - before) / MIB
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        _run(build(data), 3, data)
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / MIB


def _run(step: Step, times: int, data: Data) -> Taken:
    """Mean cost of some steps."""
    begin, cpu, faults = time.perf_counter(), time.process_time(), _page_faults()
    for _ in range(times):
        step()
    if data.gain.is_cuda:
        torch.cuda.synchronize()
    spent = 1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - cpu)
    return Taken(*(n / times for n in (*spent, _page_faults() - faults)))


def _steps_in(seconds: float, wall: float) -> int:
    """The steps of ``wall`` milliseconds that fill a time, at least one."""
    return max(1, round(1e3 * seconds / wall))


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _left_out(name: str, failure: Exception) -> None:
    """Report a contender that cannot run a network."""
    said = "".join(traceback.format_exception_only(failure)).splitlines()[0]
    sys.stderr.write(f"left out: {name} ({said})\n")


def measure(
    size: Size, data: Data, rounds: int, names: str | None, peers: bool, warm: float
) -> list[Row]:
    """Time everybody at one size, in turn."""
    peaks: dict[str, float] = {}
    steps: dict[str, Step] = {}
    turns: dict[str, int] = {}
    on_gpu = data.gain.is_cuda
    everybody = contenders(size, peers=peers, largest_gib=24 if on_gpu else 8, on_gpu=on_gpu)
    for name, build in everybody.items():
        if names is not None and name not in (PLAIN, KEEPING, *names.split(",")):
            continue
        settings_of(name)
        try:
            peaks[name], step = peak_memory(build, data), build(data)
            wall = _run(step, 3, data).wall
            wall = _run(step, _steps_in(warm, wall), data).wall
            turns[name] = _steps_in(TURN, wall)
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as failure:
            # Opacus refuses networks by any of these; from ours each is a bug.
            if not name.startswith("opacus"):
                raise
            _left_out(name, failure)
            continue
        steps[name] = step
    taken: dict[str, list[Taken]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            settings_of(name)
            step()  # memory settles
            taken[name].append(_run(step, turns[name], data))
    plain = [taken[name] for name in (PLAIN, KEEPING) if name in taken]
    fastest = min(plain, key=lambda each: median(t.wall for t in each))
    return [_row(size, name, peaks[name], taken[name], fastest) for name in steps]


def _row(size: Size, name: str, peak: float, taken: list[Taken], plain: list[Taken]) -> Row:
    """The medians and quartiles of one contender's rounds."""
    pairs = list(zip(taken, plain, strict=True))
    walls, ratios = [t.wall for t in taken], [t.wall / base.wall for t, base in pairs]
    low, _, high = quantiles(walls, n=4)
    ratio_low, _, ratio_high = quantiles(ratios, n=4)
    return Row(
        model=size.model,
        batch=size.batch,
        width=size.width,
        optimizer=name,
        step_ms=round(median(walls), 3),
        low_ms=round(low, 3),
        high_ms=round(high, 3),
        ratio=round(median(ratios), 3),
        ratio_low=round(ratio_low, 3),
        ratio_high=round(ratio_high, 3),
        cpu_ms=round(median(t.cpu for t in taken), 3),
        cpu_ratio=round(median(t.cpu / base.cpu for t, base in pairs), 3),
        page_faults=round(median(t.faults for t in taken)),
        peak_mib=round(peak, 3),
        sweep=size not in HEADLINE,
    )


def table(rows: Iterable[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| network | batch | optimizer | step, ms | times plain | CPU, ms | times plain | "
        "peak, MiB | page faults a step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = list(rows)
    for row in rows:
        network = row.model if row.width is None else f"{row.model}, {row.width} wide"
        lines.append(
            f"| {network} | {row.batch} | {row.optimizer} | "
            f"{row.step_ms:.1f} ({row.low_ms:.1f}–{row.high_ms:.1f}) | "
            f"{row.ratio:.2f} ({row.ratio_low:.2f}–{row.ratio_high:.2f}) | "
            f"{row.cpu_ms:.1f} | {row.cpu_ratio:.2f} | {row.peak_mib:.0f} | "
            f"{row.page_faults:,.0f} |"
        )
    return "\n".join(lines)


def machine(device: torch.device) -> dict[str, Any]:
    """Sources of the figures."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "forced": {name: os.environ[name] for name in INSTRUCTIONS["avx2"] if name in os.environ},
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
    parser.add_argument("--model", choices=IMAGES, nargs="+", help="only these (mlp and cnn)")
    parser.add_argument("--batch", type=int, help="this batch size instead of those listed")
    parser.add_argument("--only", metavar="NAMES", help="only these, separated by commas")
    parser.add_argument("--no-peers", action="store_true", help="leave Opacus out")
    parser.add_argument("--rounds", type=int, default=7, help="turns of everybody (7)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument(
        "--class-table", action="store_true", help="a table of the page, all models"
    )
    parser.add_argument("--instructions", choices=INSTRUCTIONS, help="leave out the others")
    parser.add_argument("--warm", type=float, default=WARM, metavar="SECONDS", help="of each (3)")
    options = parser.parse_args()
    forced = INSTRUCTIONS.get(options.instructions, {})
    if any(os.environ.get(name) != value for name, value in forced.items()):
        # Libraries read them when they are loaded.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **forced})  # noqa: S606
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    device = torch.device(options.device)
    sizes = DEEP_SIZES + (HEADLINE if options.quick else HEADLINE + SWEEP)
    models = options.model or ("mlp", "cnn")
    if options.class_table:
        sizes = CLASS_SIZES
        models = options.model or tuple(dict.fromkeys(size.model for size in sizes))
    if options.batch:
        sizes = tuple(Size(model, options.batch) for model in models)
    rows: list[Row] = []
    for model in models:
        data = random_images(model, device)
        for size in (size for size in sizes if size.model == model):
            sys.stderr.write(f"{size} ...\n")
            peers = not options.no_peers
            rows += measure(size, data, options.rounds, options.only, peers, options.warm)
            if options.json:  # as it goes
                found = {"machine": machine(device), "rows": [asdict(r) for r in rows]}
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()
