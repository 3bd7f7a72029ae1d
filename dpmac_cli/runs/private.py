"""Train an existing network privately, step by step, in a Python program."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import affordable_steps
from dpmac_cli.config.keywords import Keywords, TrainingKeywords
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.settings import Settings
from dpmac_cli.data.schema import AtHand
from dpmac_cli.dp.losses import Loss
from dpmac_cli.dp.rules import Rule
from dpmac_cli.errors import BudgetError, InputError
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.ledger import Ledger, Spent
from dpmac_cli.runs.report import metrics_line
from dpmac_cli.runs.session import Finished, Session
from dpmac_cli.runs.setup import make_task, make_trainer
from dpmac_cli.storage.progress import outcome
from dpmac_cli.torch_errors import explained
from dpmac_cli.training.evaluation import Evaluation
from dpmac_cli.training.loop import Evaluated
from dpmac_cli.training.schedules import LossKind


class PrivateTraining:
    """Private training of an existing network in your own training loop.

    Iterating takes the remaining steps and yields their numbers, from 1. Batches, losses and
    gradients belong to private records and are never returned.

    Args:
        model: maps (samples, channels, height, width) to logits (samples, classes). It is trained
            in place: its parameters become views of one vector.
        data: name or path of a dataset, or records in memory.
        settings: settings as a model; ``model``, ``data`` and ``loss`` replace its own.
        loss: name of a loss, or a function ``loss(output, target)`` of tensors of one sample, shape
            (1, classes) and (1,), that returns its loss. It runs on each sample separately, and
            must not store or print its inputs, which are private.
        rule: update rule that replaces the optimizer's; see
            :func:`~dpmac_cli.dp.algorithm.build_algorithm`.
        keywords: settings of docs/configuration.md by name, such as ``epsilon=3, epochs=10,
            optimizer="dp-macadam"``.

    Attributes:
        model: the network. Every step sets it to training mode.
        plan: the plan of the training, with ``sigma`` and ``delta``.
        notes: notes on probable mistakes in valid settings.

    Raises:
        InputError: settings, data or device cannot be used; lists every fault found.
        BudgetError: no noise meets the target epsilon, or ``max_epsilon`` allows no step.
        ModelError: the network mixes samples, or cannot be clipped.
    """

    def __init__(
        self,
        model: nn.Module,
        data: str | Path | AtHand,
        settings: Settings | None = None,
        *,
        loss: str | Loss | None = None,
        rule: Rule | None = None,
        **keywords: Unpack[TrainingKeywords],
    ) -> None:
        named, own = (loss, None) if isinstance(loss, str) else (None, loss)
        name = f"{type(model).__module__}:{type(model).__qualname__}"
        chosen: Keywords = {"dataset": data, "model": name}
        if loss is not None:
            chosen["loss"] = named
        given = {} if settings is None else settings.given
        resolved = resolve({**given, **keywords, **chosen})
        device = choose_device(resolved.plan.device)
        plan = replace(resolved.plan, device=str(device))
        if plan.scores is not None:
            raise InputError("cover_scores is for dpmac train: evaluate() returns exact scores.")
        if own is not None:  # the report names it
            called = f"{own.__module__}:{getattr(own, '__qualname__', type(own).__qualname__)}"
            recorded = {**plan.recorded, "loss": called}
            recipe = replace(plan.recipe, loss=LossKind(called))
            plan = replace(plan, recipe=recipe, recorded=recorded)
        self.plan = plan
        steps = affordable_steps(plan.event, plan.delta, plan.max_epsilon)
        keys = make_keys(plan.seed)
        self._task = outcome(make_task(plan, device, keys, model=model))
        self._trainer = make_trainer(
            plan, steps=steps, device=device, keys=keys, task=self._task, loss=own, rule=rule
        )
        self._begun, self._steps, self._seconds = 0, steps, 0.0
        self.model, self.notes = model, (*resolved.notes, *self._task.notes)

    def __len__(self) -> int:
        """Return the total number of steps."""
        return self._steps

    def __iter__(self) -> Iterator[int]:
        """Take the remaining steps. Raises the same errors as :meth:`step`."""
        while self._trainer.state.step < self._steps:
            yield self.step()

    def step(self) -> int:
        """Draw a batch, clip, add noise and update the weights; return the step number.

        Raises:
            BudgetError: all steps that the privacy budget covers have begun.
            DivergedError: a weight is no longer finite; checked once per epoch.
            ModelError: the network changed a buffer, or cannot be clipped on these records.
            RunError: memory ran out with a single sample, or the device failed.
        """
        trainer = self._trainer
        if self._begun >= self._steps:
            raise BudgetError(
                f"All {self._steps} steps have been taken, and epsilon is {self.epsilon:.4g}. To "
                "train longer, start again with more epochs: make_private(..., epochs=N)."
            )
        self._begun, began = self._begun + 1, time.perf_counter()
        with explained():
            trainer.step()
            if trainer.state.step % self.plan.steps_per_epoch == 0:
                trainer.check_finite()
        self._seconds += time.perf_counter() - began
        return trainer.state.step

    @property
    def epsilon(self) -> float:
        """Privacy cost of all steps that have begun, at the plan's delta."""
        return total_epsilon((self.plan.event_of(self._begun),), self.plan.delta)

    @property
    def lr(self) -> float:
        """Learning rate of the next step, before warm-up and schedule; set it to change it.

        It has no privacy cost if it depends only on public values, including test scores.
        """
        return self._trainer.algorithm.hyper.lr

    @lr.setter
    def lr(self, rate: float) -> None:
        Settings(lr=rate)  # raises InputError
        hyper = replace(self.plan.hyper, lr=float(rate))
        recorded = {**self.plan.recorded, "lr": hyper.lr}
        self.plan = replace(self.plan, hyper=hyper, recorded=recorded)
        self._trainer.algorithm = replace(self._trainer.algorithm, hyper=hyper)

    def standardise(self, x: Tensor) -> Tensor:
        """Standardise records of the dataset, as for the network's inputs."""
        return self._task.data.standardised(x.to(self._trainer.state.theta.device))

    def evaluate(self) -> Evaluation:
        """Score the network, or the average of its weights with ``ema``, on the test records."""
        return self._trainer.evaluate()

    @torch.no_grad()
    def publish(self, out: str | Path, *, force: bool = False) -> Finished:
        """Write the model, its report and its card to a run folder, like ``train``.

        ``out`` is a new or empty folder; ``force`` replaces an existing run.

        Raises:
            DivergedError: a weight is no longer finite.
            InputError: the folder cannot be used.
            ModelError: the network has changed a buffer or a frozen weight.
        """
        trainer, where, plan = self._trainer, Path(out), self.plan
        folder.check_chosen_folder(where, force)
        trainer.check_finite()
        trainer.check_untrained()
        seeded, step = plan.seed is not None, trainer.state.step
        spent = Spent((), plan.event_of(self._steps), 0, self._begun, seeded, plan.secure)
        epoch, result = step / plan.steps_per_epoch, self.evaluate()
        scored = Evaluated(
            step, epoch, self._seconds, result, last=True, public=trainer.public_values()
        )
        session = Session(
            plan=replace(plan, out=where),
            task=self._task,
            trainer=trainer,
            where=folder.make_folder(where),
            ledger=Ledger(where, spent),
            history=[metrics_line(scored, self.epsilon, plan)],
            scored=result,
            seconds=self._seconds,
        )
        with folder.locked(where):
            folder.clear(where)
            session.begin_files()
            return session.publish(self._seconds)


#: Opacus also uses this name.
make_private = PrivateTraining
