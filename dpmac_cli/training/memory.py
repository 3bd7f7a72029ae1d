"""Configure the allocator to keep freed memory. Imports no torch."""

import contextlib
import ctypes
import os

#: Constants from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
#: Sizes in bytes up to which blocks are kept, and free memory at the heap's end; glibc's maxima
#: are 32 and 64 MiB.
BLOCKS, AT_THE_END = 1 << 30, (1 << 31) - 1
#: Variables of the environment by which a person sets these thresholds.
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees for the next one; elsewhere, do nothing.

    Otherwise glibc returns it to the system, and the next step waits while pages are mapped and
    cleared, as in networks of convolutions with norms (docs/performance.md). Where the environment
    sets one of :data:`CHOSEN`, nothing changes.
    """
    if any(name in os.environ for name in CHOSEN):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, BLOCKS)
        libc.mallopt(M_TRIM_THRESHOLD, AT_THE_END)
