"""Rows of one shape in a private file, each with its checksum.

Rows are read one by one instead of mapped, so resident memory does not grow with the file. Layout:
a header of one JSON line, padded with spaces; the rows; the SHA-256 of each row, zeros if it is not
written yet; and notes as JSON, once the file is complete.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
import weakref
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.errors import InputError
from dpmac_cli.storage.files import PRIVATE_MODE, naming

HEADER, CHECKSUM = 4096, 32
VERSION = 1
#: Permissions of others to write.
SHARED = stat.S_IWGRP | stat.S_IWOTH


class DamagedError(InputError):
    """A row differs from what was written."""


class RowFile:
    """An open file of rows. Several processes may write different rows of it.

    Attributes:
        shape: shape of a row. dtype: type of its values. nbytes: size of all rows.

    Raises:
        OSError: the file cannot be opened, or others may have written to it.
        ValueError: it is not a file of rows.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        self._handle = _opened(path, os.O_RDWR if writable else os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)
        head = json.loads(os.pread(self._handle, HEADER, 0))
        if (head["version"], head["name"]) != (VERSION, path.stem):
            raise ValueError(f"{path} does not match its name")
        self.shape, self.dtype = tuple(head["shape"]), np.dtype(head["dtype"])
        self._rows: int = head["rows"]
        self._size: int = prod(self.shape) * self.dtype.itemsize
        self.nbytes = self._rows * self._size
        self._end = HEADER + self.nbytes + self._rows * CHECKSUM  # where notes begin
        self.checksums = self._read_checksums()

    def __len__(self) -> int:
        return self._rows

    def __reduce__(self) -> tuple[type["RowFile"], tuple[Path]]:
        return RowFile, (self.path,)  # another process opens the file itself

    def _read_checksums(self) -> NDArray[np.uint8]:
        """Return the checksums on disk, shape (rows, 32)."""
        content = os.pread(self._handle, self._rows * CHECKSUM, HEADER + self.nbytes)
        return np.frombuffer(content, np.uint8).reshape(self._rows, CHECKSUM)

    def missing(self) -> NDArray[np.int64]:
        """Return the rows that no process has written yet."""
        return np.flatnonzero(~self._read_checksums().any(1))

    def write(self, row: int, values: NDArray[Any]) -> None:
        """Write a row and then its checksum. Raises OSError with the file's name."""
        content = np.ascontiguousarray(values, self.dtype)
        checksum = hashlib.sha256(content.data).digest()
        with naming(self.path):
            os.pwrite(self._handle, content.data, HEADER + row * self._size)
            os.pwrite(self._handle, checksum, HEADER + self.nbytes + row * CHECKSUM)

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return rows in the requested order, shape (rows, ...).

        Raises DamagedError, and removes the file, if a row differs from what was written.
        """
        found = np.empty((len(rows), *self.shape), self.dtype)
        for place, row in zip(found, rows.tolist(), strict=True):
            os.preadv(self._handle, [place], HEADER + row * self._size)
            if hashlib.sha256(place.data).digest() != self.checksums[row].tobytes():
                self.path.unlink(missing_ok=True)
                raise DamagedError(
                    f"{self.path} is damaged in row {row} and has been removed. Run the command "
                    "again to recompute its contents."
                )
        return found

    def notes(self) -> Any:
        """Return the notes stored by :meth:`finish`."""
        size = os.fstat(self._handle).st_size - self._end
        return json.loads(os.pread(self._handle, size, self._end))

    def finish(self, path: Path, notes: Any) -> None:
        """Add notes, sync the file to disk and rename it. Raises OSError with the file's name."""
        with naming(self.path):
            os.pwrite(self._handle, json.dumps(notes).encode(), self._end)
            os.fsync(self._handle)
            os.replace(self.path, path)


def open_incomplete(path: Path, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> RowFile:
    """Open an incomplete file, or reserve space for a new one that only its owner can read.

    Raises:
        OSError: with the file's name and, if the disk is full, the missing space.
    """
    head = {"version": VERSION, "name": path.stem, "rows": rows, "shape": shape, "dtype": dtype.str}
    header = json.dumps(head).encode().ljust(HEADER)
    size = HEADER + rows * (prod(shape) * dtype.itemsize + CHECKSUM)
    with naming(path):
        try:
            handle = _opened(path, os.O_RDWR | os.O_CREAT)
        except OSError:  # somebody else's, or a link
            path.unlink(missing_ok=True)
            handle = _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if os.fstat(handle).st_size != size or os.pread(handle, HEADER, 0) != header:
                lacking = size - os.fstat(handle).st_size - shutil.disk_usage(path.parent).free
                if lacking > 0:
                    path.unlink()
                    need = f"{size / 1e9:.1f} GB are needed, {max(lacking / 1e9, 0.1):.1f} GB more"
                    raise OSError(errno.ENOSPC, f"{need} than are available")
                os.truncate(handle, 0)  # a different layout, or a new file
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, size)
                os.truncate(handle, size)
                os.pwrite(handle, header, 0)
        finally:
            os.close(handle)
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


@dataclass(frozen=True)
class Rows:
    """Some rows of a file, in any order."""

    file: RowFile
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, places: NDArray[np.int64] | slice = slice(None)) -> NDArray[Any]:
        """Return some of the rows, or all. Raises DamagedError."""
        return self.file.read(self.rows[places])

    def sha256(self) -> str:
        """Return the SHA-256 of shape, dtype and checksums."""
        head = f"{self.file.dtype}{(len(self), *self.file.shape)}".encode()
        return hashlib.sha256(head + self.file.checksums[self.rows].tobytes()).hexdigest()
