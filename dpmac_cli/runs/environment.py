"""Devices, and the software and hardware that all ranks of a run must have in common."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpmac_cli import __version__
from dpmac_cli.config.settings import Settings
from dpmac_cli.dp.clipping.batch_invariance import TRIED, chunks_alike
from dpmac_cli.dp.precision import Arithmetic, full_float32
from dpmac_cli.errors import InputError
from dpmac_cli.files import cache_folder, data_folder
from dpmac_cli.training.distributed import Ranks

#: Prefixes of environment variables that make libraries choose other kernels.
KERNEL_VARIABLES = (
    *("ONEDNN_", "DNNL_", "MKL_", "OMP_", "KMP_", "GOMP_", "ATEN_", "TORCH_", "PYTORCH_", "NPY_"),
    *("TORCHINDUCTOR_", "OPENBLAS_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_OVERRIDE", "GLIBC_TUNABLES"),
)
#: Variables without such an effect, which scikit-learn, torch and dpmac set after the start.
UNRELATED = (
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"),
    "TORCH_CPP_LOG_LEVEL",
)
#: Note for products that are rounded by the place of a row.
RANDOM_PLACES = (
    "On this device, products by torch are rounded by the place of a record in a batch. Where a "
    "network needs them, the records of each step have random places. This is slower."
)
#: Capacity of the chunks of a trial.
CHUNK = 112
#: Lines of /proc/cpuinfo that distinguish processors.
PROCESSOR_LINES = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")


def choose_device(name: str, ranks: Ranks | None = None) -> torch.device:
    """Return the device of a name, after a check that the machine has it.

    Args:
        name: "cpu", "cuda", "cuda:1" or "auto", which is CUDA if it is available.
        ranks: the processes of a run, each of which uses the GPU of its local rank, whatever the
            number in ``name``; None for one process.

    Raises:
        InputError: there is no such device, or it is no name of one.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    Settings(device=name)  # raises InputError
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and ranks is not None:
        return torch.device("cuda", ranks.local)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"{{device=}}{name}: this machine has {torch.cuda.device_count()} CUDA devices. "
            "Use {device=}cpu or auto."
        )
    return device


def device_name(device: torch.device) -> str:
    """Return the name of a device, for reports.

    Args:
        device: a device of this machine.

    Returns:
        The model of a GPU, such as "NVIDIA A100-SXM4-40GB", or "cpu".
    """
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def environment() -> dict[str, Any]:
    """Return what decides how this process rounds, which must be equal at every rank.

    A record's gradient is computed at some rank. If ranks rounded differently, another record,
    which changes the places of all in a batch, would change more than its own row.

    Returns:
        Versions, processor, threads and switches by their names, as JSON values: "dpmac", "torch",
        "numpy", "processor" (a list of lines), "instructions", "threads", "build of torch",
        "settings of torch" and "environment variables" (both by name).
    """
    variables = dict[str, str]()
    for name in sorted(os.environ):
        if name.startswith(KERNEL_VARIABLES) and name not in UNRELATED:
            variables[name] = os.environ[name]
    return {
        "dpmac": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "build of torch": torch.__config__.show().strip(),
        "settings of torch": Arithmetic.now().switches,
        "environment variables": variables,
    }


def facts() -> dict[str, Any]:
    """Return what a bug report needs: the environment, devices, folders, and fallbacks by dtype.

    A tiny network is run for the fallbacks, on the device that "auto" means.

    Returns:
        JSON values by name: those of :func:`environment`, "python", "system", "device", "data",
        "cache", and "fallbacks". These are by dtype, "float32" and "float64": a note on what is
        done so that no record's result is rounded by the others, or None if nothing needs to be
        done.
    """
    device, fallbacks = choose_device("auto"), dict[str, str | None]()
    for dtype in (torch.float32, torch.float64):
        fallbacks[str(dtype).removeprefix("torch.")] = _fallback(dtype, device)
    return {
        **environment(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": device_name(device),
        "data": str(data_folder(None)),
        "cache": str(cache_folder()),
        "fallbacks": fallbacks,
    }


@full_float32()
def _fallback(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the note on random places, if products of this dtype need them; None otherwise."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device, dtype)
        base = torch.randn(TRIED, 64).to(device, dtype)

    def run(x: Tensor) -> Tensor:
        result: Tensor = network(x)
        return result

    return None if device.type == "cpu" and chunks_alike(run, base, CHUNK) else RANDOM_PLACES


def _processor() -> list[str]:
    """Return the processor's model and features, as sorted lines, of which equal ones are one."""
    if platform.system() == "Darwin":
        command = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
        return [subprocess.run(command, capture_output=True, check=False, text=True).stdout]  # noqa: S603
    lines = set(Path("/proc/cpuinfo").read_text(errors="replace").splitlines())
    return sorted(line for line in lines if line.startswith(PROCESSOR_LINES))
