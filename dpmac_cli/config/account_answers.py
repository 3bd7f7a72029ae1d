"""Answers of ``dpmac account``: the rows for its questions, and notes on them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dpmac_cli.accounting import calibration
from dpmac_cli.accounting.accountants import DEFAULT_ACCOUNTANT
from dpmac_cli.accounting.calibration import MOST_STEPS
from dpmac_cli.accounting.events import LEAST_NOISE, TrainingEvent
from dpmac_cli.accounting.pricing import Row, accountant_note, price
from dpmac_cli.accounting.selection import Search, Trials
from dpmac_cli.config.account_flags import USED, AccountQuery
from dpmac_cli.config.checks import delta_note
from dpmac_cli.errors import BudgetError


def answer(*questions: AccountQuery) -> Iterator[Row]:
    """Yield the rows that answer questions, one for each combination of the values of each.

    Raises:
        BudgetError: after all rows that can be computed, if some targets cannot be met.
    """
    out_of_reach: dict[str, None] = {}
    for question in questions:
        for case in itertools.product(
            question.sigma or (0.0,),
            question.lengths or (("steps", 1),),
            question.epsilon or (0.0,),
            USED[question.accountant],
        ):
            try:
                yield _solved(question, *case)
            except BudgetError as failure:
                out_of_reach[str(failure)] = None
    if out_of_reach:
        raise BudgetError("\n".join(out_of_reach))


def _solved(
    question: AccountQuery, sigma: float, length: tuple[str, int], target: float, accountant: str
) -> Row:
    """Solve for a setting, and compute the privacy cost of the result."""
    size, batch, delta = question.dataset_size, question.batch_size, question.delta
    unit, count = length
    per_epoch = math.ceil(size / batch)
    steps = count * per_epoch if unit == "epochs" else count
    event = TrainingEvent(batch / size, sigma, steps, question.sampler, per_epoch)
    if question.trials is not None:
        row = _searched(question.trials, event, delta, target if question.solve else None)
        return replace(row, dataset_size=size, batch_size=batch, solved=question.solve)
    if question.solve == "sigma":
        sigma = calibration.calibrate_noise(event, delta, target, accountant)
        event = replace(event, noise_multiplier=sigma)
    elif question.solve == "steps":
        event = replace(event, steps=calibration.longest_run(event, delta, target, accountant))
    row = price((event,), delta, accountant)
    return replace(row, dataset_size=size, batch_size=batch, solved=question.solve)


def _searched(trials: Trials, event: TrainingEvent, delta: float, target: float | None) -> Row:
    """Return the cost of a search whose trials train like this, with noise for a target if any."""

    def search_of(epsilon: float) -> Search:
        noisy = replace(event, noise_multiplier=calibration.calibrate_noise(event, delta, epsilon))
        return Search(trials, (calibration.with_score(noisy, delta),))

    if target is not None:
        search = search_of(calibration.calibrate_search(search_of, delta, target))
    elif event.noise_multiplier == 0:
        search = Search(trials, ((event,),))
    else:
        search = Search(trials, (calibration.with_score(event, delta),))
    (events,) = search.candidates
    return price(events, delta, search=search)


def account_notes(rows: Sequence[Row], accountant: str = DEFAULT_ACCOUNTANT) -> Iterator[str]:
    """Yield what is legal, but probably not what was meant; ``accountant`` was asked for."""
    events = [event for row in rows for event in row.events]
    for delta, size in dict.fromkeys((row.delta, row.dataset_size) for row in rows):
        if size is not None:
            yield from delta_note(delta, size)
    if DEFAULT_ACCOUNTANT in USED[accountant]:
        by_rdp = (accountant_note(row.events, row.delta) for row in rows)
        yield from dict.fromkeys(itertools.chain.from_iterable(by_rdp))
    allocated = [e for e in events if e.sampling.once_an_epoch and e.sampling.amplified]
    if any(0 < e.noise_multiplier < LEAST_NOISE for e in allocated):
        yield (
            f"Below noise multiplier {LEAST_NOISE:g} random allocation is accounted without "
            "amplification: an epoch costs as much as a step on all records. Poisson sampling may "
            "cost less (--sampler poisson)."
        )
    if any(row.solved == "steps" and row.steps == MOST_STEPS for row in rows):
        yield f"{MOST_STEPS:,} steps is the maximum of a run; the budget would allow more."
