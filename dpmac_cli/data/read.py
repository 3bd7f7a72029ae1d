"""Read a dataset once: for training, to score a model, and for predictions.

All faults of its files are reported together. Nothing else opens files of records.
"""

from dataclasses import replace
from pathlib import Path

# Each of these modules registers the readers of a kind.
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.encoder_folder import read_encoder
from dpmac_cli.config.facts import published_facts, refuse
from dpmac_cli.config.networks import BACKBONES
from dpmac_cli.config.settings import Settings
from dpmac_cli.config.tokens import TOKENS, TextReader
from dpmac_cli.data import array_file, hugging_face, image_folder, in_memory, table, text_folder
from dpmac_cli.data.arrays import dataset_of_arrays
from dpmac_cli.data.crafted import crafted_records
from dpmac_cli.data.dataset import Dataset, Declaration
from dpmac_cli.data.published import read_published
from dpmac_cli.data.reader import Reading, reading_of
from dpmac_cli.data.table_schema import TableSchema, read_schema
from dpmac_cli.files import data_folder

#: Modules that register the readers.
KINDS = (array_file, hugging_face, image_folder, in_memory, table, text_folder)


def read(
    settings: Settings, texts: TextReader | None = None, schema: TableSchema | None = None
) -> Dataset:
    """Read training and test records, and return them with their facts.

    Args:
        settings: settings of a run, of which those of the dataset are read.
        texts: reads texts; None for the tokenizer of the settings.
        schema: declares a table; None for the one of the settings.

    Raises:
        InputError: lists every fault of the dataset.
    """
    name = settings.dataset
    if not isinstance(name, str) or name not in DATASETS:
        return read_own(declaration(settings, texts, schema))
    facts = published_facts(name, settings.unit)
    train, test = read_published(name, data_folder(settings.data_dir))
    if settings.canaries is None:
        return Dataset(train, test, facts)
    count, seed = settings.canaries, settings.seed
    crafted = crafted_records(facts.records, facts.task, count, train, seed)
    return Dataset(crafted.added_to(train), test, facts, crafted=crafted)


def read_own(declared: Declaration) -> Dataset:
    """Return your own dataset, not a registered one, as it is declared.

    Args:
        declared: the dataset: its settings, and what they name.

    Raises:
        InputError: with every fault found.
    """
    return dataset_of_arrays(declared, reading_of(declared))


def read_new(declared: Declaration) -> Reading:
    """Read records without labels, with the ``name`` of each: its key, or its row from 0.

    Unusable ones are left out with ``skip_bad``.

    Args:
        declared: new records, with the shape that the model needs.

    Raises:
        InputError: with every fault found, or if there is no record.
    """
    reading = reading_of(declared)
    count = len(reading.arrays["x"])
    if not count:
        fault = f"{declared.path} contains no records"
        if reading.left_out.records:
            fault += " that can be used"
        refuse([fault, *reading.left_out.reasons])
    names = list(reading.arrays.get("key", range(count)))
    return replace(reading, arrays={"name": names, **reading.arrays})


def declaration(
    settings: Settings, texts: TextReader | None = None, schema: TableSchema | None = None
) -> Declaration:
    """Return your own dataset as it is declared.

    The schema of records in memory comes first, then the one that is passed, then the file that
    settings name. For arguments see :func:`read`.

    Raises:
        InputError: the encoder or the schema of the settings cannot be read.
    """
    if texts is None and settings.backbone is not None and settings.backbone not in BACKBONES:
        texts = read_encoder(settings.backbone).reader(settings.tokens or TOKENS)
    declared = Declaration(settings, schema, texts)
    if declared.in_memory is not None and declared.in_memory.schema is not None:
        return replace(declared, schema=declared.in_memory.schema)
    if schema is None and settings.schema is not None:
        return replace(declared, schema=read_schema(Path(settings.schema)))
    return declared
