"""A finished run as a program holds it: its report, its network, scores and predictions."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import nn

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.arguments import checked
from dpmac_cli.before_0_4 import ReportValues
from dpmac_cli.errors import InputError
from dpmac_cli.files import to_json
from dpmac_cli.models.build import Network
from dpmac_cli.release import prediction, scoring
from dpmac_cli.release.model_file import Released, load_model
from dpmac_cli.release.prediction import Predictions
from dpmac_cli.release.report import read_report
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.ledger import State
from dpmac_cli.training.evaluation import Evaluation


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run, or the model file of one: what it promises, and its network.

    :func:`~dpmac_cli.train`, :func:`~dpmac_cli.resume` and ``publish`` of
    :func:`~dpmac_cli.make_private` return one, and :func:`~dpmac_cli.load` reads one from disk::

        run = train(dataset="digits", epsilon=3)
        run.epsilon, run.score().accuracy, run.predict(images).predicted

    Attributes:
        report: content of report.json; of a model file alone, its header, which has the same keys
            but no scores.
        folder: folder of the run, or the model file.
        read: reads the published network; called when it is first used.
        notes: probable mistakes in settings, and messages about the training; none of a run that
            was loaded.
        private_notes: notes on the records, for the person who holds them: do not publish or log.
    """

    report: dict[str, Any] = field(repr=False)
    folder: Path
    read: Callable[[], Released] = field(repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    private_notes: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "report", ReportValues(self.report))

    @cached_property
    def released(self) -> Released:
        """Return the network with the facts published with it.

        Raises:
            InputError: the model file is missing or damaged, or is another one than that of the
                report: the run was resumed, or replaced.
            ModelError: the network cannot be built.
        """
        released = self.read()
        _check_same_run(released, self.report, self.folder)
        return released

    @property
    def model(self) -> nn.Module:
        """Return the trained network, in evaluation mode. Raises as :func:`~dpmac_cli.load`."""
        return self.released.model

    @property
    def epsilon(self) -> float:
        """Return the privacy cost of everything that was done; infinity without privacy.

        In the report, which is JSON, it is None where it is not finite.
        """
        cost: float | None = self.report["epsilon"]
        return math.inf if cost is None else cost

    @property
    def events(self) -> tuple[TrainingEvent, ...]:
        """Return what was done to the records; :func:`~dpmac_cli.total_epsilon` composes it."""
        return TypeAdapter(tuple[TrainingEvent, ...]).validate_python(self.report["events"])

    @property
    def state(self) -> State:
        """Return how the run ended."""
        state: State = self.report["state"]
        return state

    @checked()
    def score(self, dataset: Any = None, *, data_dir: Path | str | None = None) -> Evaluation:
        """Score the network on all test records.

        Scores are exact functions of the test records, which epsilon does not cover. The protected
        score of a run with ``cover_scores`` is in its report.

        Args:
            dataset: a name, the path of your own data, or records in memory; by default the
                dataset of the training.
            data_dir: folder of datasets; by default DPMAC_DATA_DIR or the cache.

        Raises:
            InputError: a file is missing or damaged.
            ModelError: the network does not fit the dataset.
        """
        result, _ = scoring.score(self.released, dataset, data_dir)
        return result

    @checked()
    def predict(
        self,
        data: Any,
        *,
        skip_bad: bool = False,
        id_column: str | None = None,
        length: int | None = None,
        temperature: float | None = None,
        threshold: str | float | None = None,
        level: float | None = None,
    ) -> Predictions:
        """Predict the classes or numbers of new records, or continue texts.

        Predictions tell about the new records, which epsilon does not cover.

        Args:
            data: a folder of images or texts, an .npz with an array x, or a table, like the
                model's training data; or in memory the array x itself, a list of texts, a data
                frame, or a dataset of Hugging Face.
            skip_bad: leave out unusable records instead of rejecting all.
            id_column: column of a table to keep beside each record; by default ``id``.
            length: number of tokens to add to a text; by default 50.
            temperature: of the draws of tokens; 0 for the most probable ones, by default 1.
            threshold: operating point of two classes: "balanced", "sensitivity=0.9", a
                probability, or "most-likely"; by default that of the model.
            level: share of the targets that the intervals of numbers have; by default 0.9.

        Raises:
            InputError: a file is missing or damaged, or records do not match the training data.
            ModelError: the network cannot be built.
        """
        return prediction.predict(
            self.released,
            data,
            skip_bad=skip_bad,
            id_column=id_column,
            length=length,
            temperature=temperature,
            threshold=threshold,
            level=level,
        )


@checked()
def load(
    path: Path | str,
    *,
    device: str = "auto",
    factory: str | None = None,
    network: Network | None = None,
    public: Path | str | None = None,
) -> Run:
    """Load a run, or a model file, to use its network.

    Args:
        path: a run folder or a model file.
        device: "cpu", "cuda", "mps", or "auto" for the best one that there is.
        factory: ``FILE.py:FACTORY`` of a user-supplied network. The name in the file is not
            imported.
        network: instead of ``factory``, a network that is defined in the program: its class or a
            function, called like a factory, or an instance, of which a copy gets the weights.
        public: folder of the text encoder, or file of the weights of the backbone, that it was
            trained on; by default a registered one, or where the config.yaml beside it says.

    Raises:
        InputError: the file does not exist, is not a dpmac model, or is damaged; there is no such
            factory; or the public network is missing, or another one.
        ModelError: the network cannot be built, or does not fit the file.
    """
    place = Path(path)
    read = partial(
        load_model, place, choose_device(device), factory=factory, network=network, public=public
    )
    released = read()
    if not (place / folder.REPORT).is_file():
        return Run(released.facts.values(), place, read)
    run = Run(read_report(place).values(), place, read)
    _check_same_run(released, run.report, place)
    vars(run)["released"] = released  # it is not read again
    return run


def _check_same_run(released: Released, report: Mapping[str, Any], place: Path) -> None:
    """Raise InputError if a report is not of a model: an epsilon must not be told of another one.

    Args:
        released: the model, with the first half of its report.
        report: content of report.json, in which there may be tuples in place of lists.
        place: folder of both.
    """
    facts = released.facts.values()
    first_half = {name: report.get(name) for name in facts}
    if json.loads(to_json(first_half)) != facts:
        raise InputError(
            f"{place} has another model than the one of this report. If it was trained or resumed "
            f"again since, load it again: load({str(place)!r}). If files of two runs were mixed, "
            "copy the whole folder again."
        )
