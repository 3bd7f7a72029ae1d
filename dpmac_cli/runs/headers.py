"""Headers of the files of a run, each one typed model whose numbers have bounds. Imports no torch.

A file that was damaged or made up is rejected when it is read, with one message: no number of it is
so large that what follows fails or does not end.
"""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from dpmac_cli.accounting.events import Count, Steps, TrainingEvent
from dpmac_cli.config.records import MOST_NUMBER, AnyNumber
from dpmac_cli.tasks.bins import MOST_BINS

#: Largest number of parts of a run: it was resumed as many times.
MOST_PARTS = 100_000
#: Largest number of histograms of a run.
MOST_HISTOGRAMS = 16


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("control characters, which a terminal may interpret as commands")
    return text


Number = Annotated[float, Field(ge=0, le=MOST_NUMBER)]
PrintableText = Annotated[str, AfterValidator(_printable)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
#: A score, or the ends of its interval.
Score = bool | AnyNumber | None | tuple[AnyNumber | None, ...]


class Part(BaseModel):
    """An object of a header. Keys that a later version added are ignored."""

    model_config = ConfigDict(
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_by_name=True,
    )


class Spent(Part):
    """Steps that a run may have taken: ``spent`` of spent.json, beside its checksum."""

    earlier: Annotated[tuple[TrainingEvent, ...], Field(max_length=MOST_PARTS)]
    event: TrainingEvent
    base: Steps
    begun: Steps
    seeded: bool
    secure: bool
    score: TrainingEvent | None
    histograms: Annotated[tuple[TrainingEvent, ...], Field(max_length=MOST_HISTOGRAMS)] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.base <= self.begun <= self.base + self.event.steps:
            raise ValueError("begun is not a step of the current part")
        if len({bool(event.noise_multiplier) for event in (*self.earlier, self.event)}) > 1:
            raise ValueError("some parts have noise and others none")
        return self


class MetricsLine(Part):
    """A line of metrics.jsonl: an evaluation, or that training diverged.

    Further keys are scores of the test records, and ``diverged``.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Score]

    step: Steps
    epoch: Number
    epsilon: Number | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    seconds: Number | None = None
    test_samples: Count | None = None
    test_loss: AnyNumber | None = None


class _State(Part):
    """Numbers of the state of training: steps taken, and the optimizer's kappa*."""

    step: Steps
    kappa_star: Number


def _with_source(settings: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(settings.get(name), str) for name in ("dataset", "model")):
        raise ValueError("no dataset or no model")
    return settings


#: Settings of a run by their flags, which are validated once more when they are used.
Config = Annotated[dict[str, Any], AfterValidator(_with_source)]


class Histogram(Part):
    """A noisy histogram of training records: counts of cells, and the deviation of their noise."""

    counts: Annotated[tuple[AnyNumber, ...], Field(max_length=MOST_BINS)]
    noise: Annotated[float, Field(gt=0, le=MOST_NUMBER)]


class Record(Part):
    """Everything in a checkpoint but its tensors: the step, the settings and the history."""

    state: _State
    config: Config
    searched: bool
    history: tuple[MetricsLine, ...]
    seconds: Number
    facts: dict[str, Any]
    start: Annotated[int, Field(ge=0, lt=1 << 32)]
    parts: Annotated[int, Field(ge=0, le=MOST_PARTS)]
    histogram: Histogram | None = None

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the history as JSON values."""
        return [line.model_dump(mode="json", exclude_unset=True) for line in self.history]


class Versioned(Part):
    """Header of a checkpoint of any version."""

    version: int
