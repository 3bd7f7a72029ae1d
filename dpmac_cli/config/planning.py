"""From settings and facts of the records to the plan of a run. Reads no records."""

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
    given: Settings,
    facts: DataFacts,
    *,
    earlier: tuple[TrainingEvent, ...] = (),
    noise: TrainingEvent | None = None,
    of_records: Iterable[str] = (),
) -> Plan:
    """Complete settings, validate them together, and calibrate the noise.

    Args:
        given: settings as they were given.
        facts: facts of the records.
        earlier: events on the same records, which a target epsilon must cover too.
        noise: event of a run that has begun, whose noise is never calibrated again; None for a new
            run.
        of_records: faults of the records, which are reported with those of settings.

    Raises:
        InputError: lists every fault of settings together.
        BudgetError: no noise meets the target epsilon.
    """
    settings = completed(given, facts)
    if settings.scale == PRIVATE_SCALE and isinstance(facts.records, Table):
        facts = replace(facts, records=facts.records.ranked())
    event = event_of(settings, facts.train_size)
    found = Plan(settings, facts, event, optimizer_of(settings))
    unlabelled = not is_labelled(settings.task)
    needs = {name: others for name, others in NEEDS.items() if name != "task" or unlabelled}
    raise_errors([*lonely(given.explicit, needs), *of_records, *checks.faults(found)])
    event = event if noise is None else event.with_noise_of(noise)
    shares = shares_of_counts(settings, facts)
    ranges, after = histograms_of(settings.epsilon, settings.delta, event, shares, facts.train_size)
    found = replace(found, event=event, ranges=ranges, histogram=next(iter(after), None))
    if noise is None:
        others = (*earlier, *found.counts)
        found = replace(found, event=calibrated(settings, event, others))
    _ = found.score  # raises BudgetError before anything is written
    return found
