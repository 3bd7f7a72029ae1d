"""Catalogues of what dpmac knows by name, in TOML files beside the code. Loads nothing heavy."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

Kind = TypeVar("Kind")


def catalogue(kind: type[Kind], file: Path) -> Mapping[str, Kind]:
    """Return the entries of a file by name, each as a dataclass of a kind."""
    entries = tomllib.loads(file.read_text("utf-8"))
    return TypeAdapter(dict[str, kind]).validate_python(entries)  # type: ignore[valid-type]
