"""Resolve settings from flags and YAML into one frozen plan, and report all errors together.

Those of a dataset can be resolved alone.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import calibrate_noise
from dpmac_cli.accounting.events import TrainingEvent, score_event
from dpmac_cli.config import checks
from dpmac_cli.config.defaults import (
    completed,
    recipe_notes,
    samples_on_gpu,
)
from dpmac_cli.config.flags import lonely, valid
from dpmac_cli.config.plan import (
    CheckpointInterval,
    DataPlan,
    NetworkPlan,
    PrivacyPlan,
    TrainPlan,
    unit_of_privacy,
)
from dpmac_cli.config.settings import BALANCED, DATA, NEEDS, SETTINGS, Settings
from dpmac_cli.config.sources import Values, given_settings, over, read_yaml
from dpmac_cli.data.column_schema import TOKENS
from dpmac_cli.data.registry import DATASETS, Dataset, Defaults
from dpmac_cli.data.schema import DataFacts, InMemoryData, Source
from dpmac_cli.data.table_schema import TableSchema, read_schema
from dpmac_cli.data.tokens import TextReader
from dpmac_cli.errors import InputError, named, raise_errors
from dpmac_cli.files import data_folder
from dpmac_cli.models import registry
from dpmac_cli.models.encoders import read_encoder
from dpmac_cli.models.registry import BACKBONES
from dpmac_cli.optim import OPTIMIZERS, Optimizer
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.training.schedules import LossKind, Recipe


def resolve_data(
    settings: Values,
    file: Path | None = None,
    texts: TextReader | None = None,
    schema: TableSchema | None = None,
) -> DataPlan:
    """Resolve where records are and how to read them, and read their facts.

    Args:
        settings: values by name, as text or of their types; None if not given.
        file: config.yaml of a run, of which only the settings of its dataset are read.
        texts: how texts are read; None if ``settings`` have an encoder, or there are none.
        schema: of a table, such as that of a model; None for the file that ``settings`` name.

    Raises:
        InputError: lists every fault found.
    """
    errors: list[str] = []
    found = {} if file is None else read_yaml(file, errors)
    above = valid(Settings, settings, errors).explicit
    below = {n: v for n, v in found.items() if n not in above and (n == "dataset" or _of_data(n))}
    if file is not None and str(below.get("dataset", "")).startswith("<"):
        raise InputError(
            f"{file.parent} was trained on records in memory of a program. Add --dataset with the "
            "path of a file of them, or pass them: dpmac_cli.score(run, data)."
        )
    values = over(above, valid(Settings, below, errors, f"{file}: ").explicit)
    raise_errors(errors)
    return plan_data(Settings.model_validate(values), texts, schema)


def _of_data(name: str) -> bool:
    return name in SETTINGS and SETTINGS[name].group == DATA


def plan_data(
    settings: Settings, texts: TextReader | None = None, schema: TableSchema | None = None
) -> DataPlan:
    """Return the plan of a dataset, with facts that are read once: files may change during a run.

    ``texts`` reads texts, and ``schema`` declares a table; None to read those of the settings.

    Raises:
        InputError: lists every fault of the dataset.
    """
    name, folder = settings.dataset, data_folder(settings.data_dir)
    if isinstance(name, str) and name in DATASETS:
        if settings.unit is not None:
            raise InputError(
                f"--unit {settings.unit}: {name} does not contain the units of records. Use "
                "a table, a folder, or an .npz with an array unit."
            )
        found = DataFacts(DATASETS[name], name)
        return DataPlan(dataset=name, source=name, found=found, folder=folder)
    from dpmac_cli.data.user_data import inspect  # noqa: PLC0415  (loads numpy)

    if texts is None and settings.backbone is not None and settings.backbone not in BACKBONES:
        texts = read_encoder(settings.backbone).reader(settings.tokens or TOKENS)
    source = _source(settings, name if isinstance(name, InMemoryData) else None, schema)
    source = replace(source, texts=texts)
    return DataPlan(dataset=str(source.path), source=source, found=inspect(source), folder=folder)


def _source(
    settings: Settings, in_memory: InMemoryData | None, schema: TableSchema | None
) -> Source:
    if in_memory is not None and in_memory.schema is not None:
        schema = in_memory.schema
    elif schema is None and settings.schema is not None:
        schema = read_schema(Path(settings.schema))
    same = ("test_fraction", "split_seed", "image_size", "levels", "standardise", "unit", "task")
    low, _, high = (settings.feature_range or "").partition(",")
    names = settings.classes and tuple(name.strip() for name in settings.classes.split(","))
    return Source(
        in_memory.path if in_memory is not None else Path(str(settings.dataset)),
        channels=None if settings.channels is None else int(settings.channels),
        classes=names or None,
        feature_range=(float(low), float(high)) if high else None,
        schema=schema,
        in_memory=in_memory,
        skip_bad=settings.skip_bad,
        **{name: getattr(settings, name) for name in same},
    )


#: Name of the batches of a program in place of a dataset, and records of them to process at a time.
BATCHES, RECORDS_AT_A_TIME = "<batches>", 256


@dataclass(frozen=True)
class Resolved:
    """A validated plan, and notes for the user.

    Attributes:
        settings: every setting, with its default, before noise was calibrated.
        notes: probable mistakes in settings, which no private record decides.
        chosen: what the recipe chose, with reasons.
    """

    plan: TrainPlan
    settings: Settings
    notes: tuple[str, ...]
    chosen: tuple[str, ...] = ()

    @property
    def private_notes(self) -> tuple[str, ...]:
        """Return notes about the records, for the person who holds them: do not publish or log."""
        return checks.private_notes(self.plan)


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
    raise_errors([*lonely(given.explicit, NEEDS), *faults])
    plan = _calibrated(plan, earlier)
    notes = checks.notes_on_plan(plan, Settings.model_validate(flags).explicit)
    chosen = recipe_notes(given, data.facts)
    return Resolved(plan, completed_settings, tuple(map(named, notes)), tuple(chosen))


def resolve_batches(
    records: int, keywords: dict[str, Any], earlier: tuple[TrainingEvent, ...] = ()
) -> tuple[TrainPlan, tuple[str, ...]]:
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
    size = keywords["batch_size"]
    facts = Dataset(
        train_size=records,
        test_size=0,
        shape=(1, 1, 1),
        task=Classification(("0", "1")),  # no setting of a step depends on it
        mean=(),
        std=(),
        defaults=Defaults(keywords["model"], size, physical_batch=RECORDS_AT_A_TIME),
        about="",
    )
    found = DataFacts(facts, BATCHES)
    data = DataPlan(dataset=BATCHES, source=BATCHES, found=found, folder=Path())
    resolved = resolve(keywords, earlier=earlier, data=data)
    return resolved.plan, resolved.notes


def _calibrated(plan: TrainPlan, earlier: tuple[TrainingEvent, ...]) -> TrainPlan:
    """Return a plan with the least noise for which the whole run costs at most the target epsilon.

    It also covers ``earlier`` events. A covered test score costs at most as much as training.
    """
    privacy, settings = plan.privacy, plan.settings
    if privacy.private and settings.epsilon is not None:
        sigma = calibrate_noise(privacy.event, privacy.delta, settings.epsilon, earlier=earlier)
        event = replace(privacy.event, noise_multiplier=sigma)
        privacy = replace(privacy, event=event, target=settings.epsilon)
        settings = settings.replace(sigma=sigma, epsilon=None)
    if privacy.score is not None:
        target = min(total_epsilon((privacy.event,), privacy.delta), privacy.max_epsilon)
        sigma = calibrate_noise(privacy.score, privacy.delta, target)
        privacy = replace(privacy, score=score_event(sigma))
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
    return PrivacyPlan(
        private=not settings.no_dp,
        event=event,
        batch_size=settings.batch_size,
        delta=settings.delta,
        max_epsilon=settings.max_epsilon or math.inf,
        unit=unit,
        score=score_event(0.0) if settings.cover_scores else None,
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
        trained=registry.Trained(
            settings.train or "all", settings.lora_rank or registry.Trained.rank
        ),
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
        return encoder.of(data.facts.texts, causal=data.facts.task.network is not None)
    if settings.backbone is not None and settings.backbone_size is not None:
        return registry.Backbone(settings.backbone, settings.backbone_size, settings.backbone_flips)
    return None if settings.features is None else registry.Scattered(settings.features)


def _recipe(settings: Settings, records: int = 1) -> Recipe:
    return Recipe(
        schedule=settings.lr_schedule,
        warmup=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        ema=settings.ema or 0.0,
        views=settings.augmentations or 1,
        augment=settings.augment or "none",
        records=records,
        loss=_loss(settings),
    )


def _loss(settings: Settings) -> LossKind:
    """Return the loss, with balanced weights as numbers; none if the shares are no shares."""
    shares, weights = _numbers(settings.shares), tuple[float, ...]()
    if settings.class_weights != BALANCED:
        weights = _numbers(settings.class_weights)
    elif min(shares, default=0.0) > 0:
        weights = tuple(1 / share for share in shares)
    return LossKind(settings.loss, settings.label_smoothing, weights, shares)


def _numbers(text: str | None) -> tuple[float, ...]:
    """Return the numbers of a text such as "1,15"."""
    return tuple(map(float, text.split(","))) if text else ()


#: Checkpoints by default: every minute, and every fiftieth of the steps if they take little time.
SECONDS, PARTS, SHARE = 60.0, 50, 0.05


def _interval(text: str | None, steps: int) -> CheckpointInterval:
    if text is None:
        return CheckpointInterval(math.ceil(steps / PARTS), SECONDS, SHARE)
    if text.endswith("s"):
        return CheckpointInterval(steps=0, seconds=float(text[:-1]))
    return CheckpointInterval(steps=int(text), seconds=math.inf)
