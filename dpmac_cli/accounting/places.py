"""Number of places of a step's records, whose overflow every delta covers.

Where the place of a record in a batch decides how it is rounded, the records of a step go to random
places in a public number of rows (docs/rounding.md). A step that draws more records than that is
so rare that all such steps of a run together have a share of its delta that accountants set aside.
"""

import math

from dpmac_cli.accounting.events import MOST_OVERFLOW, TrainingEvent

#: Probability that a composition draws too many records, relative to delta.
OVERFLOW = 1e-13
#: Standard deviations above the mean at which the search for a number of places begins.
FIRST = 5


def overflow_of(delta: float) -> float:
    """Return the probability that a composition has too few places, with a guarantee at delta.

    It is a small share of delta, at most :data:`~.events.MOST_OVERFLOW`.

    Args:
        delta: delta of the guarantee, in (0, 1).
    """
    return min(OVERFLOW * delta, MOST_OVERFLOW)


def places_of(event: TrainingEvent, records: int, ranks: int = 1) -> int:
    """Return the number of places for the records of a step, at least one more than B.

    Others than one record are fewer than that in all steps of a composition, except with
    probability ``event.overflow``, which its privacy cost covers. With B = n, or without such a
    probability, there is a place for every record.

    Args:
        event: event of the training, whose noise does not matter.
        records: number n of records or units; one of them may be added.
        ranks: number of processes, each with a share of the records and places of its own.
    """
    allowed, rate = event.overflow / ranks, event.sampling_rate
    if event.sampling.once_an_epoch:
        rate = 1 / event.steps_per_epoch
        allowed /= event.steps_per_epoch
    share = -(-records // ranks)
    if allowed == 0:
        return share + 1
    mean = share * rate
    places = math.ceil(mean + FIRST * math.sqrt(mean * (1 - rate))) + 1
    while places <= share and log_tail(share, rate, places) > math.log(allowed):
        places += 1
    return min(places, share + 1)


def log_tail(count: int, rate: float, least: int) -> float:
    """Return an upper bound of log P(X >= least) for X binomial, with ``least`` above its mean.

    From one number to the next, the probability shrinks by a factor that shrinks, too, so the tail
    is at most a geometric series.

    Args:
        count: number of trials of X.
        rate: probability of each, above 0.
        least: number from which on X counts; -inf is returned if X cannot be so large.
    """
    if rate == 1 or least > count:
        return 0.0 if least <= count else -math.inf
    lost = count - least
    log_choices = (math.lgamma(count + 1), -math.lgamma(least + 1), -math.lgamma(lost + 1))
    log_chances = (least * math.log(rate), lost * math.log1p(-rate))
    first = math.fsum((*log_choices, *log_chances))  # log P(X = least)
    shrinks = lost * rate / ((least + 1) * (1 - rate))
    return first - math.log1p(-shrinks)
