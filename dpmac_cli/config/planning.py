"""Plan of a run, from settings and facts of the records. Reads no records.

The order matters: defaults first, because checks need them; then all faults together; and the
noise last, because it covers every event that the defaults add, such as a histogram.
"""

from collections.abc import Iterable
from dataclasses import replace

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config import checks
from dpmac_cli.config.defaults import completed
from dpmac_cli.config.facts import DataFacts
from dpmac_cli.config.flags import lonely
from dpmac_cli.config.plan import (
    Plan,
    calibrated,
    event_of,
    histograms_of,
    optimizer_of,
    shares_of_counts,
)
from dpmac_cli.config.records import Table
from dpmac_cli.config.settings import NEEDS, PRIVATE_SCALE, Settings
from dpmac_cli.errors import raise_errors
from dpmac_cli.tasks.task import is_labelled


def plan(
    settings: Settings,
    facts: DataFacts,
    *,
    earlier: tuple[TrainingEvent, ...] = (),
    noise: TrainingEvent | None = None,
    ranged: bool = False,
    of_records: Iterable[str] = (),
) -> Plan:
    """Complete settings, validate them together, and calibrate the noise.

    Args:
        settings: settings as they were given.
        facts: facts of the records.
        earlier: events on the same records, which a target epsilon must cover too.
        noise: event of a run that has begun, whose noise is never calibrated again; None for a new
            run.
        ranged: whether ranges of columns were found by an earlier part of the run.
        of_records: faults of the records, which are reported with those of settings.

    Returns:
        The plan, whose events cost at most the target epsilon together with ``earlier`` ones.

    Raises:
        InputError: lists every fault of settings together.
        BudgetError: no noise meets the target epsilon.
    """
    explicit = settings.explicit
    settings = completed(settings, facts)
    if settings.scale == PRIVATE_SCALE and isinstance(facts.records, Table):
        facts = replace(facts, records=facts.records.ranked())
    event = event_of(settings, facts.train_size)
    made = Plan(settings, facts, event, optimizer_of(settings), ranged=ranged)
    needs = dict(NEEDS)
    if is_labelled(settings.task):
        del needs["task"]  # it says that there are labels, which needs no encoder
    raise_errors([*lonely(explicit, needs), *of_records, *checks.faults(made)])
    if noise is not None:
        event = event.with_noise_of(noise)
    shares = shares_of_counts(settings, facts)
    ranges, after = histograms_of(settings.epsilon, settings.delta, event, shares, facts.train_size)
    histogram = after[0] if after else None
    made = replace(made, event=event, ranges=ranges, histogram=histogram)
    if noise is None:
        others = (*earlier, *made.counts)
        made = replace(made, event=calibrated(settings, event, others))
    _ = made.score  # raises BudgetError before anything is written
    return made
