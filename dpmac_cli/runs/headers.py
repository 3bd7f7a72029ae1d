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
    """An object of a header. Keys that a later version added are ignored.

    Subclasses are read by pydantic: ``Record.model_validate_json(text, strict=True)`` raises a
    ValidationError, which is a ValueError, for numbers out of bounds, NaN and infinity.
    """

    model_config = ConfigDict(
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_by_name=True,
    )


class Spent(Part):
    """Steps that a run may have taken: ``spent`` of spent.json, beside its checksum.

    Attributes:
        earlier: events of the parts of the run before the last resume, and of what else was done to
            the records, such as histograms.
        event: steps of the current part as planned.
        base: step after which the current part begins.
        begun: last step that may have begun, from ``base`` to ``base + event.steps``.
        seeded: whether randomness came from --seed.
        secure: whether randomness came from the operating system's generator.
        score: event of the covered score; None for exact scores.
        histograms: events of histograms that are planned and have not begun.
    """

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
        if len({event.noisy for event in (*self.earlier, self.event)}) > 1:
            raise ValueError("some parts have noise and others none")
        return self


class MetricsLine(Part):
    """A line of metrics.jsonl: an evaluation, or that training diverged.

    Further keys are scores of the test records, and ``diverged``.

    Attributes:
        step: number of steps taken.
        epoch: the step in epochs, which need not be whole.
        epsilon: epsilon up to the step; None without privacy, and if it is infinite.
        delta: delta of that epsilon; None without privacy.
        seconds: training time so far, without evaluation; None if it is not published.
        test_samples: number of test records; None without.
        test_loss: mean loss on them; None without, and if it is not finite.
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
    """A noisy histogram of training records, with cells as :mod:`dpmac_cli.dp.histogram` has them.

    Attributes:
        counts: noisy count of each cell, which may be negative.
        noise: standard deviation of the noise in each of them, in records.
    """

    counts: Annotated[tuple[AnyNumber, ...], Field(max_length=MOST_BINS)]
    noise: Annotated[float, Field(gt=0, le=MOST_NUMBER)]


class Record(Part):
    """Everything in a checkpoint but its tensors: the step, the settings and the history.

    Attributes:
        state: steps taken, and the optimizer's kappa*.
        config: settings of the run, by flag, as in config.yaml.
        searched: whether the run is a trial of a search.
        history: lines of metrics.jsonl so far.
        seconds: training time so far, without evaluation.
        facts: what must be unchanged to resume, see :attr:`.PreparedRun.compared`.
        start: public seed of the initial weights.
        parts: number of parts of the run before this one, see :class:`.Ledger`.
        histogram: histogram of the training records that was released; None if there is none.
    """

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
        """Return the history as JSON values, with the keys that each line was written with."""
        return [line.model_dump(mode="json", exclude_unset=True) for line in self.history]
