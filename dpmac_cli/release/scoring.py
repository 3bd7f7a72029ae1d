"""Score a published model on a test split."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from dpmac_cli.config.data import resolve_data
from dpmac_cli.config.plan import DataPlan
from dpmac_cli.data.dataset import Data, standardisation
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.registry import Dataset
from dpmac_cli.data.schema import InMemoryData, Source
from dpmac_cli.data.table_schema import schema_of
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models.build import Network
from dpmac_cli.release.model_file import load_model, read_facts, text_reader
from dpmac_cli.release.report import Facts
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.folder import CONFIG
from dpmac_cli.training.evaluation import Evaluation, evaluate


@dataclass(frozen=True)
class Scored:
    """Results of a model file on every test sample.

    ``covered``: its run released scores with noise. ``held_out``: there was no test set.
    """

    result: Evaluation
    dataset: str
    path: Path
    covered: bool = False
    held_out: bool = False


def score(
    path: Path | str,
    dataset: str | InMemoryData | None = None,
    data_dir: Path | str | None = None,
    device: str = "auto",
    factory: str | None = None,
    network: Network | None = None,
) -> Scored:
    """Score a published model on the whole test split.

    Args:
        path: a run folder or a model file.
        dataset: a name, the path of your own data, or records in memory; None for the dataset it
            was trained on.
        data_dir: folder of datasets; None for DPMAC_DATA_DIR or the cache.
        device: see ``--device``.
        factory: ``FILE.py:FACTORY`` of a user-supplied model.
        network: instead, a network of the program: see :func:`load_model`.

    Raises:
        InputError: a file is missing or damaged.
        ModelError: the model does not fit the dataset.
    """
    where = choose_device(device)
    file, facts = read_facts(Path(path))
    plan = _chosen(file, facts, {"dataset": dataset, "data_dir": data_dir})
    known = plan.facts
    released = load_model(file, where, factory=factory, network=network)
    if known.signature.shape != facts.input.shape:
        raise ModelError(
            f"{file} does not fit {plan.found.name}: it takes records of shape "
            f"{facts.input.shape}, but those of the dataset have {known.signature.shape}."
        )
    if known.task != facts.task and (plan.own or known.task.outputs != facts.task.outputs):
        raise ModelError(
            f"{plan.dataset} has {known.task.summary}, but {file} was trained on "
            f"{facts.task.summary}."
        )
    data = load_data(plan.source, plan.folder, where, found=plan.found)
    return Scored(
        result=_evaluated(released.model, facts, data, known),
        dataset=plan.found.name,
        path=file,
        covered=facts.privacy.covered_scores is not None,
        held_out=plan.found.held_out,
    )


def _evaluated(model: nn.Module, facts: Facts, data: Data, known: Dataset) -> Evaluation:
    """Evaluate a model on test records, read as those that it was trained on."""
    device = data.gain.device
    gain, offset = standardisation(facts.input.levels, facts.input.mean, facts.input.std, device)
    data = replace(data, gain=gain, offset=offset)
    if known.own:
        data = data.in_form(facts.input.record)
    return evaluate(model, data, data.test)


def _chosen(file: Path, facts: Facts, given: dict[str, Any]) -> DataPlan:
    """Return the data to score on. Raises InputError and ModelError."""
    known, beside = facts.dataset, file.parent / CONFIG
    # A run's config.yaml records how your own data was read and split.
    below = beside if known.own and beside.is_file() else None
    if below is None and given["dataset"] is None:
        if known.own:
            raise InputError(
                f"{file} was trained on your own data, {known.name}. Set --dataset to its path."
            )
        given = {**given, "dataset": known.name}
    schema = None if known.table is None else schema_of(known.table, f"{file}: its schema")
    plan = resolve_data(given, below, text_reader(file, facts), schema)
    own = plan.source.schema if isinstance(plan.source, Source) else None
    if own is not None and schema is not None and own.columns != schema.columns:
        raise ModelError(
            f"{plan.dataset} has a schema with other columns than the one that {file} was trained "
            "with. Pass that schema to from_dataframe."
        )
    if below is None and plan.found.held_out:
        raise InputError(
            f"{plan.dataset} has no test set, and the split is only recorded in the {CONFIG} of "
            "the run. Use the run's folder, or data with a test set."
        )
    return plan
