"""Faults in combinations of settings, and notes on likely mistakes."""

import importlib.util
import math
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence

from dpmac_cli.accounting.calibration import MOST_STEPS
from dpmac_cli.accounting.pricing import accountant_note
from dpmac_cli.config.flags import flag_name
from dpmac_cli.config.plan import DataPlan, NetworkPlan, PrivacyPlan, TrainPlan
from dpmac_cli.config.settings import BALANCED, DATA, OPTIMIZER, SETTINGS
from dpmac_cli.data.schema import DataFacts, LeftOut, listed
from dpmac_cli.errors import counted, named
from dpmac_cli.models.registry import BACKBONES, Backbone, Scattered, UserModel
from dpmac_cli.optim.adaclip import AdaClip
from dpmac_cli.optim.dp_macadam import InEllipsoid
from dpmac_cli.tasks.known import is_loss_of_a_task
from dpmac_cli.tasks.language_model import LANGUAGE_MODEL, NETWORK
from dpmac_cli.training.schedules import LossKind, Recipe

#: Fraction of the records from which a batch counts as most of them.
MOST = 0.5
#: What to do about a table without texts.
DECLARE = "Declare a column of texts in the schema (NAME: {text: 128}), or leave it out."
#: Number of classes to list in a note; the rest are counted.
NAMED = 5


def faults(plan: TrainPlan, epochs: int | None) -> Iterator[str]:
    """Yield faults in combinations of settings, each a sentence with a remedy.

    ``epochs`` is None if a number of steps was given instead.
    """
    data, privacy, optimizer = plan.data, plan.privacy, plan.optimizer
    if isinstance(optimizer, AdaClip | InEllipsoid) and optimizer.h1 > optimizer.h2:
        yield f"--h1 ({optimizer.h1:g}) must not be above --h2 ({optimizer.h2:g})."
    if plan.recipe.loss.name.startswith("quantile") and optimizer.centred:
        yield (
            f"--loss {plan.recipe.loss.name} is not for --optimizer {optimizer.name}, which clips "
            "about a centre that moves: the predictions would cover another share of the records. "
            "Use --optimizer dp-adam, dp-sgd or dp-adambc."
        )
    lengths = [] if epochs is None else [epochs]
    yield from misfits(data.dataset, data.facts.train_size, privacy.batch_size, lengths)
    if plan.recipe.warmup >= privacy.steps:
        yield (
            f"--warmup-steps ({plan.recipe.warmup:,}) must be below the steps of the run, "
            f"{privacy.steps:,}."
        )
    if privacy.canaries and privacy.event.sampler != "poisson":
        yield (
            f"--canaries: only poisson sampling can be audited, not {privacy.event.sampler}. Leave "
            "out --sampler or --canaries."
        )
    yield from _frozen_faults(plan.network, plan.recipe, data)
    yield from _tested_twice(data, privacy)
    task = data.facts.task
    known, chosen = task.covered, [metric.name for metric in task.metrics if metric.chosen]
    if plan.settings.metric not in chosen:
        yield (
            f"--metric {plan.settings.metric}: records of {data.dataset} have {task.of_record} "
            f"each. Use {', '.join(chosen)}."
        )
    elif privacy.score is not None and plan.settings.metric not in known:
        use = f"{' or '.join(known)}, or dpmac train" if known else "dpmac train"
        yield (
            f"--metric {plan.settings.metric} cannot be released with noise, as dpmac tune and "
            f"--cover-scores release scores. Use {use} without --cover-scores."
        )
    if task.network is not None and plan.settings.model != task.network:
        yield f"--model {plan.settings.model} is not for --task {task.kind}. Leave it out."
    elif plan.settings.model == NETWORK != task.network:
        yield f"--model {NETWORK} is only for --task {LANGUAGE_MODEL}. Leave it out."
    if task.network is not None and plan.network.trained.part == "head":
        yield f"--train head: a {task.kind} has no separate head. Use --train lora, norm or all."
    if plan.recipe.augmented and not data.facts.is_images and data.facts.shape[1:] == (1, 1):
        yield f"--augmentations is for images, but {data.dataset} is a table. Leave it out."
    yield from _loss_faults(plan.recipe.loss, data)
    yield from _weight_faults(plan.recipe.loss, plan.settings.class_weights, data)


def _tested_twice(data: DataPlan, privacy: PrivacyPlan) -> Iterator[str]:
    """Yield a fault if scores are to be covered, and a record is trained and tested on.

    A unit is on one side only. Without units, each record is one, with its copies.
    """
    tested = data.found.signs.tested
    if tested and privacy.score is not None and not data.found.unit:
        yield (
            f"--cover-scores: {_copies(len(tested), 'test record', data.dataset)} of training "
            f"records, such as test record {tested[0] + 1}. Epsilon covers the scores of records "
            "that are not trained on, so it would be too low for these. Leave them out on one "
            "side, or name the person of each record with --unit, or in an .npz by arrays unit and "
            "unit_test: a unit is on one side."
        )


def _loss_faults(loss: LossKind, data: DataPlan) -> Iterator[str]:
    task = data.facts.task
    if is_loss_of_a_task(loss.name) and not task.fits(loss.name):
        yield (
            f"--loss {loss.name}: records of {data.dataset} have {task.of_record} each. Use "
            f"{' or '.join(task.losses)}."
        )
    if loss.smoothing and not task.weighted:
        yield (
            f"--label-smoothing is for classes, but records of {data.dataset} have "
            f"{task.of_record} each. Leave it out."
        )


def _weight_faults(loss: LossKind, chosen: str | None, data: DataPlan) -> Iterator[str]:
    """Yield faults in class weights, as ``chosen``, and in declared shares."""
    task, weights, shares = data.facts.task, loss.weights, loss.shares
    if chosen is not None and not task.weighted:
        yield (
            f"--class-weights is for classes, but records of {data.dataset} have {task.of_record} "
            "each. Leave it out."
        )
        return
    if chosen == BALANCED and not shares:
        yield (
            "--class-weights balanced needs the shares of the classes, which are private if they "
            "are counted in the records. Declare what is known of them with --shares, such as "
            "--shares 0.94,0.06, or give weights as numbers."
        )
    elif weights and (len(weights) != task.outputs or min(weights) <= 0):
        yield (
            f"--class-weights must be {task.outputs} numbers above 0, one for each class of "
            f"{data.dataset}, not {chosen}."
        )
    if shares and (len(shares) != task.outputs or min(shares) <= 0 or abs(sum(shares) - 1) > 0.01):
        yield (
            f"--shares must be {task.outputs} numbers above 0 with the sum 1, one for each class "
            f"of {data.dataset}, not {', '.join(f'{share:g}' for share in shares)}."
        )


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


def _frozen_faults(network: NetworkPlan, recipe: Recipe, data: DataPlan) -> Iterator[str]:
    """Yield faults in combinations of frozen layers with other settings."""
    features, weights = network.features, network.pretrained
    if features is not None:
        flag = f"--{'features' if isinstance(features, Scattered) else 'backbone'} {features.kind}"
        if features.reads != data.facts.holds:
            declarable = (features.reads, data.facts.holds) == ("texts", "numbers")
            yield (
                f"{flag} is for {features.reads}, but {data.dataset} contains {data.facts.holds}. "
                f"{DECLARE if declarable else 'Leave it out.'}"
            )
        elif (fault := features.fault(data.facts.shape)) is not None:
            yield f"{flag}: {features.reads} of {data.dataset} {fault}"
        if features.reads == "texts" and weights is not None:
            yield (
                f"{flag} starts from the weights in the encoder's own folder. Leave out "
                "--pretrained, or use another folder with --backbone."
            )
        package = BACKBONES[features.kind].package if isinstance(features, Backbone) else ""
        if package and weights is None:
            yield from fault_of_package(package, "backbones", flag)
    if weights is not None and not weights.is_file():
        yield f"--pretrained: no such file: {weights}."
    if recipe.augmented and (isinstance(features, Scattered) or network.trained.part == "head"):
        yield (
            "--augmentations uses new views in every step, but features of frozen layers are "
            "computed only once. Leave one of them out."
        )


def notes_on_plan(plan: TrainPlan, flags: Collection[str]) -> Iterator[str]:
    """Yield notes on valid settings that are probably mistakes."""
    data, privacy = plan.data, plan.privacy
    yield from _idle(plan, flags)
    if data.found.inferred and privacy.private:
        yield (
            f"{listed(data.found.inferred).capitalize()} of {data.dataset} were taken from its "
            "records and are treated as public. Declare them to avoid that: "
            f"{_declaration(data.found)}"
        )
    if isinstance(plan.network.features, Backbone) and data.facts.shape[0] == 1:
        yield f"Grey images of {data.dataset} are repeated to three channels for the backbone."
    yield from _notes_on_privacy(privacy, data.facts.train_size)


def private_notes(plan: TrainPlan) -> tuple[str, ...]:
    """Return notes about the records, such as counts of them, which epsilon does not cover.

    They are for the person who holds the records. No file and no log has them.
    """
    return tuple(map(named, _notes_on_records(plan.data, plan.privacy)))


def _notes_on_records(data: DataPlan, privacy: PrivacyPlan) -> Iterator[str]:
    """Yield notes on what was found in the records."""
    found, dataset, private = data.found, data.dataset, privacy.private
    if found.skipped:
        yield LeftOut(found.skipped, found.why).note(dataset)
    tested = found.signs.tested
    copies_matter = private and not found.signs.expected
    if found.signs.copies and copies_matter:
        both = f" ({len(tested):,} of training records among test records)" * bool(tested)
        yield (
            f"{_copies(found.signs.copies, 'record', dataset)} of others{both}. If they "
            "come from one person, epsilon protects each copy, but not the person: name the unit "
            "of each record with --unit, or in an .npz by an array unit."
        )
    if tested and copies_matter and not found.held_out:
        yield (
            f"{_copies(len(tested), 'test record', dataset)} of training records, such as test "
            f"record {tested[0] + 1}. Epsilon does not count that they are used twice, and scores "
            "on them are too high. Leave them out on one side."
        )
    yield from (f"{dataset}: {remark}." for remark in found.signs.remarks)
    if found.untested and privacy.score is None:
        some, more = found.untested[:NAMED], len(found.untested) - NAMED
        yield (
            f"{dataset} has no test record of the classes {', '.join(some)}"
            f"{f' and {more} more' if more > 0 else ''}. Accuracy does not cover them."
        )


def _notes_on_privacy(privacy: PrivacyPlan, records: int) -> Iterator[str]:
    """Yield notes on a guarantee that is weak, or more expensive than it need be."""
    if not privacy.private:
        return
    yield from delta_note(privacy.delta, records)
    yield from accountant_note((privacy.event,), privacy.delta)
    rate = privacy.event.sampling_rate
    if rate >= MOST and not privacy.event.sampling.once_an_epoch:
        yield (
            f"With --batch-size {privacy.batch_size} each record takes part in {rate:.0%} of the "
            "steps, so random sampling saves little or no privacy cost. Unless you want "
            "only a few such steps, use a smaller --batch-size."
        )


def _copies(number: int, what: str, dataset: str) -> str:
    return (
        f"{counted(number, what)} of {dataset} "
        f"{'is an exact copy' if number == 1 else 'are exact copies'}"
    )


def _declaration(found: DataFacts) -> str:
    """Return the flags that declare inferred facts; names with commas are not supported."""
    (channels, *size), names = found.facts.shape, ",".join(found.facts.task.names)
    flags = {"channels": f"--channels {channels}", "image size": f"--image-size {max(size)}"}
    if names.count(",") < found.facts.task.outputs:
        flags["classes"] = f"--classes {shlex.quote(names)}"
    return " ".join(flags[part] for part in found.inferred if part in flags)


def _idle(plan: TrainPlan, flags: Collection[str]) -> Iterator[str]:
    """Yield a note on each given setting that has no effect, with the reason."""
    used = {*plan.optimizer.used(), "optimizer"}
    for name in flags:
        group, why = SETTINGS[name].group, ""
        if group == OPTIMIZER and name not in used:
            why = plan.optimizer.name
        elif name == "fix_norm" and not isinstance(plan.network.model, UserModel):
            why = plan.network.model.name
        elif name == "lora_rank" and plan.network.trained.part != "lora":
            why = f"--train {plan.network.trained.part}"
        elif group == DATA and not plan.data.own:
            why = plan.data.dataset
        if why:
            yield f"--{flag_name(name)} has no effect with {why}."


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
