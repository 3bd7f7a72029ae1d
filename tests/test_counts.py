"""Private distributions of columns: sensitivity, privacy cost, and the ranges that are found."""

import numpy as np
import pytest

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.features.counts import ROUNDS, column_events, distributions, target_events
from dpmac_cli.randomness.noise import Noise


@pytest.mark.promise("histogram")
def test_the_events_have_the_stated_privacy_cost_together() -> None:
    assert sum(1 / event.noise_multiplier**2 for event in column_events(0.02)) == pytest.approx(
        0.02
    )
    *ranges, moments = target_events(0.03, 0.05)
    assert sum(1 / event.noise_multiplier**2 for event in ranges) == pytest.approx(0.03)
    assert 1 / moments.noise_multiplier**2 == pytest.approx(0.05)


@pytest.mark.promise("histogram")
def test_each_round_has_begun_before_numbers_are_read() -> None:
    begun: list[TrainingEvent] = []
    events = column_events(1.0)
    values = np.random.default_rng(1).normal(size=(500, 2))
    found = distributions(values, events, Noise(bytes(32)).at(1), begun.append)
    assert tuple(begun) == events
    assert len(begun) == len(ROUNDS)
    assert all(column.low < 0 < column.high for column in found)
