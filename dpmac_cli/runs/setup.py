"""Build a trainer from a plan: algorithm, mechanism, random draws and canaries."""

import torch
from torch import nn

from dpmac_cli.accounting.statements import short
from dpmac_cli.config.plan import ComputePlan, DataPlan, PrivacyPlan, StepsPlan, TrainPlan
from dpmac_cli.data.dataset import Data
from dpmac_cli.dp.losses import Loss, check_loss
from dpmac_cli.dp.mechanism import GaussianMechanism, SecureMechanism
from dpmac_cli.errors import InputError
from dpmac_cli.randomness.keystream import Keys, make_keys
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.prepare import PreparedRun, prepare
from dpmac_cli.storage.progress import outcome
from dpmac_cli.training.canaries import Canaries
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.lineage import Training, attach
from dpmac_cli.training.schedules import Recipe, StepPlan
from dpmac_cli.training.state import Randomness
from dpmac_cli.training.trainer import Trainer


def make_trainer(
    plan: TrainPlan,
    *,
    steps: int | None = None,
    device: torch.device | None = None,
    keys: Keys | None = None,
    data: Data | None = None,
    task: PreparedRun | None = None,
    ranks: Ranks | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
) -> Trainer:
    """Build the trainer of a run, ready for its first step.

    Args:
        plan: plan of the run.
        steps, device: None for the plan's.
        keys: secret keys; None for those of the plan's seed, or new keys. Ranks other than the
            first only use the key of the layers.
        data: data on the device; None to load it. ranks: the processes of the run.
        task: result of :func:`prepare`; None to make it from ``data`` and ``model``.
        model: a network to train in place, instead of the plan's.
        loss: loss of one output, shape (1, classes), and its label, instead of the plan's. It runs
            on each sample separately.

    Raises:
        InputError: data or device cannot be used, or the plan freezes a part of a network that it
            does not build.
        ModelError: the model is not a torch module, or mixes samples.
    """
    device = device or choose_device(plan.run.device)
    keys = keys or make_keys(plan.run.seed)
    task = task or outcome(prepare(plan, device, keys, data, model=model))
    _check_size(plan.data, plan.privacy, task.data)
    if loss is not None and not plan.network.isolate:
        outputs, labels = plan.data.facts.task.examples()
        check_loss(loss, outputs.to(device), labels.to(device))
    steps = plan.privacy.steps if steps is None else steps
    trainer = Trainer(
        model=task.trained,
        data=task.data,
        optimizer=plan.optimizer,
        mechanism=mechanism_of(plan.privacy, secure=plan.run.secure),
        plan=steps_of(plan, steps, device, loss=loss),
        randomness=_randomness(plan, keys, task, rank=0 if ranks is None else ranks.rank),
        hooks=_canaries(plan.privacy, plan.recipe, task, keys),
        ranks=ranks,
    )
    trainer.training = training_of(plan.privacy, plan.run, unit_of(plan.privacy, plan.data))
    attach(task.model, trainer.training)
    return trainer


def steps_of(
    plan: StepsPlan,
    steps: int,
    device: torch.device,
    *,
    loss: Loss | None = None,
) -> StepPlan:
    """Return what is fixed about every step. A ``loss`` replaces that of the plan."""
    return StepPlan(
        steps=steps,
        steps_per_epoch=plan.privacy.steps_per_epoch,
        physical_batch=plan.run.physical_batch_on(device.type),
        private=plan.privacy.private,
        recipe=plan.recipe,
        loss=loss,
        scores=plan.privacy.scores,
    )


def training_of(privacy: PrivacyPlan, run: ComputePlan, unit: tuple[str, str]) -> Training:
    """Return the training that a network carries from now on, with no step yet."""
    return Training(
        event=privacy.event,
        unit=unit,
        private=privacy.private,
        seeded=run.seed is not None,
        secure=run.secure,
    )


def unit_of(privacy: PrivacyPlan, data: DataPlan) -> tuple[str, str]:
    """Return the unit of privacy, and what tells the units of records apart."""
    return short(privacy.unit), data.found.unit


def _check_size(plan: DataPlan, privacy: PrivacyPlan, data: Data) -> None:
    """Reject data whose number of records differs from that of sampling rate and epsilon."""
    facts, name = plan.facts, plan.found.name
    if data.train.size != facts.train_size:
        raise InputError(
            f"data has {data.train.size:,} {privacy.unit.split(' with ')[0]}s, but epsilon was "
            f"computed for the {facts.train_size:,} of {name}. Save your records as an .npz and "
            "use that as the dataset."
        )
    if privacy.scores is not None and data.test.size != facts.test_size:
        raise InputError(
            f"data has {data.test.size:,} test records or units, but scores are covered for the "
            f"{facts.test_size:,} of {name}. Use the dataset with its units."
        )


def mechanism_of(privacy: PrivacyPlan, *, secure: bool) -> GaussianMechanism:
    """Return the mechanism with the noise of a plan. Raises ValueError for private runs without."""
    if privacy.private and privacy.sigma == 0:
        raise ValueError("a private run needs noise")
    kind = SecureMechanism if secure else GaussianMechanism
    return kind(privacy.sigma, privacy.batch_size)


def _canaries(
    privacy: PrivacyPlan, recipe: Recipe, task: PreparedRun, keys: Keys
) -> list[Canaries]:
    """Return the canaries of an audit run; an empty list for other runs."""
    if privacy.audit.canaries == 0:
        return []
    return [
        Canaries(
            parameters=sum(p.numel() for p in task.trained.parameters() if p.requires_grad),
            rate=privacy.event.sampling_rate,
            batch=privacy.batch_size,
            first=task.data.train.size,
            count=privacy.audit.canaries,
            inputs=recipe.inputs,
            keys=keys,
            device=task.data.gain.device,
        )
    ]


def _randomness(plan: TrainPlan, keys: Keys, task: PreparedRun, *, rank: int) -> Randomness:
    """Return the random draws of a rank; ranks other than the first only have those of layers."""
    # Built-in networks use no random numbers in their forward pass; others may.
    drawn = task.own or plan.recipe.augmented or plan.data.found.unit
    layers = LayerDraws(keys.layers, rank) if drawn else None
    if rank > 0:
        return Randomness(sampler=None, noise=None, layers=layers)
    privacy, secure = plan.privacy, plan.run.secure
    sampler = KeyedSampler(
        privacy.event.sampler,
        size=plan.data.facts.train_size + privacy.audit.canaries,
        batch=privacy.batch_size,
        key=keys.sampler,
        secure=secure,
        rate=privacy.event.sampling_rate,
        base=keys.base,
    )
    noise = Noise(keys.noise, secure=secure)
    scores = Noise(keys.scores, secure=True) if privacy.scores else None
    return Randomness(sampler=sampler, noise=noise, layers=layers, scores=scores)
