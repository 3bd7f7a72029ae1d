"""A budget of several fits on the same records, which no copy of an estimator can spend twice."""

import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpmac_cli.accounting.account import RECORD_UNIT, Account
from dpmac_cli.accounting.accountants import order_for
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.errors import BudgetError, InputError, raise_errors

CLOSED = (
    "This is a copy of a budget in another process, and what it books would not count in the "
    "first one. Keep the budget in a file, Budget(epsilon, path=...), which processes share; or "
    "train in one process (n_jobs=1, or threads)."
)


class Budget:
    """Epsilon that all fits on the same records may cost together.

    Every fit is booked before its first step, and nothing is given back, also if it fails. A copy
    of a budget, as by ``clone`` or in a grid search, is the budget itself.

    ::

        budget = Budget(epsilon=3)
        model = PrivateClassifier(epsilon=1, bounds=(0, 16), budget=budget)
        search = GridSearchCV(model, grid, cv=PredefinedSplit(folds))

    The fold of a record must depend on it alone, as a hash of its name does. With folds by the
    number of its row, as of ``cv=5``, or by all labels, others change folds if one is removed, and
    :attr:`spent` does not cover that.

    A budget belongs to records: pass the same one to everything that is fitted on them. All fits
    protect the unit of the first one: a record, or what ``fit(..., unit=)`` tells apart. In memory
    a budget belongs to its process, and arrives closed in others; in a file, processes share it.

    Args:
        epsilon, delta: the largest privacy cost of all fits together.
        path: file of the budget, which is created if there is none; None to keep it in memory.
        adaptive: whether fits may be chosen after results of earlier ones were seen. Their costs
            then add up to more, and the guarantee is ``epsilon``, used up or not. Otherwise they
            must be fixed beforehand, as those of a grid are.

    Raises:
        InputError: a number is not possible, or the file has another budget or is damaged.
    """

    def __init__(
        self,
        epsilon: float,
        delta: float = 1e-5,
        path: Path | str | None = None,
        *,
        adaptive: bool = False,
    ) -> None:
        raise_errors(_faults(epsilon, delta))
        self.epsilon, self.delta, self.adaptive = epsilon, delta, adaptive
        self.path = None if path is None else Path(path).absolute()
        self._account = self._opened()
        self._lock = threading.Lock()

    def _opened(self) -> Account:
        """Return the account of the budget, which is created if it is not in a file yet."""
        if self.path is None:
            order = order_for(self.epsilon, self.delta) if self.adaptive else None
            return Account(delta=self.delta, target=self.epsilon, order=order)
        chosen: dict[str, Any] = {
            "delta": self.delta,
            "epsilon": self.epsilon,
            "adaptive": self.adaptive,
        }
        if not self.path.exists():
            return Account.create(self.path, **chosen)
        account = Account.open(self.path)
        adaptive = account.order is not None
        stored = {"delta": account.delta, "epsilon": account.target, "adaptive": adaptive}
        if stored != chosen:
            raise InputError(
                f"{self.path} has another budget: {stored}, not {chosen}. Use the numbers of the "
                "file."
            )
        return account

    def __repr__(self) -> str:
        file = "" if self.path is None else f", path='{self.path}'"
        return f"Budget(epsilon={self.epsilon:g}, delta={self.delta:g}{file})"

    def __sklearn_clone__(self) -> "Budget":
        """Return this budget: a clone of an estimator spends it, too."""
        return self

    def __copy__(self) -> "Budget":
        return self

    def __deepcopy__(self, memo: Any) -> "Budget":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the file of a budget; one in memory becomes a closed one elsewhere."""
        account, numbers = self._account, (self.epsilon, self.delta, self.adaptive)
        return _unpickled, (numbers, self.path, account.number, account.others)

    @property
    def account(self) -> Account:
        """Return the account that all fits are booked in."""
        return self._account

    @property
    def events(self) -> tuple[TrainingEvent, ...]:
        """Return the events of all fits so far; equal ones may be one event of all their steps.

        Raises InputError if the budget is in a file that is missing, damaged or an older copy.
        """
        return self._account.own

    @property
    def spent(self) -> float:
        """Return the privacy cost of all fits so far; raises like :attr:`events`."""
        return self._account.cost(self.events) if self.events else 0.0

    def begin(self, events: Sequence[TrainingEvent], unit: tuple[str, str] = RECORD_UNIT) -> None:
        """Book the events of a fit, before it reads records for its first step.

        Args:
            events: the events.
            unit: unit of privacy that the fit protects, as in :class:`~dpmac_cli.Account`.

        Raises:
            BudgetError: they would exceed the budget, or it is in the memory of another process.
            InputError: its file is missing or damaged, or is an older copy; or earlier fits protect
                another unit.
        """
        if self.path is None and os.getpid() != self._account.process:  # a fork, or unpickled
            raise BudgetError(CLOSED)
        with self._lock:
            cost = self._account.cost((*self.events, *events))
            if cost > self.epsilon:
                raise BudgetError(
                    f"With this fit epsilon would be {format_epsilon(cost)}, above the budget of "
                    f"{self.epsilon:g}, of which {format_epsilon(self.spent)} is spent. Nothing "
                    "was trained."
                )
            for event in events:
                self._account.begin(event, unit)


def _faults(epsilon: object, delta: object) -> Iterator[str]:
    """Yield the faults of the numbers of a budget."""
    if not (isinstance(epsilon, int | float) and 0 < epsilon < math.inf):
        yield f"epsilon={epsilon!r} must be a positive number, as in Budget(epsilon=3)."
    if not (isinstance(delta, int | float) and 0 < delta < 1):
        yield f"delta={delta!r} must be a number between 0 and 1, as in Budget(3, delta=1e-5)."


def _unpickled(
    numbers: tuple[float, float, bool],
    path: Path | None,
    number: str,
    begun: tuple[TrainingEvent, ...],
) -> Budget:
    """Return a budget that another process has pickled.

    One in a file begins events if the file is there, and counts at least what it did. One in
    memory is closed.

    Args:
        numbers: epsilon, delta and whether fits are adaptive.
        path: file of the budget; None if it was in memory.
        number: number of its account, which the file must have.
        begun: events that had begun.
    """
    epsilon, delta, adaptive = numbers
    budget = Budget(epsilon, delta, adaptive=adaptive)
    budget.path = path
    budget._account = replace(budget._account, path=path, number=number, others=begun, process=0)
    return budget
