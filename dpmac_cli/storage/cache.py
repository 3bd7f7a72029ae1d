"""Cache of what is computed once from private records: features, and decoded images.

It is as private as the records: folder 0700, files 0600. A file is named by all that decides its
contents, and has a checksum for each row. Those used longest ago are removed.
"""

import os
from collections.abc import Callable, Generator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from dpmac_cli.errors import InputError
from dpmac_cli.storage.files import PRIVATE_FOLDER, PRIVATE_MODE
from dpmac_cli.storage.paths import cache_size
from dpmac_cli.storage.progress import Computing
from dpmac_cli.storage.rows import RowFile, begin

#: Endings of a whole file, and of one that is still computed.
WHOLE, BEGUN = ".rows", ".begun"
#: Seconds between looks at whether another process is done.
PATIENCE = 0.2


def whole(path: Path) -> RowFile | None:
    """Return the user's own file that is whole, marked as used now; None if there is none."""
    try:
        if path.stat().st_uid != os.geteuid():
            return None
        os.utime(path)
        return RowFile(path)
    except (OSError, ValueError, KeyError):
        return None


def kept_file(
    path: Path,
    rows: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    fill: Callable[[RowFile], Generator[Computing, None, Any]],
    *,
    what: str = "features",
) -> Generator[Computing, None, RowFile]:
    """Return a whole file, computed if it is missing. What a killed process computed is used.

    Of several processes one computes; the others wait. Raises InputError if it cannot be kept.

    Args:
        path: of the whole file. rows, shape, dtype: of what is in it.
        fill: writes the missing rows of a file, reports progress, and returns the notes to keep.
        what: name of the rows in messages.
    """
    folder, begun = path.parent, path.with_suffix(BEGUN)
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise PermissionError("the folder is another user's")
        folder.chmod(PRIVATE_FOLDER)
        # Only an flock ends with its process: a file system without one keeps nothing.
        lock = FileLock(path.with_suffix(".lock"), mode=PRIVATE_MODE, fallback_to_soft=False)
        while (file := whole(path)) is None:
            try:
                with lock.acquire(timeout=PATIENCE):
                    if whole(path) is None:
                        make_room(folder, cache_size() - rows * prod(shape) * dtype.itemsize, begun)
                        partial = begin(begun, rows, shape, dtype)
                        partial.finish(path, (yield from fill(partial)))
            except Timeout:
                yield Computing(0, rows, folder, elsewhere=True, what=what)
        make_room(folder, cache_size(), path)
    except OSError as failure:
        raise InputError(
            f"The {what} cannot be kept in {folder} ({failure.strerror or failure}). Make room "
            "there, or name another folder by DPMAC_CACHE_DIR."
        ) from failure
    return file


def kept_files(folder: Path) -> list[Path]:
    """Return the files of a cache, whole and begun, the last used first."""
    files = [file for file in folder.glob("*") if file.suffix in (WHOLE, BEGUN)]
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)


def make_room(folder: Path, size: float, kept: Path | None = None) -> list[Path]:
    """Remove the files used longest ago but ``kept``, down to ``size`` bytes, and return them."""
    removed, total = [], 0
    for file in kept_files(folder):
        total += file.stat().st_size
        if total > size and file != kept:
            file.unlink(missing_ok=True)
            removed.append(file)
    return removed
