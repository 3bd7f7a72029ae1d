"""Ledger of a run: the number of steps, recorded on disk before they begin. Imports no torch."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dpmac_cli import files
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.runs import folder, headers

FILE = folder.LEDGER
#: Reservations of a run, because syncing to disk takes time. Steps of one that are not taken are
#: counted if the run is killed.
RESERVED = 100


@dataclass(frozen=True)
class Spent:
    """Steps that a run may have taken, in all its parts.

    A part uses one set of keys. Every resume starts a new part.

    Attributes:
        earlier: events of previous parts.
        event: event of the current part with all planned steps; it began at step ``base``.
        begun: last step of the run that may have begun.
        seeded: whether any part used a chosen seed. secure: whether all parts used --secure.
        score: event of the test score at the end, if it is covered.
        target: epsilon that was asked for, which a resumed run keeps to; None without.
    """

    earlier: tuple[TrainingEvent, ...]
    event: TrainingEvent
    base: int = 0
    begun: int = 0
    seeded: bool = False
    secure: bool = True
    score: TrainingEvent | None = None
    target: float | None = None

    @property
    def end(self) -> int:
        """Step of the run at which the current part ends as planned."""
        return self.base + self.event.steps

    @property
    def kept_to(self) -> float:
        """Epsilon that a resumed run keeps to, for which it was calibrated; infinity for others."""
        return self.target if self.earlier and self.target is not None else math.inf

    @property
    def planned(self) -> tuple[TrainingEvent, ...]:
        """Return events of all parts, with all planned steps of this one."""
        return (*self.earlier, self.event)

    @property
    def events(self) -> tuple[TrainingEvent, ...]:
        """Events of all parts, up to the last step that may have begun."""
        part = replace(self.event, steps=self.begun - self.base)
        done = (*self.earlier, part) if part.steps or not self.earlier else self.earlier
        if self.score is None or not self.base < self.end <= self.begun:
            return done
        return (*done, self.score)

    def continued(self, step: int) -> "Spent":
        """Return what was spent as a new part begins after a step: all that began, kept or not."""
        earlier = tuple(event for event in self.events if event.steps)
        return replace(self, earlier=earlier, base=step, begun=step)


def read_spent(run: Path) -> Spent | None:
    """Return the contents of a run's ledger; None if it is missing or damaged."""
    try:
        text = (run / folder.CHECKPOINTS / FILE).read_bytes()
        kept = headers.Ledger.model_validate_json(text, strict=True)
        same = kept.sha256 == _sum(json.loads(text)["spent"])
        return Spent(**kept.spent.values()) if same else None
    except folder.BROKEN:
        return None


def begun_events(
    run: Path, planned: TrainingEvent, *, whole: bool = False
) -> tuple[TrainingEvent, ...]:
    """Return the events of all steps that may have begun in a folder; () if there are none.

    If ``whole``, the last part counts with all its planned steps, and a run that has not begun as
    ``planned``. So does one whose ledger is missing or damaged.
    """
    if (found := read_spent(run)) is not None:
        return tuple(e for e in (found.planned if whole else found.events) if e.steps)
    begun = whole or (run / folder.CHECKPOINTS).exists() or folder.is_configured(run)
    return (planned,) if begun else ()


def _sum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


class Ledger:
    """Ledger of a run that is being trained. Steps up to ``spent.begun`` stay charged."""

    def __init__(self, run: Path, spent: Spent) -> None:
        self.spent = spent
        self._run, self._floor = run, spent.begun

    def write(self, begun: int) -> None:
        """Record on disk that steps up to ``begun`` may have begun, with sync. Raises OSError."""
        self.spent = replace(self.spent, begun=begun)
        text = files.to_json({"sha256": _sum(asdict(self.spent)), "spent": asdict(self.spent)})
        path = folder.checkpoints(self._run) / FILE
        files.write_atomically(path, text.encode())

    def before(self, step: int) -> None:
        """Reserve the next step, and at most a hundredth of all steps."""
        if step > self.spent.begun:
            self.write(min(self.spent.end, step + self.spent.event.steps // RESERVED))

    def charged(self, step: int) -> int:
        """Return the steps to charge for once ``step`` is taken."""
        return max(step, self._floor)
