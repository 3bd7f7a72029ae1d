"""From a plan to a trainer: network, data, optimizer and secret keys put together."""

import torch
from torch import nn

from dpmac_cli.config.plan import Secret, TrainPlan
from dpmac_cli.data.dataset import Data
from dpmac_cli.dp.algorithm import build_algorithm
from dpmac_cli.dp.mechanism import GaussianMechanism, SecureMechanism
from dpmac_cli.dp.rules import Rule
from dpmac_cli.errors import InputError
from dpmac_cli.models.registry import UserModel
from dpmac_cli.randomness.keystream import Keys, make_keys
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.task import Task, make_task, outcome, task_of
from dpmac_cli.training.canaries import Canaries, GradientCanaries, ImageCanaries
from dpmac_cli.training.diagnostics import Diagnostics
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.hooks import Hook
from dpmac_cli.training.schedules import Plan
from dpmac_cli.training.state import Randomness
from dpmac_cli.training.trainer import Trainer


def keys_of(plan: TrainPlan, base: int = 0) -> Keys:
    """Return the keys of a plan's seed, or fresh ones; ``base`` steps were taken before."""
    return make_keys(None if isinstance(plan.seed, Secret) else plan.seed, base=base)


def make_trainer(
    plan: TrainPlan,
    *,
    steps: int | None = None,
    device: torch.device | None = None,
    diagnostics: Diagnostics | None = None,
    keys: Keys | None = None,
    data: Data | None = None,
    task: Task | None = None,
    ranks: Ranks | None = None,
    model: nn.Module | None = None,
    rule: Rule | None = None,
) -> Trainer:
    """Build the trainer of a run, ready for its first step.

    Args:
        plan: of the run.
        steps: T; None for the plan's.
        device: None for the plan's.
        diagnostics: sees losses and norms that are not private.
        keys: those of a run that is resumed exactly; None for those of the plan's seed, or fresh
            ones. Ranks other than the first use that of the layers alone.
        data: on the device; None to load it.
        task: of :func:`~dpmac_cli.runs.task.make_task`; None to make it of ``data``.
        ranks: the processes of the run.
        model: a network that is at hand, in place of the one that the plan names. It is trained as
            it is, in place.
        rule: see :func:`~dpmac_cli.dp.algorithm.build_algorithm`.

    Raises:
        InputError: data or device cannot be used, or the plan freezes a part of a network that it
            does not build.
        ModelError: the model is no torch module, or mixes samples.
    """
    device = device or choose_device(plan.device)
    keys = keys or keys_of(plan)
    if model is not None:
        task = task_of(model, plan, device, data)
    task = task or outcome(make_task(plan, device, keys, data))
    _check_size(plan, task.data)
    canaries = _canaries(plan, task, keys)
    # Built-in networks draw no random numbers in their forward pass; others may.
    own = model is not None or isinstance(plan.model, UserModel)
    observers: tuple[Hook | None, ...] = (diagnostics, canaries)
    isolated = task.independence == "isolated" and not plan.start.head_only
    return Trainer(
        model=task.trained,
        data=canaries.data if isinstance(canaries, ImageCanaries) else task.data,
        algorithm=build_algorithm(
            plan.method, plan.hyper, private=plan.private, decay=plan.recipe.weight_decay, rule=rule
        ),
        mechanism=_mechanism(plan),
        plan=_schedule(plan, steps, isolated=isolated),
        randomness=_randomness(plan, keys, 0 if ranks is None else ranks.rank, own=own),
        hooks=[hook for hook in observers if hook is not None],
        ranks=ranks,
    )


def _schedule(plan: TrainPlan, steps: int | None, *, isolated: bool) -> Plan:
    return Plan(
        steps=plan.steps if steps is None else steps,
        steps_per_epoch=plan.steps_per_epoch,
        physical_batch=plan.physical_batch,
        private=plan.private,
        compiled=plan.compile,
        recipe=plan.recipe,
        isolated=isolated,
    )


def _check_size(plan: TrainPlan, data: Data) -> None:
    """Reject data with another number of records than the sampling rate, so epsilon, is for."""
    if len(data.train) != plan.facts.train_size:
        raise InputError(
            f"data has {len(data.train):,} training records, but epsilon was computed for the "
            f"{plan.facts.train_size:,} of {plan.dataset_name}. Save your records as an .npz and "
            "name that as the dataset."
        )


def _mechanism(plan: TrainPlan) -> GaussianMechanism:
    if plan.private and plan.sigma == 0:
        raise ValueError("a private run needs noise")
    kind = SecureMechanism if plan.secure else GaussianMechanism
    return kind(plan.sigma, plan.batch_size)


def _canaries(plan: TrainPlan, task: Task, keys: Keys) -> Canaries | None:
    """Return what an audit run adds to the records; None for any other."""
    facts, audit, data = plan.facts, plan.audit, task.data
    if audit.canaries == 0:
        return None
    if audit.kind == "images":
        classes = len(facts.classes)
        return ImageCanaries(
            data, levels=facts.levels, classes=classes, count=audit.canaries, keys=keys
        )
    return GradientCanaries(
        parameters=sum(p.numel() for p in task.trained.parameters()),
        rate=plan.event.sampling_rate,
        batch=plan.batch_size,
        first=len(data.train),
        count=audit.canaries,
        keys=keys,
        device=data.gain.device,
    )


def _randomness(plan: TrainPlan, keys: Keys, rank: int, *, own: bool) -> Randomness:
    """Return the random draws of a rank: all but the first have those of layers alone."""
    layers = LayerDraws(keys.layers, rank) if own or plan.recipe.augmented else None
    if rank > 0:
        return Randomness(keys=Keys(layers=keys.layers), sampler=None, noise=None, layers=layers)
    sampler = KeyedSampler(
        plan.event.sampler,
        size=plan.facts.train_size + plan.audit.canaries,
        batch=plan.batch_size,
        key=keys.sampler,
        secure=plan.secure,
        rate=plan.event.sampling_rate,
        base=keys.base,
    )
    noise = Noise(keys.noise, secure=plan.secure)
    return Randomness(keys=keys, sampler=sampler, noise=noise, layers=layers)
