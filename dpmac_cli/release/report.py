"""Report of a run: one model that writes report.json, reads it, and is its schema.

Its first half are the :class:`~dpmac_cli.release.facts.Facts` of the model. Does not import torch.
"""

from json import loads
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import (
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from dpmac_cli.accounting.events import MOST_COUNT, Count, TrainingEvent
from dpmac_cli.config.records import AnyNumber
from dpmac_cli.errors import InputError, first_fault
from dpmac_cli.files import model_header
from dpmac_cli.release.facts import FORMAT, Facts, UnknownTaskError
from dpmac_cli.runs import folder, ledger, lock
from dpmac_cli.runs.headers import Number, Part, PrintableText
from dpmac_cli.tasks.metrics import EvaluationMetric

T = TypeVar("T")


class Score(Part):
    """A metric of the published model on the test records."""

    value: AnyNumber | None
    """The metric. Null if it is not defined, or was not released."""
    low: AnyNumber | None = None
    """Lower end of its 95% interval for records like these. Absent if it was not computed."""
    high: AnyNumber | None = None
    """Upper end of that interval."""
    constant: AnyNumber | None = None
    """The same metric of the best constant prediction: of the most frequent class, of the shares of
    the classes, or of the median or mean of the test records. Absent if it was not computed."""


#: A score without an interval, by class, or of a true and a predicted class.
Detail = bool | AnyNumber | None | tuple[AnyNumber | None, ...]
ByClass = tuple[Annotated[int, Field(ge=0, le=MOST_COUNT)], ...]
Interval = tuple[AnyNumber | None, AnyNumber | None]


class Scores(Part):
    """Scores of the published model on the test records.

    They are not protected unless noise is not null; then the released score has a value, and others
    do not. Besides these keys, it has the metrics of the task by their names, such as accuracy,
    auroc, mae or r2, each with value, low, high and constant. sensitivity and specificity are in
    the order of classes, and so are the rows (true class) and columns (predicted class) of
    confusion, the numbers of records. For a number to predict, by_bin has the numbers of records
    by true (rows) and predicted (columns) number in 10 equal parts of the range, after the
    transform; interval_coverage is the share of the targets that are in their intervals of 90%,
    and interval_coverage_by_bin that share by predicted number.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Score | Detail | tuple[ByClass, ...]]

    samples: Count
    """Number of scored test records, or units: all of them."""
    loss: AnyNumber | None
    """Mean default loss of the task: cross entropy in nats, or of targets scaled to [-1, 1]. Null
    if it is not finite."""
    noise: Number | None
    """Standard deviation of the noise in the score. Null for exact scores."""
    interval: Interval | None
    """95% interval, because of the noise, for the exact score on these test records: low, high.
    Null for exact scores."""


class Report(Facts):
    """Report of a run.

    It holds public values and values computed after the noise, and nothing computed from the
    training records without noise. A key is null where it does not apply; each description says
    what null means.
    """

    scores: Scores | None = None
    """Scores of the published model on the test records. Null without test records."""
    environment: dict[str, str | Number | None]
    """Versions of the software that matters to the result, the machine that the run ended on, and
    the measured seconds of training, over all sessions of the run. The guarantee does not cover
    these; they are null for the result of a search, because they would tell which trial it was."""
    state: PrintableText
    """How the run ended: it took all its steps (finished), it was stopped (interrupted), or epsilon
    would have exceeded --max-epsilon (budget-spent)."""

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
        key = self.task.headline.key
        if self.scores is not None and not isinstance(getattr(self.scores, key, None), Score):
            raise ValueError(f"scores has no {key}")
        return self

    @property
    def score(self) -> tuple[EvaluationMetric, Score]:
        """Return the headline metric of the task, and its score.

        A score whose ``value`` is None is not defined, or no record was tested on.
        """
        metric = self.task.headline
        return metric, getattr(self.scores, metric.key, Score(value=None))


class Versioned(Part):
    """A file of any format. Before the second, the number of the format had another name.

    Attributes:
        version: number of the format of a report or a model.
        schema_version: that of a comparison, and of reports and models before.
    """

    version: int | None = None
    schema_version: int | None = None


def parse_file(kind: type[T], text: str | bytes, file: Path, complaint: str, remedy: str) -> T:
    """Parse the JSON text of a file as ``kind``, a model above or a dataclass.

    Validation is strict: numbers are finite, and no value is converted to another type.

    Args:
        kind: class of the result.
        text: content of the file.
        file: where it is from, for the message.
        complaint: what is said of the file if it cannot be used, such as "is not a valid
            report of dpmac".
        remedy: sentence on what to do then, the last of the message.

    Raises:
        InputError: a key is missing or has a value that dpmac does not write, or another version
            wrote it. The message has the first fault in brackets.
    """
    try:
        header = Versioned.model_validate_json(text, strict=True)
        version = header.version
        unversioned = version is header.schema_version is None
        if version == FORMAT or unversioned:
            return TypeAdapter(kind).validate_json(text, strict=True)
    except UnknownTaskError as unknown:
        raise InputError(
            f"{file} is of the task {str(unknown)!a}, which is not registered. If it is your own, "
            "use a program that registers it first: register_task."
        ) from unknown
    except (ValidationError, InputError) as failure:
        fault = str(failure) if isinstance(failure, InputError) else first_fault(failure)
        raise InputError(f"{file} {complaint} ({fault.rstrip('.')}). {remedy}") from failure
    if version is None or version < FORMAT:
        raise InputError(
            f"{file} was written by an older version of dpmac. Train again, or read it with that "
            "version."
        )
    raise InputError(
        f"{file} was written by a newer version of dpmac (format {version}; this version "
        f"reads {FORMAT}). Upgrade dpmac."
    )


def read_report(path: Path) -> Report:
    """Read the report of a run from its folder or from the file itself.

    Args:
        path: folder of the run, or its report.json.

    Raises:
        InputError: it is missing, cannot be read, or is not a report of this version.
    """
    remedy = f"Use a run folder of dpmac train, or the {folder.REPORT} in it."
    file, text = folder.read_run_file(path, folder.REPORT, remedy)
    return parse_file(Report, text, file, "is not a valid report of dpmac", remedy)


#: States of a run without a report that can be read: a process holds its folder; it ended without
#: one; or its files were changed or damaged.
RUNNING, CUT_OFF, DAMAGED = "running", "cut-off", "damaged"


def how_it_ended(run: Path) -> tuple[str, Report | None]:
    """Return the state of a run, and its report. Never raises for a damaged one.

    Args:
        run: folder of the run.

    Returns:
        The state that the report has (:func:`~dpmac_cli.runs.ledger.state_of` says which), and the
        report. Or None as the second value, beside :data:`RUNNING` while another process has the
        folder, :data:`CUT_OFF` without a report, or :data:`DAMAGED` if it cannot be read, or is of
        another model than the one beside it.
    """
    if lock.in_use(run):
        return RUNNING, None
    if not (run / folder.REPORT).exists():
        return CUT_OFF, None
    try:
        report = read_report(run)
        is_whole = _is_of_model(run)
    except (InputError, *folder.BROKEN):
        return DAMAGED, None
    return (report.state, report) if is_whole else (DAMAGED, None)


def _is_of_model(run: Path) -> bool:
    """Return whether a report has the facts of the model beside it, or there is no model.

    Raises:
        BROKEN: one of :data:`~dpmac_cli.runs.folder.BROKEN`: one of the files is damaged.
    """
    model = run / folder.MODEL
    if not model.exists():
        return True
    report = loads((run / folder.REPORT).read_bytes())
    published = dict(model_header(model))
    return all(report.get(name) == published.get(name) for name in Facts.model_fields)


def events_of(run: Path) -> tuple[TrainingEvent, ...]:
    """Return the events of a run; all planned events if it was killed, whose steps are unknown.

    Args:
        run: folder of the run. The report counts; without one, the ledger.

    Raises:
        InputError: neither report nor ledger can be read.
    """
    account = ledger.read_ledger(run)
    if account is not None and not (run / folder.REPORT).exists():
        return account.all_planned
    return read_report(run).events
