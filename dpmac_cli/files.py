"""Atomic writes, JSON lines, CSV, catalogues in TOML, and default folders."""

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from platformdirs import user_cache_path
from pydantic import TypeAdapter

from dpmac_cli.errors import InputError

Kind = TypeVar("Kind")

#: Suffix of a file that is being written.
PART = ".part"

PUBLIC_MODE = 0o644
PRIVATE_MODE = 0o600
PRIVATE_FOLDER = 0o700


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a file's name to an OSError that lacks it, such as on a full disk."""
    try:
        yield
    except OSError as failure:
        failure.filename = str(path)
        raise


def write_atomically(path: Path, content: bytes, mode: int = PUBLIC_MODE) -> None:
    """Write a complete file, or leave the old one unchanged. See :func:`replacing`."""
    with replacing(path, mode) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, mode: int = PUBLIC_MODE) -> Iterator[BinaryIO]:
    """Open a file that gets its name when it is complete; an error leaves the old one unchanged.

    Until then, only its owner can read it. Raises OSError with the file's name.
    """
    with naming(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
        partial = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(handle)
            os.chmod(partial, mode)
            os.replace(partial, path)
            with contextlib.suppress(OSError):  # not every file system syncs folders
                handle = os.open(path.parent, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def to_json(value: Any) -> str:
    """Return indented JSON. Raises ValueError for NaN and Infinity, which JSON does not support."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def with_checksum(name: str, values: Mapping[str, Any]) -> str:
    """Return JSON of some values under a name, with their SHA-256."""
    return to_json({"sha256": _sum(values), name: values})


def checked(content: bytes, name: str) -> dict[str, Any]:
    """Return the values of :func:`with_checksum`. Raises ValueError, KeyError or TypeError."""
    sealed = json.loads(content)
    values: dict[str, Any] = sealed[name]
    if sealed["sha256"] != _sum(values):
        raise ValueError("the checksum is wrong")
    return values


def _sum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def finite_or_none(value: float) -> float | None:
    """Return a number as a JSON value: None if it is not finite."""
    return value if math.isfinite(value) else None


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a CSV header and one line per row, with only the values of these columns."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table(kind: Callable[..., Kind], file: Path) -> Mapping[str, Kind]:
    """Return the entries of a TOML file by name, each as a dataclass of plain values."""
    entries = tomllib.loads(file.read_text("utf-8"))
    return {
        name: kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in entry.items()})
        for name, entry in entries.items()
    }


def catalogue(kind: type[Kind], file: Path) -> Mapping[str, Kind]:
    """Return the entries of a TOML file by name, each as a dataclass of type ``kind``."""
    entries = tomllib.loads(file.read_text("utf-8"))
    return TypeAdapter(dict[str, kind]).validate_python(entries)  # type: ignore[valid-type]


def data_folder(chosen: Path | None) -> Path:
    """Return the folder of datasets: the flag, DPMAC_DATA_DIR, or the user's cache."""
    return chosen or _named("DPMAC_DATA_DIR")


def cache_folder() -> Path:
    """Return the cache folder, in DPMAC_CACHE_DIR or the user's cache."""
    return _named("DPMAC_CACHE_DIR") / "rows"


def cache_size() -> float:
    """Return the maximum size of the cache in bytes: DPMAC_CACHE_SIZE gigabytes, by default 20.

    Raises InputError if that is not a number.
    """
    text = os.environ.get("DPMAC_CACHE_SIZE", "20")
    with contextlib.suppress(ValueError):
        if (size := float(text)) >= 0:
            return size * 1e9
    raise InputError(f"DPMAC_CACHE_SIZE must be a number of gigabytes, such as 20, not '{text}'.")


def _named(variable: str) -> Path:
    named = os.environ.get(variable)
    return Path(named).expanduser() if named else user_cache_path("dpmac")
