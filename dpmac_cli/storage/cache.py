"""Files of the cache of features: which there are, and removal of those used longest ago."""

from pathlib import Path

#: Endings of a whole file of features, and of one that is still computed.
WHOLE, BEGUN = ".safetensors", ".begun"


def kept_files(folder: Path) -> list[Path]:
    """Return the files of a cache, whole and begun, the last used first."""
    files = [file for file in folder.glob("*") if file.suffix in (WHOLE, BEGUN)]
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)


def make_room(folder: Path, size: float, kept: Path | None = None) -> list[Path]:
    """Remove the files used longest ago, until at most ``size`` bytes are left.

    Returns:
        The files that were removed. ``kept`` is not.
    """
    removed, total = [], 0
    for file in kept_files(folder):
        total += file.stat().st_size
        if total > size and file != kept:
            file.unlink(missing_ok=True)
            removed.append(file)
    return removed
