"""Shared parts of the measurements: files of results, the machine, and turns of contenders."""

import argparse
import json
import lzma
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

#: Environment variables that make every library leave out instructions of the processor.
INSTRUCTIONS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    },
}
Step = Callable[[], object]


class Taken(NamedTuple):
    """Cost of a step: wall and CPU time in milliseconds, and minor page faults."""

    wall: float
    cpu: float
    faults: float


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser that is described by the first line of a script."""
    return argparse.ArgumentParser(description=(about or "").partition("\n")[0])


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file, compressed or not; none if there is no such file."""
    if not file.exists():
        return []
    content = file.read_bytes()
    text = lzma.decompress(content) if file.suffix == ".xz" else content
    return [json.loads(line) for line in text.splitlines()]


def append_line(file: Path, line: Mapping[str, Any]) -> None:
    """Add a JSON line to a file, and print it."""
    with file.open("a", encoding="utf-8") as lines:
        print(json.dumps(line), file=lines)
    print(json.dumps(line), flush=True)


def write_json(file: Path | None, found: Any) -> None:
    """Write a document, if a file is given."""
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the sources of measured times."""
    device = torch.device(device)
    names = INSTRUCTIONS["avx2"]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "forced": {name: os.environ[name] for name in names if name in os.environ},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def force(instructions: str) -> None:
    """Start this program again if libraries were loaded with other instructions."""
    forced = INSTRUCTIONS[instructions]
    if any(os.environ.get(name) != value for name, value in forced.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **forced})  # noqa: S606


def spent(step: Step, times: int = 1) -> Taken:
    """Return the mean cost of some steps, and of what they started on a GPU."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return Taken(1e3 * wall / times, 1e3 * cpu / times, faults / times)


def steps_in(seconds: float, wall: float) -> int:
    """Return the steps of ``wall`` milliseconds that fill a time, at least one."""
    return max(1, round(1e3 * seconds / wall))


def in_turn(
    steps: Mapping[str, Step],
    times: Mapping[str, int],
    rounds: int,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, list[Taken]]:
    """Return the costs of steps that take turns, by name: whatever else runs hits all alike.

    Args:
        steps: by name.
        times: steps in a turn, by name.
        rounds: turns of each.
        before: called with the name before a turn.
    """
    taken: dict[str, list[Taken]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            before(name)
            taken[name].append(spent(step, times[name]))
    return taken


def ratio(own: Sequence[Taken], base: Sequence[Taken], clock: str = "wall") -> float:
    """Return the median ratio of two contenders over the rounds."""
    pairs = zip(own, base, strict=True)
    return float(median(getattr(a, clock) / getattr(b, clock) for a, b in pairs))
