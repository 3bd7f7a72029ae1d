"""Cache of features and decoded images, which are computed once from private records.

It is as private as the records: folder 0700, files 0600. A file's name depends on everything that
determines its contents, and each row has a checksum. The least recently used files are removed.
"""

import os
from collections.abc import Callable, Generator
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from filelock import FileLock, Timeout

from dpmac_cli.errors import InputError
from dpmac_cli.storage.files import PRIVATE_FOLDER, PRIVATE_MODE
from dpmac_cli.storage.paths import cache_size
from dpmac_cli.storage.progress import Computing
from dpmac_cli.storage.rows import RowFile, open_incomplete

#: Suffixes of a complete file, and of one that is being computed.
WHOLE, BEGUN = ".rows", ".begun"
#: Seconds between checks for another process to finish.
PATIENCE = 0.2


def whole(path: Path) -> RowFile | None:
    """Return a complete file of this user, and mark it as used; None if there is none."""
    try:
        file = RowFile(path)
        os.utime(path)
        return file
    except (OSError, ValueError, KeyError, TypeError):
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
    """Return a complete file, and compute missing rows. Rows of a killed process are reused.

    Only one process computes; others wait. Raises InputError if the file cannot be stored.

    Args:
        path: path of the complete file. rows, shape, dtype: layout of its contents.
        fill: writes the missing rows of a file, reports progress, and returns notes to store.
        what: name of the rows in messages.
    """
    folder, begun = path.parent, path.with_suffix(BEGUN)
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        # A link that another user has made could lead to any folder of this one.
        if {folder.stat().st_uid, folder.lstat().st_uid} != {os.geteuid()}:
            raise PermissionError("the folder belongs to another user")
        folder.chmod(PRIVATE_FOLDER)
        # Only an flock is released when its process dies; file systems without it are not used.
        lock = FileLock(path.with_suffix(".lock"), mode=PRIVATE_MODE, fallback_to_soft=False)
        while not _fits(file := whole(path), rows, shape, dtype):
            try:
                with lock.acquire(timeout=PATIENCE):
                    if not _fits(whole(path), rows, shape, dtype):
                        make_room(folder, cache_size() - rows * prod(shape) * dtype.itemsize, begun)
                        partial = open_incomplete(begun, rows, shape, dtype)
                        partial.finish(path, (yield from fill(partial)))
            except Timeout:
                yield Computing(0, rows, folder, elsewhere=True, what=what)
        make_room(folder, cache_size(), path)
    except OSError as failure:
        raise InputError(
            f"The {what} cannot be stored in {folder} ({failure.strerror or failure}). Free space "
            "there, or set DPMAC_CACHE_DIR to another folder."
        ) from failure
    return file


def _fits(
    file: RowFile | None, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> TypeGuard[RowFile]:
    """Return whether a file has the layout of the rows that are asked for."""
    return file is not None and (len(file), file.shape, file.dtype) == (rows, shape, dtype)


def kept_files(folder: Path) -> list[Path]:
    """Return the complete and incomplete files of a cache, most recently used first."""
    files = [file for file in folder.glob("*") if file.suffix in (WHOLE, BEGUN)]
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)


def make_room(folder: Path, size: float, kept: Path | None = None) -> list[Path]:
    """Remove the least recently used files except ``kept``, down to ``size`` bytes; return them."""
    removed, total = [], 0
    for file in kept_files(folder):
        total += file.stat().st_size
        if total > size and file != kept:
            file.unlink(missing_ok=True)
            removed.append(file)
    return removed
