"""Cache of features and decoded images, which are computed once from private records.

It is as private as the records: folder 0700, files 0600, so no other user can write to it either. A
file's name is the SHA-256 of everything that determines its contents. A truncated file is computed
again, and the least recently used files are removed.

A file is an .npy of rows, each with its values and whether they are written; and, once the file is
complete, faults as JSON.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from filelock import FileLock
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from dpmac_cli.errors import InputError
from dpmac_cli.files import PRIVATE_FOLDER, PRIVATE_MODE, cache_size, naming

#: Suffixes of a complete file, and of one that is being computed.
WHOLE, BEGUN = ".rows", ".begun"


class RowFile:
    """A file of rows, mapped into memory. Several processes may write different rows of it.

    Attributes:
        shape: shape of a row. dtype: type of its values. values: all rows, shape (rows, ...).
        faults: why rows could not be computed, by their numbers; empty until it is complete.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not a complete file of rows.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path, self.faults = path, dict[int, str]()
        self._table = open_memmap(path, "r+" if writable else "r")
        self.values, self._done = self._table["values"], self._table["done"]
        self.shape, self.dtype = self.values.shape[1:], self.values.dtype
        self._end = self._table.offset + self._table.nbytes
        if not writable:
            with path.open("rb") as file:
                file.seek(self._end)
                self.faults = {int(row): fault for row, fault in json.loads(file.read()).items()}

    def __len__(self) -> int:
        return len(self.values)

    def __reduce__(self) -> tuple[type["RowFile"], tuple[Path]]:
        return RowFile, (self.path,)  # another process opens the file itself

    def missing(self) -> NDArray[np.int64]:
        """Return the rows that no process has written yet."""
        return np.flatnonzero(~self._done)

    def write(self, row: int, values: NDArray[Any]) -> None:
        """Write a row."""
        self.values[row] = values
        self._done[row] = True

    def finish(self, path: Path, faults: Mapping[int, str]) -> None:
        """Add faults, sync the file to disk and rename it. Raises OSError."""
        self._table.flush()
        with naming(self.path), self.path.open("r+b") as file:
            file.seek(self._end)
            file.write(json.dumps(faults).encode())
            file.flush()
            os.fsync(file.fileno())
            os.replace(self.path, path)


@dataclass(frozen=True)
class Rows:
    """Some rows of a file, in any order, which stand for an array of them."""

    file: RowFile
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array: (rows, ...)."""
        return len(self), *self.file.shape

    def __getitem__(self, places: Any) -> "Rows":
        return Rows(self.file, self.rows[places])

    def read(self, places: NDArray[np.int64] | slice = slice(None)) -> NDArray[Any]:
        """Return a copy of some of the rows, or of all."""
        return np.ascontiguousarray(self.file.values[self.rows[places]])

    def sha256(self) -> str:
        """Return the SHA-256 of what determines the file's contents and the numbers of the rows."""
        return hashlib.sha256(self.file.path.stem.encode() + self.rows.tobytes()).hexdigest()


#: A function that writes the rows of a file, reports progress, and returns faults by row.
Fill: TypeAlias = Callable[[RowFile], Mapping[int, str]]


def complete(path: Path) -> RowFile | None:
    """Return a complete file of this user, and mark it as used; None if there is none."""
    try:
        _check_owner(path.parent)
        file = RowFile(path)
        os.utime(path)
        return file
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None


def _check_owner(folder: Path) -> None:
    """Raise PermissionError if a folder, or a link to it, belongs to another user."""
    # A link that another user has made could lead to any folder of this one.
    if {folder.stat().st_uid, folder.lstat().st_uid} != {os.geteuid()}:
        raise PermissionError("the folder belongs to another user")


def kept_file(
    path: Path,
    rows: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    fill: Fill,
    *,
    what: str = "features",
) -> RowFile:
    """Return a complete file, which is computed if there is none.

    Only one process computes; others wait. Raises InputError if the file cannot be stored or the
    folder is another user's.

    Args:
        path: path of the complete file. rows, shape, dtype: layout of its contents.
        fill: writes the rows.
        what: name of the rows in messages.
    """
    folder = path.parent
    layout = np.dtype([("values", dtype, shape), ("done", "?")], align=True)
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        _check_owner(folder)
        folder.chmod(PRIVATE_FOLDER)
        # Only an flock is released when its process dies; file systems without it are not used.
        lock = FileLock(path.with_suffix(".lock"), mode=PRIVATE_MODE, fallback_to_soft=False)
        with lock:
            if (file := complete(path)) is None:
                make_room(folder, cache_size() - rows * layout.itemsize)
                begun = _begun(path.with_suffix(BEGUN), rows, layout)
                begun.finish(path, fill(begun))
                file = RowFile(path)
    except OSError as failure:
        raise InputError(
            f"The {what} ({rows * layout.itemsize / 1e9:.1f} GB) cannot be stored in {folder} "
            f"({failure.strerror or failure}). Free space there, or set DPMAC_CACHE_DIR to another "
            "folder."
        ) from failure
    return file


def _begun(path: Path, rows: int, layout: np.dtype[Any]) -> RowFile:
    """Reserve space for a new file that only its owner can read. Raises OSError."""
    with naming(path):
        path.unlink(missing_ok=True)
        path.touch(PRIVATE_MODE, exist_ok=False)
        open_memmap(path, "w+", layout, (rows,))
        if hasattr(os, "posix_fallocate"):  # a mapped file must not find the disk full
            with path.open("r+b") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
                except OSError:
                    path.unlink()
                    raise
    return RowFile(path, writable=True)


def kept_files(folder: Path) -> list[Path]:
    """Return the complete and incomplete files of a cache, most recently used first."""
    files = [file for file in folder.glob("*") if file.suffix in (WHOLE, BEGUN)]
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)


def make_room(folder: Path, size: float) -> list[Path]:
    """Remove the least recently used files, down to ``size`` bytes; return them."""
    removed, total = [], 0
    for file in kept_files(folder):
        total += file.stat().st_size
        if total > size:
            file.unlink(missing_ok=True)
            removed.append(file)
    return removed
