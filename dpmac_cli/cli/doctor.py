"""dpmac doctor."""

import contextlib
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
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
from dpmac_cli.config.resolve import parse
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.storage.files import to_json
from dpmac_cli.storage.paths import cache_folder, data_folder
from dpmac_cli.studies.executors import usable_cores

HELP = """Say what this machine has for dpmac to work with, and what is missing and what for.

Made to be pasted into a report of a bug: it names no user and no host, and the home folder is ~.
Nothing is downloaded, verified or written.

Exit codes: 0 done, whatever is missing, 1 a bug in dpmac, 2 usage or input.
"""

#: States of a data set, and what is said of them.
STATES = {
    "built-in": "come with packages",
    "here": "there",
    "partly": "not whole, would be downloaded",
    "absent": "not there, would be downloaded",
}


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
    for name, text, missing in _lines(found):
        table.add_row(name, Text(text, console.ATTENTION if missing else ""))
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
    found |= {"threads": None, "cuda": [], "fault": None}
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
    """Return the states of built-in data sets, by the names of their files alone."""
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


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Yield names, texts, and whether a text says that something is missing."""
    versions, devices = found["versions"], found["devices"]
    yield (
        "versions",
        ", ".join(f"{name} {known}" for name, known in versions.items() if known),
        False,
    )
    if missing := [name for name, known in versions.items() if not known]:
        yield "", f"{', '.join(missing)} is missing: pip install dpmac", True
    for extra, (package, use) in EXTRAS.items():
        if known := found["extras"][package]:
            yield package, f"{known}, for {use}", False
        else:
            yield package, f"not installed: {use} needs pip install 'dpmac[{extra}]'", True
    yield "system", found["system"], False
    yield "cpu", f"{devices['cores']} cores, {_gib(devices['memory'])} of memory", False
    if devices["fault"]:
        yield "fault", devices["fault"], True
    if devices["threads"] is None:
        yield "torch", "cannot be loaded, and nothing can be trained", True
    else:
        built = f"CUDA {devices['cuda_build']}" if devices["cuda_build"] else "the CPU alone"
        used = f"{devices['threads']} threads, with {devices['instructions']}"
        yield "torch", f"{used}; built for {built}", False
        if not devices["cuda"]:
            yield "cuda", "no device: runs are trained on the CPU", True
    for number, card in enumerate(devices["cuda"]):
        yield f"cuda:{number}", f"{card['name']}, {_gib(card['memory'])}", False
    for state, words in STATES.items():
        if names := [name for name, kind in found["datasets"].items() if kind == state]:
            yield "data sets", f"{words}: {', '.join(names)}", state == "partly"
    for name in ("data", "runs", "features"):
        place = found[name]
        refused = "" if place["writable"] else ", cannot be written to"
        yield name, f"{place['folder']}, {_gib(place['free'])} free{refused}", bool(refused)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"
