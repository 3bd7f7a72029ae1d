"""Cache of features and decoded images, which are computed once from private records.

It is as private as the records: folder 0700, files 0600. A file's name depends on everything that
determines its contents, and one SHA-256 of them is verified when it is opened; a damaged file is
computed again. The least recently used files are removed.

Layout of a file: a header of one JSON line, padded with spaces; rows of one shape; one byte per row
that says whether it is written; and, once the file is complete, faults and SHA-256 as JSON.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from dpmac_cli.errors import InputError
from dpmac_cli.storage.files import PRIVATE_FOLDER, PRIVATE_MODE, naming
from dpmac_cli.storage.paths import cache_size
from dpmac_cli.storage.progress import Computing

#: Suffixes of a complete file, and of one that is being computed.
WHOLE, BEGUN = ".rows", ".begun"
#: Seconds between checks for another process to finish.
PATIENCE = 0.2
HEADER = 4096
Mapped: TypeAlias = "np.memmap[Any, Any]"
#: Permissions of others to write.
SHARED = stat.S_IWGRP | stat.S_IWOTH


class RowFile:
    """A file of rows, mapped into memory. Several processes may write different rows of it.

    Attributes:
        shape: shape of a row. dtype: type of its values. values: all rows, shape (rows, ...).
        faults: why rows could not be computed, by their numbers; empty until it is complete.
        sha256: checksum of all contents; "" until it is complete.

    Raises:
        OSError: the file cannot be opened, or others may have written to it.
        ValueError: it is not a complete file of rows, or damaged.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path, self.sha256, self.faults = path, "", dict[int, str]()
        access = "r+b" if writable else "rb"
        with os.fdopen(_opened(path, os.O_RDWR if writable else os.O_RDONLY), access) as file:
            head = json.loads(file.read(HEADER))
            if head["name"] != path.stem:
                raise ValueError(f"{path} does not match its name")
            self.shape, self.dtype = tuple(head["shape"]), np.dtype(head["dtype"])
            mode: Literal["r+", "r"] = "r+" if writable else "r"
            size = (head["rows"], *self.shape)
            self.values: Mapped = np.memmap(file, self.dtype, mode, HEADER, size)
            self._end = HEADER + self.values.nbytes
            self._done: Mapped = np.memmap(file, np.uint8, mode, self._end, size[:1])
            if not writable:
                file.seek(self._end + len(self))
                tail = json.loads(file.read())
                self.faults = {int(row): fault for row, fault in tail["faults"].items()}
                self.sha256 = self._digest(self.faults)
                if tail["sha256"] != self.sha256:
                    raise ValueError(f"{path} is damaged")

    def __len__(self) -> int:
        return len(self.values)

    def __reduce__(self) -> tuple[type["RowFile"], tuple[Path]]:
        return RowFile, (self.path,)  # another process opens the file itself

    def _digest(self, faults: Mapping[int, str]) -> str:
        found = hashlib.sha256(json.dumps([self.dtype.str, self.values.shape, faults]).encode())
        found.update(self.values.data)
        found.update(self._done.data)
        return found.hexdigest()

    def missing(self) -> NDArray[np.int64]:
        """Return the rows that no process has written yet."""
        return np.flatnonzero(self._done == 0)

    def write(self, row: int, values: NDArray[Any]) -> None:
        """Write a row."""
        self.values[row] = values
        self._done[row] = 1

    def finish(self, path: Path, faults: Mapping[int, str]) -> None:
        """Add faults and the checksum, sync the file to disk and rename it. Raises OSError."""
        tail = {"faults": faults, "sha256": self._digest(faults)}
        self.values.flush()
        self._done.flush()
        with naming(self.path), self.path.open("r+b") as file:
            file.seek(self._end + len(self))
            file.write(json.dumps(tail).encode())
            file.flush()
            os.fsync(file.fileno())
            os.replace(self.path, path)


@dataclass(frozen=True)
class Rows:
    """Some rows of a file, in any order."""

    file: RowFile
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, places: NDArray[np.int64] | slice = slice(None)) -> NDArray[Any]:
        """Return a copy of some of the rows, or of all."""
        return np.array(self.file.values[self.rows[places]])

    def sha256(self) -> str:
        """Return the SHA-256 of the file's contents and the numbers of the rows."""
        return hashlib.sha256(self.file.sha256.encode() + self.rows.tobytes()).hexdigest()


class Fill(Protocol):
    """A function that writes the rows of a file, reports progress, and returns faults by row."""

    def __call__(self, file: RowFile, /) -> Generator[Computing, None, Mapping[int, str]]:
        """Write the rows."""


def complete(path: Path) -> RowFile | None:
    """Return an undamaged file of this user, and mark it as used; None if there is none."""
    try:
        file = RowFile(path)
        os.utime(path)
        return file
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def kept_file(
    path: Path,
    rows: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    fill: Fill,
    *,
    what: str = "features",
) -> Generator[Computing, None, RowFile]:
    """Return a complete file, which is computed if there is none.

    Only one process computes; others wait. Raises InputError if the file cannot be stored.

    Args:
        path: path of the complete file. rows, shape, dtype: layout of its contents.
        fill: writes the rows.
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
        while not _fits(file := complete(path), rows, shape, dtype):
            try:
                with lock.acquire(timeout=PATIENCE):
                    if not _fits(complete(path), rows, shape, dtype):
                        make_room(folder, cache_size() - rows * prod(shape) * dtype.itemsize)
                        partial = _begun(begun, rows, shape, dtype)
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


def _begun(path: Path, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> RowFile:
    """Reserve space for a new file that only its owner can read.

    Raises OSError with the file's name and, if the disk is full, the missing space.
    """
    head = {"name": path.stem, "rows": rows, "shape": shape, "dtype": dtype.str}
    size = HEADER + rows * (prod(shape) * dtype.itemsize + 1)
    with naming(path):
        path.unlink(missing_ok=True)
        lacking = size - shutil.disk_usage(path.parent).free
        if lacking > 0:
            need = f"{size / 1e9:.1f} GB are needed, {max(lacking / 1e9, 0.1):.1f} GB more"
            raise OSError(errno.ENOSPC, f"{need} than are available")
        with os.fdopen(_opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), "r+b") as file:
            file.write(json.dumps(head).encode().ljust(HEADER))
            file.truncate(size)
            if hasattr(os, "posix_fallocate"):  # a mapped file must not find the disk full
                os.posix_fallocate(file.fileno(), 0, size)
    return RowFile(path, writable=True)


def _opened(path: Path, flags: int) -> int:
    """Open a file of this user alone. Raises OSError for links, and files others may write to.

    The open file is examined, not its name, which may be another's a moment later.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, PRIVATE_MODE)
    found = os.fstat(handle)
    if found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode) and not found.st_mode & SHARED:
        return handle
    os.close(handle)
    raise PermissionError(errno.EPERM, "others may have written to it", str(path))


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
