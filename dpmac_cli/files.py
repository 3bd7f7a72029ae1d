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

#: Key of the facts of a model in the header of its safetensors file.
MODEL_HEADER = "dpmac"
#: Largest number of bytes of that header that is read: safetensors itself reads no longer one.
LONGEST_HEADER = 100_000_000

PUBLIC_MODE = 0o644
PRIVATE_MODE = 0o600
PRIVATE_FOLDER = 0o700


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a file's name to an OSError that lacks it, such as on a full disk; a context manager.

    Args:
        path: the file that the block writes. The error is raised again with its name.
    """
    try:
        yield
    except OSError as failure:
        failure.filename = str(path)
        raise


def write_atomically(path: Path, content: bytes, mode: int = PUBLIC_MODE) -> None:
    """Write a complete file, or leave the old one unchanged.

    Args:
        path: the file, in a folder that exists.
        content: all of it.
        mode: permissions: PUBLIC_MODE, or PRIVATE_MODE for its owner alone.

    Raises:
        OSError: it cannot be written; the error has its name.
    """
    with replacing(path, mode) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, mode: int = PUBLIC_MODE) -> Iterator[BinaryIO]:
    """Open a file that gets its name when it is complete; a context manager, which yields the file.

    If the block raises, the old file stays unchanged and no part is left. Until then, only its
    owner can read it.

    Args:
        path: the file, in a folder that exists.
        mode: permissions of the complete file.

    Raises:
        OSError: it cannot be written; the error has its name.
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
    r"""Return indented JSON that ends with a line break.

    Args:
        value: dicts, lists, texts, numbers, truth values and None.

    Raises:
        ValueError: a number is NaN or infinite, which JSON does not support.

    >>> to_json({"epsilon": 3})
    '{\n  "epsilon": 3\n}\n'
    """
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def with_checksum(name: str, values: Mapping[str, Any]) -> str:
    """Return JSON of some values under a name, with their SHA-256 under "sha256".

    :func:`checked` reads it.

    Args:
        name: key of the values.
        values: JSON values by key.
    """
    return to_json({"sha256": _sum(values), name: values})


def checked(content: bytes, name: str) -> dict[str, Any]:
    """Return the values of :func:`with_checksum`, after a comparison with their SHA-256.

    Args:
        content: the file.
        name: key of the values in it.

    Raises:
        ValueError: it is no JSON, or the checksum is another one.
        KeyError: a key is missing.
        TypeError: it is JSON of another form.
    """
    sealed = json.loads(content)
    values: dict[str, Any] = sealed[name]
    if sealed["sha256"] != _sum(values):
        raise ValueError("the checksum is wrong")
    return values


def _sum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def model_header(file: Path) -> dict[str, Any]:
    """Return the facts in the header of a model file; its weights are not read.

    Args:
        file: a safetensors file. It begins with the length of its header in 8 bytes, little-endian.

    Raises:
        OSError: it cannot be read.
        ValueError: its header is no JSON.
        KeyError, TypeError, RecursionError: it is JSON of another form.
    """
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(size, LONGEST_HEADER)))
    facts: dict[str, Any] = json.loads(header["__metadata__"][MODEL_HEADER])
    return facts


def finite_or_none(value: float) -> float | None:
    """Return a number as a JSON value: None if it is infinite or NaN.

    >>> finite_or_none(3.0), finite_or_none(float("inf"))
    (3.0, None)
    """
    return value if math.isfinite(value) else None


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    r"""Return a CSV header and one line per row, each of which ends with a line break.

    Args:
        columns: names of the columns, in their order.
        rows: values by column. A missing one is an empty cell, and other columns are left out.

    >>> to_csv(["step", "loss"], [{"step": 1, "loss": 0.5, "note": "a"}, {"step": 2}])
    'step,loss\n1,0.5\n2,\n'
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table(kind: Callable[..., Kind], file: Path) -> Mapping[str, Kind]:
    """Return the entries of a TOML file by name, without validation.

    Args:
        kind: class that is called with the keys of an entry as keywords. Lists become tuples.
        file: a file of the package.
    """
    entries = tomllib.loads(file.read_text("utf-8"))
    return {
        name: kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in entry.items()})
        for name, entry in entries.items()
    }


def catalogue(kind: type[Kind], file: Path) -> Mapping[str, Kind]:
    """Return the entries of a TOML file by name, each validated by pydantic.

    Args:
        kind: dataclass or model of an entry.
        file: a file of the package.
    """
    entries = tomllib.loads(file.read_text("utf-8"))
    return TypeAdapter(dict[str, kind]).validate_python(entries)  # type: ignore[valid-type]


def data_folder(chosen: Path | None) -> Path:
    """Return the folder of datasets, which need not exist.

    Args:
        chosen: the flag ``--data-dir``; None for DPMAC_DATA_DIR, or else the user's cache.
    """
    return chosen or _named("DPMAC_DATA_DIR")


def cache_folder() -> Path:
    """Return the folder of features and decoded images, which need not exist.

    It is ``rows`` in DPMAC_CACHE_DIR, or else in the user's cache.
    """
    return _named("DPMAC_CACHE_DIR") / "rows"


def cache_size() -> float:
    """Return the maximum size of the cache in bytes: DPMAC_CACHE_SIZE gigabytes, by default 20.

    Raises:
        InputError: that variable is not a number of at least 0.
    """
    text = os.environ.get("DPMAC_CACHE_SIZE", "20")
    with contextlib.suppress(ValueError):
        if (size := float(text)) >= 0:
            return size * 1e9
    raise InputError(f"DPMAC_CACHE_SIZE must be a number of gigabytes, such as 20, not '{text}'.")


def _named(variable: str) -> Path:
    named = os.environ.get(variable)
    return Path(named).expanduser() if named else user_cache_path("dpmac")
