"""Train any network with any loss privately, on the batches of a program."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import affordable_steps
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.sampling import BatchSampling, OwnLoader
from dpmac_cli.accounting.statements import format_epsilon, statement
from dpmac_cli.config.keywords import Keywords
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.resolve import resolve_batches
from dpmac_cli.config.settings import Settings
from dpmac_cli.data.registry import Dataset, Defaults
from dpmac_cli.data.schema import AtHand, Found
from dpmac_cli.dp.algorithm import build_algorithm
from dpmac_cli.dp.clipping.batches import (
    NOTHING,
    Batch,
    Structure,
    map_rows,
    parts_by_name,
    samples_in,
)
from dpmac_cli.dp.losses import returned
from dpmac_cli.dp.mechanism import GaussianMechanism, SecureMechanism
from dpmac_cli.dp.optimizers import Kappa
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.dp.rules import Rule
from dpmac_cli.errors import BudgetError, InputError, ModelError, raise_errors
from dpmac_cli.models.trial import Objective
from dpmac_cli.models.validation import validated
from dpmac_cli.randomness.keystream import Keys, make_keys
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import Batch as Records
from dpmac_cli.storage.digest import digest
from dpmac_cli.torch_errors import explained
from dpmac_cli.training.chunks import BatchSum, Running
from dpmac_cli.training.descent import Descent
from dpmac_cli.training.lineage import Training, attach, carried_by, check_composable
from dpmac_cli.training.loading import (
    Collate,
    Drawn,
    KeyedLoader,
    OneByOne,
    collate_of,
    fingerprint,
    first_row,
)
from dpmac_cli.training.schedules import Plan
from dpmac_cli.training.state import Randomness

#: A loss of the network and a batch: one number per record, shape (records,).
BatchLoss = Callable[[Any, Any], Tensor]
#: Unit of privacy of a batch's rows.
UNIT = ("training record", "")
#: Records to process at a time by default.
AT_A_TIME = 256


class StepKeywords(TypedDict, total=False):
    """Settings of docs/configuration.md that a :class:`PrivateStep` has; None if not given."""

    isolate: bool | None
    epochs: int | None
    steps: int | None
    sigma: float | None
    epsilon: float | None
    max_epsilon: float | None
    delta: float | None
    secure: bool | None
    optimizer: str | None
    lr: float | None
    clip_norm: float | None
    beta1: float | None
    beta2: float | None
    gamma: float | None
    gamma_prime: float | None
    h1: float | None
    h2: float | None
    kappa: Kappa | None
    phi: str | None
    lr_schedule: str | None
    warmup_steps: int | None
    weight_decay: float | None
    physical_batch: int | None
    seed: int | None


@dataclass
class _Given:
    """Sampler of the records of a batch that was given."""

    records: Records | None = None

    def draw(self, step: int) -> Records:
        """Return the records of the batch."""
        assert self.records is not None  # noqa: S101
        return self.records


class PrivateStep:
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

    def __init__(
        self,
        model: nn.Module,
        loss: BatchLoss,
        *,
        sampling: BatchSampling | OwnLoader,
        example: Batch | None = None,
        rule: Rule | None = None,
        **keywords: Unpack[StepKeywords],
    ) -> None:
        _check_arguments(model, loss, sampling, keywords)
        self._model, self._loss, self._sampling, self._rule = model, loss, sampling, rule
        self._objective = Objective(model, loss)
        self._earlier = carried_by(model, loss)
        check_composable(self._earlier, UNIT)
        counted = tuple(training.done for training in self._earlier)
        resolved = resolve_batches(*_settings(model, sampling, keywords), counted)
        recipe = replace(resolved.plan.recipe, ema=0.0)  # nothing is scored or published
        self.plan: TrainPlan = replace(resolved.plan, recipe=recipe)
        self._steps = affordable_steps(
            self.plan.event, self.plan.delta, self.plan.max_epsilon, counted
        )
        self._keys = make_keys(self.plan.seed, part=len(self._earlier))
        self._notes = resolved.notes
        self._given = _Given()
        self._drawn: Drawn | None = None
        self._descent: Descent | None = None
        self._sums: BatchSum | None = None
        self._structure: Structure | None = None
        self._records = ""  # identifies the dataset
        if example is not None:
            self._prepare(Structure(_checked_example(example, _device_of(model)), keep=True))

    @property
    def model(self) -> nn.Module:
        """Return the network. Every step sets it to training mode."""
        return self._model

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
        return 0 if self._descent is None else self._descent.state.step

    @property
    def event(self) -> TrainingEvent:
        """Return the privacy event of all steps that have begun."""
        return self.plan.event_of(self._begun)

    @property
    def epsilon(self) -> float:
        """Return the privacy cost of all steps that have begun, and of earlier training."""
        return total_epsilon(self._events, self.plan.delta)

    @property
    def statement(self) -> str:
        """Return the meaning of the guarantee, and who is responsible for the sampling."""
        said = statement(self.epsilon, self.plan.delta, self._events)
        if not isinstance(self._sampling, OwnLoader):
            return said
        return (
            f"{said} The batches came from a loader of the program, which states that it draws "
            "them in this way; dpmac did not draw them and cannot check it."
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step, before warm-up and schedule; set it to change it.

        It has no privacy cost if it depends only on public values.
        """
        return self.plan.hyper.lr

    @lr.setter
    def lr(self, rate: float) -> None:
        Settings(lr=rate)  # raises InputError
        self.plan = replace(self.plan, hyper=replace(self.plan.hyper, lr=float(rate)))
        if self._descent is not None:
            algorithm = replace(self._descent.algorithm, hyper=self.plan.hyper)
            self._descent.algorithm = algorithm

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
        size = len(dataset)
        if size != self._sampling.n:
            raise InputError(
                f"The dataset has {size:,} records, but epsilon was computed for n="
                f"{self._sampling.n:,}. Use sampling={type(self._sampling).__name__}"
                "(n=len(dataset), ...)."
            )
        records = OneByOne(dataset, collate_of(collate_fn), self._keys.layers)
        row = first_row(records)
        known = fingerprint(records, size)
        if self._records not in ("", known):
            raise InputError(
                "The dataset is not the one that this training began with, whose noise would be "
                "used again for other records. Start from a new PrivateStep, whose epsilon also "
                "counts the steps so far."
            )
        self._records = known
        if self._descent is None:
            device = _device_of(self._model)
            self._prepare(Structure.of(row).to(device))
        return self._batches(records, workers)

    def _batches(self, records: OneByOne, workers: int) -> Iterator[Batch]:
        assert self._structure is not None  # noqa: S101
        assert isinstance(self._sampling, BatchSampling)  # noqa: S101
        sampler = self._sampling.draws(self._keys.sampler, secure=self.plan.secure)
        loader = KeyedLoader(records, sampler, self._structure, workers)
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
        records = self._records_of(batch)
        if self._descent is None:
            self._prepare(Structure.of(batch))
        assert self._descent is not None  # noqa: S101
        assert self._sums is not None  # noqa: S101
        self._given.records, self._sums.batch = records, batch
        try:
            with explained(), torch.inference_mode(False):
                self._descent.step()
                if self.taken % self.plan.steps_per_epoch == 0:
                    self._descent.check_finite()
                    self._descent.check_network()
        finally:
            self._drawn, self._sums.batch = None, NOTHING
        return self.taken

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next steps follow from, for ``torch.save``.

        It holds secret keys: who has it can remove the noise. Keep it where the records are. Frozen
        parameters and buffers are not included.

        Raises InputError if no step was taken yet.
        """
        if self._descent is None or self._structure is None:
            raise InputError("There is no state before the first step. Save it after a step.")
        state = self._descent.state
        return {
            "tensors": {name: t.detach().cpu().clone() for name, t in state.tensors().items()},
            "numbers": state.numbers(),
            "begun": self._begun,
            "earlier": [training.as_json() for training in self._earlier],
            "settings": dict(self.plan.recorded),
            "lr": self.lr,
            "structure": map_rows(Tensor.cpu, self._structure.template),
            "public": self._structure.keep,
            "records": self._records,
            "fixed": self._fixed(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue a training exactly: further steps equal those of the program that saved it.

        The network, the loss, the records and the settings must be those of that program, because
        the same noise is used again. Only continue it once.

        Args:
            saved: a state of :meth:`state_dict`.

        Raises:
            InputError: this training has begun, or has other settings, or the network is not the
                same in what is not trained.
            ModelError: the network has other parameters.
        """
        if self._begun or self._earlier:
            raise InputError(
                "A state is loaded into a new PrivateStep on a network that was not trained "
                "before. Create both again."
            )
        self._earlier = tuple(map(Training.of_json, saved["earlier"]))
        self._check_settings(saved["settings"])
        event = replace(self.plan.event, noise_multiplier=saved["settings"]["sigma"])
        self.plan = replace(self.plan, event=event)
        self.lr = saved["lr"]
        self._keys, self._records = Keys.of_json(saved["numbers"]["keys"]), saved["records"]
        for training in self._earlier:
            attach(self._model, training)
        structure = Structure(saved["structure"], saved["public"])
        self._descent = None  # its keys are others
        self._prepare(structure.to(_device_of(self._model)))
        assert self._descent is not None  # noqa: S101
        if self._fixed() != saved["fixed"]:
            raise InputError(
                "The frozen parameters or buffers of the network are not those of the saved state. "
                "Build the network as in the program that saved it."
            )
        self._descent.state.restore(saved["tensors"], saved["numbers"], exactly=True)
        assert self._descent.training is not None  # noqa: S101
        self._descent.training.begun = saved["begun"]

    @property
    def _begun(self) -> int:
        """Return the number of steps that may have used records."""
        training = None if self._descent is None else self._descent.training
        return 0 if training is None else training.begun

    @property
    def _events(self) -> tuple[TrainingEvent, ...]:
        return (*(training.done for training in self._earlier), self.event)

    def _records_of(self, batch: Batch) -> Records:
        """Return the numbers of the records of a batch, after checking it. Raises InputError."""
        if isinstance(self._sampling, OwnLoader):
            _check_rows(batch, self._structure)
            return np.arange(samples_in(batch))
        drawn = self._drawn
        if drawn is None or not drawn.is_unchanged(batch) or drawn.step != self.taken + 1:
            raise InputError(
                "The batch is not the one that the loader drew for this step, unchanged. Take one "
                "step with each batch of step.loader(...), in order: epsilon covers those records. "
                "To transform records, do it in the dataset or in collate_fn, which see each one "
                "alone. For a loader of your own, state how it draws: sampling=OwnLoader(...)."
            )
        return drawn.records

    def _fixed(self) -> str:
        """Return the SHA-256 of everything in the network that is not trained."""
        assert self._sums is not None  # noqa: S101
        fixed = {
            name: tensor
            for name, tensor in self._model.state_dict(keep_vars=True).items()
            if id(tensor) not in self._sums.trained
        }
        return digest({name: t.detach().cpu() for name, t in fixed.items()}, {})

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        """Raise InputError if a saved training has other settings."""
        free = {"lr"} | ({"sigma"} if self._earlier else set())  # it covers earlier events
        mine = dict(self.plan.recorded)
        names = [n for n in {**mine, **saved} if n not in free and mine.get(n) != saved.get(n)]
        raise_errors(
            f"{name} is {mine.get(name)}, but {saved.get(name)} in the saved state. Use the same."
            for name in names
        )

    @full_float32()
    def _prepare(self, structure: Structure) -> None:
        """Validate the network and the loss, and build what takes the steps."""
        now = carried_by(self._model, self._loss)
        if {t.number for t in now} - {t.number for t in self._earlier}:
            raise ModelError(
                "The network was trained by another PrivateStep or make_private since this one was "
                "created, so its epsilon does not count those steps. Create this one again."
            )
        kind, why = validated(self._objective, structure, isolated=self.plan.isolate)
        plan, on_cuda = self.plan, _device_of(self._model).type == "cuda"
        physical = plan.gpu_batch if on_cuda else plan.physical_batch
        layers = LayerDraws(self._keys.layers)
        how = Running(
            loss=returned,
            physical_batch=physical,
            batch=plan.batch_size,
            isolated=kind == "isolated",
        )
        self._sums = BatchSum(self._objective, structure, how, layers)
        mechanism = SecureMechanism if plan.secure else GaussianMechanism
        self._descent = Descent(
            model=self._objective,
            sums=self._sums,
            algorithm=build_algorithm(plan.method, plan.hyper, rule=self._rule),
            mechanism=mechanism(plan.sigma, plan.batch_size),
            plan=Plan(
                steps=self._steps,
                steps_per_epoch=plan.steps_per_epoch,
                physical_batch=physical,
                recipe=plan.recipe,
                isolated=kind == "isolated",
            ),
            randomness=Randomness(
                keys=self._keys,
                sampler=self._given,
                noise=Noise(self._keys.noise, secure=plan.secure),
                layers=layers,
            ),
        )
        training = Training(
            event=plan.event,
            unit=UNIT,
            private=True,
            seeded=plan.seed is not None,
            secure=plan.secure,
        )
        attach(self._model, training)
        self._descent.training = training
        self._structure = structure
        self._notes = (*self._notes, *why, *self._sums.notes)


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
    if not isinstance(sampling, (BatchSampling, OwnLoader)):
        errors.append(
            "sampling must say how batches are drawn: Poisson(n=len(dataset), batch_size=256), "
            f"RandomAllocation(...) or OwnLoader(...), not {sampling!r}."
        )
    known = StepKeywords.__annotations__
    errors += [
        f"PrivateStep has no setting '{name}'. It has {', '.join(known)}."
        for name in keywords
        if name not in known
    ]
    raise_errors(errors)


def _settings(
    model: nn.Module, sampling: BatchSampling | OwnLoader, keywords: StepKeywords
) -> tuple[Found, Keywords]:
    """Return the public facts of the records, and all settings."""
    name = f"{type(model).__module__}:{type(model).__qualname__}"
    facts = Dataset(
        train_size=sampling.n,
        test_size=0,
        shape=(1, 1, 1),
        classes=("record",),
        mean=(0.0,),
        std=(1.0,),
        defaults=Defaults(name, sampling.batch_size, physical_batch=AT_A_TIME),
        about="batches of a program",
        levels=1,
    )
    named: Keywords = {
        "dataset": AtHand(Path("<batches>")),
        "model": name,
        "batch_size": sampling.batch_size,
        "sampler": sampling.sampler,
    }
    return Found(facts, "<batches>"), {**keywords, **named}


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _checked_example(example: Batch, device: torch.device) -> Batch:
    """Return a public example batch on the device. Raises InputError."""
    _check_rows(example, None)
    if samples_in(example) == 0:
        raise InputError("example must have at least one row.")
    return map_rows(lambda t: t.to(device), example)


def _check_rows(batch: Batch, structure: Structure | None) -> None:
    """Reject a batch that is not tensors with the same number of rows, as in the structure."""
    parts = parts_by_name(batch)
    errors = [
        f"{name} is a {type(part).__name__}, not a tensor."
        for name, part in parts.items()
        if not isinstance(part, Tensor) or part.ndim == 0
    ]
    raise_errors(errors or ([] if parts else ["The batch contains no tensor."]))
    rows = {len(part) for part in parts.values()}
    if len(rows) > 1:
        raise InputError(
            "The tensors of the batch have different numbers of rows. Each must have one row per "
            f"record in its first dimension: {', '.join(parts)}."
        )
    if structure is not None and _form(batch) != _form(structure.template):
        raise InputError(
            "The batch has other parts, shapes or types than the one that was validated: "
            f"{_form(batch)}, not {_form(structure.template)}. Pad records to a fixed length."
        )


def _form(batch: Batch) -> dict[str, tuple[Any, ...]]:
    return {name: (*t.shape[1:], t.dtype, t.device) for name, t in parts_by_name(batch).items()}
