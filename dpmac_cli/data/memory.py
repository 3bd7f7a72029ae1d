"""Memory of the machine, which data must fit into before they are read."""

import os
import sys


def check_memory(size: int, what: str) -> None:
    """Raise ValueError if ``what`` needs more bytes than the machine has memory."""
    most = memory()
    if size > most:
        raise ValueError(f"{what} needs {size / 1e9:,.3g} GB of memory, of {most / 1e9:,.3g} GB")


def memory() -> int:
    """Return the bytes of memory of the machine; the largest number if it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return sys.maxsize
