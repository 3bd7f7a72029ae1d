"""Build a trainer from a plan: network, data, optimizer and secret keys."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from dpmac_cli.accounting.statements import short
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.data.dataset import Data, fingerprint
from dpmac_cli.data.loaders import loading
from dpmac_cli.data.schema import Source
from dpmac_cli.dp.algorithm import build_algorithm
from dpmac_cli.dp.losses import Loss, alone
from dpmac_cli.dp.mechanism import GaussianMechanism, SecureMechanism
from dpmac_cli.dp.rules import Rule
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models import build
from dpmac_cli.models.backbones import public_weights
from dpmac_cli.models.feature_cache import featured
from dpmac_cli.models.features import FrozenFeatures, cut_before_head, head_of
from dpmac_cli.models.registry import BACKBONES, Backbone, UserModel
from dpmac_cli.models.validation import Independence, check_model, check_precision, independence
from dpmac_cli.models.weights import PublicWeights, read_weights
from dpmac_cli.randomness.keystream import Keys, make_keys
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.release.publish import check_publishable
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.storage.digest import digest
from dpmac_cli.storage.paths import cache_folder
from dpmac_cli.storage.progress import Computing, outcome
from dpmac_cli.training.canaries import Canaries
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.lineage import Training, attach
from dpmac_cli.training.schedules import Plan
from dpmac_cli.training.state import Randomness
from dpmac_cli.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Task:
    """Network and data of a run.

    Attributes:
        model: the whole network, which takes images and is published.
        trained: the part that is trained on ``data``, without frozen features.
        independence: reason why the network is independent across samples.
        fingerprints: SHA-256 of everything that must be unchanged to resume a run: your own
            records with their classes and constants, your own network, the file of public weights,
            and the features. Private, like the records. notes: messages for the user.
        built_by: call that built a user-supplied network, as code; its file may change later.
    """

    model: nn.Module
    trained: nn.Module
    data: Data
    independence: Independence
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    built_by: str = ""

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole network."""
        return sum(p.numel() for p in self.model.parameters())


def make_trainer(
    plan: TrainPlan,
    *,
    steps: int | None = None,
    device: torch.device | None = None,
    keys: Keys | None = None,
    data: Data | None = None,
    task: Task | None = None,
    ranks: Ranks | None = None,
    model: nn.Module | None = None,
    rule: Rule | None = None,
    loss: Loss | None = None,
) -> Trainer:
    """Build the trainer of a run, ready for its first step.

    Args:
        plan: plan of the run.
        steps, device: None for the plan's.
        keys: keys of a run that is resumed exactly; None for those of the plan's seed, or new
            keys. Ranks other than the first only use the key of the layers.
        data: data on the device; None to load it. ranks: the processes of the run.
        task: result of :func:`make_task`; None to make it from ``data`` and ``model``.
        model: a network to train in place, instead of the plan's.
        rule: see :func:`~dpmac_cli.dp.algorithm.build_algorithm`.
        loss: loss of one output, shape (1, classes), and its label, instead of the plan's. It runs
            on each sample separately.

    Raises:
        InputError: data or device cannot be used, or the plan freezes a part of a network that it
            does not build.
        ModelError: the model is not a torch module, or mixes samples.
    """
    device = device or choose_device(plan.device)
    keys = keys or make_keys(plan.seed)
    task = task or outcome(make_task(plan, device, keys, data, model=model))
    _check_size(plan, task.data)
    isolated = task.independence == "isolated" and not plan.head_only
    # Built-in networks use no random numbers in their forward pass; others may.
    own = task.independence != "built in"
    trainer = Trainer(
        model=task.trained,
        data=task.data,
        algorithm=build_algorithm(plan.method, plan.hyper, private=plan.private, rule=rule),
        mechanism=_mechanism(plan),
        plan=Plan(
            steps=plan.steps if steps is None else steps,
            steps_per_epoch=plan.steps_per_epoch,
            physical_batch=plan.gpu_batch if device.type == "cuda" else plan.physical_batch,
            private=plan.private,
            recipe=plan.recipe,
            loss=None if loss is None else _checked(loss, plan, task.trained, device),
            scores=plan.scores,
            isolated=isolated,
        ),
        randomness=_randomness(plan, keys, ranks, own=own),
        hooks=_canaries(plan, task, keys),
        ranks=ranks,
    )
    trainer.training = _carried(plan, task)
    return trainer


def _carried(plan: TrainPlan, task: Task) -> Training:
    """Return the training that a network carries from now on."""
    training = Training(
        event=plan.event,
        unit=unit_of(plan),
        private=plan.private,
        seeded=plan.seed is not None,
        secure=plan.secure,
    )
    attach(task.model, training)
    return training


def unit_of(plan: TrainPlan) -> tuple[str, str]:
    """Return the unit of privacy, and what tells the units of records apart."""
    return short(plan.unit), plan.found.unit


def _checked(loss: Loss, plan: TrainPlan, model: nn.Module, device: torch.device) -> Loss:
    """Return a user-supplied loss, validated on random outputs and labels."""
    outputs, labels = plan.facts.task.examples()
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    return alone(loss, outputs.to(device), labels.to(device), names)


def make_task(
    plan: TrainPlan,
    device: torch.device,
    keys: Keys,
    data: Data | None = None,
    *,
    model: nn.Module | None = None,
) -> Generator[Computing, None, Task]:
    """Load the data and build the network of a run, and report progress.

    The network is validated before the first record is read. For arguments and errors see
    :func:`make_trainer`.
    """
    shape, at_hand = plan.facts.shape, model is not None
    seen = build.seen_by_network(plan.facts.signature, plan.features)
    own = at_hand or isinstance(plan.model, UserModel)
    notes: tuple[str, ...] = ()
    if model is None:
        model = _build(plan, keys)
    else:
        _check_at_hand(plan, model)
    fingerprints = _fingerprints(plan, data, at_hand=at_hand)
    if plan.starts_public:  # never for a network that was passed in
        weights, notes = _start(plan, model)
        fingerprints["pretrained"] = weights.sha256
    trained = model = model.to(device)
    parts = None  # the frozen part, which runs once per record, and the trained one
    if isinstance(model, FrozenFeatures) and not at_hand:
        parts = model
    elif plan.head_only:  # never for a network that was passed in
        parts = cut_before_head(model, shape)
    kind, why = _independence(plan, model, parts, own=own)
    if device.type == "cuda" and not plan.head_only:  # autocast on CUDA is not detected on the CPU
        cached = plan.features is not None and parts is not None
        whole, given = (parts.head, seen.shape) if parts and cached else (model, shape)
        check_precision(whole, given)
    if data is None:
        data = yield from loading(plan.data, plan.data_dir, device, facts=plan.facts)
    if isinstance(plan.data, Source):
        fingerprints |= record_sums(data)
    if parts is not None:
        parts.isolated = plan.features is None and kind == "isolated"
        settings = {"isolate": plan.isolate, **vars(plan.trained)}
        if plan.features is not None:
            settings |= vars(plan.features)
        data, sha256 = yield from featured(parts, data, settings, cache_folder())
        trained, fingerprints["features"] = parts.head, sha256
    named = None if at_hand or not isinstance(plan.model, UserModel) else plan.model
    return Task(
        model=model,
        trained=trained,
        data=data,
        independence=kind,
        fingerprints=fingerprints,
        notes=(*notes, *why),
        built_by="" if named is None else build.built_by(named, seen),
    )


def record_sums(data: Data) -> dict[str, str]:
    """Return checksums of user-supplied records and of their assignment to units."""
    sums = {"data": fingerprint(data.train, data.test)}
    for name, split in (("units", data.train), ("test units", data.test)):
        if split.units is not None:
            sums[name] = split.units.sha256()
    return sums


def _start(plan: TrainPlan, model: nn.Module) -> tuple[PublicWeights, tuple[str, ...]]:
    """Load the public weights into a network; return them with notes."""
    weights = None if plan.pretrained is None else read_weights(plan.pretrained)
    if isinstance(plan.features, Backbone):
        weights = weights or public_weights(plan.features.kind)
        model, head = model.get_submodule("frozen.network"), BACKBONES[plan.features.kind].head
        notes = weights.adopted_by(model, head)
    else:
        assert weights is not None  # noqa: S101  (it starts from public weights)
        notes = weights.adopted_by(model, head_of(model, plan.facts.shape))
    return weights, (*_doubts(plan, weights), *notes)


def _build(plan: TrainPlan, keys: Keys) -> nn.Module:
    model = build.build_model(
        plan.model,
        plan.facts.signature,
        int.from_bytes(keys.init[:4], "little"),
        fix_norm=plan.fix_norm,
        features=plan.features,
        trained=plan.trained if plan.starts_public else None,
        isolated=plan.isolate,
    )
    check_publishable(model)
    return model


def _check_at_hand(plan: TrainPlan, model: object) -> None:
    """Validate a network that was passed in like a built one. Raises InputError, ModelError."""
    if plan.features is not None or plan.pretrained is not None:
        raise InputError(
            "features and pretrained are for a network that dpmac builds: leave them out, or "
            "do the same in your own network."
        )
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{getattr(model, '__name__', repr(model))} is not a torch module. Pass a network "
            "instance, such as torch.nn.Linear(64, 10)."
        )
    if plan.fix_norm:
        build.without_batch_norm(model)
    check_model(model, plan.facts.shape, plan.facts.task.outputs, isolated=plan.isolate)


def _fingerprints(plan: TrainPlan, data: Data | None, *, at_hand: bool) -> dict[str, str]:
    """Return checksums of user-supplied data, networks and weights, for resuming."""
    facts, sums = plan.facts, {}
    if isinstance(plan.data, Source):
        sums["classes"] = digest({}, facts.task.declared)
        sums["constants"] = digest({}, {"mean": facts.mean, "std": facts.std})
    elif data is not None and facts.sha256 is not None:
        found = fingerprint(data.train, data.test)
        if found != facts.sha256:  # user-supplied records under a registered name
            sums["data"] = found
    if isinstance(plan.model, UserModel) and not at_hand:
        sums["network"] = build.source_sum(plan.model)
    return sums


def _independence(
    plan: TrainPlan, model: nn.Module, parts: FrozenFeatures | None, *, own: bool
) -> tuple[Independence, tuple[str, ...]]:
    if plan.isolate:
        return "isolated", ()
    if not own:
        return "built in", ()
    shape, outputs = plan.facts.shape, plan.facts.task.outputs
    if plan.features is not None:
        model, shape = model.get_submodule("head"), plan.features.shape_of(shape)
    frozen = parts.frozen if parts is not None and plan.head_only else None
    kind, why = independence(model, shape, outputs, frozen)
    if kind == "traced":
        return kind, ()
    return kind, (
        "The network is run on each sample alone, which is slower, because it could not be proven "
        f"independent across samples. {why} An operation across samples then sees only one.",
    )


def _doubts(plan: TrainPlan, weights: PublicWeights) -> tuple[str, ...]:
    """Return notes on weights that may not be public. Raises InputError if they are not."""
    name = weights.trained_on
    if name != plan.found.name or not plan.private:
        return ()
    if not isinstance(plan.data, Source):
        raise InputError(
            f"--pretrained: {weights.path} was trained on {name} by dpmac, so its weights are not "
            "public to a run on the same records, and epsilon would not cover what they reveal. "
            "Use weights from other data. To train a run further, use dpmac train --fork."
        )
    return (
        f"{weights.path.name} was trained by dpmac on data that is also called {name}. If these "
        "are the same records, its weights are not public, and epsilon does not cover what they "
        "tell.",
    )


def _check_size(plan: TrainPlan, data: Data) -> None:
    """Reject data whose number of records differs from that of sampling rate and epsilon."""
    if data.train.size != plan.facts.train_size:
        raise InputError(
            f"data has {data.train.size:,} {plan.unit.split(' with ')[0]}s, but epsilon was "
            f"computed for the {plan.facts.train_size:,} of {plan.found.name}. Save your records "
            "as an .npz and use that as the dataset."
        )
    if plan.scores is not None and data.test.size != plan.facts.test_size:
        raise InputError(
            f"data has {data.test.size:,} test records or units, but scores are covered for the "
            f"{plan.facts.test_size:,} of {plan.found.name}. Use the dataset with its units."
        )


def _mechanism(plan: TrainPlan) -> GaussianMechanism:
    if plan.private and plan.sigma == 0:
        raise ValueError("a private run needs noise")
    kind = SecureMechanism if plan.secure else GaussianMechanism
    return kind(plan.sigma, plan.batch_size)


def _canaries(plan: TrainPlan, task: Task, keys: Keys) -> list[Canaries]:
    """Return the canaries of an audit run; an empty list for other runs."""
    if plan.canaries == 0:
        return []
    return [
        Canaries(
            parameters=sum(p.numel() for p in task.trained.parameters()),
            rate=plan.event.sampling_rate,
            batch=plan.batch_size,
            first=task.data.train.size,
            count=plan.canaries,
            inputs=plan.recipe.inputs,
            keys=keys,
            device=task.data.gain.device,
        )
    ]


def _randomness(plan: TrainPlan, keys: Keys, ranks: Ranks | None, *, own: bool) -> Randomness:
    """Return the random draws of a rank; ranks other than the first only have those of layers."""
    rank = 0 if ranks is None else ranks.rank
    drawn = own or plan.recipe.augmented or plan.found.unit
    layers = LayerDraws(keys.layers, rank) if drawn else None
    if rank > 0:
        return Randomness(keys=Keys(layers=keys.layers), sampler=None, noise=None, layers=layers)
    sampler = KeyedSampler(
        plan.event.sampler,
        size=plan.facts.train_size + plan.canaries,
        batch=plan.batch_size,
        key=keys.sampler,
        secure=plan.secure,
        rate=plan.event.sampling_rate,
        base=keys.base,
    )
    noise = Noise(keys.noise, secure=plan.secure)
    scores = Noise(keys.scores, secure=True) if plan.scores else None
    return Randomness(keys=keys, sampler=sampler, noise=noise, layers=layers, scores=scores)
