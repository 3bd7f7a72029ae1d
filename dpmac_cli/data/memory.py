"""Memory of the machine, which data must fit into before they are read.

A crafted file of a few bytes may declare an array of any size. Its size is checked first.
"""

import os
import sys


def check_memory(size: int, owner: str) -> None:
    """Check that data fit into the memory of the machine.

    Args:
        size: number of bytes that are needed.
        owner: what needs them, as the subject of a message.

    Raises:
        ValueError: the machine has fewer bytes of memory.
    """
    most = memory()
    if size > most:
        raise ValueError(f"{owner} needs {size / 1e9:,.3g} GB of memory, of {most / 1e9:,.3g} GB")


def memory() -> int:
    """Return the bytes of memory of the machine; the largest number if it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return sys.maxsize
