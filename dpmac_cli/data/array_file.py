"""Datasets stored as arrays in an .npz file: images, rows of numbers, or texts.

Pickled objects are never loaded, because they may run code. An array is allocated only after its
declared size was compared with the bytes of the file.
"""

import difflib
import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.lib import format as npy
from numpy.typing import NDArray

from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.memory import check_memory
from dpmac_cli.data.reader import ArrayDict, Reading, register_reader
from dpmac_cli.data.targets import DECLARED
from dpmac_cli.errors import InputError
from dpmac_cli.tasks.task import is_labelled

#: Most times that deflate makes bytes fewer, and most cells of an array that has no bytes.
MOST_COMPRESSION, MOST_EMPTY = 1032, 1 << 20
#: Similarity from which the name of an array is taken for a misspelt one, from 0 to 1.
CLOSE = 0.75
#: Arrays that are read.
ARRAYS = (
    *("x", "y", "unit", "x_test", "y_test", "unit_test", "classes", "low", "high"),
    *DECLARED,
)


@register_reader(
    "array files", lambda declared: declared.path.suffix == ".npz" and declared.path.is_file()
)
def read_array_file(declared: Declaration) -> Reading:
    """Return the arrays of an .npz as the records of a dataset; a registered reader.

    Args:
        declared: the dataset. New records, and those of a language model, need no ``y``.

    Raises:
        InputError: the file cannot be read, or an array is missing.
    """
    has_targets = declared.labels and is_labelled(declared.settings.task)
    needed = ("x", "y") if has_targets else ("x",)
    return Reading(read_npz(declared.path, needed))


def read_npz(
    path: Path,
    needed: Sequence[str] = ("x", "y"),
) -> ArrayDict:
    """Return the arrays of a file by name. Pickled objects are never loaded.

    Args:
        path: a file of ``numpy.savez``.
        needed: arrays that must be there. Others of :data:`ARRAYS` are read if they are there, and
            arrays of any other name are ignored.

    Raises:
        InputError: the file cannot be read, an array is missing, or one has a name that is almost
            that of an array that is read.
    """
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {}
            for entry in archive.infolist():
                entries[entry.filename.removesuffix(".npy")] = entry
            names = sorted(entries)
            for name in entries.keys() & set(ARRAYS):
                arrays[name] = _read_array(archive, entries[name])
    except Exception as failure:  # numpy and zipfile raise whatever a damaged file leads to
        why = str(failure) or type(failure).__name__
        raise InputError(
            f"{path} cannot be read as an .npz of plain arrays ({why}). Write it with "
            "numpy.savez(file, x=..., y=...)."
        ) from failure
    for name in names:
        meant = difflib.get_close_matches(name.lower(), ARRAYS, n=1, cutoff=CLOSE)
        if meant and name not in ARRAYS:
            raise InputError(
                f"{path} has an array {name}, which is not read. Did you mean {meant[0]}? Then "
                "rename it."
            )
    if not arrays.keys() >= set(needed):
        raise InputError(
            f"{path} must contain the arrays x (images or rows of numbers)"
            f"{' and y (labels)' * ('y' in needed)}. It contains {', '.join(names) or 'none'}."
        )
    return arrays


def _read_array(
    archive: zipfile.ZipFile,
    entry: zipfile.ZipInfo,
) -> NDArray[Any]:
    """Return an array of a file.

    Args:
        archive: the open .npz.
        entry: the array in it.

    Raises:
        ValueError: its header declares more than its bytes can hold, or than fits into memory.
    """
    compressed = min(entry.compress_size, os.path.getsize(archive.filename or ""))
    ratio = 1 if entry.compress_type == zipfile.ZIP_STORED else MOST_COMPRESSION
    most = min(entry.file_size, ratio * compressed)
    with archive.open(entry) as file:
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(file)
    if dtype.hasobject:
        name = entry.filename.removesuffix(".npy")
        raise ValueError(f"the array {name} holds objects of Python, not numbers or texts")
    # An axis without entries, or of entries without bytes, has no data to compare its length with.
    cells = math.prod(max(1, size) for size in shape)
    is_negative = min((*shape, 0)) < 0
    declared_bytes = cells * max(1, dtype.itemsize)
    if is_negative or declared_bytes > max(most, MOST_EMPTY):
        raise ValueError(
            f"{entry.filename} declares an array of shape {shape} and type {dtype.str}, but has "
            f"{most:,} bytes"
        )
    check_memory(cells * dtype.itemsize, entry.filename)
    with archive.open(entry) as file:
        return npy.read_array(file, allow_pickle=False)
