"""Cache of features and decoded images, which are computed once from private records.

It is as private as the records: folder 0700, files 0600, so no other user can write to it either. A
file's name is the SHA-256 of everything that determines its contents, and it gets that name when it
is complete. A truncated file is computed again, and the least recently used files are removed.

A file is an .npy of rows, followed by faults as JSON.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpmac_cli.errors import InputError
from dpmac_cli.files import PART, PRIVATE_FOLDER, PRIVATE_MODE, cache_size, replacing

#: Suffix of a complete file.
WHOLE = ".rows"


class RowFile:
    """A file of rows, mapped into memory.

    Args:
        path: a complete file, as :func:`kept_file` writes it.

    Attributes:
        path: the file.
        shape: shape of a row.
        dtype: type of its values.
        values: all rows, shape (rows, ...).
        faults: why rows could not be computed, by their numbers.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not a complete file of rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = npy.open_memmap(path, "r")
        self.shape = self.values.shape[1:]
        self.dtype = self.values.dtype
        with path.open("rb") as file:
            file.seek(self.values.offset + self.values.nbytes)
            faults = json.loads(file.read())
        self.faults = {int(row): fault for row, fault in faults.items()}

    def __len__(self) -> int:
        return len(self.values)

    def __reduce__(self) -> tuple[type["RowFile"], tuple[Path]]:
        return RowFile, (self.path,)  # another process opens the file itself


@dataclass(frozen=True)
class Rows:
    """Some rows of a file, in any order, which stand for an array of them.

    Attributes:
        file: the file, of which nothing is read yet.
        rows: numbers of the rows, shape (rows,).
    """

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
        """Return a copy of some of the rows, or of all.

        Args:
            places: which rows, by their place among these; all by default.
        """
        return np.ascontiguousarray(self.file.values[self.rows[places]])

    def sha256(self) -> str:
        """Return the SHA-256 of what determines the file's contents and the numbers of the rows."""
        contents = self.file.path.stem.encode()
        return hashlib.sha256(contents + self.rows.tobytes()).hexdigest()


#: Some rows after the others, and why some of them could not be computed, by number in the file.
Computed: TypeAlias = Iterator[tuple[NDArray[Any], Mapping[int, str]]]


def complete(path: Path) -> RowFile | None:
    """Return a complete file of this user, and mark it as used; None if there is none.

    A file that is damaged or truncated counts as none.

    Args:
        path: path of the file, which need not exist.
    """
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
    compute: Callable[[], Computed],
    *,
    what: str = "features",
) -> RowFile:
    """Return a complete file, which is computed if there is none.

    Args:
        path: path of the complete file.
        rows: number of rows.
        shape: shape of a row.
        dtype: type of the values.
        compute: yields all rows in order.
        what: name of the rows in messages.

    Raises:
        InputError: the file cannot be stored, or the folder is another user's.
    """
    file = complete(path)
    if file is not None:
        return file
    folder = path.parent
    size = rows * math.prod(shape) * dtype.itemsize
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        _check_owner(folder)
        folder.chmod(PRIVATE_FOLDER)
        make_room(folder, cache_size() - size)
        _write(path, (rows, *shape), dtype, compute())
        return RowFile(path)
    except OSError as failure:
        raise InputError(
            f"The {what} ({size / 1e9:.1f} GB) cannot be stored in {folder} "
            f"({failure.strerror or failure}). Free space there, or set DPMAC_CACHE_DIR to another "
            "folder."
        ) from failure


def _write(
    path: Path,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    computed: Computed,
) -> None:
    """Write a file that only its owner can read.

    Args:
        path: path of the file, which appears when it is complete.
        shape: shape of all rows.
        dtype: type of their values.
        computed: all rows in order, with faults.

    Raises:
        OSError: it cannot be written.
    """
    faults = dict[int, str]()
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with replacing(path, PRIVATE_MODE) as file:
        npy.write_array_header_1_0(file, header)
        for values, faults_of_rows in computed:
            file.write(np.ascontiguousarray(values, dtype).data)
            faults |= faults_of_rows
        file.write(json.dumps(faults).encode())


def kept_files(folder: Path) -> list[Path]:
    """Return the files of a cache, with those being written, the last one that was used first.

    A file is used when it is written or opened. A folder that is missing has none.

    Args:
        folder: the cache.
    """
    files = [file for file in folder.glob("*") if file.suffix in (WHOLE, PART)]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    return files


def make_room(folder: Path, size: float) -> list[Path]:
    """Remove the least recently used files of a cache, and return the paths of those removed.

    Args:
        folder: the cache.
        size: number of bytes that its files may have together.
    """
    removed, total = [], 0
    for file in kept_files(folder):
        total += file.stat().st_size
        if total > size:
            file.unlink(missing_ok=True)
            removed.append(file)
    return removed
