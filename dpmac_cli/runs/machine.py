"""Facts about this machine and its libraries that a bug report needs."""

import platform
from typing import Any

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batch_invariance import TRIED, find_manner
from dpmac_cli.dp.clipping.per_sample import BY_ROW
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.runs.environment import choose_device, device_name, environment
from dpmac_cli.storage.paths import cache_folder, data_folder

#: Capacity of the chunks of the trial.
CHUNK = 112


def facts() -> dict[str, Any]:
    """Return versions, processor, threads, libraries, devices, folders, and fallbacks by dtype.

    Values are JSON values. Fallbacks are the notes of a trial of a tiny network: how its layers
    must run so that no record's result is rounded by the others, or None.
    """
    device = choose_device("auto")
    return {
        **environment(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": device_name(device),
        "data": str(data_folder(None)),
        "cache": str(cache_folder()),
        "fallbacks": {
            str(dtype).removeprefix("torch."): _fallback(dtype, device)
            for dtype in (torch.float32, torch.float64)
        },
    }


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
