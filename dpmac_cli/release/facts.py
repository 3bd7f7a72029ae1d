"""Facts of a run that are published with its model: the first half of a report.

One model writes them, reads them, and is their schema. Settings, events, bounds on attacks and
calibrations are the classes that the program uses itself. All of it is public, or computed after
the noise. Does not import torch.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
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
from dpmac_cli.runs.headers import MOST_PARTS, Number, Part, PrintableText, Sha256
from dpmac_cli.tasks.calibration import Calibration, cell_count
from dpmac_cli.tasks.operating_point import OperatingPoint
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.residuals import EDGES, Residuals
from dpmac_cli.tasks.task import ASKED, TASKS, Task, task_of

#: Format of report.json and of a model's header; no other is read. It also changes with the rule by
#: which records are held out, so no model is scored on records that it was trained on.
FORMAT = 2


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


def _recorded_fields() -> dict[str, tuple[Any, Any]]:
    """Return the settings that a report has, by name, as pydantic creates fields from them."""
    fields = dict[str, tuple[Any, Any]]()
    for name, field in SETTINGS.items():
        if name not in LEFT_OUT:
            fields[name] = _as_recorded(field)
    return fields


if TYPE_CHECKING:
    from dpmac_cli.config.settings import Settings

    Recorded = Settings
else:
    Recorded = create_model(
        "Recorded",
        __base__=_Recorded,
        __doc__=_Recorded.__doc__,
        **_recorded_fields(),
    )


class UnknownTaskError(Exception):
    """A task of a program, which another one has not registered."""


def _kind(name: str) -> str:
    if name not in TASKS:
        raise UnknownTaskError(name)
    if name not in ASKED:
        raise ValueError(f"is not one of {', '.join(ASKED)}")
    return name


def _kind_of_numbers(name: str) -> str:
    if name not in TASKS:
        raise UnknownTaskError(name)
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
    def training(self) -> tuple[TrainingEvent, ...]:
        """Return the events of training, without histograms and scores; the last is the model's."""
        return tuple(event for event in self.events if event.trains)

    @property
    def done(self) -> Done:
        """Return the events or the search that epsilon is of."""
        return self.search or self.events

    @property
    def task(self) -> Task:
        """Task of the model, with its calibration, its intervals or its operating point."""
        target = self.data.target
        declared = None if target is None else target.model_dump()
        task = task_of({"classes": self.data.classes, "target": declared})
        for name in task.counted_facts:
            fact = getattr(self.network, name)
            if fact is not None:
                task = replace(task, **{name: fact})
        return task

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
        calibration = network.calibration
        cells = cell_count(len(data.classes))
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

    def header(self) -> dict[str, Any]:
        """Return the JSON values of these facts alone, also of a whole report."""
        first_half = set(Facts.model_fields)
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True, include=first_half)
