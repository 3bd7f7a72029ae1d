"""Files of JSON lines, compressed if their name ends with ``.xz``."""

import json
import lzma
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from dpmac_cli.storage.files import write_atomically

#: Suffix of compressed files. Compressed lines can be appended like others.
COMPRESSED = ".xz"


def read(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; an empty list if there is no such file."""
    if not file.exists():
        return []
    with _open(file, "rt") as lines:
        return [json.loads(line) for line in lines]


def append(file: Path, line: dict[str, Any]) -> None:
    """Add a line to a file, which is created if there is none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with _open(file, "at") as lines:
        lines.write(json.dumps(line) + "\n")


def write(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Replace a file by lines. Equal lines give equal bytes."""
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    packed = file.suffix == COMPRESSED
    write_atomically(file, lzma.compress(text, preset=9) if packed else text)


def _open(file: Path, mode: str) -> IO[Any]:
    opened: Callable[..., IO[Any]] = lzma.open if file.suffix == COMPRESSED else open
    return opened(file, mode, encoding="utf-8")
