"""Accounts: privacy events on the same records, each counted before it begins. Imports no torch.

Whatever uses private records begins an event here first: a step of a training, a covered score, any
other mechanism. :meth:`Account.begin` counts it, or raises BudgetError if it would exceed the
budget, and then nothing may be read. A copy of an account is the same account.
"""

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

from dpmac_cli.accounting.accountants import COARSE, total_epsilon
from dpmac_cli.accounting.calibration import affordable_steps
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.errors import BudgetError, ModelError

#: Unit of privacy where each row of a batch is one.
RECORD_UNIT = ("training record", "")
#: Planned training of an account that has none.
NO_TRAINING = TrainingEvent(0.0, 0.0, 0)


@dataclass(slots=True, kw_only=True)
class Account:
    """Events on some records that have begun, and the training that is planned.

        account = Account(event=TrainingEvent(0.01, 1.0, 500), delta=1e-5)
        account.begin(account.steps(1))  # before the records of the step are read
        account.epsilon

    Attributes:
        event: the planned training, with all its steps.
        base: step of the training after which this account begins, for a resumed one.
        begun: last step of the training that may have begun.
        score: planned event of the covered test score at the end; None for exact scores.
        ranges: planned events of counts before the first step, which ranges follow from.
        histogram: planned event of the histogram of the training records at the end; None without.
        others: events that have begun, except for steps.
        earlier: accounts of earlier work on the same records, which epsilon covers, as they were.
        delta: delta of the guarantee.
        max_epsilon: epsilon to stop before.
        target: epsilon that was asked for; None without.
        unit: unit of privacy, in words, and what tells the units of records apart.
        seeded: whether a seed was chosen, here or earlier.
        secure: whether all random numbers came from a cipher, here and earlier.
        searched: whether it is of the best trial of a search, which costs more than its events.
        number: random number, the same in all copies.
    """

    event: TrainingEvent = NO_TRAINING
    base: int = 0
    begun: int = 0
    score: TrainingEvent | None = None
    ranges: tuple[TrainingEvent, ...] = ()
    histogram: TrainingEvent | None = None
    others: tuple[TrainingEvent, ...] = ()
    earlier: tuple["Account", ...] = ()
    delta: float = 0.0
    max_epsilon: float = math.inf
    target: float | None = None
    unit: tuple[str, str] = RECORD_UNIT
    seeded: bool = False
    secure: bool = True
    searched: bool = False
    number: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        self.seeded = self.seeded or any(account.seeded for account in self.earlier)
        self.secure = self.secure and all(account.secure for account in self.earlier)

    def __deepcopy__(self, memo: Any) -> "Account":
        """Return this account: a copy of a network may average the weights of later steps."""
        return self

    def begin(self, event: TrainingEvent) -> None:
        """Count an event that is about to use records, or a part of it that is left out.

        Steps of the planned training add up to one event, which counts whole epochs. Any other
        event is composed as it is, and one that is begun twice counts twice.

        Raises:
            BudgetError: it would exceed the budget. It does not count, and must not run.
            OSError: the account is on disk, and it cannot be written there. The same holds.
        """
        self.check(event)
        self.record_before(event)
        if self.is_of_training(event):
            self.begun += event.steps
            return
        planned = self._is_planned(event)
        self.others = (*self.others, event)
        if self.remaining and not planned:
            self._leave_room()

    def check(self, event: TrainingEvent) -> None:
        """Raise BudgetError if an event would exceed the budget.

        The budget already covers the planned steps and what is planned after them. Anything else is
        within ``max_epsilon`` and ``target``, together with what has begun.
        """
        if self.is_of_training(event):
            if event.steps > self.remaining:
                raise BudgetError(
                    f"{event.steps} more steps would exceed the {self.event.steps:,} that the "
                    f"budget allows, of which {self.remaining} are left."
                )
            return
        if self._is_planned(event) or math.isinf(self.budget):
            return
        events = (*self.events, *self._to_come, event)
        if (cost := total_epsilon(events, self.delta)) > self.budget:
            raise BudgetError(
                f"With this event epsilon would be {format_epsilon(cost)}, above {self.budget:g}. "
                "Use more noise, or a larger budget."
            )

    def record_before(self, event: TrainingEvent) -> None:
        """Record an event, which is about to begin, where the account is kept: here in memory."""

    def record(self) -> None:
        """Record exactly what has begun where the account is kept: here in memory."""

    def steps(self, count: int) -> TrainingEvent:
        """Return the event of some steps of the planned training."""
        return replace(self.event, steps=count)

    def is_of_training(self, event: TrainingEvent) -> bool:
        """Return whether an event is steps of the planned training."""
        return self.event != NO_TRAINING and self.steps(event.steps) == event

    @property
    def end(self) -> int:
        """Step of the training at which it ends as planned."""
        return self.base + self.event.steps

    @property
    def remaining(self) -> int:
        """Number of planned steps that have not begun."""
        return self.end - self.begun

    @property
    def limit(self) -> float:
        """Epsilon that the planned steps keep to.

        One that was calibrated for a target is within it as planned, so only a resumed one, which
        also counts the steps that were lost, has to keep to it.
        """
        return min(self.max_epsilon, self.kept_to)

    @property
    def budget(self) -> float:
        """Epsilon that the planned steps keep to once there are events that were not planned."""
        return min(self.max_epsilon, self.target or math.inf)

    @property
    def kept_to(self) -> float:
        """Target that a resumed training keeps to; infinity for others."""
        return self.target if self.earlier and self.target is not None else math.inf

    @property
    def done(self) -> TrainingEvent:
        """Return the event of the steps that have begun."""
        return self.steps(self.begun - self.base)

    @property
    def own(self) -> tuple[TrainingEvent, ...]:
        """Return the events that have begun, without earlier accounts."""
        return tuple(event for event in (self.done, *self.others) if event.steps)

    @property
    def count(self) -> int:
        """Return the number of steps and other events that have begun."""
        return self.begun - self.base + sum(event.steps for event in self.others)

    @property
    def before(self) -> tuple[TrainingEvent, ...]:
        """Return the events of earlier accounts."""
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
    def epsilon(self) -> float:
        """Return the privacy cost of all events that have begun."""
        return total_epsilon(self.events, self.delta)

    def bound(self, step: int) -> float:
        """Return an upper bound of epsilon up to a step of the training, exact for its last one."""
        part = self.steps(step - self.base)
        cost = min(
            total_epsilon(self.planned, self.delta),
            total_epsilon((*self.before, *self.ranges, part), self.delta, widest=COARSE),
        )
        if step < self.end:
            return cost
        cost = total_epsilon(self.planned, self.delta)
        if self.score is not None:
            cost = max(cost, total_epsilon((*self.before, self.score), self.delta))
        return cost

    @property
    def private(self) -> bool:
        """Return whether all events that have begun here have noise."""
        return all(event.noisy for event in self.own)

    @property
    def past(self) -> tuple["Account", ...]:
        """Return the accounts that work to come counts as earlier: these, and this one."""
        return (*self.earlier, self.alone()) if self.count else self.earlier

    def alone(self) -> "Account":
        """Return a copy as it is now, in memory and without earlier accounts."""
        values = {each.name: getattr(self, each.name) for each in fields(Account)}
        return Account(**{**values, "earlier": ()})

    def shorten(self) -> None:
        """Limit the planned training to the steps that the budget allows, with what follows them.

        Raises BudgetError if it allows no further step.
        """
        self._shorten_to(self.limit)

    def leave_out_histogram(self) -> None:
        """Leave out the planned histogram if what was lost has taken its part of the budget."""
        whole = (*self.before, self.event, *self.others, *self._to_come)
        if math.isfinite(self.limit) and total_epsilon(whole, self.delta) > self.limit:
            self.histogram = None

    def _shorten_to(self, limit: float) -> None:
        others = (*self.before, *self.others, *self._to_come)
        self.event = self.steps(affordable_steps(self.event, self.delta, limit, others))

    @property
    def _to_come(self) -> tuple[TrainingEvent, ...]:
        """Return what is planned besides steps and has not begun."""
        planned = (*self.histograms, *(() if self.score is None else (self.score,)))
        return without(planned, self.others)

    @property
    def histograms(self) -> tuple[TrainingEvent, ...]:
        """Return the planned histograms, begun or not."""
        return (*self.ranges, *(() if self.histogram is None else (self.histogram,)))

    def check_counted(self, now: Iterable["Account"]) -> None:
        """Raise ModelError if another account has begun more than this one counts of it."""
        counted = {account.number: account.count for account in self.earlier}
        others = (account for account in now if account.number != self.number)
        if any(account.count > counted.get(account.number, 0) for account in others):
            raise ModelError(
                "The network, or one that it or its loss uses, was trained by another PrivateStep "
                "or make_private since this one was created, so its epsilon does not count those "
                "steps. Create this one again. To train several networks together, make them parts "
                "of one."
            )

    def _is_planned(self, event: TrainingEvent) -> bool:
        """Return whether an event is planned besides steps, and has not begun."""
        return event in self._to_come

    def _leave_room(self) -> None:
        """Leave out planned steps that the budget no longer allows."""
        taken = self.begun - self.base
        try:
            self._shorten_to(self.budget)
        except BudgetError:
            self.event = self.steps(taken)
        self.event = self.steps(max(taken, self.event.steps))


def without(
    events: Iterable[TrainingEvent], others: Iterable[TrainingEvent]
) -> tuple[TrainingEvent, ...]:
    """Return events without others, each of which takes away one of those that equal it."""
    left = list(events)
    for event in others:
        if event in left:
            left.remove(event)
    return tuple(left)


def done(event: TrainingEvent, **values: Any) -> Account:
    """Return an account in which an event has begun, all of it."""
    return Account(event=event, begun=event.steps, **values)


def check_composable(earlier: Sequence[Account], unit: tuple[str, str] = RECORD_UNIT) -> None:
    """Raise ModelError if the cost of earlier accounts cannot be added to that of a new one."""
    if any(not account.private for account in earlier):
        raise ModelError(
            "The network was trained without privacy before (no_dp), so no noise covers what its "
            "weights reveal of those records. Start from weights that are public, or that were "
            "trained privately."
        )
    if any(account.searched for account in earlier):
        raise ModelError(
            "The network is the result of a search (dpmac tune), whose cost cannot be added to "
            "that of a training. Use it as it is, or start from a network that was not trained on "
            "these records."
        )
    others = sorted({account.unit[0] for account in earlier if account.unit != unit})
    if others:
        raise ModelError(
            f"The network was trained privately before, and one {others[0]} was protected. Now it "
            f"is one {unit[0]}, and costs of different units cannot be added. Use the same unit, "
            "or start from a network that was not trained on these records."
        )
