"""Secret state of a search on disk: what resuming needs, and nothing of trials that lost.

Only the owner can read the folder. It has the number of trials that count, the settings of the
current trial, and the runs of the current and of the best trial so far. Everything in it is removed
when the search is published. Imports no torch.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal

from dpmac_cli.config.dimensions import Setting
from dpmac_cli.errors import InputError
from dpmac_cli.runs import folder
from dpmac_cli.storage import files

#: Folder of the state, in the folder of the search, and what is in it.
SECRET, FILE = folder.SEARCH, folder.SEARCH_STATE
CURRENT, BEST, NOTE = "current", "best", "PRIVATE.txt"
NOTE_TEXT = """\
These files are private. They contain the number of trials of a search and their results so far,
which must stay secret for its epsilon to hold. The same command of dpmac tune ends the search and
removes them. Do not share, publish or back them up where others can read.
"""
#: Verdicts on a trial that ended, of which nothing is decided again after a kill.
Verdict = Literal["", "won", "lost", "publishing"]
WON: Final = "won"
LOST: Final = "lost"
PUBLISHING: Final = "publishing"


@dataclass(frozen=True, kw_only=True)
class SearchState:
    """State of a search between two trials, or within one.

    Attributes:
        plan: checksum of what was planned, which must not change.
        counted: secret number K of trials that count, which is not saved elsewhere: the first K.
        ended: number of trials that have ended, whether or not they count.
        setting: settings of the current trial; None before they are drawn.
        verdict: what is being done with the current trial, or the best; "" if nothing is.
        seconds: time that the search has taken.
        records: checksums of the records, and of what is declared of them.
        files: checksums of the files that trials read besides, by their paths.
    """

    plan: str
    counted: int
    ended: int = 0
    setting: Setting | None = None
    verdict: Verdict = ""
    seconds: float = 0.0
    records: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SecretFolder:
    """Folder of the state of a search, ``where`` being the folder of the search."""

    where: Path

    @property
    def path(self) -> Path:
        """Path of the secret folder."""
        return self.where / SECRET

    @property
    def current(self) -> Path:
        """Folder of the run of the current trial."""
        return self.path / CURRENT

    @property
    def best(self) -> Path:
        """Folder of the run of the best trial so far."""
        return self.path / BEST

    def read(self) -> SearchState | None:
        """Return the state; None if no search has begun.

        Raises InputError if it is damaged: its number of trials must not be drawn again.
        """
        file = self.path / FILE
        if not file.exists():
            return None
        try:
            return SearchState(**json.loads(file.read_bytes()))
        except folder.BROKEN as failure:
            raise InputError(
                f"{file} is damaged, so the search cannot be resumed: its number of trials must "
                "not be drawn again. Start a new search with another --out, and delete this one."
            ) from failure

    def write(self, state: SearchState) -> None:
        """Write the state, with sync. Raises OSError."""
        self.path.mkdir(mode=files.PRIVATE_FOLDER, exist_ok=True)
        self.path.chmod(files.PRIVATE_FOLDER)
        if not (self.path / NOTE).exists():
            files.write_atomically(self.path / NOTE, NOTE_TEXT.encode(), files.PRIVATE_MODE)
        text = files.to_json(asdict(state)).encode()
        files.write_atomically(self.path / FILE, text, files.PRIVATE_MODE)

    def clear(self) -> None:
        """Remove what a kill before the first trial, or at the very end, left. Raises OSError.

        A folder of the same name that somebody else made is not touched.
        """
        if self.path.is_dir() and all(map(_left_over, self.path.iterdir())):
            remove(self.path)

    def settle(self, verdict: Verdict) -> None:
        """Keep the current trial as the best, or remove it; again after a kill. Raises OSError."""
        if verdict == WON and self.current.exists():
            remove(self.best)
            os.replace(self.current, self.best)
        elif verdict == LOST:
            remove(self.current)

    def publish(self) -> None:
        """Move the public files of the best trial to the folder of the search, and remove the rest.

        Checksums go last: a kill in between leaves files without them, and the secret folder, from
        which the same is done again. All files get the same time. Raises OSError.
        """
        for name in (*folder.SEALED, folder.SUMS):
            if (self.best / name).exists():
                os.utime(self.best / name)
                os.replace(self.best / name, self.where / name)
        remove(self.path)


def _left_over(file: Path) -> bool:
    return file.name == NOTE or (file.name.startswith(".") and file.name.endswith(files.PART))


def remove(path: Path) -> None:
    """Remove a folder with all that is in it. Raises OSError.

    The state of a search goes last: as long as anything is left, the same command removes it.
    """
    if not path.exists():
        return
    for inner in path.iterdir():
        if inner.name != FILE:
            shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
    shutil.rmtree(path)
