"""A published model and a data set -> how well it does on the test split."""

from dataclasses import dataclass
from pathlib import Path

from dpmac_cli.assembly import choose_device, data_folder
from dpmac_cli.catalog import DATASETS
from dpmac_cli.data import load_data
from dpmac_cli.engine import Evaluation, evaluate
from dpmac_cli.release import load_model


@dataclass(frozen=True)
class Scored:
    """A model's result.

    Attributes:
        result: on every test sample.
        dataset: name. classes: names, in the order of the confusion matrix.
        path: of the model file.
    """

    result: Evaluation
    dataset: str
    classes: list[str]
    path: Path


def score(path: Path, dataset: str | None, data_dir: Path | None, device: str) -> Scored:
    """Score a published model on the whole test split.

    Args:
        path: a run folder or a model file.
        dataset: name; None for the one the model was trained on.
        data_dir: where data sets lie; None for the environment's or the cache.
        device: as in ``--device``.

    Raises:
        InputError: a file is missing or damaged.
        ModelError: the model does not fit the data set.
    """
    where = choose_device(device)
    released = load_model(path, dataset, where)
    name = dataset or str(released.facts["dataset"]["name"])
    data = load_data(name, data_folder(data_dir), where).prepared_by(released.facts["input"])
    result = evaluate(released.model, data, data.test)
    return Scored(result, name, list(DATASETS[name].classes), released.path)
