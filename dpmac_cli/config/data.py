"""Resolve the settings of a dataset, without those of a training."""

from dataclasses import replace
from pathlib import Path

from dpmac_cli.config.flags import valid
from dpmac_cli.config.plan import DataPlan
from dpmac_cli.config.settings import DATA, SETTINGS, Settings
from dpmac_cli.config.sources import Values, over, read_yaml
from dpmac_cli.data.column_schema import TOKENS
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.data.schema import DataFacts, InMemoryData, Source
from dpmac_cli.data.table_schema import TableSchema, read_schema
from dpmac_cli.data.tokens import TextReader
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.models.encoders import read_encoder
from dpmac_cli.models.registry import BACKBONES
from dpmac_cli.storage.paths import data_folder


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
    source, found = _found(settings, texts, schema)
    return DataPlan(
        dataset=str(source.path if isinstance(source, Source) else source),
        source=source,
        found=found,
        folder=data_folder(settings.data_dir),
    )


def _found(
    settings: Settings, texts: TextReader | None, schema: TableSchema | None
) -> tuple[str | Source, DataFacts]:
    """Return a registered name or the source of your own dataset, and the facts of the dataset."""
    name = settings.dataset
    if isinstance(name, str) and name in DATASETS:
        if settings.unit is not None:
            raise InputError(
                f"--unit {settings.unit}: {name} does not contain the units of records. Use "
                "a table, a folder, or an .npz with an array unit."
            )
        return name, DataFacts(DATASETS[name], name)
    from dpmac_cli.data.user_data import inspect  # noqa: PLC0415  (loads numpy)

    source = _source(settings, name if isinstance(name, InMemoryData) else None, schema)
    source = replace(source, texts=texts or _text_reader(settings))
    return source, inspect(source)


def _text_reader(settings: Settings) -> TextReader | None:
    """Return how texts are read with the tokenizer of an encoder; None without one."""
    if settings.backbone is None or settings.backbone in BACKBONES:
        return None
    return read_encoder(settings.backbone).reader(settings.tokens or TOKENS)


def _source(
    settings: Settings, in_memory: InMemoryData | None, schema: TableSchema | None
) -> Source:
    if in_memory is not None and in_memory.schema is not None:
        schema = in_memory.schema
    elif schema is None and settings.schema is not None:
        schema = read_schema(Path(settings.schema))
    same = ("test_fraction", "split_seed", "image_size", "levels", "standardise", "unit")
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
