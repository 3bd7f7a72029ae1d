"""One private step: sample records, clip the gradient of each, add noise once, update.

:class:`Step` is Algorithm 1 from top to bottom, wherever records come from. :class:`PrivateStep`
takes it on the batches of a program, and :func:`clipped_grad` is its first half alone, a function
of a batch that knows its sensitivity.
"""

import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dpmac_cli.accounting.account import RECORD_UNIT, Account, check_composable
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import SEED_GIVEN, format_epsilon, statement
from dpmac_cli.config import checks
from dpmac_cli.config.class_weights import mean_weight
from dpmac_cli.config.defaults import physical_batch
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.planning import plan as plan_run
from dpmac_cli.config.settings import Settings
from dpmac_cli.config.sources import given_settings
from dpmac_cli.data.registry import Defaults
from dpmac_cli.data.schema import DataFacts
from dpmac_cli.dp.clipping.batches import (
    NOTHING,
    Batch,
    Structure,
    check_rows,
    map_rows,
    samples_in,
)
from dpmac_cli.dp.clipping.clipped_sum import clip_limit
from dpmac_cli.dp.clipping.layers import blocks
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.geometry import (
    NO_CLIPPING,
    Ball,
    Spread,
    at_places,
    geometry_of,
    joined,
    part_of,
)
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism, PrivateMean, SecureMechanism
from dpmac_cli.dp.moments import Moments
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.dp.weights import RecordWeights
from dpmac_cli.errors import (
    BudgetError,
    DivergedError,
    InputError,
    ModelError,
    counted,
    raise_errors,
)
from dpmac_cli.models.digest import identical
from dpmac_cli.models.modes import notes_on_modes
from dpmac_cli.models.trial_samples import (
    BatchLoss,
    Objective,
    Trial,
    device_of,
    fitted,
    trained_parts,
)
from dpmac_cli.models.validation import check_trial
from dpmac_cli.randomness.keystream import KEY_BYTES, Unshared, make_keys
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import Noise, SeededNormals
from dpmac_cli.randomness.sampling import BatchSampling, Indices, Sampler
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.torch_errors import torch_failures_explained
from dpmac_cli.training.canaries import Canaries
from dpmac_cli.training.chunks import BatchSum, ChunkedSum
from dpmac_cli.training.distributed import Ranks, check_single_process
from dpmac_cli.training.lineage import (
    ACCOUNT,
    Parts,
    accounts_of,
    attach,
    carried_by,
    parts_held_by,
)
from dpmac_cli.training.loading import (
    NOT_DRAWN,
    REPLACED,
    Collate,
    Drawn,
    OneByOne,
    batches,
    check_reread,
    first_row,
    size_of,
)
from dpmac_cli.training.schedules import decay, rate
from dpmac_cli.training.state import TrainState
from dpmac_cli.training.torch_datasets import check_copies

#: Fraction of the clipping margin below 1 that the mechanism's rounding may use; the rest is for
#: the rounding of sums.
ROUNDING_SHARE = 0.01
#: Settings of docs/configuration.md that a step has.
SETTINGS_OF_STEP = (
    *("isolate", "epochs", "steps", "sigma", "epsilon", "max_epsilon", "delta", "secure"),
    *("optimizer", "lr", "clip_norm", "beta1", "beta2", "gamma", "gamma_prime", "h1", "h2"),
    *("kappa", "phi", "lr_schedule", "warmup_steps", "weight_decay", "physical_batch"),
)
#: Message for a seed in a program.
NO_SEED = (
    "seed: a program has none, because it may create two trainings, or load a state twice, and "
    "with the same seed both would add the same noise to two sums, whose difference has none. "
    "Leave it out: every training draws secret keys of its own. For the initial weights of your "
    "network use torch.manual_seed(0); to repeat a whole run, use dpmac train --seed 0."
)
#: Private note on weights that were cut.
CUT = (
    "weights returned numbers outside 0 to largest_weight, or NaN, for {} that a step used; they "
    "were cut to that range, and NaN to 0."
)


class Step(Unshared):
    """Private steps of one network. :meth:`step` is Algorithm 1.

    Args:
        sums: clipped sum over the records of a step, and the network.
        plan: settings of the steps, and the optimizer: geometry of the clipping, and rule of the
            update.
        steps: last step.
        mechanism: adds the noise.
        sampler: draws the records, or units, of each step, or names those of a batch that a loader
            drew; None at ranks other than the first.
        noise: random numbers of the mechanism; None at ranks other than the first.
        account: counts the steps that use records, before they begin.
        hooks: canaries of an audit.
        ranks: the processes of the run, each of which sums its share of every batch.

    Attributes:
        state: parameters, moments and region, all computed after noise.
        notes: messages about how the network is run.

    Raises:
        ModelError: there are too many parameters for the mechanism.
    """

    def __init__(
        self,
        sums: ChunkedSum,
        *,
        plan: Plan,
        steps: int,
        mechanism: GaussianMechanism,
        sampler: Sampler | None,
        noise: Noise | None,
        account: Account,
        hooks: Sequence[Canaries] = (),
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        if not plan.private and mechanism.noise_multiplier > 0:
            raise ValueError("noise needs clipping, which is turned off without privacy")
        self.sums, self.model, self.notes = sums, sums.model, sums.notes
        self.sampler, self.mechanism, self.noise = sampler, mechanism, noise
        self.geometry = geometry_of(plan.optimizer) if plan.private else Ball(NO_CLIPPING)
        self.plan, self.steps, self.account, self.hooks = plan, steps, account, hooks
        self._ranks = ranks or Ranks()
        theta = sums.theta
        _check_rounding(mechanism, sums.size)
        region, spread = self._first_region()
        self.state = TrainState(
            theta=theta,
            moments=Moments.before(theta, plan.optimizer.keeps),
            region=region,
            spread=spread,
            chunk=sums.chunk,
            average=theta.clone() if plan.settings.ema else None,
        )
        self._scratch = torch.empty_like(region.centre)
        # Without rows of embeddings that are padding, so nothing below sees them.
        self._blocks = blocks(theta.numel(), theta.device, sums.skipped)

    def _first_region(self) -> tuple[Ellipsoid, Spread | None]:
        """Return line 1 for the coordinates that are trained."""
        theta = self.sums.theta
        if not self.sums.skipped:
            return self.geometry.start(theta)
        trained = self.sums.trained_mask
        region, spread = self.geometry.start(theta[trained])
        return at_places(region, trained), spread and at_places(spread, trained)

    @torch.no_grad()
    def step(self) -> None:
        """Take one step of Algorithm 1. With an empty batch the step consists of noise only.

        Raises BudgetError if the account allows no further step; ModelError if the network is no
        longer the one that was validated.
        """
        self.sums.check()
        self.account.begin(self.account.steps(1))  # before any record is read
        with full_float32(self.sums.arithmetic):
            batch = self._draw()
            clipped = self._clip_and_sum(batch)
            noise = self._begin()
            if noise is not None:  # at the first rank
                private = (self._release(clipped, block, noise) for block in self._blocks)
                self._end(list(map(self._update, private, self._blocks)))
            self.share_state()

    def take(self) -> int:
        """Take a step and return its number; compare the network at the end of each epoch.

        Raises:
            DivergedError: a weight is no longer finite.
            ModelError: the network is no longer the one that was validated.
            RunError: memory ran out with a single record, or the device failed.
        """
        with torch_failures_explained(), torch.inference_mode(False):
            self.step()
            if self.state.step % self.plan.event.steps_per_epoch == 0:
                self.check_finite()
                self.check_network()
        return self.state.step

    def _draw(self) -> Indices:
        """Draw this rank's share of the batch, by number: line 3."""
        drawn = None if self.sampler is None else self.sampler.draw(self.state.step + 1)
        batch = self._ranks.share(drawn)
        for hook in self.hooks:
            batch = hook.records(batch)
        return batch

    def _clip_and_sum(self, batch: Indices) -> Tensor:
        """Sum the clipped, centred gradients over all ranks, shape (d,): lines 4 to 8.

        Reads the records chunk by chunk. For each, the gradient g of its loss (a unit: the mean
        over its records) adds c (g - m), with c <= 1, or nothing if it is not finite.
        """
        state, step = self.state, self.state.step + 1
        metric = RegionMetric(state.region, scratch=self._scratch)
        part, chunk = self.sums.of(batch, step, metric, state.chunk)
        # Equal on all ranks, so differences in rounding between runs depend on public numbers.
        state.chunk = self._ranks.least(chunk)
        clipped = self._ranks.reduce(part)
        for hook in self.hooks:
            clipped = hook.add(step, clipped, self.sums.clipped_sum, metric)
        return clipped

    def _begin(self) -> SeededNormals | None:
        """Advance all scalar state to step t; return the noise of that step."""
        state = self.state
        state.step += 1
        state.moments.step = state.step
        self.geometry.begin(state.step, state.spread)
        return None if self.noise is None else self.noise.at(state.step)

    def _release(self, clipped: Tensor, block: slice, noise: SeededNormals) -> PrivateMean:
        """Return the private mean of some coordinates: lines 9 to 11."""
        region = part_of(self.state.region, block)
        private = self.mechanism.release(clipped[block], region, noise)
        for hook in self.hooks:
            hook.hear(private, region, block)
        return private

    def _update(self, private: PrivateMean, block: slice) -> Ellipsoid:
        """Update some coordinates, lines 12 to 20; return their part of the next region."""
        state = self.state
        region, moments = part_of(state.region, block), part_of(state.moments, block)
        spread = None if state.spread is None else part_of(state.spread, block)
        theta, settings, optimizer = state.theta[block], self.plan.settings, self.plan.optimizer
        eta = optimizer.lr * rate(settings, state.step, self.steps)
        if settings.weight_decay:
            theta.mul_(1 - eta * settings.weight_decay)
        if optimizer.proportional:
            eta /= mean_weight(settings)
        optimizer.update(theta, eta, private, moments)  # lines 12 to 15
        return self.geometry.next(private, moments, region, spread)  # lines 16 to 20

    def _end(self, parts: list[Ellipsoid]) -> None:
        """Set the next region, whose parts are given, and average theta."""
        state = self.state
        ema = self.plan.settings.ema
        if state.average is not None and ema is not None:
            state.average.lerp_(state.theta, 1 - decay(ema, state.step))
        state.region = joined(state.region, parts)
        for hook in self.hooks:
            hook.end()

    def share_state(self) -> None:
        """Give all ranks the first one's parameters and region, so that they clip to the same."""
        region = self.state.region
        for tensor in (self.state.theta, region.centre, region.inverse, region.factor):
            self._ranks.broadcast(tensor)

    def check_finite(self) -> None:
        """Raise DivergedError if a parameter is not finite. Synchronises with the device."""
        if not bool(torch.isfinite(self.state.theta).all()):
            raise DivergedError(self.state.step)

    def check_network(self) -> None:
        """Raise ModelError if the network is no longer the one that was validated.

        That includes buffers and frozen parameters, which are published without noise.
        """
        with self.sums.unchanged.as_validated():
            self.sums.unchanged.check()
        self.sums.unchanged.check_values()


def _check_rounding(mechanism: GaussianMechanism, size: int) -> None:
    """Raise ModelError if the mechanism's rounding could exceed the margin of the clipping."""
    added, margin = mechanism.rounding(size), 1 - clip_limit(mechanism.expected_batch)
    if added > ROUNDING_SHARE * margin:
        raise ModelError(
            f"The model has {size:,} parameters: rounding their sums to the grid of --secure could "
            f"add {added:.1g} to the sensitivity, but clipping leaves a margin of only "
            f"{margin:.1g} for all rounding. Use a smaller model, or leave out --secure."
        )


def mechanism_of(plan: Plan) -> GaussianMechanism:
    """Return the mechanism with the noise of a plan. Raises ValueError for private runs without."""
    sigma = plan.event.noise_multiplier
    if plan.private and sigma == 0:
        raise ValueError("a private run needs noise")
    kind = SecureMechanism if plan.settings.secure else GaussianMechanism
    return kind(sigma, plan.settings.batch_size)


def account_facts(plan: Plan, unit: tuple[str, str]) -> dict[str, Any]:
    """Return what an account of a training holds of its plan, by the names of its attributes."""
    settings = plan.settings
    return {
        "delta": settings.delta,
        "max_epsilon": plan.max_epsilon,
        "unit": unit,
        "seeded": settings.seed is not None,
        "secure": settings.secure,
    }


class PrivateProgram(Unshared):
    """Private training of a network in a program, and its cost with all earlier training.

    Its keys are secret and random: of every object, and of every state that is loaded.
    """

    __slots__ = (
        *("_account", "_held", "_keys", "_left_out", "_notes", "_one_at_a_time", "_plan"),
        "_step",
    )

    def _begin(
        self,
        plan: Plan,
        unit: tuple[str, str],
        earlier: tuple[Account, ...],
        notes: tuple[str, ...],
    ) -> None:
        """Plan the steps that the budget allows after earlier training. Raises BudgetError."""
        check_single_process()
        self._plan, self._notes = plan, notes
        self._account = Account(
            event=plan.event,
            earlier=tuple(account.alone() for account in earlier),
            **account_facts(plan, unit),
        )
        self._account.shorten()
        self._keys = make_keys(None)
        self._left_out = 0  # steps of epochs that were begun and not finished
        self._step: Step | None = None
        self._held: Parts = ()  # of the network, and of others, which a step reads
        self._one_at_a_time = threading.Lock()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on probable mistakes in valid settings, and on how the network is run."""
        return (*self._notes, *[SEED_GIVEN] * self._account.seeded)

    @property
    def private_notes(self) -> tuple[str, ...]:
        """Return notes on the records, for whoever holds them. Do not log or publish them.

        They are exact: no noise is added, and epsilon does not cover them.
        """
        cut = 0 if self._step is None else int(self._step.sums.clipped_sum.cut)
        of_steps = (CUT.format(counted(cut, "record")),) * bool(cut)
        return (*checks.private_notes(self._plan), *of_steps)

    def __repr__(self) -> str:
        size = None if self._step is None else self._step.sums.size
        parts = trained_parts(self.model, size)[:-1]
        return f"{type(self).__name__}({self.taken} of {len(self)} steps; {parts})"

    def __len__(self) -> int:
        """Return the total number of steps."""
        return self._account.end - self._left_out

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """Return the network. Steps run it in the modes in which it was validated."""

    @property
    def taken(self) -> int:
        """Return the number of steps that were taken."""
        return self._account.base if self._step is None else self._step.state.step

    @property
    def plan(self) -> Plan:
        """Return the plan of the training: its settings, and its event with the noise."""
        return self._plan

    @property
    def event(self) -> TrainingEvent:
        """Return the privacy event of all steps that have begun, without earlier training.

        It includes the steps that are left out of an epoch by :meth:`PrivateStep.loader`.
        """
        return self._account.done

    @property
    def delta(self) -> float:
        """Return delta of the guarantee."""
        return self._plan.settings.delta

    @property
    def sigma(self) -> float:
        """Return the noise multiplier."""
        return self._plan.event.noise_multiplier

    @property
    def epsilon(self) -> float:
        """Return the privacy cost of all steps that have begun, and of earlier training."""
        return self._account.epsilon

    @property
    def statement(self) -> str:
        """Return the meaning of the guarantee."""
        unit, account = self._plan.unit, self._account
        seeded = account.seeded
        return statement(account.epsilon, account.delta, account.events, unit, seeded=seeded)

    @property
    def lr(self) -> float:
        """Learning rate of the next step, before warm-up and schedule; set it to change it.

        It has no privacy cost if it depends only on public values, including test scores.
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
        """Raise BudgetError if all steps have begun; InputError in one of several processes.

        Raises ModelError if the network, or one that a step reads, had steps that are not counted.
        """
        check_single_process()
        self._account.check_counted(accounts_of(self._held))
        if not self._account.remaining:
            raise BudgetError(
                f"All {len(self)} steps have been taken, and epsilon is "
                f"{format_epsilon(self.epsilon)}. To train longer, start from a new network with "
                "more epochs, or train this one again in the same way, which also counts these "
                "steps."
            )


#: Entries of the state of a :class:`.PrivateStep`, with tensors on the CPU. No key is in it.
#: ``trainings`` are those of the network, the last of which is the one that was saved.
SAVED = frozenset({"tensors", "numbers", "trainings", "structure", "public", "lr"})


class PrivateStep(PrivateProgram):
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
        sampling: how batches are drawn, such as :class:`~dpmac_cli.Poisson`.
        weights: ``weights(batch)`` returns the weight of each record, from 0 to ``largest_weight``,
            a tensor of shape (records,). It is called with one record at a time. Divided by
            ``largest_weight``, it multiplies the record's gradient after clipping. What a record
            makes of it outside this range is cut, and counted in :attr:`private_notes`. Weights
            from 0 to 1 do not change the privacy cost. By default those of the loss, if it calls
            torch's ``cross_entropy`` or ``nll_loss`` with ``weight=``, or
            ``binary_cross_entropy_with_logits`` with ``pos_weight=``, for one label per record.
        largest_weight: largest number that ``weights`` returns, which is public.
        example: a public batch of at least one row, with the shapes and types of the records. Its
            integers are used to validate the network, and its numbers where random ones fail, such
            as probabilities that sum to 1. By default integers are 0 and 1, numbers are random, and
            the shapes are those of the first record.
        keywords: settings of docs/configuration.md by name, such as ``epsilon=3, epochs=10``.

    Raises:
        InputError: settings cannot be used; lists every fault found.
        BudgetError: no noise meets the target epsilon, or ``max_epsilon`` allows no step.
        ModelError: the network or the loss cannot be clipped, or its earlier training cannot be
            added. If there is no ``example``, the first batch is awaited.
    """

    __slots__ = (
        *("_drawn", "_loaders", "_loss", "_model", "_sampling"),
        *("_structure", "_sums", "_weigh"),
    )
    _plan: Plan

    def __init__(
        self,
        model: nn.Module,
        loss: BatchLoss,
        *,
        sampling: BatchSampling,
        weights: Callable[[Batch], Tensor] | None = None,
        largest_weight: float = 1.0,
        example: Batch | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        _check_arguments(model, loss, sampling, keywords)
        self._model, self._loss, self._sampling = model, loss, sampling
        self._weigh = None if weights is None else RecordWeights(weights, largest_weight, "batch")
        earlier = carried_by(model, (loss, weights))
        check_composable(earlier, RECORD_UNIT)
        named = {
            "model": f"{type(model).__module__}:{type(model).__qualname__}",
            "batch_size": sampling.batch_size,
            "sampler": sampling.sampler,
        }
        settings: dict[str, Any] = {**keywords, **named}
        before = tuple(event for account in earlier for event in account.own)
        given = given_settings(settings)
        plan = plan_run(given, _facts_of_batches(sampling, given.model), earlier=before)
        notes = checks.notes(plan, given.explicit)
        # Nothing is scored or published.
        plan = replace(plan, settings=plan.settings.replace(ema=None))
        self._begin(plan, RECORD_UNIT, earlier, notes)
        self._drawn: Drawn | None = None
        self._loaders = 0  # number of calls of loader
        self._structure: Structure | None = None
        if example is not None:
            self._prepare(Structure(_checked_example(example, device_of(model)), keep=True))

    @property
    def model(self) -> nn.Module:
        """Return the network. Steps run it in the modes in which it was validated."""
        return self._model

    def loader(
        self, dataset: Any, collate_fn: Collate | None = None, *, workers: int = 0
    ) -> Iterator[Batch]:
        """Yield the batches of the remaining steps, drawn as their privacy cost assumes.

        A batch may have any number of rows, also none. Take a step with each, in order. Records are
        read when they are drawn, one by one, so that none changes the row of another.

        Each call begins an epoch of :class:`~dpmac_cli.RandomAllocation`, because the dataset may
        be in another order: the rest of an epoch that was begun is left out, and counted. Earlier
        loaders end.

        Args:
            dataset: map-style dataset, such as a ``torch.utils.data.Dataset``, of n records. A
                random transform is repeated exactly when a step is. A record must depend on
                itself alone: not on statistics of all records, nor on a mix with others.
            collate_fn: turns a list of records, here always of one, into a batch; torch's
                ``default_collate`` by default. All records must have the same shape.
            workers: number of processes that read records.

        Raises:
            InputError: the dataset has no length, another number of records than n, or one several
                times, as a ``Subset`` or ``ConcatDataset`` may have it, or one cannot be used; or
                it is asked for a batch after another call. Copies are not found in other datasets
                that read a dataset.
            ModelError: see :class:`PrivateStep`.
        """
        _check_size(size := size_of(dataset), self._sampling)
        check_copies(dataset)
        records = OneByOne(dataset, collate_fn or default_collate, self._keys.layers)
        row = first_row(records)
        check_reread(records, size)
        structure = self._structure or Structure.of(row).to(device_of(self._model))
        if self._step is None:
            self._prepare(structure)
        with self._one_at_a_time:
            self._leave_epoch()
            self._loaders += 1
            self._drawn = None
        return self._drawn_from(records, structure, workers, self._loaders)

    def _leave_epoch(self) -> None:
        """Begin another epoch, and count the steps that are left out of the one that was begun."""
        event, step = self._plan.event, self._step
        if step is None or not event.sampling.once_an_epoch:
            return
        account = self._account
        rest = -(self.taken - account.base + self._left_out) % event.steps_per_epoch
        rest = min(rest, account.remaining)
        account.begin(account.steps(rest))
        self._left_out += rest
        step.steps = len(self)

    def _drawn_from(
        self, records: OneByOne, structure: Structure, workers: int, number: int
    ) -> Iterator[Batch]:
        """Yield the batches of the remaining steps, until a loader of a higher number is there."""
        secure, remaining = self._plan.settings.secure, range(self.taken + 1, len(self) + 1)
        base = self._account.base - self._left_out  # steps that are left out count in an epoch
        sampler = self._sampling.draws(self._keys.sampler, secure=secure, base=base)
        for drawn in batches(records, sampler, structure, remaining, workers):
            if number != self._loaders:
                raise InputError(REPLACED)
            self._drawn = drawn
            yield drawn.batch

    def __call__(self, batch: Batch) -> int:
        """Clip, add noise and update the weights; return the step number.

        Args:
            batch: a batch of :meth:`loader`, unchanged.

        Raises:
            BudgetError: all steps that the privacy budget covers have begun.
            DivergedError: a weight is no longer finite; checked once per epoch.
            InputError: the batch is not the one that was drawn for this step.
            ModelError: the network is no longer the one that was validated, or cannot be clipped
                on these records.
            RunError: memory ran out with a single record, or the device failed.
        """
        with self._one_at_a_time:
            self._check_budget()
            drawn, step = self._drawn, self._step
            if drawn is None or step is None or not drawn.is_of(self.taken + 1, batch):
                raise InputError(NOT_DRAWN)
            with self._sums.given(drawn.records, drawn.rows):
                number = step.take()
            self._drawn = None
        return number

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training after its last step, for ``torch.save``.

        It was computed after noise, and no key is in it: to show it costs no more than epsilon.
        Frozen parameters and buffers are not included.

        Raises InputError if no step was taken yet.
        """
        if self._step is None or self._structure is None:
            raise InputError("There is no state before the first step. Save it after a step.")
        state = self._step.state
        return {
            "tensors": {name: t.detach().cpu().clone() for name, t in state.tensors().items()},
            "numbers": state.numbers(),
            "trainings": [asdict(each) for each in (*self._account.earlier, self._account.alone())],
            "structure": map_rows(Tensor.cpu, self._structure.template),
            "public": self._structure.keep,
            "lr": self.lr,
        }

    def load_state_dict(self, saved: Mapping[str, Any], *, taken: int) -> None:
        """Continue a training with new noise and batches.

        Epsilon then counts all steps that were ``taken`` before, kept in the state or not, and
        those to come. A training for an ``epsilon`` ends earlier by the steps that were lost.
        Settings may differ from those of the saved training, except for the optimizer.

        Args:
            saved: a state of :meth:`state_dict`.
            taken: number of steps that the saved training took in all, also after it was saved:
                its ``event.steps``, which counts those that failed or were left out of an epoch,
                too. If they were not counted, an upper bound.

        Raises:
            InputError: ``saved`` is no such state, this training has begun, or ``taken`` is not
                possible.
            ModelError: the network has other parameters.
        """
        if self._account.count or self._account.earlier:
            raise InputError(
                "A state is loaded into a new PrivateStep on a network that was not trained "
                "before. Create both again."
            )
        _check_state(saved)
        *earlier, last = map(ACCOUNT.validate_python, saved["trainings"])
        if not last.count <= taken <= last.event.steps:
            raise InputError(
                f"taken is {taken}, but the state holds {last.count} of {last.event.steps} steps. "
                "Set it to the number of steps that were taken, also after the state was saved."
            )
        accounts = (*earlier, replace(last, begun=last.base + taken))
        check_composable(accounts, RECORD_UNIT)
        plan, step, steps = self._plan, saved["numbers"]["step"], self._account.end
        self._account = Account(
            event=plan.event.first(max(0, steps - step)),
            base=step,
            begun=step,
            earlier=accounts,
            target=plan.settings.epsilon,
            **account_facts(plan, RECORD_UNIT),
        )
        try:
            self._account.shorten()
        except BudgetError:
            self._account.event = plan.event.first(0)
        self.lr = saved["lr"]
        self._keys = make_keys(None, base=step)
        self._loaders += 1  # those created before have other keys
        structure = Structure(saved["structure"], saved["public"])
        made = self._prepare(structure.to(device_of(self._model)))
        for account in accounts:
            attach(self._model, account)
        made.state.restore(saved["tensors"], saved["numbers"])

    def _prepare(self, structure: Structure) -> Step:
        """Validate the network and the loss on a structure, and build what takes the steps."""
        self.check_process()
        self._account.check_counted(carried_by(self._model, (self._loss, self._weigh)))
        plan, keys, objective = self._plan, self._keys, Objective(self._model, self._loss)
        self._held = parts_held_by(objective, self._weigh)
        if self._weigh is not None and structure.keep:
            self._weigh.check_example(structure.template, NOTHING)
        structure = fitted(objective, structure)
        check_trial(objective, Trial(structure, None), isolated=plan.settings.isolate)
        rows = physical_batch(plan.settings, plan.facts, device_of(objective).type)
        with full_float32():
            draws, batch = LayerDraws(keys.layers), plan.settings.batch_size
            sums = BatchSum(objective, structure, draws, rows, batch, self._weigh)
            self._step = Step(
                sums,
                plan=plan,
                steps=self._account.end,
                mechanism=mechanism_of(plan),
                sampler=sums,
                noise=Noise(keys.noise, secure=plan.settings.secure),
                account=self._account,
            )
        attach(objective, self._account)  # a loss may have parameters, too
        self._structure, self._sums = structure, sums
        frozen = any(not p.requires_grad for p in objective.parameters())
        modes = notes_on_modes(objective)
        parts = [trained_parts(objective, sums.size)] * frozen
        self._notes = (*self._notes, *parts, *modes, *sums.notes)
        return self._step


#: Name of the batches of a program in place of a dataset, and records of them to process at a time.
BATCHES, RECORDS_AT_A_TIME = "<batches>", 256


def _facts_of_batches(sampling: BatchSampling, model: str) -> DataFacts:
    """Return facts of records that a program supplies, of which their number alone matters."""
    defaults = Defaults(model, sampling.batch_size, physical_batch=RECORDS_AT_A_TIME)
    return DataFacts(
        name=BATCHES,
        train_size=sampling.n,
        test_size=0,
        shape=(1, 1, 1),
        task=Classification(("0", "1")),  # no setting of a step depends on it
        mean=(),
        std=(),
        defaults=defaults,
        about="",
    )


def _check_arguments(
    model: object, loss: object, sampling: object, keywords: Mapping[str, Any]
) -> None:
    """Raise InputError with every argument that cannot be used; ModelError without a network."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{getattr(model, '__name__', repr(model))} is not a torch module. Pass a network "
            "instance, such as torch.nn.Linear(64, 10)."
        )
    errors = []
    if not callable(loss):
        errors.append(
            f"loss must be a function loss(model, batch) that returns one loss per record, not a "
            f"{type(loss).__name__}."
        )
    if not isinstance(sampling, BatchSampling):
        errors.append(
            "sampling must say how batches are drawn: Poisson(n=len(dataset), batch_size=256) "
            f"or RandomAllocation(...), not {sampling!r}."
        )
    errors += [NO_SEED] * (keywords.get("seed") is not None)
    errors += [
        f"PrivateStep has no setting '{name}'. It has {', '.join(SETTINGS_OF_STEP)}."
        for name in keywords
        if name not in (*SETTINGS_OF_STEP, "seed")
    ]
    raise_errors(errors)


def _checked_example(example: Batch, device: torch.device) -> Batch:
    """Return a public example batch on the device. Raises InputError."""
    check_rows(example, None)
    if samples_in(example) == 0:
        raise InputError("example must have at least one row.")
    return map_rows(lambda t: t.to(device), example)


def _check_size(size: int, sampling: BatchSampling) -> None:
    """Raise InputError for a dataset of another number of records than n."""
    if size != sampling.n:
        raise InputError(
            f"The dataset has {size:,} records, but epsilon was computed for n={sampling.n:,}. Use "
            f"sampling={type(sampling).__name__}(n=len(dataset), ...)."
        )


def _check_state(given: object) -> None:
    """Raise InputError for what is not a state of :class:`.PrivateStep`."""
    if missing := sorted(SAVED - (given.keys() if isinstance(given, Mapping) else set())):
        raise InputError(
            f"This is not a state of PrivateStep: it has no {', '.join(missing)}. Pass what "
            "step.state_dict() returned, or what torch.load read of it. The state_dict of a "
            "network goes to network.load_state_dict(...), which does not know what its training "
            "cost."
        )


#: Message for an update of a program that gave noise to a row that is padding.
PADDING_CHANGED = (
    "The row of {} that padding_idx names was changed, which torch promises never to happen. Leave "
    "it out of your update: private.value.mul_(clipped.trained). If you set it on purpose, call "
    "clipped_grad again with the network."
)


class ClippedGrad:
    """Sum of the clipped per-record gradients of a network; see :func:`clipped_grad`."""

    #: Bound on the change of the sum, in the norm of the region, by one record.
    sensitivity = 1.0

    def __init__(
        self,
        objective: Objective,
        region: Ellipsoid,
        batch_size: int,
        physical_batch: int,
        *,
        isolate: bool,
        weigh: RecordWeights | None = None,
    ) -> None:
        self._objective, self._weigh = objective, weigh
        self.region, self.notes = region, tuple[str, ...]()
        self._batch, self._physical, self._isolate = batch_size, physical_batch, isolate
        self._sums: BatchSum | None = None
        self._structure: Structure | None = None
        self._padding = list[Tensor]()  # values of theta that are never trained
        self._calls, self._chunk = 0, 0

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """Return the sum over the records of a batch, shape (d,), float64 for several chunks.

        It is 0 where :attr:`trained` is.

        Raises:
            InputError: the batch is not tensors with one row per record, has other parts, shapes or
                types than the one that was validated, or many times more records than
                ``batch_size``; or the region does not fit the parameters.
            ModelError: the network is no longer the one that was validated, or an update changed a
                row that is padding.
        """
        check_rows(batch, self._structure)
        sums = self._sums or self.prepare(batch)
        _check_region(self.region, sums.theta)
        sums.check()
        self._check_padding()
        self._calls += 1
        region = self.region
        if sums.skipped and not region.is_ball:
            region = at_places(part_of(region, sums.trained_mask), sums.trained_mask)
        metric, records = RegionMetric(region), np.arange(samples_in(batch))
        with full_float32(sums.arithmetic), sums.given(records, batch):
            total, self._chunk = sums.of(records, self._calls, metric, self._chunk)
        return total.clone()

    @property
    def theta(self) -> Tensor:
        """Return the trained parameters as one vector, shape (d,); changing it changes the model.

        The row that an embedding declares as padding (``padding_idx``) has its place in it and is
        not to be changed: see :attr:`trained`.

        Raises ModelError before :meth:`prepare` or the first batch.
        """
        return self._ready.theta

    @property
    def trained(self) -> Tensor:
        """Return where theta is trained: a mask of 1 and, for rows that are padding, 0; (d,).

        Multiply a private mean by it, so that those rows get no noise. Raises ModelError before
        :meth:`prepare` or the first batch.
        """
        return self._ready.trained_mask.to(self.theta.dtype)

    def by_parameter(self, vector: Tensor) -> Mapping[str, Tensor]:
        """Return views of a vector, shape (d,), by the names of parameters, in their shapes."""
        named = self._objective.named_parameters()
        names = {id(p): name.removeprefix("network.") for name, p in named}
        return {
            names[id(p)]: vector[layer.start : layer.stop][layer.slices[key]].view(p.shape)
            for layer in self._ready.clipped_sum.layers
            for key, p in layer.parameters.items()
        }

    def prepare(self, example: Batch) -> BatchSum:
        """Validate the network on the structure of a batch, whose values are not used."""
        check_rows(example, None)
        structure = fitted(self._objective, Structure.of(example))
        check_trial(self._objective, Trial(structure, None), isolated=self._isolate)
        draws = LayerDraws(secrets.token_bytes(KEY_BYTES))
        with full_float32():
            self._sums = BatchSum(
                self._objective, structure, draws, self._physical, self._batch, self._weigh
            )
        self._structure = structure
        self._chunk, self.notes = self._sums.chunk, self._sums.notes
        self._padding = [self._sums.theta[gap].clone() for gap in self._sums.skipped]
        return self._sums

    def _check_padding(self) -> None:
        """Raise ModelError if a row that is padding was changed."""
        sums = self._ready
        for gap, before in zip(sums.skipped, self._padding, strict=True):
            if not identical(sums.theta[gap], before):
                named = self.by_parameter(torch.arange(sums.theta.numel()))
                name = next(name for name, where in named.items() if gap.start in where)
                raise ModelError(PADDING_CHANGED.format(name))

    @property
    def _ready(self) -> BatchSum:
        if self._sums is None:
            raise ModelError("The network is validated on the first batch: call prepare(batch).")
        return self._sums


def clipped_grad(
    model: nn.Module,
    loss: BatchLoss,
    region: Ellipsoid,
    *,
    batch_size: int,
    physical_batch: int = 256,
    isolate: bool = False,
    weights: Callable[[Batch], Tensor] | None = None,
    largest_weight: float = 1.0,
) -> ClippedGrad:
    """Return a function of a batch: the sum of its clipped per-record gradients, without noise.

        clipped = clipped_grad(model, loss, ball(1.0), batch_size=256)
        total = clipped(batch)  # (d,): private until noise is added

    Adding or removing a record moves the sum by at most ``clipped.sensitivity``, 1, in the norm
    ||(.)/b|| of the region: by at most C for a ball of radius C. Rounding is included. Gradient g_i
    of a record adds c_i (g_i - m), where c_i <= 1 is the largest factor with which it is in the
    region, times its weight.

    The network and the loss are validated on the first batch, and compared with what was validated
    before each further one. Parameters become views of ``clipped.theta``. Nothing is accounted for:
    see :class:`PrivateStep` for a complete step.

    Args:
        model, loss: see :class:`PrivateStep`.
        region: region to clip to, such as :func:`~dpmac_cli.ball`; a program may replace it.
        batch_size: expected number of records in a batch, which must not depend on the records.
        physical_batch: records to process at a time.
        isolate: accept a network that computes something else for a batch than for one record.
        weights, largest_weight: see :class:`PrivateStep`.

    Raises:
        InputError: a number of records is below 1, or the weights are no function.
        ModelError: the network or the loss cannot be clipped.
    """
    counts = {"batch_size": batch_size, "physical_batch": physical_batch}
    raise_errors(
        f"{name} must be at least 1, not {value!r}."
        for name, value in counts.items()
        if not value >= 1
    )
    weigh = None if weights is None else RecordWeights(weights, largest_weight, "batch")
    objective, sizes = Objective(model, loss), (batch_size, physical_batch)
    return ClippedGrad(objective, region, *sizes, isolate=isolate, weigh=weigh)


def _check_region(region: Ellipsoid, theta: Tensor) -> None:
    """Raise InputError if a region is not one of the parameters, shape (d,)."""
    shapes = {tuple(region.centre.shape), tuple(region.inverse.shape)}
    if shapes not in ({()}, {tuple(theta.shape)}):
        raise InputError(
            f"The region has the shapes {sorted(shapes)}, but the network has {theta.numel():,} "
            "trained parameters. Use ball(radius), or ellipsoid(centre, scale) with a number for "
            "each of them, such as torch.ones_like(clipped.theta)."
        )
