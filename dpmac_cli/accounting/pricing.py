"""Rows of a privacy cost and all it depends on, and curves of it, before they are rendered."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpmac_cli.accounting.accountants import choose_accountant, repeat_and_select, total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.schedule import epsilon_schedule
from dpmac_cli.accounting.statements import common, format_epsilon, statement


@dataclass(frozen=True, kw_only=True)
class Row:
    """A privacy cost and all it depends on; None for what differs between parts.

    Attributes:
        statement: the guarantee in plain sentences. events: what happened, one per part.
        noise_multiplier, sampling_rate, dataset_size, batch_size: sigma, q, n, B.
        compositions: mechanisms on all records. runs: trainings that the cost covers.
        selection: how they were counted: "none" for one, "composition" for a fixed number,
            "repeat-and-select" for a random one.
        solved: the setting that was worked out; None for epsilon.
    """

    statement: str
    events: tuple[TrainingEvent, ...]
    epsilon: float
    delta: float
    noise_multiplier: float | None
    sampling_rate: float | None
    steps: int
    epochs: float | None
    sampler: str
    accountant: str
    adjacency: str
    compositions: int
    dataset_size: int | None = None
    batch_size: int | None = None
    runs: int = 1
    selection: str = "none"
    solved: str | None = None


def price(
    events: tuple[TrainingEvent, ...],
    delta: float,
    accountant: str | None = None,
    epsilon: float | None = None,
) -> Row:
    """Return what some trainings on the same records cost together.

    Args:
        events: at least one.
        delta: in (0, 1).
        accountant: see :func:`dpmac_cli.accounting.accountants.total_epsilon`.
        epsilon: known to hold at delta; None to compute it.
    """
    if epsilon is None:
        epsilon = total_epsilon(events, delta, accountant)
    last = events[-1]
    rate = common(event.sampling_rate for event in events)
    steps = sum(event.steps for event in events)
    noisy = [event for event in events if event.noise_multiplier > 0]
    default = accountant or last.sampling.accountants[0]
    return Row(
        statement=statement(epsilon, delta, events),
        events=events,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=common(event.noise_multiplier for event in events),
        sampling_rate=rate,
        steps=steps,
        epochs=None if rate is None else steps / last.steps_per_epoch,
        sampler=last.sampler,
        accountant=choose_accountant(noisy, accountant) if noisy else default,
        adjacency=last.sampling.adjacency,
        compositions=sum(event.compositions for event in events),
    )


def best_of(rows: Sequence[Row], runs: int) -> Iterator[Row]:
    """Yield each row, and what it costs to publish the best of ``runs`` such trainings.

    A number of trainings fixed beforehand costs their composition. A random number, Poisson with
    mean ``runs``, is priced once, by RDP.

    Args:
        rows: of one training, by different accountants.
        runs: 1 for no more than the rows.
    """
    for row in rows:
        yield row
        if runs > 1:
            epsilon = total_epsilon(row.events * runs, row.delta, row.accountant)
            counts = {"steps": row.steps * runs, "compositions": row.compositions * runs}
            epochs = None if row.epochs is None else row.epochs * runs
            what = f"the best of {runs} such runs"
            yield _best(row, epsilon, runs, what, selection="composition", epochs=epochs, **counts)
    if runs > 1 and rows:
        epsilon = repeat_and_select(rows[-1].events, rows[-1].delta, runs)
        what = f"the best of a random number of such runs (Poisson, mean {runs})"
        yield _best(rows[-1], epsilon, runs, what, selection="repeat-and-select", accountant="rdp")


def _best(row: Row, epsilon: float, runs: int, what: str, **changes: Any) -> Row:
    cost = f"({format_epsilon(epsilon)}, {format_epsilon(row.delta)})"
    says = f"is {cost}-differentially private under {row.adjacency} adjacency."
    if math.isinf(epsilon):
        says = "has no finite epsilon either."
    return replace(
        row, epsilon=epsilon, runs=runs, statement=f"Publishing {what} {says}", **changes
    )


#: Pairs of a step or a delta, and epsilon.
Curve = Sequence[tuple[float, float]]


def epsilon_by_steps(row: Row) -> Curve:
    """Return (step, epsilon) from the first step of the last part to the end of training."""
    event, earlier = row.events[-1], row.events[:-1]
    schedule = epsilon_schedule(event, row.delta, event.steps_per_epoch, earlier, row.accountant)
    first = total_epsilon((*earlier, replace(event, steps=1)), row.delta, row.accountant)
    before = row.steps - event.steps
    return [(float(before + step), epsilon) for step, epsilon in ((1, first), *schedule.points)]


def epsilon_by_delta(row: Row, deltas: Sequence[float]) -> Curve:
    """Return (delta, epsilon) at the end of training."""
    return [(delta, total_epsilon(row.events, delta, row.accountant)) for delta in deltas]
