"""Score a published model on a test split, and draw the results."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpmac_cli.config.data import resolve_data
from dpmac_cli.config.keywords import Keywords
from dpmac_cli.config.plan import DataPlan
from dpmac_cli.data.dataset import standardisation
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.data.schema import InMemoryData
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.plots import COLOURS, new_figure, write_figure
from dpmac_cli.release.model_file import load_model, read_facts, text_reader
from dpmac_cli.release.report_file import Facts
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.folder import CONFIG
from dpmac_cli.training.evaluation import Evaluation, evaluate
from dpmac_cli.training.metrics import BINS, Answers


@dataclass(frozen=True)
class Scored:
    """Results of a model file on every test sample; classes in the confusion matrix's order.

    ``covered``: its run released scores with noise. ``held_out``: there was no test set.
    """

    result: Evaluation
    dataset: str
    classes: list[str]
    path: Path
    covered: bool = False
    held_out: bool = False


def score(
    path: Path | str,
    dataset: str | InMemoryData | None = None,
    data_dir: Path | str | None = None,
    device: str = "auto",
    factory: str | None = None,
) -> Scored:
    """Score a published model on the whole test split.

    Args:
        path: a run folder or a model file.
        dataset: a name, the path of your own data, or records in memory; None for the dataset it
            was trained on.
        data_dir: folder of datasets; None for DPMAC_DATA_DIR or the cache.
        device: see ``--device``.
        factory: ``FILE.py:FACTORY`` of a user-supplied model.

    Raises:
        InputError: a file is missing or damaged.
        ModelError: the model does not fit the dataset.
    """
    where = choose_device(device)
    file, facts = read_facts(Path(path))
    plan = _chosen(file, facts, {"dataset": dataset, "data_dir": data_dir})
    known = plan.facts
    released = load_model(file, plan.found.name, where, signature=known.signature, factory=factory)
    data = load_data(plan.source, plan.folder, where, facts=known)
    if plan.own and known.classes != facts.classes:
        raise ModelError(
            f"{plan.dataset} has the classes {', '.join(known.classes)}, but {file} was trained on "
            f"{', '.join(facts.classes)}."
        )
    gain, offset = standardisation(facts.levels, facts.mean, facts.std, where)
    result = evaluate(released.model, replace(data, gain=gain, offset=offset), data.test)
    covered = facts.covered_scores is not None
    classes = list(known.classes)
    return Scored(result, plan.found.name, classes, file, covered, plan.found.held_out)


def _chosen(file: Path, facts: Facts, given: Keywords) -> DataPlan:
    """Return the data to score on. Raises InputError and ModelError."""
    dataset, beside = given["dataset"], file.parent / CONFIG
    if facts.own and beside.is_file():
        # A run's config.yaml records how your own data was read and split.
        return resolve_data(given, beside, text_reader(file, facts))
    if dataset is None and facts.own:
        raise InputError(
            f"{file} was trained on your own data, {facts.dataset}. Set --dataset to its path."
        )
    if dataset is None and facts.dataset not in DATASETS:
        raise ModelError(
            f"{file} was trained on {facts.dataset}, which this version does not support."
        )
    given = {**given, "dataset": facts.dataset if dataset is None else dataset}
    plan = resolve_data(given, texts=text_reader(file, facts))
    if plan.found.held_out:
        raise InputError(
            f"{dataset} has no test set, and the split is only recorded in the {CONFIG} of the "
            "run. Use the run's folder, or data with a test set."
        )
    return plan


def draw_evaluation(answers: Answers, error: float, classes: Sequence[str], path: Path) -> None:
    """Draw one ROC curve per class against the others, and a reliability diagram.

    Only as many classes as there are colours are drawn; of two classes only the last. ``error`` is
    the calibration error. Raises OSError if the file cannot be written.
    """
    from sklearn.calibration import CalibrationDisplay  # noqa: PLC0415  (a second to import)
    from sklearn.metrics import RocCurveDisplay  # noqa: PLC0415  (a second to import)

    figure, (roc, reliability) = new_figure(2)
    roc.plot([0, 1], [0, 1], "-", color="#bbbbbb", linewidth=1)
    for k in answers.ranked[: len(COLOURS)]:
        name = classes[k].replace("$", r"\$")  # it would begin a formula
        truth, scores = answers.truth[:, k], answers.scores[:, k]
        RocCurveDisplay.from_predictions(truth, scores, name=name, ax=roc)
    roc.set(xlabel="1 - specificity", ylabel="sensitivity")
    confidence, hit = (part.ravel() for part in answers.judged)
    CalibrationDisplay.from_predictions(hit, confidence, n_bins=BINS, ax=reliability)
    reliability.set(xlabel="confidence", ylabel="accuracy")
    reliability.set_title(f"calibration error {error:.3f}", fontsize="small")
    if (legend := reliability.get_legend()) is not None:
        legend.remove()
    write_figure(figure, path)
