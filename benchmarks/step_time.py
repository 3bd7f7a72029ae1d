"""Compare step time and memory of the optimizers of the paper with plain torch and Opacus.

All of them run in this one process, a few steps at a time in turn, so that whatever else the
machine does hits them alike. A ratio is the median over the rounds of a contender's time over that
of plain torch with Adam in the same round, with glibc's settings or with freed memory kept as
``dpmac train`` keeps it, whichever is faster.

    python benchmarks/step_time.py --quick                  # the headline sizes
    python benchmarks/step_time.py --json docs/data/step_time.json
    python benchmarks/step_time.py --model wrn-16-4 resnet18 vit-tiny --json step_time_deep.json
    python benchmarks/step_time.py --class-table --instructions avx2 --json step_time_avx2.json

Our optimizers work on the default physical batch at a time, 256 images of CIFAR-10 in the cnn.
"""

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from common import (
    INSTRUCTIONS,
    Step,
    Taken,
    force,
    in_turn,
    machine,
    parser_of,
    ratio,
    spent,
    steps_in,
    write_json,
)
from contenders import (
    IMAGES,
    KEEPING,
    PLAIN,
    Build,
    Size,
    contenders,
    random_images,
    settings_of,
)
from torch.profiler import ProfilerActivity, profile

from dpmac_cli.models.dataset import Data

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
    *(Size(kind, 64) for kind in ("vit-tiny", "lstm", "gru")),
)
#: Sizes of the table of docs/performance.md.
CLASS_SIZES = (
    *(Size("mlp", batch) for batch in (64, 256)),
    Size("cnn", 512),
    *(Size(model, 64) for model in ("lstm", "gru", "wrn-16-4", "vit-tiny")),
    Size("resnet18", 32),
)
#: Seconds that a contender's turn should take at least, one step if a step takes longer.
TURN = 0.25
#: Seconds that it runs before: oneDNN compiles its kernels again for each size of a batch.
WARM = 3.0
MIB = 2**20


def peak_memory(build: Build, data: Data) -> float:
    """Return the most MiB of tensors that a contender holds in its first three steps.

    Weights and state count, and the data set does not.
    """
    gc.collect()
    if data.gain.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        spent(build(data), 3)
        return (torch.cuda.max_memory_allocated() - before) / MIB
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        spent(build(data), 3)
    held = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / MIB


def measure(
    size: Size, data: Data, rounds: int, names: str | None, peers: bool, warm: float
) -> Iterator[dict[str, Any]]:
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
            wall = spent(step, steps_in(warm, spent(step, 3).wall)).wall
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as failure:
            # Opacus refuses networks by any of these; from ours each is a bug.
            if not name.startswith("opacus"):
                raise
            said = "".join(traceback.format_exception_only(failure)).splitlines()[0]
            sys.stderr.write(f"left out: {name} ({said})\n")
            continue
        steps[name], turns[name] = step, steps_in(TURN, wall)

    def before(name: str) -> None:
        settings_of(name)
        steps[name]()  # memory settles

    taken = in_turn(steps, turns, rounds, before)
    plain = [taken[name] for name in (PLAIN, KEEPING) if name in taken]
    fastest = min(plain, key=lambda each: median(t.wall for t in each))
    for name in steps:
        row = {"model": size.model, "batch": size.batch, "width": size.width, "optimizer": name}
        yield row | costs(taken[name], fastest) | {"peak_mib": round(peaks[name], 3)}


def costs(taken: Sequence[Taken], plain: Sequence[Taken]) -> dict[str, float]:
    """Return medians and quartiles of the rounds of a contender, in milliseconds and ratios."""
    walls = [t.wall for t in taken]
    ratios = [t.wall / base.wall for t, base in zip(taken, plain, strict=True)]
    low, _, high = quantiles(walls, n=4)
    ratio_low, _, ratio_high = quantiles(ratios, n=4)
    found = {"step_ms": median(walls), "low_ms": low, "high_ms": high}
    found |= {"ratio": median(ratios), "ratio_low": ratio_low, "ratio_high": ratio_high}
    found |= {"cpu_ms": median(t.cpu for t in taken), "cpu_ratio": ratio(taken, plain, "cpu")}
    rounded = {name: round(value, 3) for name, value in found.items()}
    return rounded | {"page_faults": round(median(t.faults for t in taken))}


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    heads = "network | batch | optimizer | step, ms | times plain | CPU, ms | times plain | "
    lines = [f"| {heads}peak, MiB | page faults per step |", "|---" * 9 + "|"]
    for row in rows:
        network = row["model"] if row["width"] is None else f"{row['model']}, {row['width']} wide"
        form = (
            "| {network} | {batch} | {optimizer} | {step_ms:.1f} ({low_ms:.1f}–{high_ms:.1f}) | "
            "{ratio:.2f} ({ratio_low:.2f}–{ratio_high:.2f}) | {cpu_ms:.1f} | {cpu_ratio:.2f} | "
            "{peak_mib:.0f} | {page_faults:,} |"
        )
        lines.append(form.format(network=network, **row))
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="leave the sweep out")
    parser.add_argument("--model", choices=IMAGES, nargs="+", help="only these (mlp and cnn)")
    parser.add_argument("--batch", type=int, help="this batch size instead of those listed")
    parser.add_argument("--only", metavar="NAMES", help="only these, separated by commas")
    parser.add_argument("--no-peers", action="store_true", help="leave Opacus out")
    parser.add_argument("--rounds", type=int, default=7, help="turns of everybody (7)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--class-table", action="store_true", help="the table of the page")
    parser.add_argument("--instructions", choices=INSTRUCTIONS, default="default")
    parser.add_argument("--warm", type=float, default=WARM, metavar="SECONDS", help="of each (3)")
    options = parser.parse_args()
    force(options.instructions)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    device = torch.device(options.device)
    sizes = CLASS_SIZES
    if not options.class_table:
        sizes = DEEP_SIZES + (HEADLINE if options.quick else HEADLINE + SWEEP)
    everything = IMAGES if options.class_table else ("mlp", "cnn")
    models = options.model or everything
    if options.batch:
        sizes = tuple(Size(model, options.batch) for model in models)
    rows: list[dict[str, Any]] = []
    for model in models:
        data = random_images(model, device)
        for size in (size for size in sizes if size.model == model):
            sys.stderr.write(f"{size} ...\n")
            given = options.rounds, options.only, not options.no_peers, options.warm
            rows += measure(size, data, *given)
            write_json(options.json, {"machine": machine(device), "rows": rows})  # as it goes
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()
