"""What the process does with memory that is freed. Loads no torch."""

import contextlib
import ctypes

#: From malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
#: Bytes up to which blocks are kept, and are kept at the heap's end; glibc's own choice is 32 and
#: 64 MiB at most.
BLOCKS, AT_THE_END = 1 << 30, (1 << 31) - 1


def keep_freed_memory() -> None:
    """Have glibc keep the memory that a step frees for the next one; elsewhere, do nothing.

    Otherwise it gives back to the system what it can, and the next step waits while pages are
    mapped and cleared: a seventh of a step of wrn-16-4 (docs/performance.md).
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, BLOCKS)
        libc.mallopt(M_TRIM_THRESHOLD, AT_THE_END)
