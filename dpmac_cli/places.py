"""Where data sets and features lie on this machine. Loads nothing."""

import os
from pathlib import Path


def data_folder(chosen: Path | None) -> Path:
    """Where data sets lie: the flag, the environment, or a cache in the home folder."""
    if chosen is not None:
        return chosen
    named = os.environ.get("DPMAC_DATA_DIR")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "dpmac"


def cache_folder() -> Path:
    """Where features are kept: the environment's folder, or a cache in the home folder."""
    named = os.environ.get("DPMAC_CACHE_DIR")
    root = Path(named).expanduser() if named else Path.home() / ".cache" / "dpmac"
    return root / "features"
