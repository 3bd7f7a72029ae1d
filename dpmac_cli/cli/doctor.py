"""dpmac doctor: what this machine has, and what is missing."""

import contextlib
import os
import platform
import re
import shutil
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dpmac_cli import __version__
from dpmac_cli.cli import console
from dpmac_cli.cli.failures import explained
from dpmac_cli.cli.options import DEBUG, JSON, option, with_options
from dpmac_cli.config.extras import EXTRAS
from dpmac_cli.config.given import parse
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.storage.files import to_json
from dpmac_cli.storage.paths import cache_folder, data_folder
from dpmac_cli.studies.executor import usable_cores

HELP = """Say what this machine has for dpmac to work with, and what is missing.

Made to be pasted into a report of a bug: it names no user and no host, and the home folder is ~.
Nothing is downloaded, verified or written.

Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
"""


@with_options(
    option("data_dir", "Where data sets lie (or DPMAC_DATA_DIR).", metavar="PATH"), JSON, DEBUG
)
@explained
def doctor(data_dir: str | None, json: bool) -> None:
    """Look, and print what was found."""
    data = data_folder(parse({"data_dir": data_dir}).get("data_dir"))
    listed: list[str] = []
    with contextlib.suppress(PackageNotFoundError):
        listed = requires("dpmac") or []
    packages = [re.split(r"[^\w.-]", line)[0] for line in listed if "extra ==" not in line]
    ours = {"dpmac": __version__, "python": platform.python_version()}
    found = {
        "versions": ours | _versions(packages),
        "extras": _versions(package for package, _ in EXTRAS.values()),
        "system": platform.platform(),
        "devices": _devices(),
        "data": _place(data),
        "datasets": _datasets(data),
        "runs": _place(Path("runs")),
        "features": _place(cache_folder()),
    }
    if json:
        console.print_result(to_json(found))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in found.items():
        table.add_row(name, Text(_words(value)))
    console.stdout().print(table)


def _versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the versions of packages; None for those that are not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in found:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _devices() -> dict[str, Any]:
    """Return processors and GPUs. A broken torch or driver is a ``fault``, not an error."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, Any] = {"cores": usable_cores(), "memory": memory}
    try:
        import torch  # noqa: PLC0415  (seconds to load, and it may be broken)

        found |= {
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "cuda_build": torch.version.cuda,
        }
        cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        found["cuda"] = [{"name": card.name, "memory": card.total_memory} for card in cards]
    except Exception as failure:  # noqa: BLE001  (a driver fails in ways of its own)
        found["fault"] = str(failure).strip().partition("\n")[0] or type(failure).__name__
    return found


def _datasets(data_dir: Path) -> dict[str, str]:
    """Return whether each data set is built-in, here, partly or absent, by file names alone."""
    try:
        from dpmac_cli.data.loaders import missing_files  # noqa: PLC0415  (loads torch)

        counts = {name: missing_files(name, data_dir) for name in DATASETS}
    except (ImportError, OSError):  # a broken torch, which is reported with the devices
        return {}
    return {
        name: ("partly" if missing < of else "absent") if missing else "here" if of else "built-in"
        for name, (missing, of) in counts.items()
    }


def _place(folder: Path) -> dict[str, Any]:
    """Return a folder's name, whether it can be written to, and the bytes free on its disk."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    where, home = folder.resolve(), Path.home().resolve()  # whose name is often its owner's
    name = "~" / where.relative_to(home) if where.is_relative_to(home) else folder
    return {"folder": str(name), "writable": writable, "free": shutil.disk_usage(there).free}


def _words(value: object) -> str:
    """Return a value in words. Large integers are bytes."""
    match value:
        case dict():
            return ", ".join(f"{name} {_words(known)}" for name, known in value.items())
        case list():
            return "; ".join(map(_words, value)) or "none"
        case int() if value >= 2**20:
            return f"{value / 2**30:,.1f} GiB"
    return "missing" if value is None else str(value)
