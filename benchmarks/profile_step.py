"""Profile training steps on a GPU: kernels, launches, copies, waits, and the CPU's share.

    python benchmarks/profile_step.py --model mlp resnet18 --json profile.json

Each optimizer takes its steps as in ``step_time.py``. Wall time is measured without the profiler,
and the time of the noise by drawing it alone.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import Size, contenders, random_images, settings_of
from step_time import machine
from torch.profiler import ProfilerActivity, profile

from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.randomness.noise import Noise

BATCHES = {"mlp": 256, "cnn": 512, "resnet18": 128, "wrn-16-4": 256, "vit-tiny": 64}
WARM, STEPS, TOP = 30, 10, 15


def finish(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def median_ms(work: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """Return the median time of a call and all that it starts, in milliseconds."""
    taken = []
    for _ in range(times):
        finish(device)
        begin = time.perf_counter()
        work()
        finish(device)
        taken.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(taken)


def profiled(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Return what a step starts on the device, per step, and the operations by their time."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as found:
        for _ in range(STEPS):
            step()
        finish(device)
    kernels, calls, microseconds = 0, Counter[str](), 0.0
    by_kernel: Counter[str] = Counter()
    for event in found.events() or ():
        if getattr(event, "is_user_annotation", False):
            continue
        if event.device_type.name == "CUDA":
            kernels += 1
            microseconds += event.self_device_time_total
            by_kernel[event.name[:90]] += event.self_device_time_total
        elif event.name.startswith("cuda"):
            calls[event.name] += 1
    busiest = found.key_averages()
    by_cpu = sorted(busiest, key=lambda e: -e.self_cpu_time_total)[:TOP]
    return {
        "kernels_and_copies": kernels / STEPS,
        "device_ms": microseconds / STEPS / 1e3,
        "calls": {name: n / STEPS for name, n in calls.most_common()},
        "by_kernel_ms": {name: us / STEPS / 1e3 for name, us in by_kernel.most_common(TOP)},
        "by_cpu_ms": {e.key: e.self_cpu_time_total / STEPS / 1e3 for e in by_cpu},
    }


def noise_ms(size: int, device: torch.device, *, secure: bool) -> float:
    """Return the time of drawing and copying the noise of a step."""
    like = torch.empty(size, device=device, dtype=torch.float64 if secure else torch.float32)
    noise, steps = Noise(make_keys(0).noise, secure=secure), iter(np.arange(1, 10**6).tolist())
    return median_ms(lambda: noise.at(next(steps)).standard_normal(like), device)


def main() -> None:
    """Print a summary per network and optimizer, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=BATCHES, nargs="+", default=["mlp", "resnet18"])
    parser.add_argument("--batch", type=int, help="this batch size instead of the default")
    parser.add_argument("--only", default="plain-adam,dp-adam,dp-macadam", metavar="NAMES")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    options = parser.parse_args()
    device, rows = torch.device(options.device), []
    for model in options.model:
        size, data = Size(model, options.batch or BATCHES[model]), random_images(model, device)
        noise = {kind: noise_ms(size.parameters, device, secure=kind) for kind in (False, True)}
        print(
            f"{model}: {size.parameters:,} normals {noise[False]:.2f} ms, secure {noise[True]:.2f}"
        )
        for name, build in contenders(size, peers=False, largest_gib=8).items():
            if name not in options.only.split(","):
                continue
            settings_of(name)
            step = build(data)
            for _ in range(WARM):
                step()
            wall = median_ms(step, device)
            row = {"model": model, "batch": size.batch, "optimizer": name, "wall_ms": wall}
            row |= {"noise_ms": noise[False], **profiled(step, device)}
            rows.append(row)
            print(
                f"{model} {name}: {wall:.2f} ms, of which the device works {row['device_ms']:.2f}; "
                f"{row['kernels_and_copies']:.0f} kernels and copies",
                flush=True,
            )
            for part in ("calls", "by_kernel_ms", "by_cpu_ms"):
                print("  ", part, {k: round(v, 3) for k, v in row[part].items()})
            if options.json:  # as it goes
                text = json.dumps({"machine": machine(device), "rows": rows}, indent=1)
                options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
