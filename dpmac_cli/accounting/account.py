"""Accounts: privacy events on the same records, each counted before it begins. Imports no torch.

Whatever uses private records begins an event here first: a step of a training, a covered score, any
other mechanism. :meth:`Account.begin` counts it, or raises BudgetError if it would exceed the
budget, and then nothing may be read. A copy of an account is the same account.

Several trainings and processes share one on disk: :meth:`Account.create`, :meth:`Account.open`.
"""

import math
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

from dpmac_cli.accounting import accountants
from dpmac_cli.accounting.account_file import AccountFile, locked, read_account, read_again
from dpmac_cli.accounting.accountants import COARSE, epsilon_at_order, order_for, total_epsilon
from dpmac_cli.accounting.calibration import affordable_steps
from dpmac_cli.accounting.events import TrainingEvent, covers, merged, without
from dpmac_cli.accounting.planned_training import PlannedTraining
from dpmac_cli.accounting.statements import RECORD, UNIT, format_epsilon, statement
from dpmac_cli.errors import BudgetError, InputError

#: Unit of privacy where each row of a batch is one.
RECORD_UNIT = ("training record", "")
#: Reservations of a training on disk, because syncing takes time. Steps of one that are not taken
#: are counted if the process is killed.
RESERVED = 100
#: One thread at a time begins an event.
_BEGINNING = threading.RLock()
#: Sentence on an account whose events are chosen after results of earlier ones were seen.
ADAPTIVE = (
    "Trainings may have been chosen after earlier results were seen, so the guarantee is the "
    "account's target, epsilon {:g}, of which this much is used."
)
#: Message for an account in memory that is not in the process that created it.
CLOSED = (
    "This account was copied into another process, which the first one does not see: both would "
    "spend the same budget. Keep it on disk, with Account.create(path, ...): all processes that "
    "open it share it."
)


@dataclass(slots=True, kw_only=True)
class Account(PlannedTraining):
    """Events on some records that have begun, and the training that is planned.

        account = Account(event=TrainingEvent(0.01, 1.0, 500), delta=1e-5)
        account.begin(account.steps(1))  # before the records of the step are read
        account.epsilon

    What the training plans is in :class:`.PlannedTraining`.

    Attributes:
        others: events that have begun, except for steps.
        earlier: accounts of earlier work on the same records, which epsilon covers, as they were.
        delta: delta of the guarantee.
        max_epsilon: epsilon to stop before.
        target: epsilon that was asked for; None without.
        unit: unit of privacy, in words, and what tells the units of records apart.
        seeded: whether a seed was chosen, here or earlier.
        secure: whether all random numbers came from a cipher, here and earlier.
        searched: whether it is of the best trial of a search, which costs more than its events.
        order: Renyi order, fixed beforehand, at which events compose that a program chooses after
            it has seen the results of earlier ones; None for events that are fixed beforehand.
        path: file of the account; None in memory.
        process: process that may begin events of an account in memory, by its id; 0 for a copy that
            was pickled. In any other one, such as a fork, it begins none.
        number: random number, the same in all copies.
        series: random number, the same in all parts of a training that was resumed.
        affordable: events that are within the budget together, as was computed before.
    """

    others: tuple[TrainingEvent, ...] = ()
    earlier: tuple["Account", ...] = ()
    delta: float = 0.0
    max_epsilon: float = math.inf
    target: float | None = None
    unit: tuple[str, str] = RECORD_UNIT
    seeded: bool = False
    secure: bool = True
    searched: bool = False
    order: float | None = None
    path: Path | None = None
    process: int = field(default_factory=lambda: os.getpid(), repr=False)  # noqa: PLW0108  (late)
    number: str = field(default_factory=lambda: secrets.token_hex(16))
    series: str = field(default_factory=lambda: secrets.token_hex(16))
    affordable: tuple[TrainingEvent, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        self.seeded = self.seeded or any(account.seeded for account in self.earlier)
        self.secure = self.secure and all(account.secure for account in self.earlier)

    def __copy__(self) -> Self:
        """Return this account."""
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        """Return this account: a copy of a network may average the weights of later steps."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path of an account on disk, or a copy of one in memory that is closed."""
        if self.path is not None:
            return reopened, (str(self.path), self.number, self.others)
        return partial(Account, **{**self._values(), "process": 0}), ()

    @staticmethod
    def create(
        path: str | Path,
        *,
        delta: float,
        epsilon: float | None = None,
        unit: tuple[str, str] = RECORD_UNIT,
        adaptive: bool = False,
    ) -> "Account":
        """Create an account on disk for records of which nothing was released yet.

        Every event is on disk before it begins. Several programs and processes can share it.

        Args:
            path: file to create, which only its owner can read.
            delta: delta of the guarantee.
            epsilon: epsilon that all events together keep to; None to count without a limit.
            unit: unit of privacy, as in :class:`Account`.
            adaptive: whether events, such as the settings of a training, may be chosen after
                results of earlier ones were seen. They then compose by Renyi DP at an order that is
                fixed here, which allows fewer steps, and the guarantee is ``epsilon``, used up or
                not. Otherwise they must be fixed beforehand, except for where they end.

        Raises:
            InputError: the file exists, or a number is not possible.
            OSError: the file cannot be written.
        """
        accountants.check_arguments((), delta, 1.0 if epsilon is None else epsilon)
        if delta in (0, 1) or epsilon == math.inf:
            raise InputError("delta must be above 0 and below 1, and epsilon finite.")
        if adaptive and epsilon is None:
            raise InputError("adaptive=True needs an epsilon, which is fixed beforehand.")
        order = order_for(epsilon, delta) if adaptive and epsilon is not None else None
        file = Path(path).resolve()
        account = Account(path=file, delta=delta, target=epsilon, unit=unit, order=order)
        with locked(file):
            if os.path.lexists(file):
                raise InputError(
                    f"{path} exists. To count further events in it, use Account.open(...). An "
                    "account must not be replaced: what its records have lost would be forgotten."
                )
            account._store(file, ())
        return account

    @staticmethod
    def open(path: str | Path) -> "Account":
        """Open an account of :meth:`create`, in this process or in another one.

        The file is not locked: every event reads it again, see :meth:`begin`.

        Args:
            path: the file.

        Raises:
            InputError: the file is missing, damaged, or none of an account.
        """
        file = Path(path).resolve()
        return _kept(file, read_account(file))

    def begin(self, event: TrainingEvent, unit: tuple[str, str] | None = None) -> None:
        """Count an event before it uses records. Steps that a training leaves out count, too.

        Steps of the planned training add up to one event, which counts whole epochs. Any other
        event is composed as it is, and one that is begun twice counts twice. One that was not
        planned takes its cost from the steps that are left, of which there are fewer then. An
        account on disk may be of several splits of records: there, costs of both parts add up.

        Args:
            event: the event.
            unit: the unit that it protects, which the account has from its first event on; by
                default that of the account.

        Raises:
            BudgetError: it would exceed the budget.
            InputError: the account is in memory, of another process; or its file is missing,
                damaged, another one's or older than it was; or it protects another unit.
            OSError: the account is on disk, and it cannot be written there. Whatever is raised, the
                event does not count, and must not run.
        """
        with self._held():
            event = event if self.path is None else replace(event, records="training")
            self.check(event)
            self._protect(self.unit if unit is None else unit)
            self.record_before(event)
            if self.is_of_training(event):
                self.begun += event.steps
                return
            planned = event in self._to_come
            self.others = self._others_with(event)
            if self.remaining and not planned:
                self._leave_room()

    def _protect(self, unit: tuple[str, str]) -> None:
        """Protect a unit from the first event on. Raises InputError if it is another one."""
        if unit != self.unit and self.count:
            raise InputError(
                f"The account protects one {self.unit[0]}, and this is for one {unit[0]}: costs of "
                "different units cannot be added. Use the same unit, or an account of its own for "
                "other records."
            )
        self.unit = unit

    def check(self, event: TrainingEvent) -> None:
        """Reject an event that would exceed the budget. Nothing is counted.

        The budget already covers the planned steps and what is planned after them. Anything else is
        within ``max_epsilon`` and ``target``, together with what has begun.

        Args:
            event: the event, or some steps of the planned training.

        Raises:
            BudgetError: it would exceed the budget.
        """
        if self.is_of_training(event):
            if event.steps > self.remaining:
                raise BudgetError(
                    f"{event.steps} more steps would exceed the {self.event.steps:,} that the "
                    f"budget allows, of which {self.remaining} are left."
                )
            return
        if event in self._to_come or math.isinf(self.budget):
            return
        events = (*self.before, *self.own, *self._to_come, event)
        if covers(self.affordable, events):
            return
        cost = self.cost(events)
        if cost > self.budget:
            raise BudgetError(
                f"With this event epsilon would be {format_epsilon(cost)}, above {self.budget:g}. "
                "Use more noise, or a larger budget."
            )
        self.affordable = events

    def cost(self, events: tuple[TrainingEvent, ...]) -> float:
        """Return epsilon of some events on these records, at the account's delta.

        With an order, here or earlier, events compose at the smallest of the orders.

        Args:
            events: events in any order, which need not have begun; () costs nothing.

        Raises:
            InputError: a noise multiplier is not supported.
        """
        orders = list[float]()
        for account in (*self.earlier, self):
            if account.order is not None:
                orders.append(account.order)
        if not orders:
            return total_epsilon(events, self.delta)
        return epsilon_at_order(events, self.delta, min(orders))

    def record_before(self, event: TrainingEvent) -> None:
        """Record an event, which is about to begin, where the account is kept.

        :meth:`begin` calls it once the event is within the budget. In memory it does nothing.

        Args:
            event: the event.

        Raises:
            OSError: it cannot be written, so the event must not begin.
        """
        if self.path is not None:
            self._store(self.path, self._others_with(event))

    def record(self) -> None:
        """Record exactly what has begun where the account is kept: here in memory."""

    def refresh(self) -> None:
        """Read what other processes have begun in an account on disk; in memory, do nothing.

        Raises:
            InputError: the file is missing, damaged, another one's, or older than it was.
        """
        if self.path is None:
            return
        now = read_again(self.path, self.number, self.others)
        self.others, self.unit = now.events, now.unit

    def _others_with(self, event: TrainingEvent) -> tuple[TrainingEvent, ...]:
        others = (*self.others, event)
        return others if self.path is None else merged(others)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold an account while an event begins. Raises InputError if that is not possible."""
        if self.path is None and self.process != os.getpid():
            raise InputError(CLOSED)
        with _BEGINNING:
            if self.path is None:
                yield
                return
            with locked(self.path):
                self.refresh()
                yield

    def _store(self, path: Path, events: tuple[TrainingEvent, ...]) -> None:
        """Write the account with some events to its file, with sync. Raises OSError."""
        AccountFile(
            number=self.number,
            unit=self.unit,
            delta=self.delta,
            target=self.target,
            order=self.order,
            events=events,
        ).write(path)

    @property
    def limit(self) -> float:
        """Epsilon that the planned steps keep to; infinity without a limit.

        One that was calibrated for a target is within it as planned, so only a resumed one, which
        also counts the steps that were lost, has to keep to it.
        """
        return min(self.max_epsilon, self.kept_to)

    @property
    def budget(self) -> float:
        """Epsilon that the planned steps keep to once there are events that were not planned.

        Infinity without ``max_epsilon`` and without a target.
        """
        return min(self.max_epsilon, self.target or math.inf)

    @property
    def kept_to(self) -> float:
        """Target that a resumed training keeps to; infinity for others."""
        return self.target if self.earlier and self.target is not None else math.inf

    @property
    def own(self) -> tuple[TrainingEvent, ...]:
        """Return the events that have begun, without earlier accounts; () if there are none.

        An account on disk is read again for it, which raises InputError if that is not possible.
        """
        self.refresh()
        return tuple(event for event in (self.done, *self.others) if event.steps)

    @property
    def count(self) -> int:
        """Return the number of steps and other events that have begun."""
        return self.begun - self.base + sum(event.steps for event in self.others)

    @property
    def before(self) -> tuple[TrainingEvent, ...]:
        """Return the events of earlier accounts; () without."""
        return tuple(chain.from_iterable(account.own for account in self.earlier))

    @property
    def events(self) -> tuple[TrainingEvent, ...]:
        """Return all events that have begun; without any, the training with no step."""
        return (*self.before, *self.own) or (self.done,)

    @property
    def planned(self) -> tuple[TrainingEvent, ...]:
        """Return all events on training records, with all that is planned."""
        return (*self.before, self.event, *self.histograms)

    @property
    def all_planned(self) -> tuple[TrainingEvent, ...]:
        """Return all planned events, also that of a covered score on test records."""
        return (*self.before, self.event, *self.besides)

    @property
    def epsilon(self) -> float:
        """Return the privacy cost of all events that have begun, earlier accounts included.

        Infinity if one has no noise, and 0 if nothing has begun.
        """
        return self.cost(self.events)

    @property
    def statement(self) -> str:
        """Return the meaning of the guarantee of all events that have begun.

        It is text to publish, in sentences.
        """
        events = (*self.before, *self.own)
        if not events:
            return "Nothing was released of these records: epsilon is 0."
        unit = RECORD if self.unit == RECORD_UNIT else UNIT
        guarantee = statement(self.cost(events), self.delta, events, unit, seeded=self.seeded)
        return " ".join((guarantee, *self.on_choices))

    @property
    def on_choices(self) -> tuple[str, ...]:
        """Return sentences on events that were chosen after results of earlier ones were seen.

        () for an account whose events are fixed beforehand.
        """
        return () if self.order is None else (ADAPTIVE.format(self.target),)

    def bound(self, step: int) -> float:
        """Return an upper bound of epsilon up to a step of the training, exact for its last one.

        It is for a display of progress: computed on a coarse grid, at most the cost of all that is
        planned.

        Args:
            step: step from ``base`` to ``end``.
        """
        planned = total_epsilon(self.planned, self.delta)
        if step < self.end:
            part = self.steps(step - self.base)
            begun = (*self.before, *self.ranges, part)
            return min(planned, total_epsilon(begun, self.delta, widest=COARSE))
        if self.score is None:
            return planned
        return max(planned, total_epsilon((*self.before, self.score), self.delta))

    @property
    def private(self) -> bool:
        """Return whether all events that have begun here have noise."""
        return all(event.noisy for event in self.own)

    @property
    def past(self) -> tuple["Account", ...]:
        """Return the accounts that work to come counts as earlier: these, and this one."""
        return (*self.earlier, self.alone()) if self.count else self.earlier

    def alone(self) -> "Account":
        """Return a copy as it is now, in memory and without earlier accounts.

        It has the same number, so a network that carries both counts the events once.
        """
        return Account(**{**self._values(), "earlier": (), "path": None, "affordable": ()})

    def _values(self) -> dict[str, Any]:
        """Return the fields that every account has, by name."""
        return {each.name: getattr(self, each.name) for each in fields(Account)}

    def shorten(self) -> None:
        """Limit the planned training to the steps that the budget allows, with what follows them.

        Raises:
            BudgetError: it allows no further step.
        """
        self._shorten_to(self.limit)

    def _shorten_to(self, limit: float) -> None:
        others = (*self.before, *self.others, *self._to_come)
        count = affordable_steps(self.event, self.delta, limit, others, self.cost)
        self.event = self.steps(count)

    @property
    def _to_come(self) -> tuple[TrainingEvent, ...]:
        """Return what is planned besides steps and has not begun."""
        return without(self.besides, self.others)

    def _leave_room(self) -> None:
        """Leave out planned steps that the budget no longer allows."""
        taken = self.begun - self.base
        try:
            self._shorten_to(self.budget)
        except BudgetError:
            self.event = self.steps(taken)
        self.event = self.steps(max(taken, self.event.steps))


def _kept(path: Path, content: AccountFile) -> Account:
    """Return the account that is in a file."""
    return Account(
        path=path,
        number=content.number,
        unit=content.unit,
        delta=content.delta,
        target=content.target,
        order=content.order,
        others=content.events,
    )


def reopened(path: str, number: str, others: tuple[TrainingEvent, ...]) -> Account:
    """Return an account on disk in another process, as pickle does.

    Args:
        path: the file.
        number: number of the account.
        others: events that it counted, at least, when it was pickled.

    Raises:
        InputError: the file is missing, damaged, another one's, or counts less.
    """
    return _kept(Path(path), read_again(Path(path), number, others))
