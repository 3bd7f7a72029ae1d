"""Facts about this machine and its libraries that a bug report needs."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpmac_cli import __version__
from dpmac_cli.dp.clipping.batch_invariance import TRIED, find_manner
from dpmac_cli.dp.clipping.per_sample import BY_ROW
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.runs.environment import KERNEL_VARIABLES, choose_device, device_name
from dpmac_cli.storage.paths import cache_folder, data_folder

#: Lines of /proc/cpuinfo that name a processor, on x86 and ARM.
PROCESSOR = ("model name", "cpu family", "model", "CPU implementer", "CPU part")
#: Instructions among its flags by which libraries choose kernels.
INSTRUCTIONS = ("sse4_1", "avx", "fma", "avx2", "avx512", "avx_vnni", "amx", "asimd", "sve", "bf16")
#: Capacity of the chunks of the trial.
CHUNK = 112


def facts() -> dict[str, Any]:
    """Return versions, processor, threads, libraries, devices, folders, and fallbacks by dtype.

    Values are JSON values. Fallbacks are the notes of a trial of a tiny network: how its layers
    must run so that no record's result is rounded by the others, or None.
    """
    device, listed = choose_device("auto"), _cpuinfo()
    flags = (listed.get("flags") or listed.get("Features") or "").split()
    built = torch.__config__.show()
    return {
        "dpmac": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": platform.platform(),
        "processor": {name: listed[name] for name in PROCESSOR if name in listed}
        or platform.processor(),
        "instructions": [flag for flag in flags if flag.startswith(INSTRUCTIONS)],
        "instructions of torch": torch.backends.cpu.get_cpu_capability(),
        "threads": {"processors": os.cpu_count(), "torch": torch.get_num_threads()},
        "blas": "".join(re.findall(r"BLAS_INFO=(\w+)", built)),
        "libraries": re.findall(r"^ *- (.*(?:Kernel Library|MKL-DNN) .*?)(?: \(|$)", built, re.M),
        "device": device_name(device),
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(KERNEL_VARIABLES)
        },
        "data": str(data_folder(None)),
        "cache": str(cache_folder()),
        "fallbacks": {
            str(dtype).removeprefix("torch."): _fallback(dtype, device)
            for dtype in (torch.float32, torch.float64)
        },
    }


def _cpuinfo() -> dict[str, str]:
    """Return what the system says of the first processor; nothing if it has no such file."""
    file = Path("/proc/cpuinfo")
    first = file.read_text().partition("\n\n")[0] if file.exists() else ""
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


@full_float32()
def _fallback(dtype: torch.dtype, device: torch.device) -> str | None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device, dtype)
        base = torch.randn(TRIED, 64).to(device, dtype)

    def run(x: Tensor) -> Tensor:
        result: Tensor = network(x)
        return result

    manner = find_manner(run, base, CHUNK)
    return BY_ROW if manner is None else manner.note
