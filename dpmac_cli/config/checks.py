"""Faults in combinations of settings, and notes on likely mistakes.

A fault is refused before any record is trained on; a note is printed. Limits of one setting are in
the type of its field, so they are not here. Each sentence says what to type instead, and names
settings in braces, which a command prints as flags.
"""

import importlib.util
import math
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import MOST_STEPS
from dpmac_cli.accounting.pricing import accountant_note
from dpmac_cli.config.class_weights import class_weights, shares_of
from dpmac_cli.config.defaults import ENOUGH, NEEDED
from dpmac_cli.config.facts import DataFacts, first_of, listed
from dpmac_cli.config.networks import (
    BACKBONES,
    COLUMNS,
    FEATURES,
    MODELS,
    Backbone,
    FixedFeatures,
    TableColumns,
    UserModel,
)
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.records import Table
from dpmac_cli.config.settings import (
    BALANCED,
    DATA,
    GROUPS,
    HISTOGRAM,
    OPTIMIZER,
    PRIVATE_SCALE,
    Settings,
)
from dpmac_cli.optim.adaclip import AdaClip
from dpmac_cli.optim.dp_macadam import InEllipsoid
from dpmac_cli.tasks.language_model import LANGUAGE_MODEL, NETWORK
from dpmac_cli.tasks.operating_point import needs_histogram
from dpmac_cli.tasks.task import FUNCTIONS, is_loss_of_a_task

#: Fraction of the records from which a batch counts as most of them.
MOST = 0.5
#: Settings of the part of the records to hold out.
OF_SPLIT = ("test_fraction", "split_seed")
#: Number of dimensions of an image.
IMAGE = 3


def faults(plan: Plan) -> Iterator[str]:
    """Yield faults in combinations of settings, each a sentence with a remedy; nothing if all fit.

    Settings are in braces, as in :func:`~dpmac_cli.errors.as_flags`.

    Args:
        plan: completed settings with facts of the records. Its noise may not be known yet.
    """
    settings, facts = plan.settings, plan.facts
    yield from _optimizer_faults(plan)
    yield from _step_faults(plan)
    yield from _frozen_faults(plan)
    yield from _score_faults(settings, facts)
    yield from _task_faults(plan)
    yield from _image_faults(settings, facts)
    yield from _network_faults(plan)
    if settings.loss in FUNCTIONS and settings.label_smoothing:
        yield f"{{label_smoothing}} has no effect on {{loss=}}{settings.loss}. Leave it out."
    yield from _calibration_faults(settings, facts)
    yield from _range_faults(plan)
    yield from _loss_faults(settings, facts)
    yield from _weight_faults(settings, facts)


def _optimizer_faults(plan: Plan) -> Iterator[str]:
    """Yield faults in hyperparameters of the optimizer, and in a loss that it is not for."""
    loss, optimizer = plan.settings.loss, plan.optimizer
    if isinstance(optimizer, AdaClip | InEllipsoid) and optimizer.h1 > optimizer.h2:
        yield f"{{h1}} ({optimizer.h1:g}) must not be above {{h2}} ({optimizer.h2:g})."
    if loss.startswith("quantile") and optimizer.centred:
        yield (
            f"{{loss=}}{loss} is not for {{optimizer=}}{optimizer.name}, which clips "
            "about a centre that moves: the predictions would cover another share of the records. "
            "Use {optimizer=}dp-adam, dp-sgd or dp-adambc."
        )


def _step_faults(plan: Plan) -> Iterator[str]:
    """Yield faults in the number of steps, and in how their batches are drawn."""
    settings, facts = plan.settings, plan.facts
    lengths = [] if settings.epochs is None else [settings.epochs]
    yield from misfits(facts.typed, facts.train_size, settings.batch_size, lengths)
    if settings.warmup_steps >= plan.event.steps:
        yield (
            f"{{warmup_steps}} ({settings.warmup_steps:,}) must be below the steps of the run, "
            f"{plan.event.steps:,}."
        )
    if settings.canaries and settings.sampler != "poisson":
        yield (
            f"{{canaries}}: only poisson sampling can be audited, not {settings.sampler}. Leave "
            "out {sampler} or {canaries}."
        )


def _task_faults(plan: Plan) -> Iterator[str]:
    """Yield faults in settings that are not for the task, such as the network of another one."""
    settings, task = plan.settings, plan.facts.task
    if settings.classes is not None and not task.labelled:
        yield "{task} and {classes} contradict each other: a language model has none. Give one."
    if task.network is not None and settings.model != task.network:
        yield f"{{model=}}{settings.model} is not for {{task=}}{task.kind}. Leave it out."
    elif settings.model == NETWORK != task.network:
        yield f"{{model=}}{NETWORK} is only for {{task=}}{LANGUAGE_MODEL}. Leave it out."
    if task.network is not None and plan.trained.part == "head":
        yield f"{{train=}}head: a {task.kind} has no separate head. Use lora, norm or all."


def _image_faults(settings: Settings, facts: DataFacts) -> Iterator[str]:
    """Yield a fault if records that are no images are to be augmented."""
    if settings.augment is None or len(facts.records.shape) == IMAGE:
        return
    remedy = "Leave it out."
    if facts.records.pixels > 1:
        remedy = "Add a dimension of channels to the array: x[:, None]."
    yield (
        f"{{augmentations}} is for images, but records of {facts.typed} have the shape "
        f"{facts.records.shape}. {remedy}"
    )


def _network_faults(plan: Plan) -> Iterator[str]:
    """Yield a fault if a network of images is to take rows of numbers."""
    network, features, facts = MODELS.get(plan.settings.model), plan.features, plan.facts
    if network is None or not network.of_images:
        return
    shape = facts.records.shape if features is None else features.shape_of(facts.records)
    if len(shape) == IMAGE:
        return
    inputs = f"records of {facts.typed}" if features is None else f"features of {facts.typed}"
    yield (
        f"{{model=}}{plan.settings.model} is for images, but {inputs} have the shape {shape}. Use "
        "{model=}mlp, or leave it out."
    )


def _score_faults(settings: Settings, facts: DataFacts) -> Iterator[str]:
    """Yield faults in the metric, and in scores with noise."""
    task = facts.task
    covered = task.covered
    chosen = [metric.name for metric in task.metrics if metric.chosen]
    if settings.metric not in chosen:
        yield (
            f"{{metric=}}{settings.metric}: records of {facts.typed} have {task.of_record} "
            f"each. Use {', '.join(chosen)}."
        )
    elif settings.cover_scores and settings.metric not in covered:
        use = f"{' or '.join(covered)}, or dpmac train" if covered else "dpmac train"
        yield (
            f"{{metric=}}{settings.metric} cannot be released with noise, as dpmac tune and "
            f"{{cover_scores}} release scores. Use {use} without {{cover_scores}}."
        )
    if settings.cover_scores and not facts.test_size:
        yield (
            "{cover_scores} releases a score of test records, but with {test_fraction=}0 there are "
            "none. Leave out one of them."
        )


def _loss_faults(settings: Settings, facts: DataFacts) -> Iterator[str]:
    """Yield a fault if the loss is of another task."""
    task, loss = facts.task, settings.loss
    if is_loss_of_a_task(loss) and not task.fits(loss):
        yield (
            f"{{loss=}}{loss}: records of {facts.typed} have {task.of_record} each. Use "
            f"{' or '.join(task.losses)}."
        )


def _range_strength(plan: Plan) -> tuple[float, tuple[str, ...]]:
    """Return n epsilon / sqrt(C), and the names of the C columns whose ranges are to be found.

    Epsilon is that of the whole run. Infinity without such columns, without privacy, and where
    ranges are kept.
    """
    settings, names = plan.settings, plan.counted_columns
    if not names or not plan.private or plan.ranged:
        return math.inf, names
    epsilon = settings.epsilon or total_epsilon((plan.event,), settings.delta)
    return plan.facts.train_size * epsilon / math.sqrt(len(names)), names


def _range_faults(plan: Plan) -> Iterator[str]:
    """Yield faults in columns of a table whose ranges are found by noisy counts."""
    facts, settings = plan.facts, plan.settings
    strength, names = _range_strength(plan)
    of_columns = isinstance(facts.records, Table) and isinstance(plan.features, TableColumns)
    if settings.scale == PRIVATE_SCALE and not of_columns:
        yield (
            f"{{scale=}}{PRIVATE_SCALE} is for the columns of a table "
            f"({{features=}}{COLUMNS}). Leave it out."
        )
    if isinstance(facts.records, Table) and facts.schema is not None:
        unread = [column.name for column in facts.schema.columns if column.open]
        if unread and not isinstance(plan.features, TableColumns):
            chosen = "backbone" if settings.features is None else "features"
            yield (
                f"{{{chosen}}} cannot read {first_of(unread)}, of which the type alone is "
                "declared. Leave it out, or declare range or categories."
            )
    if strength < NEEDED:
        least = NEEDED * math.sqrt(len(names)) / facts.train_size
        yield (
            f"The ranges of {first_of(names)} cannot be found from {facts.train_size:,} "
            f"{'units' if facts.unit else 'records'} at this epsilon: noise would hide them. "
            f"Declare range for these columns in the schema, or use an epsilon of at least "
            f"{math.ceil(least * 100) / 100:g}."
        )


def _calibration_faults(settings: Settings, facts: DataFacts) -> Iterator[str]:
    """Yield faults in the operating point, and in the histogram for calibration."""
    task, threshold = facts.task, settings.threshold
    if threshold is not None and (task.outputs != 2 or not task.calibrates):
        yield (
            f"{{threshold=}}{threshold} is for two classes, but {facts.typed} has "
            f"{task.described}. Leave it out."
        )
    elif threshold is not None and needs_histogram(threshold) and settings.calibration != HISTOGRAM:
        yield (
            f"{{threshold=}}{threshold} follows from a noisy histogram of the training records: "
            f"add {{calibration=}}{HISTOGRAM}, or use a probability, such as {{threshold=}}0.3."
        )
    if settings.calibration != HISTOGRAM:
        return
    if not facts.task.calibrates:
        yield (
            f"{{calibration=}}{HISTOGRAM} is for classes and numbers, but records of "
            f"{facts.typed} have {facts.task.of_record} each. Leave it out."
        )
    for name in ("canaries", "no_dp"):
        if getattr(settings, name):
            yield f"{{calibration=}}{HISTOGRAM} is not for {{{name}}}. Leave one of them out."


def _weight_faults(settings: Settings, facts: DataFacts) -> Iterator[str]:
    """Yield faults in class weights, and in declared shares."""
    task, chosen = facts.task, settings.class_weights
    weights, shares = class_weights(settings), shares_of(settings)
    if not task.weighted:
        for name in ("label_smoothing", "class_weights"):
            if getattr(settings, name):
                yield (
                    f"{{{name}}} is for classes, but records of {facts.typed} have "
                    f"{task.of_record} each. Leave it out."
                )
        return
    if chosen == BALANCED and not shares:
        yield (
            "{class_weights=}balanced needs the shares of the classes, which are private if they "
            "are counted in the records. Declare what is known of them with {shares}, such as "
            "{shares=}0.94,0.06, or give weights as numbers."
        )
    elif weights and (len(weights) != task.outputs or min(weights) <= 0):
        yield (
            f"{{class_weights}} must be {task.outputs} numbers above 0, one for each class of "
            f"{facts.typed}, not {chosen}."
        )
    if not shares:
        return
    sum_is_one = abs(sum(shares) - 1) <= 0.01
    if len(shares) != task.outputs or min(shares) <= 0 or not sum_is_one:
        declared = ", ".join(f"{share:g}" for share in shares)
        yield (
            f"{{shares}} must be {task.outputs} numbers above 0 with the sum 1, one for each class "
            f"of {facts.typed}, not {declared}."
        )


def misfits(data: str, size: int, batch: int, lengths: Sequence[int]) -> Iterator[str]:
    """Yield faults in combinations of dataset size, batch size and numbers of epochs.

    Args:
        data: name of the dataset, as it was typed.
        size: number of training records, or units.
        batch: expected batch size.
        lengths: numbers of epochs of a run; several for a table of costs.
    """
    if batch > size:
        yield f"{{batch_size}} ({batch}) must not be above the size of {data}, {size}."
    for epochs in lengths:
        steps = epochs * math.ceil(size / batch)
        if steps > MOST_STEPS:
            yield (
                f"{{epochs=}}{epochs} is {steps:,} steps in total at {{batch_size=}}{batch:,}; a "
                f"run has at most {MOST_STEPS:,}. Use fewer epochs or larger batches."
            )


def _frozen_faults(plan: Plan) -> Iterator[str]:
    """Yield faults in combinations of frozen layers with other settings."""
    features, weights, facts = plan.features, plan.pretrained, plan.facts
    if features is not None:
        name = "features" if features.kind in FEATURES else "backbone"
        flag = f"{{{name}=}}{features.kind}"
        kind = facts.records.kind
        if kind not in features.reads:
            remedy = features.declared_as.get(kind, "Leave it out.")
            yield f"{flag} is for {features.reads}, but {facts.typed} contains {kind}. {remedy}"
        else:
            fault = features.fault(facts.records)
            if fault is not None:
                yield f"{flag}: {features.reads} of {facts.typed} {fault}"
        if features.has_weights and weights is not None:
            yield (
                f"{flag} starts from the weights in the encoder's own folder. Leave out "
                "{pretrained}, or use another folder with {backbone}."
            )
        package = BACKBONES[features.kind].package if isinstance(features, Backbone) else ""
        if package and weights is None:
            yield from fault_of_package(package, "backbones", flag)
    if weights is not None and not weights.is_file():
        yield f"{{pretrained}}: no such file: {weights}."
    frozen = isinstance(features, FixedFeatures) or plan.trained.part == "head"
    augmented = plan.settings.augment is not None and facts.records.kind == "images"
    if frozen and augmented:
        yield (
            "{augmentations} uses new views in every step, but features of frozen layers are "
            "computed only once. Leave one of them out."
        )


def notes(plan: Plan, flags: Collection[str]) -> tuple[str, ...]:
    """Return notes on valid settings that are probably mistakes; () without any.

    Each is a sentence without a prefix, with settings in braces.

    Args:
        plan: plan of a run without faults.
        flags: names of the settings that were given. Those with a default are not commented on.
    """
    return tuple(_notes_on_plan(plan, flags))


def _notes_on_plan(plan: Plan, flags: Collection[str]) -> Iterator[str]:
    """Yield notes on a plan, see :func:`notes`."""
    facts = plan.facts
    yield from _idle(plan, flags)
    if facts.inferred and plan.private:
        yield (
            f"{listed(facts.inferred).capitalize()} were taken from the records and are treated as "
            f"public. Declare them to avoid that: {_declaration(facts)}"
        )
    columns = () if facts.schema is None else facts.schema.columns
    if plan.settings.unit in [column.name for column in columns]:
        yield (
            f"{{unit=}}{plan.settings.unit} is an input of the network, too. If this column only "
            "names units, list it in the schema under drop instead of columns."
        )
    if isinstance(plan.features, Backbone) and facts.records.channels == 1:
        yield f"Grey images of {facts.typed} are repeated to three channels for the backbone."
    strength, names = _range_strength(plan)
    if strength < ENOUGH:
        yield (
            f"The ranges of {first_of(names)} are found by noisy counts of few records. Declared "
            "ranges may give a better model here, if they are not much too wide."
        )
    yield from _notes_on_privacy(plan, flags)


def _notes_on_privacy(plan: Plan, flags: Collection[str]) -> Iterator[str]:
    """Yield notes on a guarantee that is weak, or more expensive than it need be."""
    if not plan.private:
        return
    delta, batch, rate = plan.settings.delta, plan.settings.batch_size, plan.event.sampling_rate
    yield from delta_note(delta, plan.facts.train_size)
    yield from accountant_note((plan.event,), delta)
    by_rule = isinstance(plan.features, TableColumns) and "batch_size" not in flags
    if rate >= MOST and not plan.event.sampling.once_an_epoch and not by_rule:
        yield (
            f"With {{batch_size=}}{batch} each record takes part in {rate:.0%} of the "
            "steps, so random sampling saves little or no privacy cost. Unless you want "
            "only a few such steps, use a smaller {batch_size}."
        )


def _declaration(facts: DataFacts) -> str:
    """Return the flags that declare inferred facts; names with commas are not supported."""
    if facts.schema is not None and facts.schema.from_records:
        return "check each line of the schema, and remove its line from_records."
    if facts.inferred == ("classes",) and facts.schema is not None:
        return "add classes=."
    if facts.schema is not None:
        return "add classes= and kinds=, or pass a schema."
    channels, *size = facts.records.shape
    names = ",".join(facts.task.names)
    flags = {
        "channels": f"{{channels=}}{channels}",
        "image size": f"{{image_size=}}{max(size, default=0)}",
    }
    if names.count(",") < facts.task.outputs:
        flags["classes"] = f"{{classes=}}{shlex.quote(names)}"
    declared = " ".join(flags[fact] for fact in facts.inferred if fact in flags)
    if "image size" in facts.inferred and len(set(size)) > 1:
        height, width = size
        declared += f" ({{image_size}} makes the {height}x{width} images square)"
    return declared


def _idle(plan: Plan, flags: Collection[str]) -> Iterator[str]:
    """Yield a note on each given setting that has no effect, with the reason."""
    used = {*plan.optimizer.used(), "optimizer"}
    for name in flags:
        group, why = GROUPS[name], ""
        if group == OPTIMIZER and name not in used:
            why = plan.optimizer.name
        elif name == "fix_norm" and not isinstance(plan.model, UserModel):
            why = plan.model.name
        elif name == "lora_rank" and plan.trained.part != "lora":
            why = f"{{train=}}{plan.trained.part}"
        elif group == DATA and not plan.facts.user_supplied:
            why = plan.facts.typed
        elif name in OF_SPLIT and plan.facts.test_size and not plan.facts.held_out:
            why = f"{plan.facts.typed}, which has test records of its own"
        if why:
            yield f"{{{name}}} has no effect with {why}."


def delta_note(delta: float, records: int) -> Iterable[str]:
    """Yield a note on a delta that is too large for a meaningful guarantee.

    A mechanism that publishes each record with probability delta is (0, delta)-private. From
    delta = 1/n on it publishes one record in expectation.

    Args:
        delta: delta of (epsilon, delta).
        records: n, the number of records or units.
    """
    limit = 1 / records
    if delta >= limit:
        yield (
            f"delta {delta:g} is not below 1/n = {limit:.2g}: such a guarantee allows "
            "publishing a whole record occasionally. Use a smaller {delta}."
        )


def fault_of_package(package: str, extra: str, flag: str) -> Iterator[str]:
    """Yield an error if a package of an extra is not installed; nothing if it is.

    The error is a sentence with the command that installs it.

    Args:
        package: name of the module.
        extra: extra of dpmac that installs it.
        flag: setting that needs it, as it is written in messages.
    """
    if importlib.util.find_spec(package) is None:
        yield f"{flag} needs {package}, which is not installed: pip install 'dpmac[{extra}]'"
