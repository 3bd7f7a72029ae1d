"""Report of a run: one model that writes report.json, reads it, and is its schema.

:class:`Facts` are the part that is also in the header of a published model. Both hold public values
and values computed after the noise. Does not import torch.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from dpmac_cli.accounting.events import MOST_COUNT, Count, Steps, TrainingEvent
from dpmac_cli.accounting.risk import Share
from dpmac_cli.config.datasets import Signature
from dpmac_cli.config.records import MOST_NUMBER, AnyNumber, AnyRecords
from dpmac_cli.errors import InputError, first_fault
from dpmac_cli.release.report_privacy import PrintableText, Privacy, Said
from dpmac_cli.runs import folder, ledger
from dpmac_cli.runs.headers import (
    MOST_CELLS,
    Number,
    Part,
    Score,
    Sha256,
    Versioned,
)
from dpmac_cli.tasks.calibration import cell_count
from dpmac_cli.tasks.residuals import EDGES
from dpmac_cli.tasks.task import ASKED, TASKS, EvaluationMetric, Task, task_of

#: Format of report.json and of a model's header; no other is read. It also changes with the rule by
#: which records are held out, so no model is scored on records that it was trained on.
SCHEMA_VERSION = 2
T = TypeVar("T")


ByClass = tuple[Annotated[int, Field(ge=0, le=MOST_COUNT)], ...]
Interval = tuple[AnyNumber | None, AnyNumber | None]


class Dataset(Part):
    """The dataset that the model was trained on."""

    name: PrintableText
    """Name of a registered dataset; for your own data the name of the folder or file, without its
    parent folders."""
    train_size: Count
    """n, the number of training records, or of units of privacy. Taken as public."""
    test_size: Count
    """Number of test records, or of units of privacy. Taken as public."""
    sha256: Sha256 | None
    """SHA-256 of the published records. Null for your own data, and where torchvision verifies the
    files."""
    own: bool
    """Whether it is your own data rather than a registered dataset."""
    held_out: bool
    """Whether the test records were held out of the private records."""
    test_note: str | None
    """What that means for their privacy. Null if they were not held out."""
    taken_from_records: tuple[str, ...]
    """Parts of the schema that were not declared but taken from the records, such as the image
    size. One record can change them, and epsilon does not cover them."""
    table: dict[str, Any] | None = Field(alias="schema")
    """The declared schema of a table, as its YAML file (docs/own-tables.md). Null for other data.
    """
    public_note: str
    """What is public about the records, in words."""
    text_note: str | None
    """What is revealed about texts besides the model. Null without texts."""


class PublicPart(Said):
    """The part of a network that was public before training."""

    features: PrintableText | None
    """Fixed features used instead of images. Null if images are used."""
    backbone: PrintableText | None
    """Public network whose features are used instead of images. Null without one."""
    backbone_size: Annotated[int, Field(ge=1, le=1024)] | None
    """Width and height in pixels that images are resized to for the backbone. Null without one."""
    backbone_flips: bool
    """Whether features are the mean over an image and its mirror image."""
    encoder: dict[str, Any] | None
    """Form of a text encoder: values of its config.json, the pooling of tokens, and the checksum of
    its tokenizer as vocabulary_sha256. Null for other networks."""
    lora_rank: Count | None
    """Rank of the additions to linear layers. Null without LoRA."""
    pretrained: str | None
    """Name of the file of public weights. Null if there is none."""
    sha256: Sha256 | None
    """SHA-256 of that file. Null if there is none."""
    train: PrintableText | None
    """The trained part of a network with public weights. Null for other networks."""
    trained_parameters: Count
    """d, number of trained parameters."""


class Model(Part):
    """The network."""

    name: PrintableText
    """Name of a built-in network, or FILE.py:FACTORY without its parent folders."""
    parameters: Count
    """Number of parameters, including frozen ones."""
    fix_norm: bool
    """Whether batch norm was replaced by group norm (--fix-norm)."""
    built_by: str | None
    """The call that builds your own network. Null for a built-in network."""
    public_part: PublicPart | None = None
    """The part of the network that was public before training. Absent if there is none."""


class Calibration(Said):
    """Calibration: probabilities are softmax(slope z + (0, ..., 0, intercept)) of outputs z.

    It follows from noisy counts of training records in bins: of two classes, by the log-odds of the
    last one, with an edge at 0; of more classes, by the gap between the two largest outputs. Each
    bin has two counts: of two classes their records, of more classes those of the second and of the
    most likely class.
    """

    slope: Annotated[float, Field(gt=0, le=MOST_NUMBER)]
    """Factor of the outputs; 1 if they were left as they are."""
    intercept: AnyNumber
    """Added to the output of the last class; 0 for more than two classes."""
    counts: Annotated[tuple[tuple[AnyNumber, AnyNumber], ...], Field(max_length=MOST_CELLS)]
    """Counts of units of privacy with noise, which may be published. The edges of the bins are 0,
    1, 2, 4, 8, and of two classes their negatives too."""
    noise: Annotated[float, Field(gt=0, le=MOST_NUMBER)]
    """Standard deviation of the noise in each count."""


class Residuals(Said):
    """Noisy histogram of residuals, from which the intervals of predictions follow.

    A residual is a target minus its prediction, both scaled to [-1, 1] (after the transform).
    """

    counts: Annotated[tuple[AnyNumber, ...], Field(max_length=MOST_CELLS)]
    """Counts of units of privacy with noise, which may be published. The edges of the bins are 0,
    and 0.02 times 1.5^k to both sides, for k from 0 to 11."""
    noise: Annotated[float, Field(gt=0, le=MOST_NUMBER)]
    """Standard deviation of the noise in each count."""


class Ranges(Said):
    """Ranges of columns of which the type alone was declared, from noisy counts."""

    found: dict[str, tuple[AnyNumber, AnyNumber]]
    """Lowest and highest number of each column, by its name; those of a date in days since
    1970-01-01. Others are clipped to it."""


class OperatingPoint(Said):
    """Decision between two classes: the last one is said above these log-odds of the network."""

    asked: PrintableText
    """What was asked for (--threshold): most-likely, balanced, a sensitivity or a probability."""
    log_odds: AnyNumber
    """Difference of the outputs of the network, the last minus the first."""
    sensitivity: Share | None
    """Share of the last class that is found, by the noisy histogram of the training records. Null
    without one."""
    specificity: Share | None
    """Share of the first class that is found, by the same."""
    share: Share | None
    """Share of the last class among the training records, by the same."""


class Audit(Said):
    """Public settings of an audit (--canaries). The results of the attack are in audit.json."""

    canaries: Annotated[int, Field(ge=2, le=MOST_COUNT)]
    """K, number of made-up records, each included by a secret coin flip."""
    guesses: Count
    """Number of coins that the attack guesses."""


class Target(Part):
    """A number to predict, in a public range."""

    name: PrintableText
    """Name of the column, or y."""
    kind: Literal["regression"]
    """Task."""
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


class _UnknownTaskError(Exception):
    """A task of a program, which another one has not registered."""


def _kind(name: str) -> str:
    if name not in TASKS:
        raise _UnknownTaskError(name)
    if name not in ASKED:
        raise ValueError(f"is not one of {', '.join(ASKED)}")
    return name


class NamedTask(Part):
    """A task that is asked for by its name, such as the next token of a text."""

    kind: Annotated[str, AfterValidator(_kind)]
    """Task: language-model, or one of your own that a program registered."""


class Facts(Part):
    """Facts that are published with the weights, in the model file's header."""

    schema_version: int
    """Increases when a key is removed or changes its meaning. A new key does not increase it."""
    optimizer: PrintableText
    """Optimizer: how gradients were clipped and weights were updated."""
    dataset: Dataset
    """The dataset that the model was trained on."""
    model: Model
    """The network."""
    input: AnyRecords
    """What a record is, and the public constants by which the network's inputs are scaled: pixels
    are divided by white, then mean is subtracted and the result divided by std; numbers are clipped
    to low and high, which become -1 and 1; numbers of tokens are not scaled."""
    classes: tuple[PrintableText, ...]
    """Names of the classes or labels, in the order of the network's outputs. Empty for a number to
    predict."""
    target: Target | NamedTask | None
    """The number to predict, or the name of a task, such as language-model. Null for classes."""
    privacy: Privacy
    """The privacy guarantee, over all parts of the run."""
    statement: dict[str, Any] | None
    """Answers of the model card to the questions of NIST SP 800-226 that depend on the run: its
    mechanism, tuning, data domain and audit, and public data and weights. Null without privacy."""
    audit: Audit | None
    """Public settings of an audit (--canaries). Null for any other run. The results of the attack
    are in audit.json."""
    calibration: Calibration | None = None
    """How outputs become probabilities. Null if they are the softmax of the outputs."""
    ranges: Ranges | None = None
    """Ranges that were found by noisy counts. Absent if all were declared."""
    residuals: Residuals | None = None
    """What intervals of predicted numbers follow from. Null without intervals."""
    operating_point: OperatingPoint | None = None
    """What decides between two classes. Null for more, and without calibration or --threshold."""

    @property
    def task(self) -> Task:
        """Task that the model was trained for, with its calibration."""
        target = None if self.target is None else self.target.model_dump()
        known = {
            name: None if of is None else of.model_dump(exclude={"statement"})
            for name, of in (("calibration", self.calibration), ("residuals", self.residuals))
        }
        at = self.operating_point
        point = None if at is None else at.model_dump(include={"asked", "log_odds"})
        return task_of({"classes": self.classes, "target": target, "point": point, **known})

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        part = self.model.public_part
        encoder = {} if part is None or part.encoder is None else part.encoder
        if getattr(self.input, "tokenizer", None) != encoder.get("vocabulary_sha256"):
            raise ValueError("texts without their encoder, or an encoder without texts")
        if len(self.classes) < 2 and self.target is None:
            raise ValueError("neither classes nor a target")
        found, cells = self.calibration, cell_count(len(self.classes))
        if found is not None and (self.target is not None or 2 * len(found.counts) != cells):
            raise ValueError("the calibration is not that of the classes")
        residuals = self.residuals
        if residuals is not None and not (
            isinstance(self.target, Target) and len(residuals.counts) == len(EDGES) + 1
        ):
            raise ValueError("the residuals are not those of a number to predict")
        if self.operating_point is not None and len(self.classes) != 2:
            raise ValueError("an operating point without two classes")
        return self

    @property
    def signature(self) -> Signature:
        """Signature of the network."""
        return Signature(self.input.shape, self.task.outputs, records=self.input)

    def values(self) -> dict[str, Any]:
        """Return the JSON values by key. Keys that were not set do not apply."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


class Scores(Part):
    """Scores of the published model on the test records.

    They are not protected unless covered_scores is present; then this holds the released scores,
    and null for the rest. Besides these keys, it has the metrics of the task by their names, such
    as accuracy, auroc, mae or r2, and 95% intervals for records like these as, for example,
    accuracy_interval: low, high. sensitivity and specificity are in the order of classes, and so
    are the rows (true class) and columns (predicted class) of confusion, the numbers of records;
    constant_accuracy is the share of the most frequent class, which is the accuracy of a model that
    always says it, and constant_log_loss the log loss of a model that says the shares of the
    classes for each record. For numbers to predict, constant_mae is the MAE of the median of the
    test records, and constant_rmse the RMSE of their mean.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Score | tuple[ByClass, ...]]

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


class Hyperparameters(Part):
    """Settings of training, including those of the optimizer that have an effect.

    Others have the names of their settings (docs/optimizers.md).
    """

    model_config = ConfigDict(extra="allow")

    steps: Steps
    """T, number of steps that the published model has taken in total."""
    epochs: Number
    """The same in epochs of ceil(n/B) steps."""
    batch_size: Count
    """B, the expected batch size, by which sums are divided. Actual sizes are private and not
    stored."""


class Timings(Part):
    """Times that were measured on the machine. Not covered by the guarantee.

    Null for the result of a search, because they would tell which trial it was.
    """

    training_seconds: Number | None
    """Seconds of training, over all sessions of the run."""


class Machine(Part):
    """The machine that the run ended on."""

    device: str
    """cpu, or the name of the GPU."""
    system: str
    """Operating system."""
    processor: str
    """Its architecture."""
    physical_batch: Count
    """Number of samples to process at a time, as set. It does not change the guarantee."""


class Report(Facts):
    """Report of a run.

    It holds public values and values computed after the noise, and nothing computed from the
    training records without noise. A key is null where it does not apply; each description says
    what null means.
    """

    state: PrintableText
    """How the run ended: it took all its steps (finished), it was stopped (interrupted), or epsilon
    would have exceeded --max-epsilon (budget-spent)."""
    test: Scores
    """Scores of the published model on the test records. They are not protected unless
    covered_scores is present; then this holds the released scores, and null for the rest."""
    hyperparameters: Hyperparameters
    """Settings of training, including those of the optimizer that have an effect."""
    recipe: dict[str, Any]
    """Training recipe besides the optimizer, by the names of its settings
    (docs/configuration.md). None of it changes epsilon."""
    timings: Timings
    """Measured on the machine. Not covered by the guarantee."""
    versions: dict[str, str]
    """Versions of the software that matters to the result."""
    machine: Machine
    """The machine that the run ended on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        key = self.task.headline.key
        if not isinstance(getattr(self.test, key, ""), float | int | None):
            raise ValueError(f"test has no {key}")
        return self

    @property
    def score(self) -> tuple[EvaluationMetric, float | None]:
        """Return the headline metric of the task, and its value; None if it is not defined."""
        metric = self.task.headline
        return metric, getattr(self.test, metric.key)


def parse_file(kind: type[T], text: str | bytes, file: Path, complaint: str, remedy: str) -> T:
    """Parse the JSON text of a file as ``kind``, a model above or a dataclass.

    Validation is strict: numbers are finite, and no value is converted to another type. Messages
    contain the file, the complaint, the first fault in brackets, and the remedy.

    Raises:
        InputError: a key is missing or has a value that dpmac does not write, or another version
            wrote it.
    """
    try:
        version = Versioned.model_validate_json(text, strict=True).version
        if version == SCHEMA_VERSION:
            return TypeAdapter(kind).validate_json(text, strict=True)
    except _UnknownTaskError as unknown:
        raise InputError(
            f"{file} is of the task {str(unknown)!a}, which is not registered. If it is your own, "
            "use a program that registers it first: register_task."
        ) from unknown
    except ValidationError as failure:
        fault = first_fault(failure)
        raise InputError(f"{file} {complaint} ({fault}). {remedy}") from failure
    what_to_do = "Train again, or read it with dpmac 0.3."
    if version > SCHEMA_VERSION:
        what_to_do = "Upgrade dpmac."
    raise InputError(
        f"{file} was written by another version of dpmac (format {version}; this version reads "
        f"{SCHEMA_VERSION}). {what_to_do}"
    )


def read_report(path: Path) -> Report:
    """Read the report of a run from its folder or from the file itself.

    Raises:
        InputError: it is missing, cannot be read, or is not a report of this version.
    """
    remedy = f"Use a run folder of dpmac train, or the {folder.REPORT} in it."
    file, text = folder.read_run_file(path, folder.REPORT, remedy)
    return parse_file(Report, text, file, "is not a valid report of dpmac", remedy)


def events_of(run: Path) -> tuple[TrainingEvent, ...]:
    """Return the events of a run; all planned events if it was killed.

    Raises InputError if neither report nor ledger can be read.
    """
    found = ledger.read_ledger(run)
    if found is not None and not (run / folder.REPORT).exists():
        return found.planned
    return read_report(run).privacy.events
