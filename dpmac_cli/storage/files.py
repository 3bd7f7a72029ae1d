"""Atomic writes, JSON lines and CSV."""

import contextlib
import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Suffix of a file that is being written.
PART = ".part"

PUBLIC_MODE = 0o644
PRIVATE_MODE = 0o600
PRIVATE_FOLDER = 0o700


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a file's name to an OSError that lacks it, such as that of a full disk."""
    try:
        yield
    except OSError as failure:
        failure.filename = str(path)
        raise


def write_atomically(path: Path, content: bytes, mode: int = PUBLIC_MODE) -> None:
    """Write a whole file, or leave the old one. Raises OSError, naming the file."""
    with written_atomically(path, mode) as partial:
        partial.write_bytes(content)


@contextlib.contextmanager
def written_atomically(path: Path, mode: int) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` at the end, or is removed after an error.

    Until then only its owner can read it. Raises OSError, naming the file.
    """
    with naming(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
        partial = Path(name)
        try:
            os.close(handle)
            yield partial
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            os.chmod(partial, mode)
            os.replace(partial, path)
            _sync_folder(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def to_json(value: Any) -> str:
    """Return indented JSON. Raises ValueError on NaN and Infinity, which JSON does not have."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def to_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON."""
    return json.dumps(record, allow_nan=False) + "\n"


def append_line(path: Path, record: Mapping[str, Any], mode: int = PUBLIC_MODE) -> None:
    """Append one line of JSON and sync it to the disk. Raises OSError, naming the file.

    A line before it that was cut short by a kill is ended first.
    """
    line = to_line(record)
    with naming(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
        with os.fdopen(handle, "ab") as file:
            size = file.tell()
            cut = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            file.write((b"\n" if cut else b"") + line.encode())
            file.flush()
            os.fsync(handle)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines, without lines that are damaged or cut short."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a header and one line per row; values of other columns are left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
