"""Read and validate files of runs: reports, model headers, audits; and recompute epsilon.

Pydantic models declare the keys that are read; other keys are ignored. Validation is strict:
numbers are finite, and no value is converted to another type. Does not import torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from dpmac_cli.accounting.accountants import DEFAULT_ACCOUNTANT, SIGMA_MAX, SIGMA_MIN
from dpmac_cli.accounting.calibration import MOST_STEPS
from dpmac_cli.accounting.events import ALIASES, SAMPLERS, TrainingEvent
from dpmac_cli.accounting.pricing import Row, price
from dpmac_cli.accounting.selection import LEAST_MEAN, MOST_MEAN, Search, Trials, epsilon_of
from dpmac_cli.accounting.statements import RECORD
from dpmac_cli.config import account_flags
from dpmac_cli.config.settings import DELTA
from dpmac_cli.data.column_schema import faults_of_range
from dpmac_cli.data.registry import Signature
from dpmac_cli.data.writing import WRITTEN
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.models.encoders import BertConfig
from dpmac_cli.runs import folder, ledger
from dpmac_cli.tasks.known import task_of
from dpmac_cli.tasks.task import Task

SCHEMA_VERSION = 1
T = TypeVar("T")
#: Flags that may be combined with a run, which determines everything else.
BESIDE_A_RUN = ("delta", "accountant")


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("control characters, which a terminal may interpret as commands")
    return text


def _at(*keys: str, **limits: Any) -> Any:
    """Return a nested field of the file."""
    return Field(validation_alias=AliasPath(*keys), **limits)


PrintableText = Annotated[str, AfterValidator(_printable)]
CountInFile = Annotated[int, Field(ge=1)]
NoiseInFile = Literal[0] | Annotated[float, Field(ge=SIGMA_MIN, le=SIGMA_MAX)]
PUBLIC_PART = ("model", "public_part")
STRICT = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Event(BaseModel):
    """A :class:`~dpmac_cli.accounting.events.TrainingEvent` that every accountant supports.

    Other keys are rejected, because they may change the privacy cost.
    """

    model_config = STRICT | ConfigDict(extra="forbid")

    sampling_rate: float = Field(ge=1e-9, le=1)
    noise_multiplier: NoiseInFile
    steps: int = Field(ge=0, le=MOST_STEPS)
    sampler: Literal[(*SAMPLERS, *ALIASES)]  # type: ignore[valid-type]
    steps_per_epoch: CountInFile
    records: Literal["training", "test"] = "training"


class SearchInFile(BaseModel):
    """A search that a run is the best trial of."""

    model_config = STRICT

    mean_trials: float = Field(ge=LEAST_MEAN, le=MOST_MEAN)
    most_trials: CountInFile
    candidates: tuple[Annotated[tuple[Event, ...], Field(min_length=1)], ...] = Field(min_length=1)

    @property
    def search(self) -> Search:
        """Return the number of trials and the candidates."""
        events = (tuple(TrainingEvent(**dict(e)) for e in each) for each in self.candidates)
        return Search(Trials(self.mean_trials, self.most_trials), tuple(events))


class Report(BaseModel):
    """Keys of report.json that dpmac reads.

    ``epsilon`` is None if it is infinite; ``delta`` is None if no noise was added. ``audit`` is
    None if there are no canaries.
    """

    model_config = STRICT

    state: PrintableText | None = None
    optimizer: PrintableText | None = None
    dataset: PrintableText = _at("dataset", "name")
    train_size: CountInFile = _at("dataset", "train_size")
    accuracy: float | None = _at("test", "accuracy", default=None)
    mae: float | None = _at("test", "mae", default=None)
    nmae: float | None = _at("test", "nmae", default=None)
    seeded: bool | None = _at("privacy", "seed_policy", "given", default=None)
    audit: dict[str, Any] | None = None
    private: bool = _at("privacy", "private")
    unit: PrintableText = _at("privacy", "unit", "name", default=RECORD)
    epsilon: float | None = _at("privacy", "epsilon", ge=0)
    delta: Annotated[float, Field(gt=0, lt=1)] | None = _at("privacy", "delta")
    events: tuple[Event, ...] = _at("privacy", "events", min_length=1)
    abandoned: tuple[Event, ...] = _at("privacy", "abandoned")
    searched: SearchInFile | None = _at("privacy", "search", default=None)

    @model_validator(mode="after")
    def _check_noise(self) -> "Report":
        noisy = all(event.noise_multiplier for event in self.events)
        if not noisy == self.private == (self.delta is not None):
            raise ValueError("private and delta contradict the noise of the events")
        if self.searched is not None and self.events not in self.searched.candidates:
            raise ValueError("the events are not those of a trial of the search")
        return self

    @property
    def search(self) -> Search | None:
        """Return the search that the run is the best trial of, if it is."""
        return None if self.searched is None else self.searched.search

    def training_events(self, *, attempts: bool = False) -> tuple[TrainingEvent, ...]:
        """Return the events of all parts; ``attempts`` puts those of replaced attempts first."""
        before = self.abandoned if attempts else ()
        return tuple(TrainingEvent(**dict(event)) for event in (*before, *self.events))


class Target(BaseModel):
    """A number to predict, in a public range."""

    model_config = STRICT

    name: PrintableText
    kind: Literal["regression", "counts"]
    low: float
    high: float
    transform: Literal["none", "log1p"]

    @model_validator(mode="after")
    def _check_range(self) -> "Target":
        for fault in faults_of_range(self.low, self.high, self.transform, "number"):
            raise ValueError(fault)
        return self


class SeveralTargets(BaseModel):
    """Several numbers to predict."""

    model_config = STRICT

    kind: Literal["several numbers"]
    targets: tuple[Target, ...] = Field(min_length=2)


class Facts(BaseModel):
    """Keys of a model file's header that dpmac reads.

    Images are standardised as ``(pixels / levels - mean) / std`` per channel. ``trained_part``,
    ``features``, ``backbone`` and ``backbone_size`` are None for networks without a public part.
    """

    model_config = STRICT

    checksum: str
    dataset: PrintableText = _at("dataset", "name")
    own: bool = _at("dataset", "own")
    multilabel: bool = _at("dataset", "multilabel")
    model: PrintableText = _at("model", "name")
    fix_norm: bool = _at("model", "fix_norm")
    trained_part: PrintableText | None = _at(*PUBLIC_PART, "train", default=None)
    features: PrintableText | None = _at(*PUBLIC_PART, "features", default=None)
    backbone: PrintableText | None = _at(*PUBLIC_PART, "backbone", default=None)
    backbone_size: int | None = _at(*PUBLIC_PART, "backbone_size", default=None, ge=1, le=1024)
    encoder: BertConfig | None = _at(*PUBLIC_PART, "encoder", default=None)
    backbone_flips: bool = _at(*PUBLIC_PART, "backbone_flips", default=False)
    covered_scores: dict[str, Any] | None = _at("privacy", "covered_scores", default=None)
    searched: dict[str, Any] | None = _at("privacy", "search", default=None)
    private: bool = _at("privacy", "private")
    unit: PrintableText = _at("privacy", "unit", "name", default=RECORD)
    told_by: PrintableText | None = _at("privacy", "unit", "told_by", default=None)
    seeded: bool = _at("privacy", "seed_policy", "given", default=False)
    secure: bool = _at("privacy", "randomness", "secure", default=False)
    events: tuple[Event, ...] = _at("privacy", "events", min_length=1)
    classes: tuple[PrintableText, ...]
    target: Target | SeveralTargets | None = None
    table: dict[str, Any] | None = _at("dataset", "schema", default=None)
    shape: tuple[CountInFile, CountInFile, CountInFile] = _at("input", "shape")
    record: tuple[CountInFile, ...] | None = _at("input", "record", default=None)
    levels: CountInFile = _at("input", "levels")
    mean: tuple[float, ...] = _at("input", "mean")
    std: tuple[Annotated[float, Field(gt=0)], ...] = _at("input", "std")
    texts: tuple[tuple[Annotated[int, Field(ge=0)], CountInFile], ...] = _at(
        "input", "texts", default=()
    )

    @property
    def task(self) -> Task:
        """Task that the model was trained for."""
        target = None if self.target is None else self.target.model_dump()
        return task_of({"classes": self.classes, "multilabel": self.multilabel, "target": target})

    @property
    def signature(self) -> Signature:
        """Signature of the network."""
        return Signature(self.shape, self.task.outputs, self.mean, self.std)

    @property
    def form(self) -> tuple[int, ...]:
        """Shape of a record as the network takes it; versions before 0.3 did not write it."""
        return self.record or self.shape

    @model_validator(mode="after")
    def _check_channels(self) -> "Facts":
        if not len(self.mean) == len(self.std) == self.shape[0]:
            raise ValueError("input.mean and input.std must have one number per channel")
        if math.prod(self.form) != math.prod(self.shape):
            raise ValueError("input.record must have as many numbers as input.shape")
        ends = [0, *(first + count + WRITTEN for first, count in self.texts)]
        if any(first < end for end, (first, _) in zip(ends, self.texts, strict=False)):
            raise ValueError("input.texts must be in order")
        if ends[-1] > self.shape[0] or bool(self.texts) != (self.encoder is not None):
            raise ValueError("input.texts must be of the inputs, and of an encoder")
        return self


class _Versioned(BaseModel):
    model_config = STRICT

    schema_version: int


def parse_file(kind: type[T], text: str | bytes, file: Path, complaint: str, remedy: str) -> T:
    """Parse the JSON text of a file as ``kind``, a model above or a dataclass.

    Messages contain the file, the complaint, the first fault in brackets, and the remedy.

    Raises:
        InputError: a key is missing or has a value that dpmac does not write, or a newer version
            wrote it.
    """
    try:
        version = _Versioned.model_validate_json(text).schema_version
        if version <= SCHEMA_VERSION:
            return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as failure:
        first = failure.errors()[0]
        fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        fault = fault.replace("Value error, ", "")
        raise InputError(f"{file} {complaint} ({fault}). {remedy}") from failure
    raise InputError(
        f"{file} was written by a newer dpmac (format {version}; this version supports "
        f"{SCHEMA_VERSION}). Upgrade dpmac."
    )


def read_report(path: Path) -> Report:
    """Read the report of a run from its folder or from the file itself.

    Raises:
        InputError: it is missing, cannot be read, or is not a report of this version.
    """
    remedy = f"Use a run folder of dpmac train, or the {folder.REPORT} in it."
    file, text = folder.read_run_file(path, folder.REPORT, remedy)
    return parse_file(Report, text, file, "is not a valid report of dpmac", remedy)


def recount(
    path: Path, given: Mapping[str, str], found: Sequence[str] = ()
) -> tuple[list[Row], float, float]:
    """Recompute the privacy cost of a run from its report.

    Returns rows for the requested delta and accountants, and the stored and the correct epsilon.

    Args:
        path: a run folder, or a report.
        given: see :func:`dpmac_cli.config.account_flags.ask`; only :data:`BESIDE_A_RUN` are
            allowed.
        found: faults that were found before.

    Raises:
        InputError: the file is not a dpmac report, or a flag does not apply to it.
    """
    why = f"contradicts {path}, which has all facts of the run. Leave it out."
    errors = [*found, *(f"--{name} {why}" for name in given if name not in BESIDE_A_RUN)]
    beside = {name: text for name, text in given.items() if name in BESIDE_A_RUN}
    named = account_flags.by_name(beside, errors)
    asked = account_flags.parse_account_flags(named, errors)
    raise_errors(errors)
    report = read_report(path)
    search = report.search
    if search is not None and asked.accountant != DEFAULT_ACCOUNTANT:
        raise InputError(f"{path} is of a search: use --accountant {DEFAULT_ACCOUNTANT}.")
    events, own_delta = report.training_events(), report.delta or DELTA
    delta = asked.delta if "delta" in named else own_delta
    rows = [
        replace(price(events, delta, name, report.unit, search), dataset_size=report.train_size)
        for name in account_flags.USED[asked.accountant]
    ]
    stored = math.inf if report.epsilon is None else report.epsilon
    return rows, stored, epsilon_of(search or events, own_delta)


def events_of(run: Path, *, attempts: bool = False) -> tuple[TrainingEvent, ...]:
    """Return the events of a run, or the planned events if it was killed.

    ``attempts`` adds the attempts that it replaced in a study. Raises InputError if neither report
    nor ledger can be read.
    """
    found = ledger.read_spent(run)
    there = (run / folder.SUMS).exists()
    if found is not None and there and not folder.vouched(run, folder.REPORT):
        # The report is damaged, or from before the run was resumed.
        return (*(found.abandoned if attempts else ()), *found.earlier, found.event)
    return read_report(run).training_events(attempts=attempts)
