"""A run's report priced again: does the epsilon that it states hold?"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpmac_cli.accounting import pricing
from dpmac_cli.accounting.accountants import SIGMA_MAX, SIGMA_MIN, total_epsilon
from dpmac_cli.accounting.calibration import MOST_STEPS
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.pricing import Row
from dpmac_cli.accounting.samplers import SAMPLERS
from dpmac_cli.config import question
from dpmac_cli.config.settings import COUNT, PROBABILITY
from dpmac_cli.errors import InputError
from dpmac_cli.runs import ledger
from dpmac_cli.runs.folder import CONFIG, REPORT, SUMS, resume_command, vouched


@dataclass(frozen=True)
class Recount:
    """A run priced again.

    Attributes:
        rows: the price, for the delta and the accountants asked for.
        stored: the epsilon in the report; ``inf`` where it has none.
        again: what the report should say.
    """

    rows: list[Row]
    stored: float
    again: float

    @property
    def right(self) -> bool:
        """Whether the report holds, but for what another version of the accountant may move."""
        return math.isclose(self.again, self.stored, rel_tol=TOLERANCE, abs_tol=1e-9)


TOLERANCE = 1e-3
#: Flags that make sense beside a run, which brings everything else.
BESIDE_A_RUN = ("delta", "accountant", "runs")


def recount(path: Path, flags: Mapping[str, str | None], found: Sequence[str] = ()) -> Recount:
    """Price a run again from its report.

    Args:
        path: a run folder, or a report.
        flags: as for :func:`dpmac_cli.config.question.ask`; only :data:`BESIDE_A_RUN` may be given.
        found: faults that were found before.

    Raises:
        InputError: there is no report of ours, or a flag contradicts it.
    """
    errors = list(found)
    errors += [
        f"--{name} contradicts {path}, which says what was done: leave it out."
        for name, text in flags.items()
        if text is not None and name not in BESIDE_A_RUN
    ]
    values = question.parse({name: flags.get(name) for name in BESIDE_A_RUN}, errors)
    if errors:
        raise InputError(errors)
    events, size, own_delta, stored, _ = _read_report(path)
    accountants = question.accountants_for(events[-1].sampler, values.get("accountant"), errors)
    if errors:
        raise InputError(errors)
    (delta,) = values.get("delta", (own_delta,))
    rows = []
    for accountant in accountants:
        row = replace(pricing.price(events, delta, accountant), dataset_size=size)
        rows.append(row)
        rows += [pricing.composition(row, runs) for runs in values.get("runs", ())]
    rows += [pricing.selection(row, runs) for runs in values.get("runs", ())]
    return Recount(rows, stored, total_epsilon(events, own_delta))


def events_of(run: Path, *, attempts: bool = False) -> tuple[TrainingEvent, ...]:
    """Return the events of a run; those that were planned, if it was killed.

    ``attempts`` adds the events of attempts that it replaced in a study.

    Raises:
        InputError: neither report nor ledger can be read.
    """
    found = ledger.read(run)
    if found is not None and (run / SUMS).exists() and not vouched(run, REPORT):
        # The report is damaged, or from before the run was resumed.
        events, abandoned = (*found.earlier, found.event), found.abandoned
    else:
        events, *_, abandoned = _read_report(run)
    return (*abandoned, *events) if attempts else events


def _read_report(
    path: Path,
) -> tuple[tuple[TrainingEvent, ...], int, float, float, tuple[TrainingEvent, ...]]:
    """Return what was done, to how many records, delta, the epsilon stated, and other attempts."""
    if path.suffix == ".safetensors":
        raise InputError(
            f"{path} is a model, which does not say what was done with the records. Name its run's "
            f"folder, or the {REPORT} in it."
        )
    file = path / REPORT if path.is_dir() else path
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        privacy, size = report["privacy"], int(report["dataset"]["train_size"])
        events, abandoned = (
            tuple(TrainingEvent(**event) for event in listed)
            for listed in (privacy["events"], privacy.get("abandoned", ()))
        )
        _check_events(events)
        _check_events((*events, *abandoned))
        without = any(event.noise_multiplier == 0 for event in events)
        delta = question.DEFAULT_DELTA if without else float(privacy["delta"])
        stored = math.inf if privacy["epsilon"] is None else float(privacy["epsilon"])
        if not PROBABILITY.holds(delta) or not stored >= 0 or size < 1:
            raise ValueError(f"delta {delta:g}, epsilon {stored:g}, {size} records")
    except FileNotFoundError as failure:
        hint = ""
        if (path / CONFIG).exists():
            hint = f" The run was cut off before it wrote one. Go on: {resume_command(path)}"
        raise InputError(f"{file} does not exist.{hint}") from failure
    except OSError as failure:
        raise InputError(f"{file} cannot be read ({failure.strerror or failure}).") from failure
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as failure:
        raise InputError(
            f"{file} is not a report of dpmac, or not a whole one: what was done with the records "
            f"cannot be read from it ({failure})."
        ) from failure
    return events, size, delta, stored, abandoned


def _check_events(events: Sequence[TrainingEvent]) -> None:
    if not events:
        raise ValueError("no events")
    for event in events:
        good = (
            event.sampler in SAMPLERS
            and 1 / COUNT.high <= event.sampling_rate <= 1
            and (event.noise_multiplier == 0 or event.noise_multiplier >= SIGMA_MIN)
            and event.noise_multiplier <= SIGMA_MAX
            and isinstance(event.steps, int)
            and 0 <= event.steps <= MOST_STEPS
            and isinstance(event.steps_per_epoch, int)
            and event.steps_per_epoch >= 1
        )
        if not good:
            raise ValueError(f"{event}")
