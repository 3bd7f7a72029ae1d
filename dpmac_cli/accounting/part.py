"""A training as a part of an account that several trainings use. Imports no torch."""

import math
from dataclasses import dataclass, replace
from typing import Any

from dpmac_cli.accounting.account import RESERVED, Account
from dpmac_cli.accounting.calibration import affordable_steps
from dpmac_cli.accounting.events import TrainingEvent


@dataclass(slots=True, kw_only=True)
class Part(Account):
    """Planned training whose steps begin in another account of the same records.

    Its epsilon is that of everything in that account. Its number is the other account's, so a
    network that carries both counts the events once.

    Attributes:
        shared: the account of the records.
        reserved: last step that has begun there.
    """

    shared: Account
    reserved: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a closed copy without the path, which may be private, as a network carries it."""
        return replace(self.alone(), earlier=self.earlier).__reduce__()

    def reserve(self, steps: int) -> None:
        """Begin steps in the account of the records, which are taken later. See :meth:`begin`.

        Args:
            steps: number of further steps to reserve.

        Raises:
            BudgetError, InputError, OSError: as for :meth:`begin`; then none is reserved.
        """
        self.shared.begin(self.steps(steps))
        self.reserved += steps

    def record_before(self, event: TrainingEvent) -> None:
        """Begin an event in the account of the records; of steps, a hundredth of all at once.

        Epochs of :class:`~dpmac_cli.RandomAllocation` begin as a whole.

        Args:
            event: the event. Steps that are reserved have begun there already.

        Raises:
            BudgetError, InputError, OSError: as for :meth:`begin` of that account; the event must
                not begin.
        """
        if not self.is_of_training(event):
            self.shared.begin(event)
        elif (step := self.begun + event.steps) > self.reserved:
            step += self.event.steps // RESERVED
            if self.event.sampling.once_an_epoch:
                step += -(step - self.base) % self.event.steps_per_epoch
            self.reserve(min(self.end, step) - self.reserved)

    @property
    def own(self) -> tuple[TrainingEvent, ...]:
        """Return all events of the account of the records."""
        return self.shared.own

    @property
    def count(self) -> int:
        """Return the number of steps and other events in the account of the records."""
        return self.shared.count

    @property
    def kept_to(self) -> float:
        """Return the target; infinity without."""
        return math.inf if self.target is None else self.target

    @property
    def on_choices(self) -> tuple[str, ...]:
        """Return what holds for events of the account of the records: see :class:`Account`."""
        return self.shared.on_choices

    def alone(self) -> Account:
        """Return a copy of what has begun, in memory and without earlier accounts."""
        return Account(
            others=self.own,
            delta=self.delta,
            target=self.shared.target,
            order=self.order,
            unit=self.unit,
            secure=self.secure,
            number=self.number,
        )

    def _shorten_to(self, limit: float) -> None:
        """Limit the training to its own budget, and to that of the account of the records."""
        shared, begun = self.shared, self.own
        before = (*self.before, *begun)
        steps = affordable_steps(self.event, self.delta, limit, before, self.cost)
        self.event = self.steps(steps)
        steps = affordable_steps(self.event, self.delta, shared.budget, begun, shared.cost)
        self.event = self.steps(steps)
        shared.affordable = (*begun, self.event)
