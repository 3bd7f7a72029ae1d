"""Private steps on the batches of a program: :class:`PrivateStep`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.part import Part
from dpmac_cli.accounting.places import places_of
from dpmac_cli.arguments import checked
from dpmac_cli.config.defaults import physical_batch
from dpmac_cli.config.plan import Plan
from dpmac_cli.dp.clipping.batches import (
    NOTHING,
    Batch,
    Structure,
    check_rows,
    map_rows,
    samples_in,
)
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.dp.weights import RecordWeights
from dpmac_cli.errors import (
    BudgetError,
    InputError,
)
from dpmac_cli.models.build import without_batch_norm
from dpmac_cli.models.modes import notes_on_modes
from dpmac_cli.models.trial_samples import (
    BatchLoss,
    Objective,
    device_of,
    trained_parts,
)
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import BatchSampling
from dpmac_cli.training.carried_accounts import (
    ACCOUNT,
    attach,
    carried_by,
    check_composable,
    parts_held_by,
)
from dpmac_cli.training.clipped_grad import validated_sum
from dpmac_cli.training.loading import NOT_DRAWN, REPLACED, Drawn, batches
from dpmac_cli.training.private_program import PrivateProgram, account_of, check_counted
from dpmac_cli.training.reading import (
    Checked,
    Collate,
    OneByOne,
    Reader,
    check_reread,
    first_row,
    probes,
    seeds_generators,
    size_of,
)
from dpmac_cli.training.saved_state import check_counts, check_state, with_lost
from dpmac_cli.training.state import copies_of
from dpmac_cli.training.step import Step, mechanism_of
from dpmac_cli.training.step_plan import check_account, check_arguments, check_size, plan_of_step
from dpmac_cli.training.torch_datasets import check_copies


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
        loss: ``loss(model, batch)`` returns one loss per record, a tensor of shape (records,), or
            their mean, such as ``model(**batch).loss`` of a Hugging Face network. The loss of a
            record must not depend on the others, which is validated.
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
        account: account of the records, of :meth:`.Account.create` or :meth:`.Account.open`. Every
            step begins there too, and epsilon, its target and ``max_epsilon`` cover everything that
            it counts. By default what this network carries along is all that is counted.
        keywords: settings of docs/configuration.md by name, such as ``epsilon=1, epochs=10``.
            Without ``epsilon`` and ``sigma``, epsilon is at most 3 by default.

    Raises:
        InputError: settings cannot be used; lists every fault found.
        BudgetError: no noise meets the target epsilon, or ``max_epsilon`` or the account allows no
            step.
        ModelError: the network or the loss cannot be clipped, or its earlier training cannot be
            added. If there is no ``example``, the first batch is awaited.
    """

    __slots__ = (
        *("_drawn", "_loaders", "_loss", "_model", "_sampling"),
        *("_structure", "_sums", "_weigh", "_shared"),
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
        account: Account | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        check_arguments(model, loss, sampling, account, keywords)
        self._model, self._loss, self._sampling = model, loss, sampling
        self._weigh = None if weights is None else RecordWeights(weights, largest_weight, "batch")
        self._shared = account
        earlier = carried_by(model, (loss, weights))
        if account is not None:
            earlier = tuple(each for each in earlier if each.number != account.number)
            keywords.setdefault("delta", account.delta)
        check_composable(earlier)
        counted = earlier if account is None else (*earlier, account)
        before = chain.from_iterable(each.own for each in counted)
        plan, notes = plan_of_step(model, sampling, tuple(before), keywords)
        if plan.settings.fix_norm:
            self._model = without_batch_norm(model)
        if account is not None:
            check_account(account, plan)
        self._begin(plan, earlier, notes, shared=account)
        self._drawn: Drawn | None = None
        self._loaders = 0  # number of calls of loader
        self._structure: Structure | None = None
        if example is not None:
            self._prepare(Structure(_checked_example(example, device_of(model)), keep=True))

    @property
    def model(self) -> nn.Module:
        """Return the network. Steps run it in the modes in which it was validated."""
        return self._model

    @checked()
    def loader(
        self, dataset: Any, collate_fn: Collate | None = None, *, workers: int = 0
    ) -> Iterator[Batch]:
        """Yield the batches of the remaining steps, drawn as their privacy cost assumes.

        A batch may have any number of rows, also none. Take a step with each, in order. Records are
        read when they are drawn, so that none changes the row of another: rows of a
        ``TensorDataset`` are indexed, and others are read one by one.

        Each call begins an epoch of :class:`~dpmac_cli.RandomAllocation`, because the dataset may
        be in another order: the rest of an epoch that was begun is left out, and counted. Earlier
        loaders end.

        Args:
            dataset: map-style dataset, such as a ``torch.utils.data.Dataset``, of n records. A
                random transform draws secret numbers from the global generators of torch, NumPy or
                Python. A record must depend on itself alone: not on statistics of all records, nor
                on a mix with others.
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
        if workers < 0:
            raise InputError(f"loader: workers must be at least 0, not {workers}.")
        size = size_of(dataset)
        check_size(size, self._sampling)
        records = OneByOne(dataset, collate_fn or default_collate, self._keys.layers)
        row, numbers = first_row(records), probes(size)
        if not isinstance(dataset, Checked):
            check_copies(dataset)
            check_reread(records, numbers)
        structure = self._structure or Structure.of(row).to(device_of(self._model))
        if self._step is None:
            self._prepare(structure)
        reader = Reader(records, structure, alone=seeds_generators(records, numbers))
        with self._one_at_a_time:
            self._leave_epoch()
            self._loaders += 1
            self._drawn = None
        return self._drawn_from(reader, structure, workers, self._loaders)

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
        self, reader: Reader, structure: Structure, workers: int, number: int
    ) -> Iterator[Batch]:
        """Yield the batches of the remaining steps, until a loader of a higher number is there."""
        secure, remaining = self._plan.settings.secure, range(self.taken + 1, len(self) + 1)
        base = self._account.base - self._left_out  # steps that are left out count in an epoch
        sampler = self._sampling.draws(self._keys.sampler, secure=secure, base=base)
        for drawn in batches(reader, sampler, structure, remaining, workers):
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

    @checked()
    def reserve(self, steps: int) -> None:
        """Begin the next steps in the account of the records at once, before they are taken.

        A program that shows nothing until all are taken, as a silo does, then has begun all of them
        or none. Otherwise some begin with each step. Steps that are reserved count in epsilon,
        taken or not; a second call for the same steps reserves nothing more.

        Args:
            steps: number of steps from the next one on.

        Raises:
            BudgetError: the account does not allow all of them. None has begun.
            InputError: the training has no ``account``.
        """
        if not isinstance(self._account, Part):
            raise InputError("To reserve steps, use PrivateStep(..., account=Account.open(path)).")
        account = self._account
        account.check(account.steps(steps))
        missing = account.begun + steps - account.reserved
        if missing > 0:
            account.reserve(missing)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training after its last step, for ``torch.save``.

        It was computed after noise, and no key is in it: to show it costs no more than epsilon.
        Frozen parameters and buffers are not included. Tensors are copies on the CPU. Keys are
        "tensors", "numbers", "trainings", "structure", "public" and "lr".

        Raises:
            InputError: no step was taken yet.
        """
        if self._step is None or self._structure is None:
            raise InputError("There is no state before the first step. Save it after a step.")
        state = self._step.state
        return {
            "tensors": copies_of(state.tensors()),
            "numbers": state.numbers(),
            "trainings": [asdict(each) for each in (*self._account.earlier, self._account.alone())],
            "structure": map_rows(Tensor.cpu, self._structure.template),
            "public": self._structure.keep,
            "lr": self.lr,
        }

    @checked()
    def load_state_dict(self, saved: Mapping[str, Any], *, taken: int | None = None) -> None:
        """Continue a training with new noise and batches.

        Epsilon then counts all steps that were ``taken`` before, kept in the state or not, and
        those to come. A training for an ``epsilon`` ends earlier by the steps that were lost.
        Settings may differ from those of the saved training, except for the optimizer.

        Args:
            saved: a state of :meth:`state_dict`.
            taken: number of steps that the training took in all, from its first one, also after the
                state was saved: :attr:`begun` of the last process, which counts those that failed
                or were left out of an epoch, too. If they were not counted, an upper bound. A
                training with an ``account`` needs none, because that counts them.

        Raises:
            InputError: ``saved`` is no such state, or newer than the account; this training has
                begun; or ``taken`` is not possible.
            ModelError: the network has other parameters.
        """
        if self._account.begun or self._account.earlier:
            raise InputError(
                "A state is loaded into a new PrivateStep on a network that was not trained "
                "before. Create both again."
            )
        check_state(saved)
        *earlier, last = map(ACCOUNT.validate_python, saved["trainings"])
        if self._shared is None:
            accounts = (*earlier, with_lost(last, earlier, taken))
        else:
            check_counts(self._shared, last, taken)
            accounts = tuple(earlier)
        check_composable(accounts)
        plan, step = self._plan, saved["numbers"]["step"]
        self._account = account_of(
            plan,
            self._shared,
            resumed=True,
            event=plan.event.first(max(0, plan.event.steps - step)),
            base=step,
            begun=step,
            earlier=accounts,
            series=last.series,
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
        check_counted(self._account, carried_by(self._model, (self._loss, self._weigh)))
        plan, keys, objective = self._plan, self._keys, Objective(self._model, self._loss)
        self._held = parts_held_by(objective, self._weigh)
        if self._weigh is not None and structure.keep:
            self._weigh.check_example(structure.template, NOTHING)
        sums = validated_sum(
            objective,
            structure,
            keys.layers,
            places=places_of(plan.event, plan.facts.train_size),
            physical_batch=physical_batch(plan.settings, plan.facts, device_of(objective).type),
            batch_size=plan.settings.batch_size,
            weigh=self._weigh,
            isolated=plan.settings.isolate,
        )
        with full_float32():
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
        self._structure, self._sums = sums.structure, sums
        frozen = any(not p.requires_grad for p in objective.parameters())
        modes = notes_on_modes(objective)
        if frozen:
            self._notes = (*self._notes, trained_parts(objective, sums.size))
        self._notes = (*self._notes, *modes, *sums.notes)
        return self._step


def _checked_example(example: Batch, device: torch.device) -> Batch:
    """Return a public example batch on the device. Raises InputError."""
    check_rows(example, None)
    if samples_in(example) == 0:
        raise InputError("example must have at least one row.")
    return map_rows(lambda t: t.to(device), example)
