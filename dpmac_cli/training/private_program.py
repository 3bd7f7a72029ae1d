"""Private training of a program: its model, epsilon, statement and notes, whoever makes batches."""

import threading
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.part import Part
from dpmac_cli.accounting.statements import SEED_GIVEN, format_epsilon, statement
from dpmac_cli.before_0_4 import METHODS, SEE
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.settings import Settings
from dpmac_cli.errors import (
    BudgetError,
    ModelError,
    as_keywords,
    counted,
)
from dpmac_cli.models.trial_samples import (
    trained_parts,
)
from dpmac_cli.randomness.keystream import Unshared, make_keys
from dpmac_cli.training.carried_accounts import (
    Parts,
    accounts_of,
    steps_of,
)
from dpmac_cli.training.distributed import check_single_process
from dpmac_cli.training.memory import keep_freed_memory
from dpmac_cli.training.step import Step

#: Private note on weights that were cut.
CUT = (
    "weights returned numbers outside 0 to largest_weight, or NaN, for {} that a step used; they "
    "were cut to that range, and NaN to 0."
)


class PrivateProgram(Unshared):
    """Private training of a network in a program, and its cost with all earlier training.

    The base of :class:`~dpmac_cli.training.private_step.PrivateStep` and of what
    :func:`~dpmac_cli.release.private.make_private` returns. ``len`` is the total number of steps.
    Its keys are secret and random: of every object, and of every state that is loaded. It cannot be
    copied, pickled or used in a forked process.
    """

    __slots__ = (
        *("_account", "_held", "_keys", "_left_out", "_notes", "_on_records", "_plan"),
        *("_one_at_a_time", "_step"),
    )

    def _begin(
        self,
        plan: Plan,
        earlier: tuple[Account, ...],
        notes: tuple[str, ...],
        on_records: tuple[str, ...] = (),
        shared: Account | None = None,
    ) -> None:
        """Plan the steps that the budget allows after earlier training.

        Args:
            plan: settings and event of all steps.
            earlier: accounts of what the network was trained on before.
            notes: messages on the settings.
            on_records: messages on the records, which are private.
            shared: account of the records, in which steps begin; None if a program has none.

        Raises BudgetError if the budget allows no step.
        """
        check_single_process()
        keep_freed_memory()
        self._plan, self._notes, self._on_records = plan, notes, on_records
        before = tuple(account.alone() for account in earlier)
        self._account = account_of(plan, shared, event=plan.event, earlier=before)
        self._account.shorten()
        self._keys = make_keys(None)
        self._left_out = 0  # steps of epochs that were begun and not finished
        self._step: Step | None = None
        self._held: Parts = ()  # of the network, and of others, which a step reads
        self._one_at_a_time = threading.Lock()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on probable mistakes in valid settings, and on how the network is run.

        () if there are none. Those on the network are there once it is validated.
        """
        notes = self._notes
        if self._account.seeded:
            notes = (*notes, SEED_GIVEN)
        return tuple(as_keywords(note) for note in notes)

    @property
    def private_notes(self) -> tuple[str, ...]:
        """Return notes on the records, for whoever holds them. Do not log or publish them.

        They are exact: no noise is added, and epsilon does not cover them. () if there are none.
        """
        notes = self._on_records
        cut = 0 if self._step is None else int(self._step.sums.clipped_sum.cut)
        if cut:
            notes = (*notes, CUT.format(counted(cut, "record")))
        return tuple(as_keywords(note) for note in notes)

    if not TYPE_CHECKING:  # otherwise mypy would accept any name

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, which says where to look for a method of version 0.3."""
            page = f". {SEE}" if name in METHODS else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{page}")

    def __repr__(self) -> str:
        size = None if self._step is None else self._step.sums.size
        parts = trained_parts(self.model, size)[:-1]
        return f"{type(self).__name__}({self.taken} of {len(self)} steps; {parts})"

    def __len__(self) -> int:
        """Return the total number of steps, without those that were left out of an epoch."""
        return self._account.end - self._left_out

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """Return the network. Steps run it in the modes in which it was validated."""

    @property
    def taken(self) -> int:
        """Return the number of steps that were taken, with those of a state that was loaded."""
        return self._account.base if self._step is None else self._step.state.step

    @property
    def begun(self) -> int:
        """Return the number of steps that have begun, also before the last state was loaded.

        It counts those that failed, or were left out of an epoch by :meth:`PrivateStep.loader`, so
        it is at least :attr:`taken`.
        """
        parts = (*self._account.earlier, self._account)
        return steps_of(parts, self._account.series)

    @property
    def plan(self) -> Plan:
        """Return the plan of the training: its settings, and its event with the noise."""
        return self._plan

    @property
    def event(self) -> TrainingEvent:
        """Return the privacy event of all steps that have begun, without earlier training.

        It includes the steps that are left out of an epoch by :meth:`PrivateStep.loader`, and not
        those before a state was loaded.
        """
        return self._account.done

    @property
    def delta(self) -> float:
        """Return delta of the guarantee."""
        return self._plan.settings.delta

    @property
    def sigma(self) -> float:
        """Return the noise multiplier: the deviation of the noise in a sum of sensitivity 1."""
        return self._plan.event.noise_multiplier

    @property
    def epsilon(self) -> float:
        """Return the privacy cost of all steps that have begun, and of earlier training.

        It is at :attr:`delta`. With an account of the records, it is that of all that the account
        counts.
        """
        return self._account.epsilon

    @property
    def statement(self) -> str:
        """Return the meaning of the guarantee, also before anything has begun.

        It is text to publish, with :attr:`epsilon` and :attr:`delta`.
        """
        account = self._account
        guarantee = statement(
            account.epsilon,
            account.delta,
            account.events,
            self._plan.unit,
            seeded=account.seeded,
        )
        return " ".join((guarantee, *account.on_choices))

    @property
    def lr(self) -> float:
        """Learning rate of the next step, before warm-up and schedule; set it to change it.

        It has no privacy cost if it depends only on public values, including test scores. Setting
        it raises InputError for a number that is no learning rate; 0 is accepted.
        """
        return self._plan.optimizer.lr

    @lr.setter
    def lr(self, rate: float) -> None:
        # Raises InputError, but not for 0, where a schedule ends.
        Settings.model_validate({"lr": rate or None})
        optimizer = self._plan.optimizer.with_lr(rate)
        settings = self._plan.settings.replace(lr=optimizer.lr)
        self._plan = replace(self._plan, optimizer=optimizer, settings=settings)
        if self._step is not None:
            self._step.plan = self._plan

    def _check_budget(self) -> None:
        """Raise BudgetError if all steps have begun; InputError in another or several processes.

        Raises ModelError if the network, or one that a step reads, had steps that are not counted.
        """
        self.check_process()
        check_single_process()
        check_counted(self._account, accounts_of(self._held))
        if not self._account.remaining:
            raise BudgetError(
                f"All {len(self)} steps have been taken, and epsilon is "
                f"{format_epsilon(self.epsilon)}. To train longer, start from a new network with "
                "more epochs, or train this one again in the same way, which also counts these "
                "steps."
            )


def check_counted(account: Account, now: Iterable[Account]) -> None:
    """Reject work on a network whose other accounts have begun more than an account counts.

    Args:
        account: account of the work.
        now: accounts that the network carries as it is; ``account`` among them is left out.

    Raises:
        ModelError: one has begun more than ``account.earlier`` has of it.
    """
    counted = {each.number: each.count for each in account.earlier}
    for carried in now:
        if carried.number == account.number:
            continue
        if carried.count > counted.get(carried.number, 0):
            raise ModelError(
                "The network, or one that it or its loss uses, was trained by another "
                "PrivateStep or make_private since this one was created, so its epsilon does "
                "not count those steps. Create this one again. To train several networks "
                "together, make them parts of one."
            )


def account_of(
    plan: Plan, shared: Account | None, *, resumed: bool = False, **values: Any
) -> Account:
    """Return the account of a training, whose events begin in that of the records, if any.

    Args:
        plan: plan of the training.
        shared: account of the records; None if a program has none.
        resumed: whether the training goes on from a state, and keeps to its target from there on.
        values: further fields of :class:`~dpmac_cli.accounting.account.Account`, such as ``event``
            and ``earlier``, which replace those of the plan.
    """
    values = {**plan.of_account, **values}
    if resumed or shared is not None:
        values["target"] = plan.settings.epsilon
    if shared is None:
        return Account(**values)
    values |= {"order": shared.order, "number": shared.number}
    return Part(shared=shared, reserved=values.get("begun", 0), **values)
