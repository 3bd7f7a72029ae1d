"""Train an existing network privately, step by step, in a Python program."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.class_weights import class_weights
from dpmac_cli.config.facts import InMemoryData
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.settings import HISTOGRAM, NO_CALIBRATION, Settings
from dpmac_cli.config.sources import values_of
from dpmac_cli.dp.losses import Loss
from dpmac_cli.dp.weights import RecordWeights
from dpmac_cli.errors import InputError
from dpmac_cli.models.modes import notes_on_modes
from dpmac_cli.models.trial_samples import trained_parts
from dpmac_cli.release.publish import publish
from dpmac_cli.release.run import Run
from dpmac_cli.runs import folder, lock, new_folder
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.prepare import prepare
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.session import Session, metrics_line
from dpmac_cli.runs.trainer import Trainer, make_trainer
from dpmac_cli.training.carried_accounts import carried_by, check_composable, parts_held_by
from dpmac_cli.training.evaluation import Evaluation
from dpmac_cli.training.private_program import PrivateProgram
from dpmac_cli.training.step_plan import NO_SEED


class PrivateTraining(PrivateProgram):
    """Private training of an existing network in your own training loop.

    Iterating takes the remaining steps and yields their numbers, from 1. Batches, losses and
    gradients belong to private records and are never returned.

    Args:
        model: maps (samples, channels, height, width) to logits (samples, classes). It is trained
            in place: its parameters become views of one vector.
        data: name or path of a dataset, or records in memory: a data frame, a dataset of Hugging
            Face, :class:`~dpmac_cli.ArrayData` or the result of :func:`~dpmac_cli.from_torch`.
        settings: settings as a model; ``model``, ``data`` and ``loss`` replace its own.
        loss: name of a loss, or a function ``loss(output, target)`` of tensors of one sample, shape
            (1, classes) and (1,), that returns its loss. It runs on each sample separately, and
            must not store or print its inputs, which are private.
        weights: ``weights(x, target)`` returns the weight of a record, from 0 to
            ``largest_weight``, a tensor of shape (1,), or with units (K,) for K records. It is
            called with the records of one unit at a time. Divided by ``largest_weight``, it
            multiplies the gradient after clipping; see :class:`~dpmac_cli.PrivateStep`. By default
            the class weights of the loss, if any.
        largest_weight: largest number that ``weights`` returns, which is public.
        keywords: settings of docs/configuration.md by name, such as ``epsilon=3, epochs=10,
            optimizer="dp-macadam"``. Without ``epsilon`` and ``sigma``, epsilon is at most 3 by
            default. The folder ``out``, where :meth:`publish` writes, is checked before the
            training.

    The network gets arrays and torch datasets as they are given, clipped to their range, so it is
    used afterwards as any other network: ``model(x)``. ``standardise="half"`` maps the range to
    [-1, 1] before the network, which then takes ``private.standardise(x)``. Records that dpmac
    reads itself (a dataset's name, a file, a data frame) are always standardised, as by
    ``dpmac train``. Weights are averaged only with ``ema=``: then the average is scored and
    published, and ``model`` has the weights of the last step.

    A network that was trained privately before, or a part of it, carries what was done: epsilon,
    its target and ``max_epsilon`` then cover the earlier steps too.

    Raises:
        InputError: settings, data or device cannot be used; lists every fault found.
        BudgetError: no noise meets the target epsilon, or ``max_epsilon`` allows no step.
        ModelError: the network mixes samples, or cannot be clipped; or its earlier training cannot
            be added.
    """

    __slots__ = ("_seconds", "_task", "_weighed")
    _plan: Plan
    _step: Trainer

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        settings: Settings | None = None,
        *,
        loss: str | Loss | None = None,
        weights: Callable[[Tensor, Tensor], Tensor] | None = None,
        largest_weight: float = 1.0,
        **keywords: Any,
    ) -> None:
        super().__init__()
        function = None if isinstance(loss, str) else loss
        weigh = None if weights is None else RecordWeights(weights, largest_weight, "x", "target")
        read_by_them = (function, weights)  # networks that these read count, too
        earlier = carried_by(model, read_by_them) if isinstance(model, nn.Module) else ()
        counted = list[TrainingEvent]()
        for account in earlier:
            if account.private:
                counted += account.own
        asked = {**values_of(settings), **keywords}
        _check_asked(asked)
        name = f"{type(model).__module__}:{type(model).__qualname__}"
        chosen = {"dataset": data, "model": name, "calibration": NO_CALIBRATION}
        if loss is not None:
            chosen["loss"] = loss if function is None else None
        resolved = resolve({**asked, **chosen}, earlier=tuple(counted))
        device = choose_device(resolved.plan.settings.device)
        plan = _as_asked(resolved.plan.on(str(device)), asked)
        if plan.settings.out is not None:
            folder.check_chosen_folder(plan.settings.out, plan.settings.force)
        if plan.settings.cover_scores:
            raise InputError("cover_scores is for dpmac train: evaluate() returns exact scores.")
        if function is not None:
            plan = _with_loss(plan, function)
        if plan.private:
            check_composable(earlier, plan.account_unit)
        if earlier and plan.settings.canaries:
            raise InputError(
                "canaries: the network was trained before, and an audit tests one guarantee. Use "
                "a new network."
            )
        self._seconds = 0.0
        self._begin(plan, earlier, resolved.notes, resolved.private_notes)
        self._task = prepare(plan, device, self._keys, resolved.data, model=model)
        if weigh is not None and class_weights(plan.settings):
            raise InputError(
                "class_weights and weights= are two ways to say the same. Use one of them."
            )
        self._step = make_trainer(
            plan, self._task, self._keys, self._account, loss=function, weigh=weigh
        )
        self._held = parts_held_by(model, read_by_them)
        self._weighed = self._step.sums.per_sample.weighed if weigh is None else weigh.name
        on_run = (*self._task.notes, *notes_on_modes(model), *self._step.notes)
        if not all(parameter.requires_grad for parameter in model.parameters()):
            on_run = (trained_parts(model, self._step.sums.size), *on_run)
        self._notes = (*resolved.notes, *self._notes_on_earlier(), *on_run)

    @property
    def model(self) -> nn.Module:
        """Return the network. Steps run it in the modes in which it was validated."""
        return self._task.model

    def _notes_on_earlier(self) -> tuple[str, ...]:
        """Return a note on earlier private steps of the network; () if there are none."""
        events = self._account.before
        if not events:
            return ()
        cost, target = total_epsilon(events, self.delta), self._plan.settings.epsilon or math.inf
        steps = sum(event.steps for event in events)
        of_target = ""
        if cost < target < math.inf:
            of_target = f" of the {format_epsilon(target)} asked for"
        return (
            f"The network was trained privately before: epsilon counts those steps too ({steps}), "
            f"which cost {format_epsilon(cost)}{of_target} alone. To leave them out, start from a "
            "new network.",
        )

    def __iter__(self) -> Iterator[int]:
        """Take the remaining steps. Raises the same errors as :meth:`step`."""
        while self.taken < self._account.end:
            yield self.step()

    def step(self) -> int:
        """Draw a batch, clip, add noise and update the weights; return the step number.

        Raises:
            BudgetError: all steps that the privacy budget covers have begun.
            DivergedError: a weight is no longer finite; checked once per epoch.
            ModelError: the network is no longer the one that was validated, or cannot be clipped
                on these records.
            RunError: memory ran out with a single sample, or the device failed.
        """
        with self._one_at_a_time:
            self._check_budget()
            began = time.perf_counter()
            number = self._step.take()
            self._seconds += time.perf_counter() - began
        return number

    def standardise(self, x: Tensor) -> Tensor:
        """Return records of the dataset as the network takes them, on its device.

        Args:
            x: records on the scale of the data, shape (records, ...). Numbers outside the declared
                range are not clipped.

        Returns:
            Records of the same shape: as they are for arrays and torch datasets, unless
            ``standardise=`` was set, and scaled for records that dpmac reads itself.
        """
        return self._task.data.standardised(x.to(self._step.state.theta.device))

    def evaluate(self) -> Evaluation:
        """Score the network, or the average of its weights with ``ema``, on the test records."""
        return self._step.evaluate()

    @torch.no_grad()
    def publish(self, out: str | Path | None = None, *, force: bool = False) -> Run:
        """Write the model, its report and its card to a run folder, like ``train``.

        Args:
            out: a new or empty folder; None for the setting ``out``, which was checked before the
                training.
            force: whether to replace an existing run in it; also the setting ``force``.

        Returns:
            The run, which can score and predict.

        Raises:
            DivergedError: a weight is no longer finite.
            InputError: the folder cannot be used, or none is set. Nothing is written, and the
                training stays as it is: call it again with another folder.
            ModelError: the network is no longer the one that was validated.
        """
        trainer, plan = self._step, self.plan
        chosen = plan.settings.out if out is None else out
        if chosen is None:
            raise InputError('publish needs a folder, such as publish("my-run").')
        where = Path(chosen)
        try:
            folder.check_chosen_folder(where, force or plan.settings.force)
        except InputError as failure:
            raise InputError([*failure.errors, _KEPT.format(f"{where}-2")]) from None
        trainer.check_finite()
        trainer.check_network()
        result = self.evaluate() if plan.facts.test_size else None
        trainer.check_network()  # it also runs while it is scored
        seconds, epsilon = self._seconds, self.epsilon
        line = metrics_line(plan, trainer.state.step, seconds, epsilon, result)
        session = Session(
            task=self._task,
            trainer=trainer,
            where=new_folder.make_folder(where),
            history=[line],
            scored=result,
            seconds=seconds,
            weighed=self._weighed,
        )
        with lock.locked(where):
            folder.clear(where)
            session.begin_files()
            return publish(session, self.model)


#: Remedy for a folder that cannot be used once the training is over.
_KEPT = (
    "Nothing was written, and this program still holds what was trained: call publish with another "
    "folder, such as publish({!r}). To have the folder checked before the training, set {{out}}."
)


def _check_asked(asked: Mapping[str, Any]) -> None:
    """Reject settings that are for ``dpmac train`` alone. Raises InputError."""
    if asked.get("seed") is not None:
        raise InputError(NO_SEED)
    if asked.get("calibration") == HISTOGRAM:
        raise InputError("calibration is for dpmac train, which counts its records at the end.")


def _as_asked(plan: Plan, asked: Mapping[str, Any]) -> Plan:
    """Return a plan without an average of weights, or standardised arrays, that nobody asked for.

    So the network that a program holds is the one that was trained, on records as it gave them.
    """
    settings, facts = plan.settings, plan.facts
    if asked.get("ema") is None:
        settings = settings.replace(ema=None)
    memory = settings.dataset
    as_arrays = isinstance(memory, InMemoryData) and memory.arrays is not None
    if asked.get("standardise") is None and as_arrays:
        facts = replace(facts, records=facts.records.model_copy(update={"standardised": False}))
    return replace(plan, settings=settings, facts=facts)


def _with_loss(plan: Plan, loss: Loss) -> Plan:
    """Return a plan, and so a report, that names a function as the loss."""
    function = getattr(loss, "__qualname__", type(loss).__qualname__)
    settings = plan.settings.replace(
        loss=f"{loss.__module__}:{function}",
        label_smoothing=0.0,
        class_weights=None,
        shares=None,
    )
    return replace(plan, settings=settings)


#: Opacus also uses this name.
make_private = PrivateTraining
