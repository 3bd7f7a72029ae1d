"""Runs read back from their files: their events, and epsilon computed again. Loads no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.pricing import Row, price
from dpmac_cli.config import question
from dpmac_cli.errors import InputError
from dpmac_cli.runs import folder, ledger
from dpmac_cli.runs.report_file import read_report

TOLERANCE = 1e-3
#: Flags that make sense beside a run, which brings everything else.
BESIDE_A_RUN = ("delta", "accountant")


@dataclass(frozen=True)
class Recount:
    """Rows for the delta and accountants asked for; epsilon as stored, and as it should be."""

    rows: list[Row]
    stored: float
    again: float

    @property
    def right(self) -> bool:
        """Whether they agree, up to differences between versions of the accountant."""
        return math.isclose(self.again, self.stored, rel_tol=TOLERANCE, abs_tol=1e-9)


def recount(path: Path, given: Mapping[str, str], found: Sequence[str] = ()) -> Recount:
    """Price a run again from its report.

    Args:
        path: a run folder, or a report.
        given: as for :func:`dpmac_cli.config.question.ask`; only :data:`BESIDE_A_RUN` may be given.
        found: faults that were found before.

    Raises:
        InputError: there is no report of ours, or a flag does not fit it.
    """
    foreign = [name for name in given if name not in BESIDE_A_RUN]
    errors = list(found)
    errors += [
        f"--{n} contradicts {path}, which says what was done: leave it out." for n in foreign
    ]
    typed = question.parse({n: given[n] for n in given if n not in foreign}, errors)
    if errors:
        raise InputError(errors)
    report = read_report(path)
    events, own_delta = report.training_events(), report.delta or question.DEFAULTS["delta"]
    delta = typed.get("delta", own_delta)
    rows = [
        replace(price(events, delta, accountant), dataset_size=report.train_size)
        for accountant in question.accountants_for(
            typed.get("accountant", question.DEFAULTS["accountant"])
        )
    ]
    stored = math.inf if report.epsilon is None else report.epsilon
    return Recount(rows, stored, total_epsilon(events, own_delta))


def events_of(run: Path, *, attempts: bool = False) -> tuple[TrainingEvent, ...]:
    """Return the events of a run; as planned, if it was killed.

    ``attempts`` adds the attempts that it replaced in a study. Raises InputError if neither report
    nor ledger can be read.
    """
    found = ledger.read(run)
    if (
        found is not None
        and (run / folder.SUMS).exists()
        and not folder.vouched(run, folder.REPORT)
    ):
        # The report is damaged, or from before the run was resumed.
        return (*(found.abandoned if attempts else ()), *found.earlier, found.event)
    return read_report(run).training_events(attempts=attempts)
