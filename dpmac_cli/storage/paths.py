"""Default folders for datasets and the cache. Imports nothing slow."""

import contextlib
import os
from pathlib import Path

from platformdirs import user_cache_path

from dpmac_cli.errors import InputError


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
