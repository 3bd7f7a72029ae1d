"""An accountant that shares no code with ours agrees: Opacus's, of privacy random variables.

Gopi, Lee and Wutschitz 2021 (arXiv 2106.02848). It rounds and truncates otherwise, knows by how
much, and so gives a lower and an upper bound on epsilon about its estimate; what it reports as
epsilon is the upper one.
"""

import math
import warnings
from collections.abc import Mapping

import pytest

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from tests.tiers import rest_long

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from opacus.accountants import PRVAccountant

pytestmark = [
    pytest.mark.privacy,
    # Said by the Renyi accountant with which it finds out how far its grid must reach.
    pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha:UserWarning"),
]

#: (sampling rate, noise multiplier) -> steps.
GRID: Mapping[tuple[float, float], tuple[int, ...]] = {
    (0.001, 0.4): (100, 10_000),
    (0.001, 0.7): (100, 10_000),
    (0.001, 1.0): (1000, 10_000),
    (0.001, 4.0): (10_000,),
    (256 / 60_000, 0.5): (235, 1175),
    (256 / 60_000, 1.0): (235, 1175),
    (512 / 50_000, 0.8): (98, 490, 5000),
    (512 / 50_000, 2.0): (490, 9800),
    (0.03, 0.5): (1, 30, 300),
    (0.03, 1.3): (40, 2000),
    (128 / 1437, 1.5): (12, 240),
    (0.1, 0.7): (1, 10, 100),
    (0.1, 4.0): (50, 1000, 10_000),
    (0.25, 1.0): (1, 5, 50),
    (0.25, 8.0): (30, 500),
    (0.5, 0.6): (1, 10, 70),
    (0.5, 2.0): (3, 100),
    (0.5, 8.0): (1, 100, 5000),
}
SETTINGS = [
    (rate, sigma, steps, delta)
    for (rate, sigma), lengths in GRID.items()
    for number, steps in enumerate(lengths)
    for delta in (1e-5, (1e-3, 1e-8)[number % 2])
]


def prv_bounds(
    rate: float, sigma: float, steps: int, delta: float, error: float
) -> tuple[float, float]:
    """Opacus's lower and upper bound on epsilon, some 2 ``error`` apart."""
    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, steps)]
    delta_error = delta / 1000  # its default
    distribution = accountant._get_dprv(eps_error=error, delta_error=delta_error)
    low, _, high = distribution.compute_epsilon(delta, delta_error, error)
    return float(low), float(high)


def test_there_are_enough_settings() -> None:
    assert len(set(SETTINGS)) == len(SETTINGS) >= 60


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), rest_long(SETTINGS, 4))
def test_our_price_lies_within_the_bounds_of_opacus(
    rate: float, sigma: float, steps: int, delta: float
) -> None:
    ours = total_epsilon((TrainingEvent(rate, sigma, steps),), delta)
    assert 0.02 <= ours <= 100
    # Its default, and less where that would be no more than a guess.
    error = max(0.001, min(0.01, 0.05 * ours))
    low, high = prv_bounds(rate, sigma, steps, delta, error)
    assert low <= ours <= high
    assert high - low < 3 * error


def test_what_opacus_reports_is_its_upper_bound() -> None:
    """So the figures of a paper that used it lie above ours, by its error."""
    accountant = PRVAccountant()
    accountant.history = [(1.0, 256 / 60_000, 1175)]
    reported = accountant.get_epsilon(1e-5)
    assert reported == prv_bounds(256 / 60_000, 1.0, 1175, 1e-5, 0.01)[1]
    assert reported == pytest.approx(0.795, abs=1e-3)
    assert (
        reported - 0.011 < total_epsilon((TrainingEvent(256 / 60_000, 1.0, 1175),), 1e-5) < reported
    )


@pytest.mark.parametrize(
    "event",
    rest_long(
        [
            TrainingEvent(0.05, 0.3, 3000),
            TrainingEvent(0.1, 0.05, 500),
            TrainingEvent(0.3, 0.7, 500),
            TrainingEvent(1.0, 0.5, 60),
        ],
        short=2,
    ),
    ids=str,
)
def test_beyond_its_reach_our_price_lies_below_the_renyi_accountants(event: TrainingEvent) -> None:
    price = total_epsilon((event,), 1e-5)
    assert 100 < price <= total_epsilon((event,), 1e-5, "rdp") < math.inf
