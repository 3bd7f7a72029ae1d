"""Shell completion of names and run folders. Loads no torch, and reads no more than names."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from dpmac_cli.runs.folder import is_configured

#: Folder of runs.
DEFAULT_ROOT = Path("runs")

Completer = Callable[[str], list[str]]


def one_of(names: Iterable[str], *, several: bool = False) -> Completer:
    """Return a completer for a name, or for ``several`` with commas between them."""
    known = tuple(names)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        return [f"{before}{comma}{name}" for name in known if name.startswith(last)]

    return complete


def run_folders(incomplete: str) -> list[str]:
    """Return runs in the folder that a path points to, and other folders with a slash."""
    inside, slash, _ = incomplete.rpartition("/")
    where = Path(inside or "/") if slash else Path()
    if not slash and str(DEFAULT_ROOT).startswith(incomplete) and DEFAULT_ROOT.is_dir():
        where, incomplete = DEFAULT_ROOT, f"{DEFAULT_ROOT}/"
    try:
        paths = sorted(where / entry.name for entry in os.scandir(where) if entry.is_dir())
    except OSError:
        return []
    names = [f"{path}{'' if is_configured(path) else '/'}" for path in paths if path.name[0] != "."]
    return [name for name in names if name.startswith(incomplete)]
