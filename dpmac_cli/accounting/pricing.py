"""Privacy costs before rendering: rows with all their inputs, and schedules of epsilon."""

from collections.abc import Iterator
from dataclasses import dataclass

from dpmac_cli.accounting.accountants import (
    DEFAULT_ACCOUNTANT,
    total_epsilon,
    used_accountant,
)
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.risk import Risk
from dpmac_cli.accounting.selection import Done, Search
from dpmac_cli.accounting.statements import (
    BY_RDP,
    RECORD,
    SEED_GIVEN,
    common,
    format_epsilon,
    search_statement,
    statement,
)

#: Largest delta at which the accountant may not be the default one.
SMALL_DELTA = 1e-7


@dataclass(frozen=True, kw_only=True)
class Row:
    """A privacy cost, and what it is of, as :func:`price` returns it.

    Properties that differ between the events of training are None.

    Attributes:
        events: one event per part.
        epsilon: the privacy cost; infinite without noise.
        delta: delta of that epsilon.
        accountant: accountant that epsilon is from, see
            :func:`~dpmac_cli.accounting.accountants.used_accountant`.
        unit: unit of privacy, in words.
        search: search that the events are one trial of; None if there was none.
        dataset_size, batch_size: n and B, if they are known.
        solved: setting that was solved for; None for epsilon.
        risk: bounds on attacks, if requested.
        seeded: whether a seed was chosen for any of the events, and they are private.
    """

    events: tuple[TrainingEvent, ...]
    epsilon: float
    delta: float
    accountant: str
    unit: str = RECORD
    search: Search | None = None
    dataset_size: int | None = None
    batch_size: int | None = None
    solved: str | None = None
    risk: Risk | None = None
    seeded: bool = False

    @property
    def done(self) -> Done:
        """Return the events or the search that the privacy cost is of."""
        return self.search or self.events

    @property
    def statement(self) -> str:
        """Return the guarantee in plain sentences; of a seed that was chosen first."""
        if self.search is None:
            guarantee = statement(self.epsilon, self.delta, self.events, self.unit)
        else:
            guarantee = search_statement(self.epsilon, self.delta, self.search, self.unit)
        return f"{SEED_GIVEN} {guarantee}" if self.seeded else guarantee

    @property
    def trained(self) -> tuple[TrainingEvent, ...]:
        """Return the events of training."""
        return tuple(event for event in self.events if event.trains)

    @property
    def noise_multiplier(self) -> float | None:
        """Return sigma of the training."""
        return common(event.noise_multiplier for event in self.trained)

    @property
    def sampling_rate(self) -> float | None:
        """Return q of the training."""
        return common(event.sampling_rate for event in self.trained)

    @property
    def steps(self) -> int:
        """Return the number of steps of all parts."""
        return sum(event.steps for event in self.trained)

    @property
    def epochs(self) -> float | None:
        """Return the number of epochs of ceil(n/B) steps; None if the sampling rates differ."""
        return None if self.sampling_rate is None else self.steps / self.trained[-1].steps_per_epoch

    @property
    def sampler(self) -> str:
        """Return the sampler of the last part."""
        return self.trained[-1].sampler

    @property
    def compositions(self) -> int:
        """Return the number of mechanisms on the training records, also of counts and sums."""
        on_training = (event for event in self.events if event.records == "training")
        return sum(event.compositions for event in on_training)


def price(
    events: tuple[TrainingEvent, ...],
    delta: float,
    accountant: str = DEFAULT_ACCOUNTANT,
    unit: str = RECORD,
    search: Search | None = None,
) -> Row:
    """Return the total privacy cost of one or more trainings on the same records.

    Args:
        events: events of all trainings.
        delta: delta in (0, 1).
        accountant: a key of :data:`~dpmac_cli.accounting.accountants.ACCOUNTANTS`. A search is
            always by the default one.
        unit: unit of privacy, in words.
        search: search whose best trial the events are; None if there was none.

    Raises:
        InputError: a noise multiplier is not supported.
    """
    if search is None:
        epsilon, used = total_epsilon(events, delta, accountant), accountant
    else:
        epsilon, used = search.epsilon(delta), DEFAULT_ACCOUNTANT
    return Row(
        events=events,
        epsilon=epsilon,
        delta=delta,
        accountant=used_accountant(events, delta, used),
        unit=unit,
        search=search,
    )


def accountant_note(events: tuple[TrainingEvent, ...], delta: float) -> Iterator[str]:
    """Yield a note if epsilon is from RDP because delta is too small for the default accountant.

    Args:
        events: events on the same records.
        delta: delta in (0, 1).
    """
    if delta < SMALL_DELTA and used_accountant(events, delta) != DEFAULT_ACCOUNTANT:
        yield BY_RDP.format(format_epsilon(delta))
