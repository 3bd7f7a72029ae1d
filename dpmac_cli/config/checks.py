"""Faults in combinations of settings, and notes on likely mistakes."""

import importlib.util
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dpmac_cli.accounting.calibration import MOST_STEPS
from dpmac_cli.accounting.pricing import accountant_note
from dpmac_cli.config.fields import flag_name
from dpmac_cli.config.given import Given
from dpmac_cli.config.keywords import SettingName
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.settings import DATA, OPTIMIZER, SETTINGS
from dpmac_cli.data.schema import TABLES, Found, Source, listed
from dpmac_cli.models.registry import BACKBONES, Backbone, Scattered, UserModel
from dpmac_cli.tasks.known import is_known

#: Fraction of the records from which a batch counts as most of them.
MOST = 0.5
#: Number of classes to list in a note; the rest are counted.
NAMED = 5


def lonely(given: Mapping[SettingName, Given]) -> Iterator[str]:
    """Yield faults of settings that need another setting."""
    for name in given:
        needs = SETTINGS[name].flag.needs
        wanted = {flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", needs)}
        if needs and wanted.isdisjoint(given):
            yield f"--{flag_name(name)} has no effect alone: add {needs}, or leave it out."


def faults(plan: TrainPlan) -> Iterator[str]:
    """Yield faults in combinations of settings, each a sentence with a remedy."""
    epochs = [] if plan.settings.epochs is None else [plan.settings.epochs]
    low, high = plan.hyper.h1, plan.hyper.h2
    if low > high:
        yield f"--h1 ({low:g}) must not be above --h2 ({high:g})."
    yield from misfits(plan.dataset, plan.facts.train_size, plan.batch_size, epochs)
    if plan.canaries and plan.event.sampler != "poisson":
        yield (
            f"--canaries: only poisson sampling can be audited, not {plan.event.sampler}. Leave "
            "out --sampler or --canaries."
        )
    if 0 < plan.canaries < plan.guesses:
        yield f"--guesses ({plan.guesses:,}) must not be above --canaries ({plan.canaries:,})."
    yield from _frozen_faults(plan)
    task = plan.facts.task
    known, chosen = task.covered, [metric.name for metric in task.metrics if metric.chosen]
    if plan.metric not in chosen:
        yield (
            f"--metric {plan.metric}: records of {plan.dataset} have {task.of_record} each. Use "
            f"{', '.join(chosen)}."
        )
    elif plan.scores is not None and plan.metric not in known:
        yield (
            f"--metric {plan.metric} cannot be released with --cover-scores. Use "
            f"{' or '.join(known)}, or leave out --cover-scores."
        )
    if plan.recipe.augmented and not plan.facts.is_images and plan.facts.shape[1:] == (1, 1):
        yield f"--augmentations is for images, but {plan.dataset} is a table. Leave it out."
    yield from _loss_faults(plan)
    if plan.recipe.warmup >= plan.steps:
        yield (
            f"--warmup-steps ({plan.recipe.warmup:,}) must be below the steps of the run, "
            f"{plan.steps:,}."
        )


def _loss_faults(plan: TrainPlan) -> Iterator[str]:
    loss, task = plan.recipe.loss, plan.facts.task
    if is_known(loss.name) and not task.fits(loss.name):
        yield (
            f"--loss {loss.name}: records of {plan.dataset} have {task.of_record} each. Use "
            f"{' or '.join(task.losses)}."
        )
    weights = loss.weights
    if (weights or loss.smoothing) and not task.weighted:
        yield (
            f"--class-weights and --label-smoothing are for classes, but records of {plan.dataset} "
            f"have {task.of_record} each. Leave them out."
        )
    elif weights and (len(weights) != task.outputs or min(weights) <= 0):
        yield (
            f"--class-weights must be {task.outputs} numbers above 0, one for each class of "
            f"{plan.dataset}, not {', '.join(f'{w:g}' for w in weights)}."
        )
    audited, cached = task.audited or not plan.canaries, task.frozen_parts or plan.features is None
    if not (audited and cached):
        yield f"--canaries, --features and --backbone need one class each, not {plan.dataset}."


def misfits(data: str, size: int, batch: int, lengths: Sequence[int]) -> Iterator[str]:
    """Yield faults in combinations of dataset size, batch size and numbers of epochs."""
    if batch > size:
        yield f"--batch-size ({batch}) must not be above the size of {data}, {size}."
    for epochs in lengths:
        steps = epochs * math.ceil(size / batch)
        if steps > MOST_STEPS:
            yield (
                f"--epochs {epochs} is {steps:,} steps in total at --batch-size {batch:,}; a "
                f"run has at most {MOST_STEPS:,}. Use fewer epochs or larger batches."
            )


def _frozen_faults(plan: TrainPlan) -> Iterator[str]:
    """Yield faults in combinations of frozen layers with other settings."""
    features, weights, part = plan.features, plan.pretrained, plan.trained.part
    once = isinstance(features, Scattered) or part == "head"
    if features is not None:
        flag = f"--{'backbone' if isinstance(features, Backbone) else 'features'} {features.kind}"
        if not plan.facts.is_images:
            yield f"{flag} is for images, but {plan.dataset} contains numbers. Leave it out."
        elif (fault := features.fault(plan.facts.shape)) is not None:
            yield f"{flag}: images of {plan.dataset} {fault}"
        package = BACKBONES[features.kind].package if isinstance(features, Backbone) else ""
        if package and weights is None:
            yield from fault_of_package(package, "backbones", flag)
    if weights is not None and not weights.is_file():
        yield f"--pretrained: no such file: {weights}."
    if plan.recipe.augmented and once:
        yield (
            "--augmentations uses new views in every step, but features of frozen layers are "
            "computed only once. Leave one of them out."
        )


def notes(plan: TrainPlan, flags: Mapping[SettingName, Given]) -> Iterator[str]:
    """Yield notes on valid settings that are probably mistakes."""
    found = plan.found
    for name, what in _idle(plan).items():
        if name in flags:
            yield f"{flags[name].origin} has no effect with {what}."
    if found.skipped:
        yield (f"{len(found.skipped)} records of {plan.dataset} are left out: {found.skipped[0]}.")
    if found.inferred and plan.private:
        yield (
            f"{listed(found.inferred).capitalize()} of {plan.dataset} were taken from its "
            "records and are treated as public. Declare them to avoid that: "
            f"{_declaration(found)}"
        )
    if found.signs.repeated and plan.private:
        yield (
            f"Names such as {found.signs.repeated} suggest several images per person, but epsilon "
            "protects single images. To protect all images of a person, add a pattern for the "
            "common part of their names: --unit 'patient([0-9]+)'."
        )
    if found.signs.copies and plan.private:
        yield (
            f"{found.signs.copies} records of {plan.dataset} are exact copies of others. If they "
            "come from one person, epsilon protects each copy, but not the person: leave them out, "
            f"or name the unit of each record: {_unit_remedy(plan)}."
        )
    if found.signs.dim:
        yield f"{plan.dataset}: {found.signs.dim}."
    if found.untested and plan.scores is None:
        some, more = found.untested[:NAMED], len(found.untested) - NAMED
        yield (
            f"{plan.dataset} has no test record of the classes {', '.join(some)}"
            f"{f' and {more} more' if more > 0 else ''}. Accuracy does not cover them."
        )
    if isinstance(plan.features, Backbone) and plan.facts.shape[0] == 1:
        yield f"Grey images of {plan.dataset} are repeated to three channels for the backbone."
    if plan.private:
        yield from delta_note(plan.delta, plan.facts.train_size)
        yield from accountant_note((plan.event,), plan.delta)
        rate = plan.event.sampling_rate
        if rate >= MOST and not plan.event.sampling.once_an_epoch:
            yield (
                f"With --batch-size {plan.batch_size} each record takes part in {rate:.0%} of the "
                "steps, so random sampling saves little or no privacy cost. Unless you want "
                "only a few such steps, use a smaller --batch-size."
            )


def _unit_remedy(plan: TrainPlan) -> str:
    """Return how to name the unit of each record of a dataset."""
    if not isinstance(plan.data, Source) or plan.data.at_hand is not None:
        return "unit= with one item per record"
    path = plan.data.path
    if path.is_dir():
        return "--unit 'patient([0-9]+)'"
    return "--unit COLUMN" if path.suffix in TABLES else "an array unit"


def _declaration(found: Found) -> str:
    """Return the flags that declare inferred facts; names with commas are not supported."""
    (channels, *size), names = found.facts.shape, ",".join(found.facts.task.names)
    flags = {"channels": f"--channels {channels}", "image size": f"--image-size {max(size)}"}
    if names.count(",") < found.facts.task.outputs:
        flags["classes"] = f"--classes {shlex.quote(names)}"
    return " ".join(flags[part] for part in found.inferred if part in flags)


def _idle(plan: TrainPlan) -> dict[SettingName, str]:
    """Return the settings that have no effect, with the reason."""
    used, data = {*plan.method.settings, "optimizer"}, plan.dataset
    group = {name: option.flag.group for name, option in SETTINGS.items()}
    idle = {n: plan.optimizer for n in group if group[n] == OPTIMIZER and n not in used}
    if not isinstance(plan.model, UserModel):
        idle |= {"fix_norm": plan.model.name}
    if plan.trained.part != "lora":
        idle |= dict.fromkeys(_LORA, f"--train {plan.trained.part}")
    if not plan.found.unit:
        idle |= {"records_per_unit": f"{data}, where each record is a unit"}
    if not isinstance(plan.data, Source):
        return idle | {name: data for name in group if group[name] == DATA}
    idle |= {"data_dir": f"{data}, which is a path"}
    if not plan.found.held_out:
        idle |= dict.fromkeys(_OF_SPLIT, f"{data}, which has its own test set")
    if not plan.data.path.is_dir():
        idle |= {"levels": f"{data}, which is not a folder of images"}
    if plan.data.path.suffix not in TABLES:
        idle |= {"schema": f"{data}, which is not a table"}
    if not plan.facts.is_images:
        return idle | dict.fromkeys(_OF_IMAGES, f"{data}, which contains numbers")
    return idle | {"feature_range": f"{data}, which contains images"}


_LORA: tuple[SettingName, ...] = ("lora_rank", "lora_alpha")
_OF_SPLIT: tuple[SettingName, ...] = ("test_fraction", "split_seed")
_OF_IMAGES: tuple[SettingName, ...] = ("channels", "image_size", "standardise")


def delta_note(delta: float, records: int) -> Iterable[str]:
    """Yield a note on a delta that is too large for a meaningful guarantee."""
    limit = 1 / records
    if delta >= limit:
        yield (
            f"delta {delta:g} is not below 1/n = {limit:.2g}: such a guarantee allows "
            "publishing a whole record occasionally. Use a smaller --delta."
        )


def fault_of_package(package: str, extra: str, flag: str) -> Iterator[str]:
    """Yield an error if a package of an extra is not installed."""
    if importlib.util.find_spec(package) is None:
        yield f"{flag} needs {package}, which is not installed: pip install 'dpmac[{extra}]'"
