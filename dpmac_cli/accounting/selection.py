"""Privacy cost of a search that runs a random number of trials and releases only the best.

Liu and Talwar 2019 and Papernot and Steinke 2022 (arXiv 2110.03620) show that the best of K trials
costs little more than one of them if K is drawn in secret, and nothing else is ever seen. The cost
here is from the privacy curve of a trial (after Koskela, Redberg and Wang 2024), for any
distribution of K, such as one with a largest value:

Let Q be the distribution of a trial's output, Q' the one without the record, and g(q) = E K q^(K-1)
the derivative of the generating function of K. The output y that wins has the density
A(y) = Q(y) g(q), where q = Q(outputs up to y). If g(q) <= e^c g(q') for all y, then

    integral of (A - e^epsilon A')+  =  integral of g(q) (Q - e^epsilon g(q')/g(q) Q')+
                                    <=  E K  delta_Q(epsilon - c).

"The output is above y" is a test with errors 1 - q and q', so q' is at least beta(1 - q), the least
type II error of a trial, and c is the largest log g(q) / g(beta(1 - q)). docs/tuning.md has the
assumptions, and how each is enforced.
"""

import functools
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import ConfigDict, Field

from dpmac_cli.accounting import accountants
from dpmac_cli.accounting.accountants import Curve, delta_curve, type_two_errors
from dpmac_cli.accounting.events import TrainingEvent, merged
from dpmac_cli.errors import raise_errors
from dpmac_cli.libraries import np, optimize

#: Limits of the mean number of trials.
LEAST_MEAN, MOST_MEAN = 2, 1_000
#: Largest number of trials, as a multiple of the mean.
LONGEST = 4
#: Type I errors between which a trial's trade-off curve is bounded, and the least above 0.
PLACES, LEAST = 4_000, 1e-9
#: What rounding of probabilities and slopes may take from the surcharge.
MARGIN = 1e-9
#: Every k-th point of a trial's privacy curve is used for its trade-off curve.
THINNING = 4


@dataclass(frozen=True)
class Trials:
    """Distribution of the number of trials K: ``P(K = k)`` is proportional to ``w^k / k``.

    It is the logarithmic distribution, a truncated negative binomial of shape 0, limited to at most
    ``most`` trials. At least one trial is run.

    Raises:
        InputError: lists every invalid number.
    """

    __pydantic_config__: ClassVar = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

    mean: Annotated[float, Field(ge=LEAST_MEAN, le=MOST_MEAN)]
    """Mean of the secret number K of trials."""
    most: Annotated[int, Field(ge=1, le=LONGEST * MOST_MEAN)]
    """Largest number of trials, above the mean."""

    def __post_init__(self) -> None:
        errors = []
        if not LEAST_MEAN <= self.mean <= MOST_MEAN:
            errors.append(
                f"The mean number of trials must be from {LEAST_MEAN} to {MOST_MEAN:,}, not "
                f"{self.mean:g}."
            )
        if self.most <= self.mean:
            errors.append(
                f"The largest number of trials must be above their mean, {self.mean:g}, not "
                f"{self.most}: the privacy cost is only low if their number is random."
            )
        raise_errors(errors)

    @property
    def log_weight(self) -> float:
        """Return log w."""
        return _log_weight(self.mean, self.most)

    @property
    def probabilities(self) -> Any:
        """Return the probability of 1, 2, ..., ``most`` trials, a float64 array."""
        return _limited(self.log_weight, self.most)

    def slope(self, q: Any) -> Any:
        """Return g(q) = E K q^(K-1), the derivative of the generating function of K.

        Args:
            q: float64 array with values in [0, 1], whose shape the result has.
        """
        weights = self.probabilities * np.arange(1, self.most + 1)
        return np.polynomial.polynomial.polyval(q, weights)

    def draw(self) -> int:
        """Return a secret number of trials, from the operating system's secure random numbers.

        It is from 1 to ``most``. Draw it once for a search, and show it to nobody.
        """
        shares = np.cumsum(self.probabilities)
        place = np.searchsorted(shares, secrets.SystemRandom().random() * shares[-1], "right")
        return int(min(place + 1, len(shares)))


def trials_of(mean: float) -> Trials:
    """Return the distribution with this mean, limited to four times the mean.

    Args:
        mean: mean number of trials, from :data:`LEAST_MEAN` to :data:`MOST_MEAN`.

    Raises:
        InputError: the mean is out of these bounds.

    >>> trials_of(10)
    Trials(mean=10, most=40)
    """
    return Trials(mean, math.ceil(LONGEST * mean))


@functools.lru_cache(maxsize=16)
def _log_weight(mean: float, most: int) -> float:
    """Return the log w at which the mean of K is ``mean``."""

    def excess(log_weight: float) -> float:
        counts = np.arange(1, most + 1)
        return math.log(float(_limited(log_weight, most) @ counts) / mean)

    return float(optimize.brentq(excess, -3.0, 50.0, xtol=1e-14))


def _limited(log_weight: float, most: int) -> Any:
    """Return probabilities proportional to w^k / k of k = 1, ..., most, a float64 array."""
    counts = np.arange(1, most + 1)
    logs = log_weight * counts - np.log(counts)
    shares = np.exp(logs - logs.max())
    return shares / shares.sum()


@dataclass(frozen=True)
class Search:
    """A search: the best of a random number of trials, each with a setting drawn at random.

    Every candidate is the events of a trial with some settings: its steps, and its covered scores.
    Settings are part of a trial's output, and drawn without looking at the records. So a trial
    costs at most as much as the most expensive candidate, at every epsilon.
    """

    __pydantic_config__: ClassVar = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

    trials: Trials
    """Distribution of the number of trials."""
    candidates: Annotated[tuple[tuple[TrainingEvent, ...], ...], Field(min_length=1)]
    """What a trial may do to the records, by its settings: steps, and a covered score. Epsilon can
    be recomputed from these, the number of trials and delta."""
    space: tuple[str, ...] = ()
    """Settings that were drawn at random for each trial, as typed."""

    @property
    def noiseless(self) -> bool:
        """Return whether any candidate has no noise."""
        return any(accountants.noiseless(events) for events in self.candidates)

    def trial_epsilon(self, delta: float) -> float:
        """Return epsilon of one trial, the largest of all candidates.

        Args:
            delta: delta in (0, 1).

        Raises:
            InputError: a noise multiplier is not supported.
        """
        return max(accountants.total_epsilon(events, delta) for events in self.candidates)

    def epsilon(self, delta: float) -> float:
        """Return epsilon of the whole search: of everything that is learnt from it.

        Args:
            delta: delta in (0, 1), of which a trial has a part: delta over the mean number of
                trials.

        Raises:
            InputError: a noise multiplier is not supported.
        """
        return self.surcharge + self.trial_epsilon(delta / self.trials.mean)

    @property
    def surcharge(self) -> float:
        """Return c, what the selection adds to epsilon of a trial at delta over the mean."""
        return _surcharge(self.trials, self.candidates)

    def curve(self) -> Curve:
        """Return a grid of epsilons from 0, and upper bounds on delta of the search at each."""
        epsilons, deltas = _worst(self.candidates)
        before = np.searchsorted(epsilons, epsilons - self.surcharge, "right") - 1
        known = np.minimum(self.trials.mean * deltas[np.maximum(before, 0)], 1.0)
        known[before < 0] = 1.0
        # (epsilon, delta) bounds smaller epsilons, too: errors add up to 2 (1 - delta)/(1 + e^eps).
        sums = np.maximum.accumulate(((1 - known) / (1 + np.exp(epsilons)))[::-1])[::-1]
        return epsilons, np.minimum(known, 1 - (1 + np.exp(epsilons)) * sums)


def _worst(candidates: Sequence[tuple[TrainingEvent, ...]]) -> Curve:
    """Return the privacy curve of the most expensive candidate at each epsilon."""
    epsilons, worst = delta_curve(merged(candidates[0]))
    for events in candidates[1:]:
        _, deltas = delta_curve(merged(events))  # on the same grid
        worst = np.maximum(worst, deltas)
    return epsilons, worst


@functools.lru_cache(maxsize=64)
def _surcharge(trials: Trials, candidates: tuple[tuple[TrainingEvent, ...], ...]) -> float:
    """Return an upper bound of log g(q) / g(beta(1 - q)) over all q."""
    beta = type_two_errors(_worst(candidates), THINNING)
    alphas = np.append(0.0, np.geomspace(LEAST, 1.0, PLACES))
    above = trials.slope(1 - alphas[:-1])
    # Both rise with q: between two places, g(q) is at most that of the one and g(q') at least that
    # of the other.
    below = trials.slope(np.clip([beta(alpha) for alpha in alphas[1:]], 0.0, 1.0))
    return float(np.log(above / below).max()) + MARGIN


#: What was done to the records: events that all were released, or a search.
Done: TypeAlias = Sequence[TrainingEvent] | Search


def epsilon_of(done: Done, delta: float) -> float:
    """Return epsilon of several trainings on the same records, or of a search.

    Args:
        done: events that all were released, or a search.
        delta: delta in (0, 1).
    """
    if isinstance(done, Search):
        return done.epsilon(delta)
    return accountants.total_epsilon(tuple(done), delta)
