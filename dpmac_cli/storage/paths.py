"""Default folders for datasets and cached features. Imports nothing heavy."""

import os
from pathlib import Path

from platformdirs import user_cache_path


def data_folder(chosen: Path | None) -> Path:
    """Return the folder of datasets: the flag, else DPMAC_DATA_DIR, else the user's cache."""
    return chosen or _named("DPMAC_DATA_DIR")


def cache_folder() -> Path:
    """Return the folder of cached features, below DPMAC_CACHE_DIR or else the user's cache."""
    return _named("DPMAC_CACHE_DIR") / "features"


def _named(variable: str) -> Path:
    named = os.environ.get(variable)
    return Path(named).expanduser() if named else user_cache_path("dpmac")
