"""Train any network with any loss privately, on the batches of a program."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
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
from dpmac_cli.dp.clipping.batches import Batch, Structure, check_rows, samples_in
from dpmac_cli.errors import BudgetError, InputError
from dpmac_cli.models.trial import BatchLoss, Objective
from dpmac_cli.randomness.keystream import make_keys
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
    check_reread,
    collate_of,
    first_row,
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
        **keywords: Any,
    ) -> None:
        super().__init__()
        check_arguments(model, loss, sampling, keywords)
        self._model, self._loss, self._sampling = model, loss, sampling
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
        self._base = 0  # steps of the state that was loaded
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
        return self._base if self._engine is None else self._engine.descent.state.step

    @property
    def event(self) -> TrainingEvent:
        """Return the privacy event of all steps that have begun, without earlier training."""
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
        return self._plan.optimizer.lr

    @lr.setter
    def lr(self, rate: float) -> None:
        Settings(lr=rate)  # raises InputError
        optimizer = self._plan.optimizer.with_lr(rate)
        self._plan = replace(self._plan, optimizer=optimizer)
        if self._engine is not None:
            self._engine.descent.optimizer = optimizer

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
        check_reread(records, size)
        engine = self._engine or self._prepare(Structure.of(row).to(device_of(self._model)))
        return self._batches(KeyedLoader(records, self._draws(), engine.structure, workers))

    def _draws(self) -> Sampler:
        assert isinstance(self._sampling, BatchSampling)  # noqa: S101
        return self._sampling.draws(
            self._keys.sampler, secure=self._plan.run.secure, base=self._base
        )

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
        if self._base + self._begun >= self._steps:
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
        """Return the state of the training after its last step, for ``torch.save``.

        It was computed after noise, and no key is in it: to show it costs no more than epsilon.
        Frozen parameters and buffers are not included.

        Raises InputError if no step was taken yet.
        """
        if self._engine is None:
            raise InputError("There is no state before the first step. Save it after a step.")
        return dict(step_state.state_of(self._engine, self._earlier, self.lr))

    def load_state_dict(self, saved: Mapping[str, Any], *, taken: int) -> None:
        """Continue a training with new noise and batches.

        Epsilon then counts all steps that were ``taken`` before, kept in the state or not, and
        those to come. A training for an ``epsilon`` ends earlier by the steps that were lost.
        Settings may differ from those of the saved training, except for the optimizer.

        Args:
            saved: a state of :meth:`state_dict`.
            taken: number of steps that the saved training took in all, also after it was saved:
                if they were not counted, an upper bound.

        Raises:
            InputError: ``saved`` is no such state, this training has begun, or ``taken`` is not
                possible.
            ModelError: the network has other parameters.
        """
        if self._begun or self._earlier:
            raise InputError(
                "A state is loaded into a new PrivateStep on a network that was not trained "
                "before. Create both again."
            )
        state = step_state.checked_state(saved)
        *earlier, last = map(Training.of_json, state["trainings"])
        if not last.begun <= taken <= last.event.steps:
            raise InputError(
                f"taken is {taken}, but the state holds {last.begun} of {last.event.steps} steps. "
                "Set it to the number of steps that were taken, also after the state was saved."
            )
        self._earlier = (*earlier, replace(last, begun=taken))
        check_composable(self._earlier, RECORD_UNIT)
        privacy, step = self.privacy, state["numbers"]["step"]
        rest = privacy.event_of(max(0, self._steps - step))
        counted = tuple(training.done for training in self._earlier)
        budget = min(privacy.max_epsilon, privacy.target or math.inf)
        with suppress(BudgetError):
            self._steps = step
            self._steps += affordable_steps(rest, privacy.delta, budget, counted)
        self._base, self.lr = step, state["lr"]
        self._keys = make_keys(self._plan.run.seed, base=step, part=len(self._earlier))
        structure = Structure(state["structure"], state["public"])
        engine = self._prepare(structure.to(device_of(self._model)))
        for training in self._earlier:
            attach(self._model, training)
        engine.descent.state.restore(state["tensors"], state["numbers"])

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
        self._engine = build_engine(
            Objective(self._model, self._loss),
            self._plan,
            structure,
            steps=self._steps,
            keys=self._keys,
        )
        self._notes = (*self._notes, *self._engine.notes)
        return self._engine
