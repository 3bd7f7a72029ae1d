"""Files that commands write: the flag that replaces them, and their faults."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, StrictBool

from dpmac_cli.config.fields import Flag
from dpmac_cli.config.settings import OUTPUT

ReplaceFile = Annotated[StrictBool, Field(description="Replace an existing file."), Flag(OUTPUT)]


def faults_of_file(
    path: Path, kinds: Sequence[str], force: bool, flag: str = "out"
) -> Iterator[str]:
    """Yield faults of the path of a file to write."""
    if path.suffix not in kinds:
        yield f"--{flag} {path} must end in {' or '.join(kinds)}."
    if not path.parent.is_dir():
        yield f"The folder {path.parent} of --{flag} does not exist."
    if path.exists() and not (force and path.is_file()):
        yield f"{path} already exists. Add --force to replace it, or use another --{flag}."
