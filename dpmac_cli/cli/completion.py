"""What a shell offers when Tab is pressed. Loads no torch, and reads no more than names."""

import os
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from pathlib import Path

from dpmac_cli.runs.folder import is_configured

#: Folder of runs.
DEFAULT_ROOT = Path("runs")

Completer = Callable[[str], list[str]]


def join_values(environment: MutableMapping[str, str]) -> None:
    """Have a value behind an equals sign completed: bash gives the sign as a word of its own."""
    words = environment.get("COMP_WORDS", "").split("\n")
    here = environment.get("COMP_CWORD", "")
    if here.isdecimal():
        before = [word for word in words[: int(here)] if word != "="]
        environment["COMP_WORDS"] = "\n".join([*before, *words[int(here) :]])
        environment["COMP_CWORD"] = str(len(before))


def one_of(names: Iterable[str], *, several: bool = False) -> Completer:
    """Offers names.

    Args:
        names: to choose from.
        several: whether more may follow one another, with commas between.
    """
    known = tuple(names)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        return [f"{before}{comma}{name}" for name in known if name.startswith(last)]

    return complete


def run_folders(incomplete: str) -> list[str]:
    """Offers the runs where the word points to, and the folders in which there may be more."""
    inside, slash, _ = incomplete.rpartition("/")
    if slash:
        where = Path(inside or "/")
    elif str(DEFAULT_ROOT).startswith(incomplete) and DEFAULT_ROOT.is_dir():
        where, incomplete = DEFAULT_ROOT, f"{DEFAULT_ROOT}/"
    else:
        where = Path()
    return [name for name in _folders(where) if name.startswith(incomplete)]


def _folders(where: Path) -> Iterator[str]:
    """The runs below a folder, and with a slash its other folders; hidden ones left out."""
    try:
        names = sorted(entry.name for entry in os.scandir(where) if entry.is_dir())
    except OSError:
        return
    for name in names:
        if not name.startswith("."):
            path = where / name
            yield str(path) if is_configured(path) else f"{path}/"
