"""A run priced again from its report: whether the epsilon that it states holds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError, model_validator

from dpmac_cli.accounting.accountants import SIGMA_MAX, SIGMA_MIN, total_epsilon
from dpmac_cli.accounting.calibration import MOST_STEPS
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.pricing import Row, best_of, price
from dpmac_cli.accounting.samplers import SAMPLERS
from dpmac_cli.config import question
from dpmac_cli.errors import InputError
from dpmac_cli.runs import ledger
from dpmac_cli.runs.folder import CONFIG, REPORT, SUMS, resume_command, vouched

TOLERANCE = 1e-3
#: Flags that make sense beside a run, which brings everything else.
BESIDE_A_RUN = ("delta", "accountant", "runs")
STRICT = ConfigDict(strict=True, allow_inf_nan=False, defer_build=True)


class _Event(BaseModel):
    """A training event that every accountant can price; other keys may change its cost."""

    model_config = STRICT | ConfigDict(extra="forbid")

    sampling_rate: float = Field(ge=1e-9, le=1)
    noise_multiplier: Literal[0] | Annotated[float, Field(ge=SIGMA_MIN, le=SIGMA_MAX)]
    steps: int = Field(ge=0, le=MOST_STEPS)
    sampler: Literal[tuple(SAMPLERS)] = "poisson"  # type: ignore[valid-type]
    steps_per_epoch: int = Field(1, ge=1)


def _at(*keys: str, **limits: Any) -> Any:
    return Field(validation_alias=AliasPath(*keys), **limits)


class _Report(BaseModel):
    """What a report says was done with the records; epsilon is None where it is infinite."""

    model_config = STRICT

    train_size: int = _at("dataset", "train_size", ge=1)
    events: list[_Event] = _at("privacy", "events", min_length=1)
    abandoned: list[_Event] = _at("privacy", "abandoned", default=[])
    epsilon: Annotated[float, Field(ge=0)] | None = _at("privacy", "epsilon")
    delta: Annotated[float, Field(gt=0, lt=1)] | None = _at("privacy", "delta")

    @model_validator(mode="after")
    def _check_delta(self) -> "_Report":
        if self.delta is None and all(event.noise_multiplier for event in self.events):
            raise ValueError("no delta, though noise was added")
        return self

    def training_events(self, *, attempts: bool = False) -> tuple[TrainingEvent, ...]:
        """Return the events of all branches; with ``attempts``, first those the run replaced."""
        listed = (*self.abandoned, *self.events) if attempts else self.events
        return tuple(TrainingEvent(**dict(event)) for event in listed)


@dataclass(frozen=True)
class Recount:
    """A run priced again.

    Attributes:
        rows: the cost, for the delta and the accountants asked for.
        stored: epsilon in the report; ``inf`` where it has none. again: what it should be.
    """

    rows: list[Row]
    stored: float
    again: float

    @property
    def right(self) -> bool:
        """Whether the report holds, but for what another version of the accountant may move."""
        return math.isclose(self.again, self.stored, rel_tol=TOLERANCE, abs_tol=1e-9)


def recount(path: Path, given: Mapping[str, str], found: Sequence[str] = ()) -> Recount:
    """Price a run again from its report.

    Args:
        path: a run folder, or a report.
        given: as for :func:`dpmac_cli.config.question.ask`; only :data:`BESIDE_A_RUN` may be given.
        found: faults that were found before.

    Raises:
        InputError: there is no report of ours, or a flag does not fit it.
    """
    foreign = [name for name in given if name not in BESIDE_A_RUN]
    errors = list(found)
    errors += [
        f"--{n} contradicts {path}, which says what was done: leave it out." for n in foreign
    ]
    typed = question.parse({n: given[n] for n in given if n not in foreign}, errors)
    if errors:
        raise InputError(errors)
    report = _read_report(path)
    events, own_delta = report.training_events(), report.delta or question.DEFAULT_DELTA
    delta = typed.delta if "delta" in given else own_delta
    rows = [
        replace(price(events, delta, accountant), dataset_size=report.train_size)
        for accountant in question.accountants_for(events[-1].sampler, typed.accountant)
    ]
    stored = math.inf if report.epsilon is None else report.epsilon
    return Recount(list(best_of(rows, typed.runs)), stored, total_epsilon(events, own_delta))


def events_of(run: Path, *, attempts: bool = False) -> tuple[TrainingEvent, ...]:
    """Return the events of a run; those that were planned, if it was killed.

    ``attempts`` adds the events of attempts that it replaced in a study.

    Raises:
        InputError: neither report nor ledger can be read.
    """
    found = ledger.read(run)
    if found is not None and (run / SUMS).exists() and not vouched(run, REPORT):
        # The report is damaged, or from before the run was resumed.
        return (*(found.abandoned if attempts else ()), *found.earlier, found.event)
    return _read_report(run).training_events(attempts=attempts)


def _read_report(path: Path) -> _Report:
    """Return the checked report of a run. Raises InputError."""
    if path.suffix == ".safetensors":
        raise InputError(
            f"{path} is a model, which does not say what was done with the records. Name its run's "
            f"folder, or the {REPORT} in it."
        )
    file = path / REPORT if path.is_dir() else path
    try:
        return _Report.model_validate_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as failure:
        hint = ""
        if (path / CONFIG).exists():
            hint = f" The run was cut off before it wrote one. Go on: {resume_command(path)}"
        raise InputError(f"{file} does not exist.{hint}") from failure
    except OSError as failure:
        raise InputError(f"{file} cannot be read ({failure.strerror or failure}).") from failure
    except ValueError as failure:
        why = str(failure)
        if isinstance(failure, ValidationError):
            first = failure.errors()[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise InputError(
            f"{file} is not a report of dpmac, or not a whole one: what was done with the records "
            f"cannot be read from it ({why})."
        ) from failure
