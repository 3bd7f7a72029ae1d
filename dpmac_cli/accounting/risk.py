"""Bounds on membership inference attacks, for training events of any kind.

An attacker sees everything that a run releases and decides whether a given record was trained on.
With false positive rate alpha (type I error), the false negative rate (type II error) is at least

    beta(alpha) = max over epsilon >= 0 of    1 - delta(epsilon) - e^epsilon alpha
                                       and    e^-epsilon (1 - delta(epsilon) - alpha),

where delta(epsilon) is that of the pessimistic privacy loss distribution, for the worse of adding
and removing the record (Dong, Roth and Su 2022, Proposition 6). Each epsilon gives a valid bound,
so the maximum over a grid is a bound, too.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter

from dpmac_cli.accounting import accountants
from dpmac_cli.accounting.accountants import Curve, delta_curve, type_two_errors
from dpmac_cli.accounting.allocation import gaussian_deltas
from dpmac_cli.accounting.events import TrainingEvent, merged
from dpmac_cli.accounting.selection import Done, Search, epsilon_of
from dpmac_cli.accounting.statements import RECORD, format_epsilon, short
from dpmac_cli.errors import InputError
from dpmac_cli.files import finite_or_none
from dpmac_cli.libraries import np

#: False positive rates of the bounds, and the one used in the statement.
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
STATED = 0.01
#: Prior probabilities that the record was in the data.
PRIORS = (0.01, 0.1, 0.5)
#: mu of Gaussian DP holds for every delta down to this one, or to twice the least delta that the
#: computation supports if that is larger.
LEAST_DELTA = 1e-10
LARGEST_MU = 1e3
#: A probability, in a report.
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Attack:
    """Bounds at one false positive rate."""

    __pydantic_config__: ClassVar = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

    false_positive_rate: Share
    """Probability of an alarm if the record was left out."""
    true_positive_rate: Share
    """Highest probability of an alarm if the record was trained on."""
    #: No bound holds for all rates, because delta allows rare alarms that are always right.
    posteriors: tuple[Share, ...]
    """For prior probabilities of 0.01, 0.1 and 0.5, the highest probability that the record was
    trained on, given an alarm at this false positive rate or a higher one."""


#: A bound in a report, null if it is infinite.
Bound = Annotated[
    float,
    Field(ge=0, allow_inf_nan=True),
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(finite_or_none, return_type=float | None),
]


@dataclass(frozen=True)
class Risk:
    """Upper bounds on what an attacker who sees everything that is released can learn.

    They are about one record, or one unit of privacy.
    """

    __pydantic_config__: ClassVar = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

    attacks: Annotated[tuple[Attack, ...], Field(max_length=len(FALSE_POSITIVE_RATES))]
    """Bounds on membership attacks, one for each of some false positive rates."""
    mu: Bound
    """Smallest mu, to 0.1%, such that the trade-off curve is above that of mu-Gaussian DP, less
    least_delta. Null if there is none."""
    least_delta: Share
    """The smallest delta for which mu holds."""
    epsilons: Annotated[tuple[tuple[Share, Bound], ...], Field(max_length=3)]
    """Pairs of delta and epsilon, at delta 1e-5, 1e-6 and 1/n^1.1. Epsilon is null if there is
    none."""
    noiseless: bool
    """Whether any part was trained without noise."""
    unit: str
    """Unit of privacy, in words."""

    @property
    def stated(self) -> float:
        """Return the true positive rate used in the statement."""
        return self.attacks[FALSE_POSITIVE_RATES.index(STATED)].true_positive_rate

    @property
    def statement(self) -> str:
        """Return the bound at false positive rate :data:`STATED`, as a sentence."""
        unit = short(self.unit)
        if self.noiseless:
            return f"An attacker may detect any {unit}: no noise was added."
        who = f"An attacker who accepts 1 false alarm in {1 / STATED:.0f}"
        most = percent(self.stated)
        if most == "100%":
            return f"{who} may detect any {unit}: epsilon is too large for a bound."
        return f"{who} detects a given {unit} with probability at most {most}."

    def values(self) -> dict[str, Any]:
        """Return the bounds as JSON values, as in a report; infinity becomes null.

        Keys are the names of the attributes.
        """
        values: dict[str, Any] = TypeAdapter(Risk).dump_python(self, mode="json")
        return values


@functools.lru_cache(maxsize=accountants.REMEMBERED)
def assess_risk(
    done: tuple[TrainingEvent, ...] | Search, dataset_size: int, unit: str = RECORD
) -> Risk:
    """Return bounds on what an attacker can learn from several trainings on the same records.

    Args:
        done: events, see :func:`~dpmac_cli.accounting.accountants.total_epsilon`, or a search.
        dataset_size: number n of records, for epsilon at delta 1/n^1.1.
        unit: unit of privacy, see :func:`~dpmac_cli.accounting.statements.statement`.

    Raises:
        InputError: there is no record, or see
            :func:`~dpmac_cli.accounting.accountants.check_noise`.
    """
    if not dataset_size >= 1:
        raise InputError(f"dataset_size must be at least 1, not {dataset_size!r}.")
    deltas = (1e-5, 1e-6, dataset_size**-1.1)
    epsilons = tuple((delta, epsilon_of(done, delta)) for delta in deltas)
    attacks = tuple(map(_attack, FALSE_POSITIVE_RATES, trade_off(done, FALSE_POSITIVE_RATES)))
    noiseless = done.noiseless if isinstance(done, Search) else accountants.noiseless(merged(done))
    mu = gaussian_mu(done)
    return Risk(attacks, mu, least_delta(done), epsilons, noiseless, unit)


def trade_off(done: Done, alphas: Iterable[float]) -> Any:
    """Return lower bounds on the type II error at some type I errors, a float64 array.

    Args:
        done: events that all were released, or a search.
        alphas: type I errors (false positive rates), from 0 to 1.

    >>> trade_off((TrainingEvent(1.0, 1.0, 1),), [0.0, 1.0]).round(2).tolist()
    [1.0, 0.0]
    """
    beta = type_two_errors(_curve(done))
    return np.array([beta(alpha) for alpha in alphas])


def gaussian_mu(done: Done) -> float:
    """Return the smallest mu of Gaussian DP, see :class:`Risk`; infinite if there is none.

    Between neighbours of the grid, delta(epsilon) is at most that of the first, and delta of
    mu-Gaussian DP at least that of the second.

    Args:
        done: events that all were released, or a search.
    """
    epsilons, deltas = _curve(done)
    count = int((deltas >= least_delta(done)).sum())
    if count in (0, len(deltas)):
        return math.inf if count else 0.0
    most, ends = deltas[:count], epsilons[1 : count + 1]
    low, high = 1e-9, LARGEST_MU
    for _ in range(40):
        middle = math.sqrt(low * high)
        if (gaussian_deltas(1 / middle, ends) >= most).all():
            high = middle
        else:
            low = middle
    return high if high < LARGEST_MU else math.inf


def least_delta(done: Done) -> float:
    """Return the smallest delta for which :func:`gaussian_mu` holds.

    Args:
        done: events that all were released, or a search.
    """
    _, deltas = _curve(done)
    beyond = float(deltas[-1])  # at an epsilon that no loss reaches, or the loss of no noise
    return max(LEAST_DELTA, 2 * beyond if beyond < 0.5 else 0.0)


def _curve(done: Done) -> Curve:
    return done.curve() if isinstance(done, Search) else delta_curve(merged(done))


def _attack(alpha: float, beta: float) -> Attack:
    """Return the bounds of an attack with type I error alpha, and at least type II error beta."""
    power = float(1 - beta)
    posteriors = []
    for prior in PRIORS:  # by Bayes' rule
        right, wrong = prior * power, (1 - prior) * alpha
        posteriors.append(right / (right + wrong))
    return Attack(alpha, power, tuple(posteriors))


def percent(share: float) -> str:
    """Return a fraction as a percentage with four digits, rounded up.

    >>> percent(0.012345)
    '1.235%'
    """
    return f"{format_epsilon(100 * share)}%"
