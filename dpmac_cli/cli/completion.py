"""Shell completion of names; the shell itself completes paths. Loads no torch."""

from collections.abc import Callable, Iterable
from pathlib import Path

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
