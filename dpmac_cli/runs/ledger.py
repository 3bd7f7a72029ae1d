"""Ledger of a run: its account on disk, where steps are counted before they begin.

Imports no torch.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from dpmac_cli import files
from dpmac_cli.accounting.account import RESERVED, Account
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent, without
from dpmac_cli.runs import folder, headers

FILE = folder.LEDGER


@dataclass(slots=True, kw_only=True)
class Ledger(Account):
    """Account of a run that is being trained, which begins nothing that is not on disk.

    A part of a run uses one set of keys. Every resume starts a new part, whose ``earlier`` accounts
    are the parts before. See :class:`~dpmac_cli.accounting.account.Account` for how events begin.

    Attributes:
        run: folder of the run, which it has before its first step; None until then.
        reserved: last step that is on disk as begun. Steps up to it begin without another write.
    """

    run: Path | None = None
    reserved: int = 0

    def record_before(self, event: TrainingEvent) -> None:
        """Record an event on disk before it begins. The account calls it.

        Of the steps of training, at most a hundredth more are reserved at once, so that few steps
        wait for the disk. A run that is killed counts them all.

        Args:
            event: the event that is about to begin.

        Raises:
            OSError: it cannot be written, so nothing may begin.
            ValueError: the ledger has no folder.
        """
        if not self.is_of_training(event):
            self._write(self.reserved, (*self.others, event))
        elif (step := self.begun + event.steps) > self.reserved:
            self._write(min(self.end, step + self.event.steps // RESERVED), self.others)

    def record(self) -> None:
        """Record on disk exactly what has begun, with sync.

        Steps that were only reserved no longer count.

        Raises:
            OSError: it cannot be written. The file before is unchanged, and counts no less.
            ValueError: the ledger has no folder.
        """
        self._write(self.begun, self.others)

    def leave_out_histogram(self) -> None:
        """Leave out the planned histogram if what was lost has taken its part of the budget."""
        if math.isinf(self.limit):
            return
        events = (*self.before, self.event, *self.others, *self._to_come)
        if total_epsilon(events, self.delta) > self.limit:
            self.histogram = None

    def _write(self, begun: int, others: tuple[TrainingEvent, ...]) -> None:
        """Write steps up to ``begun`` and other events to disk, with sync. Raises OSError."""
        if self.run is None:
            raise ValueError("the ledger has no folder")
        more = list(others)
        if self.score in more and counts_score(self.base, begun, self.end):
            more.remove(self.score)  # it counts with the last step
        spent = {
            "earlier": list(map(asdict, (*self.before, *more))),
            "event": asdict(self.event),
            "base": self.base,
            "begun": begun,
            "seeded": self.seeded,
            "secure": self.secure,
            "score": None if self.score is None else asdict(self.score),
            "histograms": list(map(asdict, without(self.histograms, more))),
        }
        text = files.with_checksum("spent", spent)
        files.write_atomically(folder.checkpoints(self.run) / FILE, text.encode())
        self.reserved = begun


def done(event: TrainingEvent, **values: Any) -> Account:
    """Return an account in memory in which an event has begun, all of it.

    Args:
        event: the event, as the planned training.
        values: further fields of the account, by name.
    """
    return Account(event=event, begun=event.steps, **values)


#: How a run ended.
State = Literal["finished", "interrupted", "budget-spent"]


def state_of(step: int, account: Account, planned: TrainingEvent) -> State:
    """Return how a run ended whose weights have taken ``step`` steps.

    It took all its steps ("finished"), it was stopped ("interrupted"), or epsilon would have
    exceeded ``max_epsilon`` ("budget-spent"). A run that was calibrated for an epsilon may end
    earlier, by the steps that were lost, and is finished then.

    Args:
        step: last step of the weights.
        account: account of the run, which may have fewer steps than were planned.
        planned: event of all steps of the run.
    """
    if step < account.end:
        return "interrupted"
    limited = account.end < planned.steps and not math.isinf(account.max_epsilon)
    return "budget-spent" if limited and account.kept_to >= account.max_epsilon else "finished"


def counts_score(base: int, begun: int, end: int) -> bool:
    """Return whether the ledger of a part counts its planned score: once its last step began.

    Args:
        base: step after which the part begins.
        begun: last step that may have begun.
        end: step at which the part ends as planned. A part without steps has no score.

    >>> counts_score(0, 9, 10), counts_score(0, 10, 10), counts_score(10, 10, 10)
    (False, True, False)
    """
    return base < end <= begun


def read_ledger(run: Path) -> Account | None:
    """Return the account in a run's ledger; None if it is missing or damaged.

    It has no delta and no target, which are settings. A file whose checksum does not fit is
    damaged: no part of it is used, because it might count less than was spent. None must not be
    understood as "nothing was spent": see :func:`begun_events`.

    Args:
        run: folder of the run.
    """
    try:
        spent = files.checked((run / folder.CHECKPOINTS / FILE).read_bytes(), "spent")
        record = headers.Spent.model_validate_json(json.dumps(spent), strict=True)
        account = Account(
            earlier=tuple(map(done, record.earlier)),
            event=record.event,
            base=record.base,
            begun=record.begun,
            score=record.score,
            ranges=record.histograms,
            seeded=record.seeded,
            secure=record.secure,
        )
        if account.score is not None and counts_score(account.base, account.begun, account.end):
            account.others = (account.score,)
        return account
    except folder.BROKEN:
        return None


def spent_account(run: Path) -> Account | None:
    """Return the account in a run's ledger, at the delta of its settings; None if either is broken.

    It counts steps that were reserved and may not have begun.

    Args:
        run: folder of the run, which need not have a report.
    """
    account = read_ledger(run)
    if account is None:
        return None
    try:
        return replace(account, delta=float(folder.settings(run)["delta"]))
    except folder.BROKEN:
        return None


def begun_events(
    run: Path, planned: tuple[TrainingEvent, ...], *, whole: bool = False
) -> tuple[TrainingEvent, ...]:
    """Return the events of all that may have begun in a folder; () if there are none.

    Args:
        run: the folder, which need not exist.
        planned: events of the run that it is for. A run whose ledger is missing or damaged counts
            as them.
        whole: whether the last part counts with all its planned steps, and a run that has not begun
            as ``planned``.
    """
    account = read_ledger(run)
    if account is not None:
        events = account.all_planned if whole else account.events
        return tuple(filter(attrgetter("steps"), events))
    begun = whole or (run / folder.CHECKPOINTS).exists() or folder.is_configured(run)
    return planned if begun else ()
