"""Ledger of a run: how many steps may have begun, on disk before they begin. Loads no torch."""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dpmac_cli.accounting.events import Scores, TrainingEvent
from dpmac_cli.runs import folder
from dpmac_cli.storage import files

FILE = folder.LEDGER
#: Seconds of training that a reservation should last: it is synced to disk, which takes a while.
SECONDS = 1.0


@dataclass(frozen=True)
class Spent:
    """Steps that a run may have taken, of all of its parts.

    A part is what one set of keys draws: a fork begins one, and so does a resume that cannot
    repeat its steps exactly.

    Attributes:
        earlier: events of the parts before.
        event: of the current part, with all of its planned steps; it began at step ``base``.
        begun: last step of the run that may have begun.
        seeded: whether any part used a chosen seed. secure: whether all ran with --secure.
        abandoned: events of attempts at the same run of a study, begun again from scratch.
        scores: of the test records, if they are covered.
    """

    earlier: tuple[TrainingEvent, ...]
    event: TrainingEvent
    base: int
    begun: int
    seeded: bool
    secure: bool
    abandoned: tuple[TrainingEvent, ...] = ()
    scores: Scores | None = None

    @property
    def end(self) -> int:
        """Step of the run at which the current part ends as planned."""
        return self.base + self.event.steps

    @property
    def events(self) -> tuple[TrainingEvent, ...]:
        """Events of all parts, up to the last step that may have begun."""
        done = (*self.earlier, replace(self.event, steps=self.begun - self.base))
        if self.scores is None:
            return done
        return (*done, self.scores.event(self.begun, self.end, self.base))

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Spent":
        """Return what ``asdict`` gave. Raises KeyError, TypeError."""
        lists = {name: _events(values[name]) for name in ("earlier", "abandoned")}
        scores = values.get("scores") and Scores(**values["scores"])
        event = TrainingEvent(**values["event"])
        return Spent(**{**values, "event": event, "scores": scores, **lists})


def read(run: Path) -> Spent | None:
    """Return what a run's ledger says; None if it is missing or damaged."""
    try:
        kept = json.loads((run / folder.CHECKPOINTS / FILE).read_bytes())
        return Spent.of(kept["spent"]) if kept["sha256"] == _sum(kept["spent"]) else None
    except folder.BROKEN:
        return None


def attempts(run: Path, planned: TrainingEvent, whole: bool = False) -> tuple[TrainingEvent, ...]:
    """Return the events of every attempt at a run of a study, of which there may be none.

    An attempt whose ledger is missing or damaged is charged as ``planned``; the last one with all
    of its planned steps if ``whole``.
    """
    found = read(run)
    if found is not None:
        last = (*found.earlier, found.event) if whole else found.events
        return (*found.abandoned, *last)
    try:
        before = _events(json.loads((run / folder.ATTEMPTS).read_bytes()))
    except folder.BROKEN:
        before = ()
    begun = whole or (run / folder.CHECKPOINTS).exists() or folder.is_configured(run)
    return (*before, planned) if begun else before


def keep_attempts(run: Path, events: Iterable[TrainingEvent]) -> None:
    """Write earlier attempts to a file that is left if the ledger is lost. Raises OSError."""
    text = files.to_json([asdict(event) for event in events])
    files.write_atomically(run / folder.ATTEMPTS, text.encode(), files.PRIVATE_MODE)


def _events(values: Iterable[Mapping[str, Any]]) -> tuple[TrainingEvent, ...]:
    return tuple(TrainingEvent(**event) for event in values)


def _sum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


class Ledger:
    """Ledger of a run that is being trained. Steps up to ``spent.begun`` stay charged."""

    def __init__(self, run: Path, spent: Spent) -> None:
        self.spent = spent
        self._run, self._floor = run, spent.begun
        self._block, self._since = 1, time.perf_counter()

    def write(self, begun: int) -> None:
        """Write, synced to disk, that steps up to ``begun`` may have begun. Raises OSError."""
        self.spent = replace(self.spent, begun=begun)
        text = files.to_json({"sha256": _sum(asdict(self.spent)), "spent": asdict(self.spent)})
        path = folder.private_folder(self._run) / FILE
        files.write_atomically(path, text.encode(), files.PRIVATE_MODE)

    def before(self, step: int) -> None:
        """Reserve a step that is about to begin, and more: for a second, or an eighth of all."""
        if step <= self.spent.begun:
            return
        seconds = time.perf_counter() - self._since
        if seconds < SECONDS / 2:
            self._block *= 2
        elif seconds > 2 * SECONDS:
            self._block = max(1, self._block // 2)
        self._block = min(self._block, 1 + (step - self.spent.base) // 8)
        self.write(min(self.spent.end, step + self._block - 1))
        self._since = time.perf_counter()

    def charged(self, step: int) -> int:
        """Return the steps to charge for by the time that ``step`` is taken."""
        return max(step, self._floor)
