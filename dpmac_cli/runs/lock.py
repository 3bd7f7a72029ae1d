"""Lock of a run's folder: one process at a time writes to it."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dpmac_cli.errors import InputError
from dpmac_cli.files import PRIVATE_MODE
from dpmac_cli.runs import folder, new_folder

#: How often a lock is tried again while :func:`in_use` may hold it, and the seconds between.
LOOKS, A_LOOK = 5, 0.05


def _lock(handle: int) -> None:
    """Lock a file, after any :func:`in_use` that is just looking. Raises BlockingIOError."""
    for _ in range(LOOKS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(A_LOOK)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Lock a run's folder within a context, and remove partial files.

    Whoever writes to a folder holds it. A second process is refused, so that two runs never share a
    ledger or a checkpoint. The lock ends with the process, also if that is killed. Nested contexts
    for one folder are refused too.

    Args:
        run: the folder, which must exist. The file ``.lock`` is created in it, and stays.

    Raises:
        InputError: another process has locked it, or it is not writable.
    """
    with new_folder.writable(run):
        handle = os.open(run / folder.LOCK, os.O_RDWR | os.O_CREAT, PRIVATE_MODE)
    try:
        try:
            _lock(handle)
        except BlockingIOError as failure:
            raise InputError(
                f"The run folder {run} is in use by another dpmac process. Wait until it ends, or "
                "stop it."
            ) from failure
        for part in folder.partial_files(run):
            part.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)


def in_use(run: Path) -> bool:
    """Return whether a process holds a run's folder (:func:`locked`); False if that is unknown.

    Args:
        run: the folder. Nothing in it is changed.
    """
    try:
        handle = os.open(run / folder.LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        # Shared, so that several lists can look at once. A run that starts meanwhile tries again.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
