"""What there is on this machine for dpmac to work with. Loads torch only when asked to look.

Nothing here verifies, downloads or writes anything, and what is broken is reported, not raised.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from dpmac_cli import __version__
from dpmac_cli.config.extras import EXTRAS
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.storage.paths import cache_folder, data_folder
from dpmac_cli.studies.executor import usable_cores

#: Where a data set may be.
BUILT_IN, HERE, PARTLY, ABSENT = "built-in", "here", "partly", "absent"
#: Seconds that a compiler may take to say its version.
PATIENCE = 10


@dataclass(frozen=True)
class Place:
    """A folder that dpmac reads or writes.

    Attributes:
        folder: with ~ for the home folder.
        writable: whether files can be made in it, or it can be made.
        free: bytes left on its disk; None where that cannot be told.
        files, size: how many files it holds, and their bytes; None where nobody counted.
    """

    folder: str
    writable: bool
    free: int | None
    files: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class Devices:
    """What computes.

    Attributes:
        cores: that this process may use. memory: bytes of the machine; None if unknown.
        threads: that torch uses. instructions: the widest that torch uses.
        cuda_build: the version of CUDA that torch was built for; None for none.
        cuda: name and bytes of memory of each device.
        faults: why torch, or a device, cannot be used.
    """

    cores: int
    memory: int | None
    threads: int | None = None
    instructions: str | None = None
    cuda_build: str | None = None
    cuda: tuple[tuple[str, int], ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkup:
    """What was found.

    Attributes:
        versions: of Python, dpmac and what it depends on; None where it is not installed.
        extras: of the packages of :data:`dpmac_cli.config.extras.EXTRAS`, likewise.
        system, processor: names.
        devices: what computes.
        data: where data sets lie. datasets: for each, whether it does.
        cipher: whether AES-256 works, from which all noise comes.
        compiler: of C++, for ``--compile``: its version; None where there is none.
        runs: where runs are written. features: where features are kept.
    """

    versions: Mapping[str, str | None]
    extras: Mapping[str, str | None]
    system: str
    processor: str
    devices: Devices
    data: Place
    datasets: Mapping[str, str]
    cipher: bool
    compiler: str | None
    runs: Place
    features: Place

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        places = {name: vars(getattr(self, name)) for name in ("data", "runs", "features")}
        cuda = [{"name": name, "memory": memory} for name, memory in self.devices.cuda]
        return {**vars(self), **places, "devices": {**vars(self.devices), "cuda": cuda}}


def examine(data_dir: Path | None) -> Checkup:
    """Look at everything.

    Args:
        data_dir: where data sets lie; None for the environment's folder or the cache.
    """
    data = data_folder(data_dir)
    return Checkup(
        versions={"dpmac": __version__, "python": platform.python_version()}
        | _versions(_dependencies()),
        extras=_versions(package for package, _ in EXTRAS.values()),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor(),
        devices=_devices(),
        data=_place(data),
        datasets=_datasets(data),
        cipher=_cipher(),
        compiler=_compiler(),
        runs=_place(Path("runs")),
        features=_place(cache_folder(), count=True),
    )


def _dependencies() -> list[str]:
    """The packages that dpmac always needs."""
    listed: list[str] = []
    with contextlib.suppress(PackageNotFoundError):
        listed = requires("dpmac") or []
    needed = [line for line in listed if "extra ==" not in line]
    return [re.split(r"[^\w.-]", line)[0] for line in needed]


def _versions(packages: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in found:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _processor() -> str:
    """As the system calls it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _devices() -> Devices:
    memory = None
    with contextlib.suppress(ValueError, OSError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    known = Devices(usable_cores(), memory)
    try:
        import torch  # noqa: PLC0415  (seconds to load, and it may be broken)

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            cuda = tuple(
                (about.name, about.total_memory)
                for about in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
            )
    except Exception as failure:  # noqa: BLE001  (a driver fails in ways of its own)
        return replace(known, faults=(_in_short(failure),))
    return replace(
        known,
        threads=torch.get_num_threads(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        cuda_build=torch.version.cuda,
        cuda=cuda,
        faults=tuple(_in_short(warning.message) for warning in said),
    )


def _in_short(failure: Warning | Exception | str) -> str:
    """Its first line."""
    return str(failure).strip().partition("\n")[0] or type(failure).__name__


def _datasets(data_dir: Path) -> dict[str, str]:
    """Which data sets of the catalogue are there, by the names of their files alone."""
    try:
        from dpmac_cli.data.loaders import missing_files  # noqa: PLC0415  (loads torch)

        counts = {name: missing_files(name, data_dir) for name in DATASETS}
    except (ImportError, OSError):  # without torch or torchvision, whose faults show elsewhere
        return {}
    return {
        name: BUILT_IN if not of else HERE if not missing else PARTLY if missing < of else ABSENT
        for name, (missing, of) in counts.items()
    }


def _cipher() -> bool:
    try:
        from dpmac_cli.randomness.keystream import cipher_works  # noqa: PLC0415  (loads cryptography)

        return cipher_works()
    except Exception:  # noqa: BLE001  (its library fails in ways of its own)
        return False


def _compiler() -> str | None:
    """The first line of what the compiler says of itself that torch.compile would call."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    path = shutil.which(name)
    if path is None:
        return None
    try:
        said = subprocess.run(  # noqa: S603  (what torch would run)
            [path, "--version"], capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return _in_short(said.stdout)


def _place(folder: Path, *, count: bool = False) -> Place:
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    free = None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(there).free
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    place = Place(from_home(folder), writable, free)
    if not count:
        return place
    sizes: list[int] = []
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_size)
    return replace(place, files=len(sizes), size=sum(sizes))


def from_home(path: Path) -> str:
    """A path with ~ for the home folder, whose name is often its owner's."""
    home = Path.home()
    for form in (path, path.absolute(), path.resolve()):
        if form.is_relative_to(home) and form != home:
            return str("~" / form.relative_to(home))
    return str(path)
