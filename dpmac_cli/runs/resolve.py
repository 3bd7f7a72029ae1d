"""From flags and files to the plan of a run: the only place that reads the records for it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config import checks
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.defaults import recipe_notes
from dpmac_cli.config.encoders import read_encoder
from dpmac_cli.config.facts import DataFacts, InMemoryData, Source
from dpmac_cli.config.flags import is_given
from dpmac_cli.config.networks import BACKBONES
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.planning import plan
from dpmac_cli.config.settings import DATA, GROUPS, SETTINGS, Settings
from dpmac_cli.config.sources import Values, Written, given_settings, over, read_yaml, values_of
from dpmac_cli.config.tokens import TOKENS, TextReader
from dpmac_cli.data.table_schema import TableSchema, read_schema
from dpmac_cli.errors import InputError, as_keywords


@dataclass(frozen=True)
class Resolved:
    """A validated plan, and notes for the user.

    Attributes:
        notes: probable mistakes in settings, which no private record decides; settings are in
            braces, as in an error.
        chosen: what the recipe chose, with reasons.
    """

    plan: Plan
    notes: tuple[str, ...]
    chosen: tuple[str, ...] = ()

    @property
    def private_notes(self) -> tuple[str, ...]:
        """Return notes about the records, for the person who holds them: do not publish or log."""
        return tuple(map(as_keywords, checks.private_notes(self.plan)))


def resolve(
    settings: Settings | Values | None = None,
    file: Path | Values | None = None,
    *,
    earlier: tuple[TrainingEvent, ...] = (),
    facts: DataFacts | None = None,
    noise: TrainingEvent | None = None,
    **keywords: Any,
) -> Resolved:
    """Resolve settings and a YAML file into a validated plan. Settings take precedence.

    Args:
        settings: a model, or values by name, as text or of their types; None and False if not
            given.
        file: YAML file with flag names as keys, or the values of a run to change, by name.
        earlier: events on the same records, which a target epsilon must cover too.
        facts: facts of the dataset, if they were read before; None to read them.
        noise: event of a run that has begun, whose noise it has; None for that of the settings.
        keywords: more settings by name: ``resolve(dataset="digits", sigma=2)``.

    Raises:
        InputError: lists every invalid value; if there is none, every fault of the dataset; if
            there is none, every fault of settings together.
        BudgetError: no noise meets the target epsilon.
    """
    flags = {**values_of(settings), **keywords}
    given = given_settings(flags, file)
    facts = facts or read_facts(given)
    found = plan(given, facts, earlier=earlier, noise=noise)
    typed = [name for name in SETTINGS if is_given(flags.get(name))]
    notes = checks.notes(found, typed)
    return Resolved(found, notes, tuple(recipe_notes(given, facts)))


def read_facts(
    settings: Settings, texts: TextReader | None = None, schema: TableSchema | None = None
) -> DataFacts:
    """Read a dataset once, because files may change during a run, and return its facts.

    ``texts`` reads texts, and ``schema`` declares a table; None to read those of the settings.

    Raises:
        InputError: lists every fault of the dataset.
    """
    name = settings.dataset
    if isinstance(name, str) and name in DATASETS:
        if settings.unit is not None:
            raise InputError(
                f"{{unit=}}{settings.unit}: {name} does not contain the units of records. Use "
                "a table, a folder, or an .npz with an array unit."
            )
        return DataFacts(**vars(DATASETS[name]), name=name)
    from dpmac_cli.data.user_data import inspect  # noqa: PLC0415  (loads numpy)

    if texts is None and settings.backbone is not None and settings.backbone not in BACKBONES:
        texts = read_encoder(settings.backbone).reader(settings.tokens or TOKENS)
    source = _source(settings, name if isinstance(name, InMemoryData) else None, schema)
    return inspect(replace(source, texts=texts))


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


def settings_of_data(values: Values, file: Path | None = None) -> Settings:
    """Return the settings of a dataset alone.

    Args:
        values: values by name, as text or of their types; None if not given.
        file: config.yaml of a run, of which only the settings of its dataset are read.

    Raises:
        InputError: lists every fault found.
    """
    found, places = Written({}, {}) if file is None else read_yaml(file)
    above = {name: value for name, value in values.items() if is_given(value)}
    below = {n: v for n, v in found.items() if n not in above and (n == "dataset" or _of_data(n))}
    if file is not None and str(below.get("dataset", "")).startswith("<"):
        raise InputError(
            f"{file.parent} was trained on records in memory of a program. Add {{dataset}} with "
            "the path of a file of them, or pass them: dpmac_cli.score(run, data)."
        )
    return Settings.model_validate(over(above, below), context=places)


def _of_data(name: str) -> bool:
    return GROUPS.get(name) == DATA
