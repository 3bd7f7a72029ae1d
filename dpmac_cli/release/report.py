"""Report of a run: one model that writes report.json, reads it, and is its schema.

Settings, events, bounds on attacks and calibrations are the classes that the program uses itself.
:class:`Facts` are the first half of a report, and the header of a published model. All of it is
public, or computed after the noise. Does not import torch.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo

from dpmac_cli.accounting.events import MOST_COUNT, Count, Steps, TrainingEvent
from dpmac_cli.accounting.risk import Risk
from dpmac_cli.accounting.selection import Done, Search
from dpmac_cli.config.datasets import Signature
from dpmac_cli.config.flags import OneOf, help_of
from dpmac_cli.config.plan import NOT_RECORDED
from dpmac_cli.config.records import AnyNumber, AnyRecords
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.errors import InputError, first_fault
from dpmac_cli.runs import folder, ledger, lock
from dpmac_cli.runs.headers import MOST_PARTS, Number, Part, PrintableText, Sha256
from dpmac_cli.tasks.calibration import Calibration, cell_count
from dpmac_cli.tasks.operating_point import OperatingPoint
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.residuals import EDGES, Residuals
from dpmac_cli.tasks.task import ASKED, TASKS, EvaluationMetric, Task, task_of

#: Format of report.json and of a model's header; no other is read. It also changes with the rule by
#: which records are held out, so no model is scored on records that it was trained on.
FORMAT = 2
T = TypeVar("T")


def _of_training(events: tuple[TrainingEvent, ...]) -> tuple[TrainingEvent, ...]:
    """Return events, one of which is of training. Raises ValueError for others."""
    if not any(event.trains for event in events):
        raise ValueError("has no event of training")
    return events


Events = Annotated[
    tuple[TrainingEvent, ...],
    Field(min_length=1, max_length=MOST_PARTS),
    AfterValidator(_of_training),
]

#: Settings that a report does not have: those of the machine, and a schema's file, which is in it.
LEFT_OUT = (*NOT_RECORDED, "device", "schema")


class _Recorded(Part):
    """Settings of a run that are in its report, completed with every default.

    They have the names of docs/configuration.md, without settings that are off, and hyperparameters
    that the optimizer does not have. Files and folders are there by their names, without those
    above them.
    """

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        for name in self.model_fields_set:
            value = getattr(self, name)
            if isinstance(value, str) and not value.isprintable():
                raise ValueError(f"{name} has control characters")
        return self


def _as_recorded(field: FieldInfo) -> tuple[Any, Any]:
    """Return a setting as reports have it: also a name that is not registered in this process."""
    limits = [part for part in field.metadata if not isinstance(part, OneOf)]
    kind: Any = field.annotation
    for limit in limits:
        kind = Annotated[kind, limit]
    return kind, Field(default=None, description=help_of(field))


if TYPE_CHECKING:
    from dpmac_cli.config.settings import Settings

    Recorded = Settings
else:
    Recorded = create_model(
        "Recorded",
        __base__=_Recorded,
        __doc__=_Recorded.__doc__,
        **{n: _as_recorded(field) for n, field in SETTINGS.items() if n not in LEFT_OUT},
    )


class _UnknownTaskError(Exception):
    """A task of a program, which another one has not registered."""


def _kind(name: str) -> str:
    if name not in TASKS:
        raise _UnknownTaskError(name)
    if name not in ASKED:
        raise ValueError(f"is not one of {', '.join(ASKED)}")
    return name


def _kind_of_numbers(name: str) -> str:
    if name not in TASKS:
        raise _UnknownTaskError(name)
    if not issubclass(TASKS[name], Regression):
        raise ValueError("is not a task of numbers")
    return name


class Target(Part):
    """A number to predict, in a public range."""

    name: PrintableText
    """Name of the column, or y."""
    kind: Annotated[str, AfterValidator(_kind_of_numbers)]
    """Task: regression, or one of your own that a program registered."""
    low: AnyNumber
    """Lowest number; others are clipped to the range."""
    high: AnyNumber
    """Highest number."""
    transform: Literal["none", "log1p"]
    """Transform before the range is scaled to [-1, 1]: log1p is log(1 + y)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.low < self.high or (self.transform == "log1p" and self.low <= -1):
            raise ValueError("low is not below high, or too low for log1p")
        return self


class NamedTask(Part):
    """A task that is asked for by its name, such as the next token of a text."""

    kind: Annotated[str, AfterValidator(_kind)]
    """Task: language-model, or one of your own that a program registered."""


class Data(Part):
    """The records that the model was trained on."""

    name: PrintableText
    """Name of a registered dataset; for your own data the name of the folder or file, without its
    parent folders."""
    user_supplied: bool
    """Whether it is your own data rather than a registered dataset."""
    train_size: Count
    """n, the number of training records, or of units of privacy. Taken as public."""
    test_size: Annotated[int, Field(ge=0, le=MOST_COUNT)]
    """Number of test records, or of units of privacy. Taken as public."""
    held_out: bool
    """Whether the test records were held out of the private records."""
    unit: PrintableText | None
    """Column, pattern of paths or array that says which unit a record belongs to. Null if each
    record is a unit."""
    records: AnyRecords
    """What a record is, and the public constants by which the network's inputs are scaled: pixels
    are divided by white, then mean is subtracted and the result divided by std; numbers are clipped
    to low and high, which become -1 and 1; numbers of tokens are not scaled."""
    classes: tuple[PrintableText, ...]
    """Names of the classes or labels, in the order of the network's outputs. Empty for a number to
    predict."""
    target: Target | NamedTask | None
    """The number to predict, or the name of a task, such as language-model. Null for classes."""
    table: dict[str, Any] | None = Field(alias="schema")
    """The declared schema of a table, as its YAML file (docs/own-tables.md). Null for other data.
    """
    taken_from_records: tuple[str, ...]
    """Parts of the schema that were not declared but taken from the records, such as the image
    size. One record can change them, and epsilon does not cover them."""
    ranges: dict[str, tuple[AnyNumber, AnyNumber]] | None
    """Lowest and highest number of each column whose range was found by noisy counts, by its name;
    those of a date in days since 1970-01-01. Others are clipped to it. Null if all were declared.
    """
    sha256: Sha256 | None
    """SHA-256 of the published records. Null for your own data, and where torchvision verifies the
    files."""


class Network(Part):
    """The network, and how its outputs are read."""

    name: PrintableText
    """Name of a built-in network, or FILE.py:FACTORY without its parent folders."""
    built_by: str | None
    """The call that builds your own network. Null for a built-in network."""
    parameters: Count
    """Number of parameters, including frozen ones."""
    trained: Count
    """d, number of trained parameters."""
    steps: Steps
    """T, number of steps that its weights have taken in total."""
    calibration: Calibration | None
    """How outputs become probabilities. Null if they are the softmax of the outputs."""
    residuals: Residuals | None
    """What intervals of predicted numbers follow from. Null without intervals."""
    operating_point: OperatingPoint | None
    """What decides between two classes. Null if the largest output does, and for more classes."""


class Features(Part):
    """Public weights that the network takes features from, or starts from."""

    name: PrintableText
    """Kind of features, name of the public network, or of the file of weights."""
    sha256: Sha256 | None
    """SHA-256 of the file of public weights. Null if there is none."""
    encoder: dict[str, Any] | None
    """Form of a text encoder: values of its config.json, the pooling of tokens, and the checksum of
    its tokenizer as vocabulary_sha256. Null for other networks."""


class Facts(Part):
    """Facts that are published with the weights, in the model file's header."""

    version: int
    """Increases when a key is removed or changes its meaning. A new key does not increase it."""
    settings: Recorded
    """Settings of the run by their names (docs/configuration.md), completed with every default."""
    data: Data
    """The records that the model was trained on."""
    network: Network
    """The network, and how its outputs are read."""
    features: Features | None
    """Features that the network takes instead of its records, and public weights that it starts
    from. Null without."""
    events: Events
    """What each part did to the records, in order; steps of the published model are the last steps.
    Epsilon can be recomputed from these and delta (dpmac account RUN)."""
    epsilon: Number | None
    """Upper bound on epsilon at delta, over all parts of the run. Null if there is none: without
    noise, or at a delta that cannot be reached."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None
    """Delta of (epsilon, delta). Null for a run with --no-dp, which has no guarantee."""
    risk: Risk | None
    """Upper bounds on what an attacker who sees everything that the run releases can learn about
    one record (docs/accounting.md). Null without privacy."""
    search: Search | None
    """Search that the run is the best trial of (dpmac tune). Epsilon covers all of it. Null if
    settings were not searched for."""
    seeded: bool
    """Whether any part used a seed that a person chose. The seed itself is not in the report."""
    secure: bool
    """Whether every part ran with --secure."""
    sentences: dict[str, str | tuple[str, ...] | dict[str, str]]
    """What the report means in words, by topic: guarantee, risk, unit, seeds, not_covered and
    others. A topic that does not apply is absent."""

    @property
    def private(self) -> bool:
        """Return whether noise was added; False for a run with ``--no-dp``."""
        return self.delta is not None

    @property
    def done(self) -> Done:
        """Return the events or the search that epsilon is of."""
        return self.search or self.events

    @property
    def task(self) -> Task:
        """Task of the model, with its calibration, its intervals or its operating point."""
        network, target = self.network, self.data.target
        kinds = {
            "calibration": network.calibration,
            "residuals": network.residuals,
            "point": network.operating_point,
        }
        facts = {name: None if of is None else asdict(of) for name, of in kinds.items()}
        facts["target"] = None if target is None else target.model_dump()
        return task_of({"classes": self.data.classes, **facts})

    @property
    def signature(self) -> Signature:
        """Signature of the network: what it takes, and what its outputs are."""
        records = self.data.records
        return Signature(records.shape, self.task.outputs, records=records)

    @model_validator(mode="after")
    def _check_guarantee(self) -> Self:
        noisy = all(event.noisy for event in self.events)
        if not noisy == self.private == (not self.settings.no_dp):
            raise ValueError("no_dp and delta contradict the noise of the events")
        if not self.private and self.epsilon is not None:
            raise ValueError("an epsilon without noise")
        if self.search is not None and self.events not in self.search.candidates:
            raise ValueError("the events are not those of a trial of the search")
        return self

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        data, network, encoder = self.data, self.network, {}
        if self.features is not None and self.features.encoder is not None:
            encoder = self.features.encoder
        if getattr(data.records, "tokenizer", None) != encoder.get("vocabulary_sha256"):
            raise ValueError("texts without their encoder, or an encoder without texts")
        if encoder and self.settings.train is None:
            raise ValueError("an encoder, but not which part of it was trained")
        if len(data.classes) < 2 and data.target is None:
            raise ValueError("neither classes nor a target")
        calibration, cells = network.calibration, cell_count(len(data.classes))
        if calibration is not None and (data.target or 2 * len(calibration.counts) != cells):
            raise ValueError("the calibration is not that of the classes")
        if network.residuals is not None and not (
            isinstance(data.target, Target) and len(network.residuals.counts) == len(EDGES) + 1
        ):
            raise ValueError("the residuals are not those of a number to predict")
        if network.operating_point is not None and len(data.classes) != 2:
            raise ValueError("an operating point without two classes")
        return self

    def values(self) -> dict[str, Any]:
        """Return the JSON values by key, as in the file. Keys that were not set do not apply."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


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


class _Versioned(Part):
    """A file of any format. Before the second, the number of the format had another name."""

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
        header = _Versioned.model_validate_json(text, strict=True)
        version = header.version
        unversioned = version is header.schema_version is None
        if version == FORMAT or unversioned:
            return TypeAdapter(kind).validate_json(text, strict=True)
    except _UnknownTaskError as unknown:
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
        folder, :data:`CUT_OFF` without a report, or :data:`DAMAGED` if it cannot be read.
    """
    if lock.in_use(run):
        return RUNNING, None
    if not (run / folder.REPORT).exists():
        return CUT_OFF, None
    try:
        report = read_report(run)
    except InputError:
        return DAMAGED, None
    return report.state, report


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
