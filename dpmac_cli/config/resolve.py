"""Resolve settings from flags and YAML into one frozen plan, and report all errors together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import calibrate_noise
from dpmac_cli.accounting.events import Scores, TrainingEvent
from dpmac_cli.config import checks
from dpmac_cli.config.defaults import completed
from dpmac_cli.config.given import Given, combined, faults_of_model, typed, validated
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.settings import DATA, DEFAULTS, RECIPE_DEFAULTS, SETTINGS, flag_name
from dpmac_cli.config.yaml_file import read_settings
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.data.schema import AtHand, Found, Source
from dpmac_cli.data.table_schema import read_schema
from dpmac_cli.dp.optimizers import Hyperparameters
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.models import registry
from dpmac_cli.storage.paths import data_folder
from dpmac_cli.training.schedules import LossKind, Recipe

#: Fields of the plan that are settings of the same name and need no conversion.
AS_GIVEN = (
    *("dataset", "fix_norm", "isolate", "delta", "secure", "optimizer", "batch_size"),
    *("physical_batch", "gpu_batch", "device", "seed", "out", "force"),
    *("metric", "json", "quiet"),
)
#: Fields of a :class:`Source` that are settings of the same name and need no conversion.
HOW_TO_READ = (
    *("test_fraction", "split_seed", "image_size", "levels", "standardise", "unit", "skip_bad"),
)
#: Settings that config.yaml omits if they have their defaults.
OMITTED = {*RECIPE_DEFAULTS, "isolate", "backbone_flips", "metric", "cover_scores"}


@dataclass(frozen=True)
class Resolved:
    """A validated plan, and notes for the user."""

    plan: TrainPlan
    notes: tuple[str, ...]


def resolve(
    flags: Mapping[str, Any] | None = None,
    file: Path | None = None,
    *,
    earlier: tuple[TrainingEvent, ...] = (),
    **settings: Any,
) -> Resolved:
    """Resolve flags and a YAML file into a validated plan. Flags take precedence.

    Args:
        flags: field name -> value, as text or of its type; None and False if not given.
        file: YAML file with flag names as keys.
        earlier: events on the same records, which a target epsilon must cover too.
        settings: more entries of ``flags``: ``resolve(dataset="digits", sigma=2)``.

    Raises:
        InputError: lists every fault found.
        BudgetError: no noise meets the target epsilon.
    """
    errors: list[str] = []
    given = {} if file is None else read_settings(file, errors)
    named = {**(flags or {}), **settings}
    if "model" in given and not named.get("model"):
        errors += faults_of_model([str(given["model"].value)], given["model"].origin)
    return _resolved(named, given, errors, earlier)


def change(recorded: Mapping[str, Any], flags: Mapping[str, Any]) -> Resolved:
    """Resolve recorded settings (:attr:`TrainPlan.recorded`) into a plan. Flags take precedence.

    Raises:
        InputError: lists every fault found.
    """
    given = {
        name.replace("-", "_"): Given(value, f"{name} in the checkpoint")
        for name, value in recorded.items()
        if value is not False
    }
    if unknown := [given[name].origin for name in given if name not in SETTINGS]:
        raise InputError(
            f"{' and '.join(unknown)}: this version of dpmac has no such setting. Resume with the "
            "version that started the run, or start a new run."
        )
    return _resolved(flags, given, [])


def data_settings(file: Path, dataset: str | AtHand | None) -> TrainPlan:
    """Return a plan with only the data settings of a run's config.yaml.

    ``dataset`` is the current path of the data; None for the path in the file. Raises InputError.
    """
    errors: list[str] = []
    given = {
        name: entry
        for name, entry in read_settings(file, errors).items()
        if name == "dataset" or SETTINGS[name].panel == DATA
    }
    if dataset is None and str(given["dataset"].value).startswith("<"):
        raise InputError(
            f"{file.parent} was trained on records in memory of a program. Add --dataset with the "
            "path of a file of them, or score it with dpmac_cli.score."
        )
    return _resolved({"dataset": dataset}, given, errors).plan


def _resolved(
    flags: Mapping[str, Any],
    file: dict[str, Given],
    errors: list[str],
    earlier: tuple[TrainingEvent, ...] = (),
) -> Resolved:
    """Return a validated plan; ``errors`` were found before."""
    on_command_line = typed(flags, errors)
    given = combined(file, on_command_line, errors)
    settings = validated(given, errors)
    # Otherwise defaults would be another dataset's, or all images would be decoded first.
    if "dataset" in given.keys() - settings.keys() or "skip_bad" in settings:
        raise_errors(errors)
    try:
        data, found = _data({**DEFAULTS, **settings})
    except InputError as failure:
        raise InputError([*errors, *failure.errors]) from failure
    if isinstance(data, Source):
        settings["dataset"] = str(data.path)
    errors += checks.lonely(given)
    plan = make_plan(completed(settings, found.facts), data, found)
    raise_errors([*errors, *checks.faults(plan)])
    plan = _calibrated(plan, earlier)
    return Resolved(plan, tuple(checks.notes(plan, on_command_line)))


def _calibrated(plan: TrainPlan, earlier: tuple[TrainingEvent, ...]) -> TrainPlan:
    """Return a plan with the least noise for which the whole run costs at most the target epsilon.

    It also covers ``earlier`` events. Covered test scores cost at most as much as training.
    """
    if plan.private and math.isfinite(plan.target_epsilon):
        target, event = plan.target_epsilon, plan.event
        sigma = calibrate_noise(event, plan.delta, target, earlier=earlier)
        recorded = {**plan.recorded, "sigma": sigma}
        recorded.pop("epsilon")
        plan = replace(plan, event=replace(plan.event, noise_multiplier=sigma), recorded=recorded)
    if plan.scores is None:
        return plan
    target = min(total_epsilon((plan.event,), plan.delta), plan.max_epsilon)
    scores = plan.scores.event(plan.steps, plan.steps)
    sigma = calibrate_noise(scores, plan.delta, target)
    return replace(plan, scores=replace(plan.scores, noise_multiplier=sigma))


def make_plan(values: Mapping[str, Any], data: str | Source, found: Found) -> TrainPlan:
    """Return the plan of :func:`completed` settings, before noise is calibrated."""
    interval: str = values["checkpoint_every"]
    by_seconds, weights = interval.endswith("s"), values["pretrained"]
    event = _event(values, found.facts.train_size)
    every = event.steps_per_epoch * (values["score_every"] or event.steps)
    trained = registry.Trained(values["train"] or "all")
    if trained.part == "lora":
        trained = replace(trained, rank=values["lora_rank"], alpha=values["lora_alpha"])
    return TrainPlan(
        **{name: values[name] for name in AS_GIVEN},
        data=data,
        found=found,
        model=registry.parse_model(values["model"]),
        features=_features(values),
        pretrained=None if weights is None else Path(weights),
        trained=trained,
        event=event,
        private=not values["no_dp"],
        target_epsilon=values["epsilon"] or math.inf,
        max_epsilon=values["max_epsilon"] or math.inf,
        hyper=Hyperparameters(**{f.name: values[f.name] for f in fields(Hyperparameters)}),
        recipe=Recipe(
            values["lr_schedule"],
            values["warmup_steps"],
            values["weight_decay"],
            values["ema"] or 0.0,
            values["augmentations"] or 1,
            values["augment"] or "none",
            values["records_per_unit"] if found.unit else 1,
            LossKind(
                values["loss"],
                values["label_smoothing"],
                tuple(map(float, filter(None, (values["class_weights"] or "").split(",")))),
            ),
        ),
        scores=Scores(0.0, every, values["metric"] != "accuracy")
        if values["cover_scores"]
        else None,
        canaries=values["canaries"] or 0,
        guesses=values["guesses"] or 0,
        data_dir=data_folder(values["data_dir"]),
        checkpoint_steps=0 if by_seconds else int(interval),
        checkpoint_seconds=float(interval[:-1]) if by_seconds else math.inf,
        recorded=_recorded(values, data),
    )


def _event(values: Mapping[str, Any], records: int) -> TrainingEvent:
    """Return the accounting event of a run. With K canaries it has n + K/2 records on average."""
    per_epoch = math.ceil(records / values["batch_size"])
    steps = values["steps"] if values["epochs"] is None else values["epochs"] * per_epoch
    rate = values["batch_size"] / (records + (values["canaries"] or 0) / 2)
    return TrainingEvent(rate, values["sigma"] or 0.0, steps, values["sampler"], per_epoch)


def _data(values: Mapping[str, Any]) -> tuple[str | Source, Found]:
    """Return a registered name or the source of your own dataset, and the facts of the dataset.

    They are read once, because files may change during a run.
    """
    name = values["dataset"]
    at_hand = name if isinstance(name, AtHand) else None
    if name in DATASETS:
        if values["unit"] is not None:
            raise InputError(
                f"--unit {values['unit']}: {name} does not contain the units of records. Use "
                "a table, a folder, or an .npz with an array unit."
            )
        return name, Found(DATASETS[name], name)
    from dpmac_cli.data.own import inspect  # noqa: PLC0415  (loads numpy)

    ends, names = values["feature_range"], values["classes"]
    low, high = map(float, ends.split(",")) if ends else (0.0, 0.0)
    schema = None if at_hand is None else at_hand.schema
    if values["schema"] is not None:
        schema = read_schema(Path(values["schema"]))
    source = Source(
        Path(name) if at_hand is None else at_hand.path,
        **{setting: values[setting] for setting in HOW_TO_READ},
        channels=None if values["channels"] is None else int(values["channels"]),
        classes=tuple(name.strip() for name in names.split(",")) if names else None,
        feature_range=(low, high) if ends else None,
        schema=schema,
        at_hand=at_hand,
    )
    return source, inspect(source)


def _features(values: Mapping[str, Any]) -> registry.Features | None:
    if values["backbone"] is not None:
        return registry.Backbone(
            values["backbone"], values["backbone_size"], values["backbone_flips"]
        )
    if values["features"] is not None:
        return registry.Scattered(values["features"])
    return None


def _recorded(values: Mapping[str, Any], data: str | Source) -> dict[str, Any]:
    """Return the contents of config.yaml, by the names of the flags."""
    kept = {
        name: values[name]
        for name, setting in SETTINGS.items()
        if setting.recorded
        and values[name] is not None
        and (name not in OMITTED or values[name] != DEFAULTS[name])
        and (isinstance(data, Source) or setting.panel != DATA)
    }
    if not isinstance(registry.parse_model(values["model"]), registry.UserModel):
        kept.pop("fix_norm")
    if values["gpu_batch"] != values["physical_batch"]:  # not given: the device decides
        kept.pop("physical_batch")
    return {flag_name(name): value for name, value in kept.items()}
