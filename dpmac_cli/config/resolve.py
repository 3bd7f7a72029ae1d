"""Resolve settings from flags and YAML into one frozen plan, and report all errors together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import calibrate_noise
from dpmac_cli.accounting.events import Scores, TrainingEvent
from dpmac_cli.config import checks
from dpmac_cli.config.defaults import completed
from dpmac_cli.config.fields import flag_name
from dpmac_cli.config.given import (
    Given,
    Values,
    by_setting,
    combined,
    faults_of_model,
    from_flags,
    validated,
)
from dpmac_cli.config.keywords import Keywords, SettingName
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.settings import DATA, SETTINGS, Complete, Settings
from dpmac_cli.config.yaml_file import read_settings
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.data.schema import AtHand, Found, Source
from dpmac_cli.data.table_schema import read_schema
from dpmac_cli.dp.optimizers import Hyperparameters
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.models import registry
from dpmac_cli.storage.paths import data_folder
from dpmac_cli.tasks.known import METRICS
from dpmac_cli.training.schedules import LossKind, Recipe


@dataclass(frozen=True)
class Resolved:
    """A validated plan, and notes for the user."""

    plan: TrainPlan
    notes: tuple[str, ...]


def resolve(
    settings: Settings | Values | None = None,
    file: Path | None = None,
    *,
    earlier: tuple[TrainingEvent, ...] = (),
    **keywords: Unpack[Keywords],
) -> Resolved:
    """Resolve settings and a YAML file into a validated plan. Settings take precedence.

    Args:
        settings: a model, or values by name, as text or of their types; None and False if not
            given.
        file: YAML file with flag names as keys.
        earlier: events on the same records, which a target epsilon must cover too.
        keywords: more settings by name: ``resolve(dataset="digits", sigma=2)``.

    Raises:
        InputError: lists every fault found.
        BudgetError: no noise meets the target epsilon.
    """
    errors: list[str] = []
    named = settings.given if isinstance(settings, Settings) else settings or {}
    on_command_line = from_flags({**named, **keywords}, errors)
    given = {} if file is None else read_settings(file, errors)
    if "model" in given and "model" not in on_command_line:
        errors += faults_of_model([str(given["model"].value)], given["model"].origin)
    return _resolved(on_command_line, given, errors, earlier)


def change(recorded: Mapping[str, Any], flags: Mapping[SettingName, Any]) -> Resolved:
    """Resolve recorded settings (:attr:`TrainPlan.recorded`) into a plan. Flags take precedence.

    Raises:
        InputError: lists every fault found.
    """
    given = {
        name: Given(value, f"{flag_name(name)} in the checkpoint")
        for name, value in by_setting(recorded).items()
        if value is not False
    }
    errors: list[str] = []
    return _resolved(from_flags(flags, errors), given, errors)


def data_settings(file: Path, dataset: str | AtHand | None) -> TrainPlan:
    """Return a plan with only the data settings of a run's config.yaml.

    ``dataset`` is the current path of the data; None for the path in the file. Raises InputError.
    """
    errors: list[str] = []
    given = {
        name: entry
        for name, entry in read_settings(file, errors).items()
        if name == "dataset" or SETTINGS[name].flag.group == DATA
    }
    if dataset is None and str(given["dataset"].value).startswith("<"):
        raise InputError(
            f"{file.parent} was trained on records in memory of a program. Add --dataset with the "
            "path of a file of them, or score it with dpmac_cli.score."
        )
    moved: Keywords = {"dataset": dataset}
    return _resolved(from_flags(moved, errors), given, errors).plan


def _resolved(
    flags: Mapping[SettingName, Given],
    file: Mapping[SettingName, Given],
    errors: list[str],
    earlier: tuple[TrainingEvent, ...] = (),
) -> Resolved:
    """Return a validated plan; ``errors`` were found before."""
    given = combined(file, flags, errors)
    settings, invalid = validated(given, errors)
    # Otherwise defaults would be another dataset's, or all images would be decoded first.
    if "dataset" in invalid or settings.skip_bad:
        raise_errors(errors)
    try:
        data, found = _data(settings)
    except InputError as failure:
        raise InputError([*errors, *failure.errors]) from failure
    if isinstance(data, Source):
        settings = settings.replace(dataset=str(data.path))
    errors += checks.lonely(given)
    plan = make_plan(completed(settings, found.facts), data, found)
    raise_errors([*errors, *checks.faults(plan)])
    plan = _calibrated(plan, earlier)
    return Resolved(plan, tuple(checks.notes(plan, flags)))


def _calibrated(plan: TrainPlan, earlier: tuple[TrainingEvent, ...]) -> TrainPlan:
    """Return a plan with the least noise for which the whole run costs at most the target epsilon.

    It also covers ``earlier`` events. Covered test scores cost at most as much as training.
    """
    if plan.private and math.isfinite(plan.target_epsilon):
        target, event = plan.target_epsilon, plan.event
        sigma = calibrate_noise(event, plan.delta, target, earlier=earlier)
        settings = plan.settings.replace(sigma=sigma, epsilon=None)
        recorded = _recorded(settings, plan.data)
        event = replace(event, noise_multiplier=sigma)
        plan = replace(plan, event=event, settings=settings, recorded=recorded)
    if plan.scores is None:
        return plan
    target = min(total_epsilon((plan.event,), plan.delta), plan.max_epsilon)
    scores = plan.scores.event(plan.steps, plan.steps)
    sigma = calibrate_noise(scores, plan.delta, target)
    return replace(plan, scores=replace(plan.scores, noise_multiplier=sigma))


def make_plan(settings: Complete, data: str | Source, found: Found) -> TrainPlan:
    """Return the plan of :func:`completed` settings, before noise is calibrated."""
    interval = settings.checkpoint_every
    by_seconds = interval.endswith("s")
    event = _event(settings, found.facts.train_size)
    every = event.steps_per_epoch * (settings.score_every or event.steps)
    by_class = METRICS[settings.metric].by_class
    return TrainPlan(
        dataset=settings.dataset,
        data=data,
        found=found,
        model=registry.parse_model(settings.model),
        fix_norm=settings.fix_norm,
        isolate=settings.isolate,
        features=_features(settings),
        pretrained=None if settings.pretrained is None else Path(settings.pretrained),
        trained=_trained(settings),
        event=event,
        delta=settings.delta,
        private=not settings.no_dp,
        target_epsilon=settings.epsilon or math.inf,
        max_epsilon=settings.max_epsilon or math.inf,
        secure=settings.secure,
        optimizer=settings.optimizer,
        hyper=Hyperparameters(**{f.name: getattr(settings, f.name) for f in _HYPERPARAMETERS}),
        recipe=_recipe(settings, found),
        batch_size=settings.batch_size,
        physical_batch=settings.physical_batch,
        gpu_batch=settings.gpu_batch,
        canaries=settings.canaries or 0,
        guesses=settings.guesses or 0,
        device=settings.device,
        seed=settings.seed,
        data_dir=data_folder(settings.data_dir),
        checkpoint_steps=0 if by_seconds else int(interval),
        checkpoint_seconds=float(interval[:-1]) if by_seconds else math.inf,
        out=settings.out,
        force=settings.force,
        metric=settings.metric,
        scores=Scores(0.0, every, by_class) if settings.cover_scores else None,
        json=settings.json,
        quiet=settings.quiet,
        settings=settings,
        recorded=_recorded(settings, data),
    )


_HYPERPARAMETERS = fields(Hyperparameters)


def _recipe(settings: Complete, found: Found) -> Recipe:
    weights = filter(None, (settings.class_weights or "").split(","))
    return Recipe(
        schedule=settings.lr_schedule,
        warmup=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        ema=settings.ema or 0.0,
        views=settings.augmentations or 1,
        augment=settings.augment or "none",
        records=settings.records_per_unit if found.unit else 1,
        loss=LossKind(settings.loss, settings.label_smoothing, tuple(map(float, weights))),
    )


def _event(settings: Complete, records: int) -> TrainingEvent:
    """Return the accounting event of a run. With K canaries it has n + K/2 records on average."""
    per_epoch = math.ceil(records / settings.batch_size)
    steps = settings.steps or 0 if settings.epochs is None else settings.epochs * per_epoch
    rate = settings.batch_size / (records + (settings.canaries or 0) / 2)
    return TrainingEvent(rate, settings.sigma or 0.0, steps, settings.sampler, per_epoch)


def _trained(settings: Complete) -> registry.Trained:
    part = settings.train or "all"
    if settings.lora_rank is None or settings.lora_alpha is None or part != "lora":
        return registry.Trained(part)
    return registry.Trained(part, settings.lora_rank, settings.lora_alpha)


def _data(settings: Settings) -> tuple[str | Source, Found]:
    """Return a registered name or the source of your own dataset, and the facts of the dataset.

    They are read once, because files may change during a run.
    """
    name = settings.dataset
    at_hand = name if isinstance(name, AtHand) else None
    if isinstance(name, str) and name in DATASETS:
        if settings.unit is not None:
            raise InputError(
                f"--unit {settings.unit}: {name} does not contain the units of records. Use "
                "a table, a folder, or an .npz with an array unit."
            )
        return name, Found(DATASETS[name], name)
    from dpmac_cli.data.own import inspect  # noqa: PLC0415  (loads numpy)

    schema = None if at_hand is None else at_hand.schema
    if settings.schema is not None:
        schema = read_schema(Path(settings.schema))
    source = Source(
        at_hand.path if at_hand is not None else Path(str(name)),
        test_fraction=settings.test_fraction,
        split_seed=settings.split_seed,
        channels=None if settings.channels is None else int(settings.channels),
        image_size=settings.image_size,
        levels=settings.levels,
        classes=_names(settings.classes),
        standardise=settings.standardise,
        feature_range=_ends(settings.feature_range),
        schema=schema,
        at_hand=at_hand,
        unit=settings.unit,
        skip_bad=settings.skip_bad,
    )
    return source, inspect(source)


def _names(text: str | None) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in text.split(",")) if text else None


def _ends(text: str | None) -> tuple[float, float] | None:
    if not text:
        return None
    low, high = map(float, text.split(","))
    return low, high


def _features(settings: Complete) -> registry.Features | None:
    if settings.backbone is not None and settings.backbone_size is not None:
        return registry.Backbone(settings.backbone, settings.backbone_size, settings.backbone_flips)
    return None if settings.features is None else registry.Scattered(settings.features)


def _recorded(settings: Complete, data: str | Source) -> dict[str, Any]:
    """Return the contents of config.yaml, by the names of the flags."""
    kept: dict[SettingName, Any] = {
        name: value
        for name, option in SETTINGS.items()
        if (value := getattr(settings, name)) is not None
        and option.flag.recorded
        and not (option.flag.omitted and value == option.default)
        and (isinstance(data, Source) or option.flag.group != DATA)
    }
    if not isinstance(registry.parse_model(settings.model), registry.UserModel):
        kept.pop("fix_norm")
    if settings.gpu_batch != settings.physical_batch:  # not given: the device decides
        kept.pop("physical_batch")
    return {flag_name(name): value for name, value in kept.items()}
