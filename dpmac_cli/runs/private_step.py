"""Train any network with any loss privately, on the batches of a program."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import affordable_steps
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.sampling import BatchSampling, OwnLoader
from dpmac_cli.accounting.statements import format_epsilon, statement
from dpmac_cli.config.plan import PrivacyPlan
from dpmac_cli.config.resolve import resolve_batches
from dpmac_cli.config.settings import Settings
from dpmac_cli.config.sources import by_flag, by_setting
from dpmac_cli.dp.clipping.batches import Batch, Structure, check_rows, samples_in
from dpmac_cli.dp.rules import Rule
from dpmac_cli.errors import BudgetError, InputError
from dpmac_cli.models.trial import BatchLoss, Objective
from dpmac_cli.randomness.keystream import KEY_BYTES, Keys, make_keys
from dpmac_cli.randomness.sampling import Indices, Sampler
from dpmac_cli.runs import step_state
from dpmac_cli.runs.fixed_settings import FixedSettings
from dpmac_cli.runs.step_arguments import (
    RECORD_UNIT,
    check_arguments,
    check_number,
    check_size,
    checked_example,
    device_of,
    settings_of,
)
from dpmac_cli.runs.step_engine import StepEngine, build_engine
from dpmac_cli.training.lineage import Training, attach, carried_by, check_composable, check_counted
from dpmac_cli.training.loading import (
    NOT_DRAWN,
    Collate,
    Drawn,
    KeyedLoader,
    OneByOne,
    collate_of,
    first_row,
    records_fingerprint,
)


class PrivateStep(FixedSettings):
    """Private training step of a network on the batches of a program.

        step = PrivateStep(model, loss, sampling=Poisson(n=len(data), batch_size=256), epsilon=3)
        for batch in step.loader(data):
            step(batch)

    A batch is a tensor, or dicts, lists and tuples of tensors, with one row per record. Batches
    belong to private records: showing them, or their losses, would break the guarantee.

    Args:
        model: the network, on the device to train on. It is trained in place: its parameters become
            views of one vector.
        loss: ``loss(model, batch)`` returns one loss per record, a tensor of shape (records,). The
            loss of a record must not depend on the others, which is validated.
        sampling: how batches are drawn, such as :class:`~dpmac_cli.Poisson`; or
            :class:`~dpmac_cli.OwnLoader`, if they are not those of :meth:`loader`.
        example: a public batch of at least one row, with the shapes and types of the records. Its
            integers are used to validate the network. By default they are 0 and 1, and the shapes
            those of the first record.
        rule: update rule that replaces the optimizer's.
        keywords: settings of docs/configuration.md by name, such as ``epsilon=3, epochs=10``.

    Raises:
        InputError: settings cannot be used; lists every fault found.
        BudgetError: no noise meets the target epsilon, or ``max_epsilon`` allows no step.
        ModelError: the network or the loss cannot be clipped, or its earlier training cannot be
            added. If there is no ``example``, the first batch is awaited.
    """

    _CREATED_BY = "PrivateStep(model, loss, ...)"

    def __init__(
        self,
        model: nn.Module,
        loss: BatchLoss,
        *,
        sampling: BatchSampling | OwnLoader,
        example: Batch | None = None,
        rule: Rule | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        check_arguments(model, loss, sampling, keywords)
        self._model, self._loss, self._sampling, self._rule = model, loss, sampling, rule
        self._earlier = carried_by(model, loss)
        check_composable(self._earlier, RECORD_UNIT)
        counted = tuple(training.done for training in self._earlier)
        settings = settings_of(model, sampling, keywords)
        plan, self._notes = resolve_batches(sampling.n, settings, counted)
        # Nothing is scored or published.
        self._plan = replace(plan, recipe=replace(plan.recipe, ema=0.0))
        privacy = self._plan.privacy
        budget = (privacy.delta, privacy.max_epsilon, counted)
        self._steps = affordable_steps(privacy.event, *budget)
        self._keys = make_keys(self._plan.run.seed, part=len(self._earlier))
        self._drawn: Drawn | None = None
        self._engine: StepEngine | None = None
        self._records, self._program = "", dict[str, str]()  # of the dataset, and of the code
        if example is not None:
            self._prepare(Structure(checked_example(example, device_of(model)), keep=True))

    @property
    def model(self) -> nn.Module:
        """Return the network. Every step sets it to training mode."""
        return self._model

    @property
    def privacy(self) -> PrivacyPlan:
        """Return the plan of the privacy cost: event, delta, and ``max_epsilon``."""
        return self._plan.privacy

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on probable mistakes in valid settings, and on how the network is run."""
        return self._notes

    def __len__(self) -> int:
        """Return the total number of steps."""
        return self._steps

    @property
    def taken(self) -> int:
        """Return the number of steps that were taken."""
        return 0 if self._engine is None else self._engine.descent.state.step

    @property
    def event(self) -> TrainingEvent:
        """Return the privacy event of all steps that have begun."""
        return self.privacy.event_of(self._begun)

    @property
    def delta(self) -> float:
        """Return delta of the guarantee."""
        return self.privacy.delta

    @property
    def sigma(self) -> float:
        """Return the noise multiplier."""
        return self.privacy.sigma

    @property
    def epsilon(self) -> float:
        """Return the privacy cost of all steps that have begun, and of earlier training."""
        return total_epsilon(self._events, self.privacy.delta)

    @property
    def statement(self) -> str:
        """Return the meaning of the guarantee, and who is responsible for the sampling."""
        said = statement(self.epsilon, self.privacy.delta, self._events)
        return f"{said}{self._sampling.caveat}"

    @property
    def lr(self) -> float:
        """Learning rate of the next step, before warm-up and schedule; set it to change it.

        It has no privacy cost if it depends only on public values.
        """
        return self._plan.optimizer.hyper.lr

    @lr.setter
    def lr(self, rate: float) -> None:
        Settings(lr=rate)  # raises InputError
        optimizer = self._plan.optimizer.with_lr(rate)
        self._plan = replace(self._plan, optimizer=optimizer)
        if self._engine is not None:
            descent = self._engine.descent
            descent.algorithm = replace(descent.algorithm, hyper=optimizer.hyper)

    def loader(
        self, dataset: Any, collate_fn: Collate | None = None, *, workers: int = 0
    ) -> Iterator[Batch]:
        """Yield the batches of the remaining steps, drawn as their privacy cost assumes.

        A batch may have any number of rows, also none. Take a step with each, in order. Records are
        read when they are drawn, one by one, so that none changes the row of another.

        Args:
            dataset: map-style dataset, such as a ``torch.utils.data.Dataset``, of n records. A
                random transform is repeated exactly when a step is.
            collate_fn: turns a list of records, here always of one, into a batch; torch's
                ``default_collate`` by default. All records must have the same shape.
            workers: number of processes that read records.

        Raises:
            InputError: the dataset has another number of records than n, or one cannot be used.
            ModelError: see :class:`PrivateStep`.
        """
        if isinstance(self._sampling, OwnLoader):
            raise InputError(
                "This PrivateStep was told that your own loader draws the batches. Call it with "
                "them, or use sampling=Poisson(...) to let dpmac draw them."
            )
        check_size(size := len(dataset), self._sampling)
        records = OneByOne(dataset, collate_of(collate_fn), self._keys.layers)
        row = first_row(records)
        known = records_fingerprint(records, size)
        if self._records not in ("", known):
            raise InputError(
                "The dataset is not the one that this training began with, whose noise would be "
                "used again for other records. Start from a new PrivateStep, whose epsilon also "
                "counts the steps so far."
            )
        self._records = known
        engine = self._engine or self._prepare(Structure.of(row).to(device_of(self._model)))
        return self._batches(KeyedLoader(records, self._draws(), engine.structure, workers))

    def _draws(self) -> Sampler:
        assert isinstance(self._sampling, BatchSampling)  # noqa: S101
        return self._sampling.draws(self._keys.sampler, secure=self._plan.run.secure)

    def _batches(self, loader: KeyedLoader) -> Iterator[Batch]:
        for drawn in loader.batches(self.taken + 1, self._steps):
            self._drawn = drawn
            yield drawn.batch

    def __call__(self, batch: Batch) -> int:
        """Clip, add noise and update the weights; return the step number.

        Args:
            batch: a batch of :meth:`loader`, unchanged; or with :class:`~dpmac_cli.OwnLoader`, any
                batch of the same structure.

        Raises:
            BudgetError: all steps that the privacy budget covers have begun.
            DivergedError: a weight is no longer finite; checked once per epoch.
            InputError: the batch is not the one that was drawn for this step.
            ModelError: the network is no longer the one that was validated, or cannot be clipped
                on these records.
            RunError: memory ran out with a single record, or the device failed.
        """
        if self._begun >= self._steps:
            raise BudgetError(
                f"All {self._steps} steps have been taken, and epsilon is "
                f"{format_epsilon(self.epsilon)}. To train longer, start from a new PrivateStep "
                "on this network, which also counts these steps."
            )
        records, rows = self._checked(batch)
        engine = self._engine or self._prepare(Structure.of(rows))
        number = engine.step(rows, records)
        self._drawn = None
        return number

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next steps follow from, for ``torch.save``.

        It holds secret keys: who has it can remove the noise. Keep it where the records are. Frozen
        parameters and buffers are not included.

        Raises InputError if no step was taken yet.
        """
        if self._engine is None:
            raise InputError("There is no state before the first step. Save it after a step.")
        step_state.check_readable(self._program)
        return {
            **step_state.saved_of(self._model, self._engine),
            "begun": self._begun,
            "earlier": [training.as_json() for training in self._earlier],
            "settings": by_flag(self._plan.recorded),
            "sampling": repr(self._sampling),
            "lr": self.lr,
            "steps": self._steps,
            "program": self._program,
            "records": self._records,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue a training exactly: further steps equal those of the program that saved it.

        The same noise is used again, and where it is added to two different sums, their difference
        reveals records without any noise. So software, settings, and the code and values of
        network, loss and rule are compared. **The records must be the same too, and nothing but 16
        of them is compared**: do not change the dataset, its transforms or ``collate_fn``.

        A learning rate that is set, or a parameter that is written, gives further steps other
        noise than without. On a GPU, on another machine and with your own loader, steps cannot be
        repeated exactly, so they get new noise, with a note. Steps that another program took after
        it saved the state are then not counted: see :meth:`load_parameters`. Only continue once.

        Args:
            saved: a state of :meth:`state_dict`.

        Raises:
            InputError: ``saved`` is no such state, this training has begun, or has other settings,
                software or code, or the network is not the same in what is not trained.
            ModelError: the network has other parameters.
        """
        if self._begun or self._earlier:
            raise InputError(
                "A state is loaded into a new PrivateStep on a network that was not trained "
                "before. Create both again."
            )
        state = step_state.checked_state(saved)
        program = step_state.program_of(self._model, self._loss, self._rule)
        step_state.check_program(program, state["program"])
        before = dict(vars(self))
        try:
            self._continue(state)
        except BaseException:
            vars(self).update(before)  # keys of the saved noise must not serve another training
            raise

    def _continue(self, state: step_state.SavedStep) -> None:
        """Take over a saved training. For errors see :meth:`load_state_dict`."""
        self._take_plan(state)
        structure = Structure(state["structure"], state["public"])
        device, drawn = device_of(self._model), isinstance(self._sampling, BatchSampling)
        engine = self._prepare(structure.to(device))
        if step_state.fixed_of(self._model, engine.sums.trained) != state["fixed"]:
            raise InputError(
                "The frozen parameters or buffers of the network are not those of the saved state. "
                "Build the network as in the program that saved it."
            )
        for training in self._earlier:
            attach(self._model, training)
        engine.training.begun = state["begun"]  # before its parameters are in the network
        engine.descent.state.restore(state["tensors"], state["numbers"], exactly=True)
        engine.history.rate = state["last_lr"]
        engine.history.remember()
        if why := step_state.why_not_repeated(device, state["environment"], drawn=drawn):
            engine.history.diverge(secrets.token_bytes(KEY_BYTES))
            self._notes = (*self._notes, step_state.new_noise_note(why, self.taken))

    def _take_plan(self, state: step_state.SavedStep) -> None:
        """Take what a saved training was planned with. Raises InputError for other settings."""
        self._earlier = tuple(map(Training.of_json, state["earlier"]))
        free = {"lr"} | ({"sigma"} if self._earlier else set())  # it covers earlier events
        mine, saved = by_flag(self._plan.recorded), state["settings"]
        mine["sampling"], saved = repr(self._sampling), {**saved, "sampling": state["sampling"]}
        step_state.check_settings(mine, saved, free)
        sigma = by_setting(state["settings"])["sigma"]
        event = replace(self.privacy.event, noise_multiplier=sigma)
        self._plan = replace(self._plan, privacy=replace(self.privacy, event=event))
        self.lr, self._steps = state["lr"], state["steps"]
        self._keys, self._records = Keys.of_json(state["numbers"]["keys"]), state["records"]

    @staticmethod
    def load_parameters(model: nn.Module, saved: Mapping[str, Any], *, taken: int) -> None:
        """Copy the parameters of a saved training into a network, with their privacy cost.

        A new :class:`PrivateStep` on the network then trains it further with new noise, and its
        epsilon also counts the steps taken: with any other loss, code or settings.

        Args:
            model: network with the trained parameters of the saved one.
            saved: a state of :meth:`state_dict`.
            taken: number of steps that were taken, also by programs after they saved the state.

        Raises:
            InputError: ``saved`` is no such state, it has more steps, or the training fewer.
            ModelError: the network has other parameters.
        """
        step_state.load_parameters(model, saved, taken)

    @property
    def _begun(self) -> int:
        """Return the number of steps that may have used records."""
        return 0 if self._engine is None else self._engine.training.begun

    @property
    def _events(self) -> tuple[TrainingEvent, ...]:
        return (*(training.done for training in self._earlier), self.event)

    def _checked(self, batch: Batch) -> tuple[Indices, Batch]:
        """Return the numbers of the records of a batch, and its rows. Raises InputError."""
        if isinstance(self._sampling, OwnLoader):
            check_rows(batch, None if self._engine is None else self._engine.structure)
            check_number(samples_in(batch), self._sampling.n)
            return np.arange(samples_in(batch)), batch
        drawn = self._drawn
        if drawn is None or not drawn.is_unchanged(batch) or drawn.step != self.taken + 1:
            raise InputError(NOT_DRAWN)
        return drawn.records, drawn.rows

    def _prepare(self, structure: Structure) -> StepEngine:
        """Validate the network and the loss, and build what takes the steps."""
        self.check_process()
        check_counted(self._model, self._loss, self._earlier)
        self._program = step_state.program_of(self._model, self._loss, self._rule)
        self._engine = build_engine(
            Objective(self._model, self._loss),
            self._plan,
            structure,
            steps=self._steps,
            keys=self._keys,
            rule=self._rule,
        )
        self._notes = (*self._notes, *self._engine.notes)
        return self._engine
