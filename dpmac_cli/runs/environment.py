"""Devices, and the software and hardware that all ranks of a run must have in common."""

import functools
import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpmac_cli import __version__
from dpmac_cli.config.settings import Settings
from dpmac_cli.data.schema import listed
from dpmac_cli.dp.precision import Arithmetic
from dpmac_cli.errors import InputError
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
#: Lines of /proc/cpuinfo that distinguish processors.
PROCESSOR_LINES = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")


def choose_device(name: str, ranks: Ranks | None = None) -> torch.device:
    """Return the device of a name; "auto" is CUDA if available. Each rank uses its own GPU.

    Raises:
        InputError: there is no such device.
    """
    Settings(device=name)  # raises InputError
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and ranks is not None:
        return torch.device("cuda", ranks.local)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices. "
            "Use --device cpu or auto."
        )
    return device


def device_name(device: torch.device) -> str:
    """Return the name of a device, for reports."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def environment() -> dict[str, Any]:
    """Return what decides how this process rounds, which must be equal at every rank."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dpmac": __version__,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "settings of torch": Arithmetic.now().switches,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "build of torch": _sum(torch.__config__.show().encode()),
        **{
            name: value
            for name, value in os.environ.items()
            if name.startswith(KERNEL_VARIABLES) and name not in UNRELATED
        },
    }


def check_ranks(ranks: Ranks) -> None:
    """Reject ranks that may round the gradients of a record differently from rank 0.

    Devices are compared later, because only rank 0 knows the plan's.

    Raises:
        InputError: lists every difference, by rank.
        RunError: a rank does not answer.
    """
    here, faults = environment(), []
    for rank, there in enumerate(ranks.posted(), start=1):
        both = here.keys() | there.keys()
        if names := sorted(name for name in both if here.get(name) != there.get(name)):
            faults.append(f"rank {rank} differs from rank 0 in {listed(names)}")
    if faults:
        raise InputError(
            f"The processes of this run do not compute alike: {'; '.join(faults)}. They could "
            "round the gradients of a record differently. Use the same processor, libraries, "
            "number of threads and environment variables for all of them."
        )


@functools.cache
def _processor() -> str:
    """Return a digest of the processor's model and features."""
    if platform.system() == "Darwin":
        asked = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
        return _sum(subprocess.run(asked, capture_output=True, check=False).stdout)  # noqa: S603
    lines = set(Path("/proc/cpuinfo").read_bytes().splitlines())
    starts = tuple(map(str.encode, PROCESSOR_LINES))
    return _sum(b"\n".join(sorted(line for line in lines if line.startswith(starts))))


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
