"""What ``dpmac account`` answers: a checked question becomes rows, rendered elsewhere.

Loads neither torch nor, before the first price, dp-accounting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpmac_cli.accounting import accountants as accounting
from dpmac_cli.accounting import schedule, statements
from dpmac_cli.accounting.accountants import choose_accountant, total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon


@dataclass(frozen=True)
class Row:
    """A privacy cost and all it depends on. Of branches that differ, what differs is None.

    Attributes:
        statement: what it protects, in plain sentences.
        events: what happened, one a branch.
        epsilon, delta: of the guarantee.
        noise_multiplier, batch_size, dataset_size, sampling_rate: sigma, B, n, q.
        steps, epochs: of training.
        sampler, accountant, adjacency: what the price is for and from.
        compositions: mechanisms on all records that it is priced as.
        runs: trainings that it covers.
        selection: how they were counted: "none" for one, "composition" for a fixed number,
            "repeat-and-select" for a random one.
        solved: what was worked out, as in :attr:`Question.solve`; None for epsilon.
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
    """Compute what some trainings on the same records cost together.

    Args:
        events: at least one.
        delta: in (0, 1).
        accountant: see :func:`dpmac_cli.accounting.accountants.total_epsilon`.
        epsilon: known to hold at delta; None to compute it.
    """
    if epsilon is None:
        epsilon = total_epsilon(events, delta, accountant)
    last = events[-1]
    sampler = last.sampling
    rate = statements.common(event.sampling_rate for event in events)
    steps = sum(event.steps for event in events)
    noisy = [event for event in events if event.noise_multiplier > 0]
    name = choose_accountant(noisy, accountant) if noisy else accountant or sampler.accountants[0]
    return Row(
        statements.statement(epsilon, delta, events),
        events,
        epsilon,
        delta,
        statements.common(event.noise_multiplier for event in events),
        rate,
        steps,
        None if rate is None else steps / last.steps_per_epoch,
        last.sampler,
        name,
        sampler.adjacency,
        sum(event.compositions for event in events),
    )


def composition(row: Row, runs: int) -> Row:
    """What it costs to train a number of times fixed beforehand, and publish the best."""
    epsilon = total_epsilon(row.events * runs, row.delta, row.accountant)
    return replace(
        row,
        epsilon=epsilon,
        steps=row.steps * runs,
        epochs=None if row.epochs is None else row.epochs * runs,
        compositions=row.compositions * runs,
        runs=runs,
        selection="composition",
        statement=_bill(epsilon, row, f"the best of {runs} such runs"),
    )


def selection(row: Row, runs: int) -> Row:
    """The same for a random number, Poisson with mean ``runs``, of which only the best is seen."""
    epsilon = accounting.repeat_and_select(row.events, row.delta, runs)
    what = f"the best of a random number of such runs (Poisson, mean {runs})"
    return replace(
        row,
        epsilon=epsilon,
        accountant="rdp",
        runs=runs,
        selection="repeat-and-select",
        statement=_bill(epsilon, row, what),
    )


def _bill(epsilon: float, row: Row, what: str) -> str:
    if math.isinf(epsilon):
        return f"Publishing {what} has no finite epsilon either."
    price = f"({format_epsilon(epsilon)}, {format_epsilon(row.delta)})"
    return f"Publishing {what} is {price}-differentially private under {row.adjacency} adjacency."


#: Pairs of a step or a delta, and epsilon.
Curve = Sequence[tuple[float, float]]


def epsilon_by_steps(row: Row) -> Curve:
    """(step, epsilon) from the first step of the last branch to the end of training."""
    event, earlier = row.events[-1], row.events[:-1]
    prices = schedule.epsilon_schedule(
        event, row.delta, event.steps_per_epoch, earlier, row.accountant
    )
    first = total_epsilon((*earlier, replace(event, steps=1)), row.delta, row.accountant)
    before = row.steps - event.steps
    points = [(1, first), *prices.points]
    return [(float(before + step), epsilon) for step, epsilon in points]


def epsilon_by_delta(row: Row, deltas: Sequence[float]) -> Curve:
    """(delta, epsilon) at the end of training."""
    return [(delta, total_epsilon(row.events, delta, row.accountant)) for delta in deltas]
