"""Privacy costs before rendering: rows with all their inputs, and schedules of epsilon."""

from collections.abc import Iterator
from dataclasses import dataclass

from dpmac_cli.accounting.accountants import (
    DEFAULT_ACCOUNTANT,
    total_epsilon,
    used_accountant,
)
from dpmac_cli.accounting.events import ADJACENCY, TrainingEvent
from dpmac_cli.accounting.risk import Risk
from dpmac_cli.accounting.selection import Done, Search
from dpmac_cli.accounting.statements import (
    BY_RDP,
    RECORD,
    common,
    format_epsilon,
    search_statement,
    statement,
)

#: Largest delta at which the accountant may not be the default one.
SMALL_DELTA = 1e-7


@dataclass(frozen=True, kw_only=True)
class Row:
    """A privacy cost and all its inputs; None for values that differ between parts.

    Attributes:
        statement: the guarantee in plain sentences. unit: unit of privacy, in words.
        events: one event per part.
        noise_multiplier, sampling_rate, dataset_size, batch_size: sigma, q, n, B.
        compositions: number of mechanisms on all records.
        solved: setting that was solved for; None for epsilon.
        accountant: accountant that epsilon is from, see
            :func:`~dpmac_cli.accounting.accountants.used_accountant`.
        risk: bounds on attacks, if requested.
        search: search that the events are one trial of; None if there was none.
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
    adjacency: str = ADJACENCY
    compositions: int
    dataset_size: int | None = None
    batch_size: int | None = None
    solved: str | None = None
    risk: Risk | None = None
    unit: str = RECORD
    search: Search | None = None

    @property
    def done(self) -> Done:
        """Return the events or the search that the privacy cost is of."""
        return self.search or self.events


def price(
    events: tuple[TrainingEvent, ...],
    delta: float,
    accountant: str = DEFAULT_ACCOUNTANT,
    unit: str = RECORD,
    search: Search | None = None,
) -> Row:
    """Return the total privacy cost of one or more trainings on the same records.

    ``unit`` is the unit of privacy, and ``search`` the search whose best trial the events are; for
    other arguments see :func:`~dpmac_cli.accounting.accountants.total_epsilon`.
    """
    if search is None:
        epsilon, used = total_epsilon(events, delta, accountant), accountant
        said = statement(epsilon, delta, events, unit)
    else:
        epsilon, used = search.epsilon(delta), DEFAULT_ACCOUNTANT
        said = search_statement(epsilon, delta, search, unit)
    trained = [event for event in events if event.trains]
    last = trained[-1]
    rate = common(event.sampling_rate for event in trained)
    steps = sum(event.steps for event in trained)
    return Row(
        statement=said,
        events=events,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=common(event.noise_multiplier for event in trained),
        sampling_rate=rate,
        steps=steps,
        epochs=None if rate is None else steps / last.steps_per_epoch,
        sampler=last.sampler,
        accountant=used_accountant(events, delta, used),
        compositions=sum(event.compositions for event in trained),
        unit=unit,
        search=search,
    )


def accountant_note(events: tuple[TrainingEvent, ...], delta: float) -> Iterator[str]:
    """Yield a note if epsilon is from RDP because delta is too small for the default accountant."""
    if delta < SMALL_DELTA and used_accountant(events, delta) != DEFAULT_ACCOUNTANT:
        yield BY_RDP.format(format_epsilon(delta))
