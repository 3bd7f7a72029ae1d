"""Resolve settings from flags and YAML into one frozen plan, and report all errors together."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import calibrate_noise
from dpmac_cli.accounting.events import Scores, TrainingEvent
from dpmac_cli.accounting.statements import RECORD
from dpmac_cli.config import checks
from dpmac_cli.config.best import recipe_notes
from dpmac_cli.config.data import plan_data
from dpmac_cli.config.defaults import (
    BATCHES,
    ON_GPU,
    completed,
    completed_for_batches,
    samples_on_gpu,
)
from dpmac_cli.config.plan import (
    CheckpointInterval,
    DataPlan,
    NetworkPlan,
    PrivacyPlan,
    StepsPlan,
    TrainPlan,
    unit_of_privacy,
)
from dpmac_cli.config.settings import Settings
from dpmac_cli.config.sources import Values, given_settings
from dpmac_cli.errors import InputError, named, raise_errors
from dpmac_cli.models import registry
from dpmac_cli.models.encoders import read_encoder
from dpmac_cli.optim import OPTIMIZERS, Optimizer
from dpmac_cli.tasks.known import METRICS
from dpmac_cli.training.schedules import LossKind, Recipe

#: A plan of private steps.
Plan = TypeVar("Plan", bound=StepsPlan)


@dataclass(frozen=True)
class Resolved:
    """A validated plan, and notes for the user.

    Attributes:
        settings: every setting, with its default, before noise was calibrated.
        notes: probable mistakes.
        chosen: what the recipe chose, with reasons.
    """

    plan: TrainPlan
    settings: Settings
    notes: tuple[str, ...]
    chosen: tuple[str, ...] = ()


def resolve(
    settings: Settings | Values | None = None,
    file: Path | Values | None = None,
    *,
    earlier: tuple[TrainingEvent, ...] = (),
    data: DataPlan | None = None,
    **keywords: Any,
) -> Resolved:
    """Resolve settings and a YAML file into a validated plan. Settings take precedence.

    Args:
        settings: a model, or values by name, as text or of their types; None and False if not
            given.
        file: YAML file with flag names as keys, or the values of a run to change, by name.
        earlier: events on the same records, which a target epsilon must cover too.
        data: the dataset, if its facts were read before; None to read them.
        keywords: more settings by name: ``resolve(dataset="digits", sigma=2)``.

    Raises:
        InputError: lists every invalid value; if there is none, every fault of the dataset; if
            there is none, every fault of settings together.
        BudgetError: no noise meets the target epsilon.
    """
    typed = settings.explicit if isinstance(settings, Settings) else settings or {}
    flags = {**typed, **keywords}
    given = given_settings(flags, file)
    data = data or plan_data(given)
    given = given.replace(dataset=data.dataset)
    completed_settings = completed(given, data.facts)
    on_gpu = given.physical_batch or samples_on_gpu(completed_settings, data.facts)
    plan = make_plan(completed_settings, data, on_gpu)
    faults = checks.faults(plan, completed_settings.epochs)
    raise_errors([*checks.lonely(given.explicit), *faults])
    plan = _calibrated(plan, earlier)
    notes = checks.notes_on_plan(plan, Settings.model_validate(flags).explicit)
    chosen = recipe_notes(given, data.facts)
    return Resolved(plan, completed_settings, tuple(map(named, notes)), tuple(chosen))


def resolve_batches(
    records: int, keywords: dict[str, Any], earlier: tuple[TrainingEvent, ...] = ()
) -> tuple[StepsPlan, tuple[str, ...]]:
    """Resolve the settings of a training whose batches a program supplies.

    Args:
        records: number of its records, which is public.
        keywords: settings by name, among them the name of the network and the size of a batch.
        earlier: events on the same records, which a target epsilon must cover too.

    Returns:
        the plan, with calibrated noise, and notes on probable mistakes.

    Raises:
        InputError: lists every fault found.
        BudgetError: no noise meets the target epsilon.
    """
    given = Settings.model_validate(keywords)
    settings = completed_for_batches(given, records)
    on_gpu = given.physical_batch or ON_GPU
    plan = StepsPlan(
        settings=settings,
        privacy=_privacy(settings, records, RECORD),
        optimizer=_optimizer(settings),
        recipe=_recipe(settings),
        gpu_batch=on_gpu,
    )
    raise_errors(checks.faults_of_steps(plan, records, BATCHES, settings.epochs))
    plan = _calibrated(plan, earlier)
    return plan, tuple(map(named, checks.notes_on_steps(plan, records, given.explicit)))


def _calibrated(plan: Plan, earlier: tuple[TrainingEvent, ...]) -> Plan:
    """Return a plan with the least noise for which the whole run costs at most the target epsilon.

    It also covers ``earlier`` events. Covered test scores cost at most as much as training.
    """
    privacy, settings = plan.privacy, plan.settings
    if privacy.private and settings.epsilon is not None:
        sigma = calibrate_noise(privacy.event, privacy.delta, settings.epsilon, earlier=earlier)
        event = replace(privacy.event, noise_multiplier=sigma)
        privacy = replace(privacy, event=event, target=settings.epsilon)
        settings = settings.replace(sigma=sigma, epsilon=None)
    if privacy.scores is not None:
        target = min(total_epsilon((privacy.event,), privacy.delta), privacy.max_epsilon)
        scores = privacy.scores.event(privacy.steps, privacy.steps)
        sigma = calibrate_noise(scores, privacy.delta, target)
        privacy = replace(privacy, scores=replace(privacy.scores, noise_multiplier=sigma))
    return replace(plan, privacy=privacy, settings=settings)


def make_plan(settings: Settings, data: DataPlan, gpu_batch: int) -> TrainPlan:
    """Return the plan of :func:`completed` settings, before noise is calibrated.

    ``gpu_batch`` is the number of samples to process at a time on a GPU.
    """
    unit = unit_of_privacy(data.found, covered=settings.cover_scores)
    privacy = _privacy(settings, data.facts.train_size, unit)
    return TrainPlan(
        settings=settings,
        data=data,
        network=_network(settings, data),
        privacy=privacy,
        optimizer=_optimizer(settings),
        recipe=_recipe(settings, settings.records_per_unit if data.found.unit else 1),
        gpu_batch=gpu_batch,
        device=settings.device,
        checkpoints=_interval(settings.checkpoint_every, privacy.steps),
    )


def _optimizer(settings: Settings) -> Optimizer:
    kind = OPTIMIZERS[settings.optimizer]
    return kind(**{name: getattr(settings, name) for name in kind.used()})


def _privacy(settings: Settings, records: int, unit: str) -> PrivacyPlan:
    event = _event(settings, records)
    every = event.steps_per_epoch * (settings.score_every or event.steps)
    by_class = METRICS[settings.metric].by_class
    return PrivacyPlan(
        private=not settings.no_dp,
        event=event,
        batch_size=settings.batch_size,
        delta=settings.delta,
        max_epsilon=settings.max_epsilon or math.inf,
        unit=unit,
        scores=Scores(0.0, every, by_class) if settings.cover_scores else None,
        canaries=settings.canaries or 0,
    )


def _event(settings: Settings, records: int) -> TrainingEvent:
    """Return the accounting event of a run. With K canaries it has n + K/2 records on average."""
    per_epoch = max(1, math.ceil(records / settings.batch_size))
    steps = settings.steps or 0 if settings.epochs is None else settings.epochs * per_epoch
    rate = settings.batch_size / (records + (settings.canaries or 0) / 2)
    rate = min(1.0, rate)  # a batch that is too large is refused with all other faults
    return TrainingEvent(rate, settings.sigma or 0.0, steps, settings.sampler, per_epoch)


def _network(settings: Settings, data: DataPlan) -> NetworkPlan:
    return NetworkPlan(
        model=registry.parse_model(settings.model),
        fix_norm=settings.fix_norm,
        isolate=settings.isolate,
        features=_features(settings, data),
        pretrained=None if settings.pretrained is None else Path(settings.pretrained),
        trained=_trained(settings),
    )


def _features(settings: Settings, data: DataPlan) -> registry.Features | None:
    if settings.backbone is not None and settings.backbone not in registry.BACKBONES:
        encoder = read_encoder(settings.backbone)
        if (read := data.reader) is not None and read != encoder.reader(read.limit):
            raise InputError(
                f"--backbone {settings.backbone} has another tokenizer than the one that "
                f"{data.dataset} was read with. All runs of a search read it once: search over "
                "encoders with the same tokenizer, or search for each of them."
            )
        return encoder.of(data.facts.texts)
    if settings.backbone is not None and settings.backbone_size is not None:
        return registry.Backbone(settings.backbone, settings.backbone_size, settings.backbone_flips)
    return None if settings.features is None else registry.Scattered(settings.features)


def _trained(settings: Settings) -> registry.Trained:
    part = settings.train or "all"
    return registry.Trained(part, settings.lora_rank or registry.Trained.rank)


def _recipe(settings: Settings, records: int = 1) -> Recipe:
    weights = filter(None, (settings.class_weights or "").split(","))
    return Recipe(
        schedule=settings.lr_schedule,
        warmup=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        ema=settings.ema or 0.0,
        views=settings.augmentations or 1,
        augment=settings.augment or "none",
        records=records,
        loss=LossKind(settings.loss, settings.label_smoothing, tuple(map(float, weights))),
    )


#: Checkpoints by default: every minute, and every fiftieth of the steps if they take little time.
SECONDS, PARTS, SHARE = 60.0, 50, 0.05


def _interval(text: str | None, steps: int) -> CheckpointInterval:
    if text is None:
        return CheckpointInterval(math.ceil(steps / PARTS), SECONDS, SHARE)
    if text.endswith("s"):
        return CheckpointInterval(steps=0, seconds=float(text[:-1]))
    return CheckpointInterval(steps=int(text), seconds=math.inf)
