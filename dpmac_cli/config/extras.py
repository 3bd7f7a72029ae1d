"""What can be installed beside dpmac. Loads nothing."""

import importlib.util
from collections.abc import Iterator, Mapping

#: By the name of the extra: its package, which is a module of that name, and what it is for.
EXTRAS: Mapping[str, tuple[str, str]] = {
    "ray": ("ray", "dpmac compare --executor ray"),
    "slurm": ("submitit", "dpmac compare --executor slurm"),
    "tensorboard": ("tensorboard", "dpmac train --tensorboard"),
}


def fault_of_extra(extra: str, flag: str) -> Iterator[str]:
    """Why a flag cannot be given that needs an extra; nothing where that is installed."""
    package, _ = EXTRAS[extra]
    if importlib.util.find_spec(package) is None:
        yield f"{flag} needs {package}, which is not installed: pip install 'dpmac[{extra}]'"
