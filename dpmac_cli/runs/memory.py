"""What the process does with memory that is freed. Loads no torch."""

import ctypes

#: From malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory(blocks: int = 1 << 30, at_the_end: int = (1 << 31) - 1) -> None:
    """Have glibc keep the memory that a step frees for the next one; elsewhere, do nothing.

    Otherwise it gives back to the system what it can, and the next step waits while pages are
    mapped and cleared: a seventh of a step of wrn-16-4 (docs/performance.md).

    Args:
        blocks: bytes up to which blocks are kept; glibc's own choice is 32 MiB at most.
        at_the_end: bytes that are kept at the heap's end; glibc's own choice is 64 MiB at most.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, blocks)
        libc.mallopt(M_TRIM_THRESHOLD, at_the_end)
    except (OSError, AttributeError):
        return
