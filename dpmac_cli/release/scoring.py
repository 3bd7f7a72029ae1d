"""Score a published model on the test records of a dataset, split as in its training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.facts import DataFacts, published_facts
from dpmac_cli.config.settings import PRIVATE_SCALE, Settings
from dpmac_cli.data.dataset import Dataset
from dpmac_cli.data.read import read
from dpmac_cli.data.table_schema import schema_of
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models.dataset import on_device
from dpmac_cli.release.facts import Facts
from dpmac_cli.release.model_file import Released
from dpmac_cli.runs.folder import CONFIG
from dpmac_cli.runs.resolve import settings_of_data
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import Task
from dpmac_cli.training.evaluation import Evaluation, evaluate


def score(
    released: Released, dataset: Any = None, data_dir: Path | str | None = None
) -> tuple[Evaluation, DataFacts]:
    """Score a published model on the whole test split; see :meth:`dpmac_cli.Run.score`.

    Args:
        released: the model.
        dataset: a name, a path, or records in memory; None for the dataset of the training.
        data_dir: folder of datasets; None for DPMAC_DATA_DIR or the cache.

    Returns:
        Outputs and exact scores of the test records, and the facts of the dataset.

    Raises:
        InputError: a file is missing or damaged.
        ModelError: the network does not fit the dataset.
    """
    data = data_of(released, dataset, data_dir)
    facts = released.facts
    task = replace(facts.task, names=data.facts.task.names)
    on_it = on_device(data, released.device)
    scaled = on_it.scaled_as(facts.data.records).predicting(task)
    return evaluate(released.model, scaled, scaled.tested), data.facts


def data_of(released: Released, dataset: Any = None, data_dir: Path | str | None = None) -> Dataset:
    """Return the records that a model was trained and tested on, split as they were.

    Args:
        released: the model.
        dataset: a name, a path, or records in memory; None for the dataset of the training.
        data_dir: folder of datasets; None for DPMAC_DATA_DIR or the cache.

    Raises:
        InputError: the data cannot be read, or nothing says which records were held out.
        ModelError: the model does not fit it.
    """
    below, chosen = _settings_of_data(released, dataset, data_dir)
    if chosen.dataset in DATASETS:  # before its files are downloaded
        _check_fits(released, published_facts(str(chosen.dataset), chosen.unit))
    return _data_to_score(released, below, chosen)


def _check_fits(released: Released, known: DataFacts) -> None:
    """Raise ModelError if a model does not fit a dataset: other shapes, classes or ranges.

    A number to predict whose range was found by counts fits any range around it, and registered
    datasets may have other names of classes.
    """
    file, facts = released.path, released.facts
    shape = known.records.shape
    if shape != facts.data.records.shape:
        raise ModelError(
            f"{file} does not fit {known.name}: it takes records of shape "
            f"{facts.data.records.shape}, but those of the dataset have {shape}."
        )
    same_outputs = known.task.outputs == facts.task.outputs
    fits = same_outputs and (_is_around(known.task, facts) or not known.user_supplied)
    if known.task != facts.task and not fits:
        raise ModelError(
            f"{known.typed} has {known.task.summary}, but {file} was trained on "
            f"{facts.task.summary}."
        )


def _is_around(task: Task, facts: Facts) -> bool:
    """Return whether a model's range was found by counts inside that of a number to predict.

    Then the model predicts a narrower range than is declared, which is no misfit.

    Args:
        task: the number to predict, as it is declared.
        facts: facts of the model.
    """
    is_found = task.open or facts.settings.scale == PRIVATE_SCALE
    return is_found and isinstance(task, Regression) and task.calibrates and task.covers(facts.task)


def _settings_of_data(
    released: Released, dataset: Any, data_dir: Path | str | None
) -> tuple[Path | None, Settings]:
    """Return the config.yaml beside a model, if it is of your own data, and settings of the data.

    Args:
        released: the model.
        dataset: a name, a path, or records; None for the dataset that it was trained on.
        data_dir: folder of datasets; None for the default.

    Raises:
        InputError: it was trained on your own data, and nothing says where that is.
    """
    file, known = released.path, released.facts.data
    beside = file.parent / CONFIG
    # A run's config.yaml records how your own data was read and split.
    below = beside if known.user_supplied and beside.is_file() else None
    if below is None and dataset is None:
        if known.user_supplied:
            raise InputError(
                f"{file} was trained on your own data, {known.name}. Set {{dataset}} to its path."
            )
        dataset = known.name
    return below, settings_of_data({"dataset": dataset, "data_dir": data_dir}, below)


def _data_to_score(released: Released, below: Path | None, chosen: Settings) -> Dataset:
    """Read the data to score on, split as in training.

    Args:
        released: the model, with the schema of its table.
        below: config.yaml of its run, which says how your own data was split; None without.
        chosen: settings of the data.

    Raises:
        InputError: the data cannot be read, or nothing says which records were held out.
        ModelError: the model does not fit it.
    """
    file, known = released.path, released.facts.data
    schema = None if known.table is None else schema_of(known.table, f"{file}: its schema")
    data = read(chosen, released.reader, schema)
    facts = data.facts
    if schema is not None and facts.schema is not None and facts.schema.columns != schema.columns:
        raise ModelError(
            f"{facts.typed} has a schema with other columns than the one that {file} was trained "
            "with. Pass that schema to from_dataframe."
        )
    _check_fits(released, facts)
    if below is None and facts.held_out:
        raise InputError(
            f"{facts.typed} has no test set, and the split is only recorded in the {CONFIG} of "
            "the run. Use the run's folder, or data with a test set."
        )
    return data
