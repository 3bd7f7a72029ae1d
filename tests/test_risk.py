"""What an attacker can learn: closed forms, simulated attacks, and what is shown of it."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import beta as beta_distribution
from scipy.stats import norm

from dpmac_cli.accounting import accountants
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.accountants import FINE, POINTS, loss_distribution, total_epsilon
from dpmac_cli.accounting.allocation import gaussian_deltas
from dpmac_cli.accounting.events import TrainingEvent, merged
from dpmac_cli.accounting.risk import (
    FALSE_POSITIVE_RATES,
    LEAST_DELTA,
    PRIORS,
    assess_risk,
    gaussian_mu,
    percent,
    trade_off,
)
from dpmac_cli.accounting.selection import Search, trials_of
from dpmac_cli.release.described_run import DescribedRun
from dpmac_cli.release.publish import guarantee_of
from dpmac_cli.runs.ledger import done
from dpmac_cli.runs.resolve import resolve

pytestmark = pytest.mark.promise("risk")

Losses = NDArray[np.float64]
ALPHAS = np.concatenate([np.geomspace(1e-6, 0.05, 40), np.linspace(0.05, 0.999, 60)])
POISSON = TrainingEvent(0.1, 1.0, 20)
ALLOCATED = TrainingEvent(0.1, 1.0, 20, "random-allocation", 10)
MNIST = TrainingEvent(256 / 60_000, 1.0, 1175)
SIMULATED = 200_000


def gaussian_trade_off(mu: float, alphas: NDArray[np.float64]) -> NDArray[np.float64]:
    """G_mu of Dong, Roth and Su 2022, equation 6."""
    curve: NDArray[np.float64] = norm.cdf(norm.isf(alphas) - mu)
    return curve


# The trade-off curve.


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (4.0, 1), (0.5, 1), (8.0, 100)])
def test_the_curve_of_full_batches_is_the_gaussian_one(sigma: float, steps: int) -> None:
    exact = gaussian_trade_off(math.sqrt(steps) / sigma, ALPHAS)
    bound = trade_off((TrainingEvent(1.0, sigma, steps),), ALPHAS)
    assert (bound <= exact + 1e-12).all()
    assert bound == pytest.approx(exact, abs=1e-4)


def simulate(event: TrainingEvent, present: bool, rng: np.random.Generator) -> Losses:
    """Log-likelihood ratios of the dominating pair, with the record or without it."""
    epochs = event.compositions if event.sampling.once_an_epoch else event.steps
    width = event.steps_per_epoch if event.sampling.once_an_epoch else 1
    total = np.zeros(SIMULATED)
    for _ in range(epochs):
        seen = event.noise_multiplier * rng.standard_normal((SIMULATED, width))
        if present and event.sampling.once_an_epoch:
            seen[np.arange(SIMULATED), rng.integers(width, size=SIMULATED)] += 1
        elif present:
            seen[:, 0] += rng.random(SIMULATED) < event.sampling_rate
        ratio = np.exp((seen - 0.5) / event.noise_multiplier**2).mean(axis=1)
        share = 1.0 if event.sampling.once_an_epoch else event.sampling_rate
        total += np.log1p(share * (ratio - 1))
    return total


def interval(hits: NDArray[np.bool_]) -> tuple[float, float]:
    """Clopper and Pearson's interval of a probability, at 99.99%."""
    count, size = int(hits.sum()), hits.size
    lower = beta_distribution.ppf(5e-5, count, size - count + 1)
    upper = beta_distribution.ppf(1 - 5e-5, count + 1, size - count)
    return float(lower), float(upper)


@pytest.mark.parametrize("claimed", ["in", "out"])
@pytest.mark.parametrize("event", [POISSON, ALLOCATED], ids=lambda event: event.sampler)
def test_no_simulated_attack_is_above_the_bound(event: TrainingEvent, claimed: str) -> None:
    rng = np.random.default_rng(20260101)
    sign = 1 if claimed == "in" else -1
    here, away = (sign * simulate(event, present, rng) for present in (True, False))
    truth, other = (here, away) if claimed == "in" else (away, here)
    rough = sign * simulate(event, claimed == "out", rng)
    for alpha in FALSE_POSITIVE_RATES:
        threshold = np.quantile(rough, 1 - alpha)
        least_found, most_found = interval(truth > threshold)
        least_false, most_false = interval(other > threshold)
        lower, upper = 1 - trade_off((event,), (least_false, most_false))
        assert least_found <= upper
        if claimed == "in":  # the worse direction, in which the bound is reached
            assert most_found >= 0.99 * lower


# What is read from it.


@pytest.mark.parametrize("prior", PRIORS)
def test_posteriors_are_bayes_rule_and_hold_at_every_higher_rate(prior: float) -> None:
    found = assess_risk((POISSON,), 1000)
    for attack in found.attacks:
        bound = attack.posteriors[PRIORS.index(prior)]
        rates = np.linspace(attack.false_positive_rate, 1, 200)
        right = prior * (1 - trade_off((POISSON,), rates))
        posteriors = right / (right + (1 - prior) * rates)
        assert posteriors.max() <= bound + 1e-12
        assert posteriors[0] == pytest.approx(bound)
        assert prior < bound < 1


@pytest.mark.parametrize("points", [POINTS, 200])
@pytest.mark.parametrize("event", [POISSON, ALLOCATED, MNIST], ids=lambda event: event.sampler)
def test_mu_covers_every_delta_down_to_the_least(
    event: TrainingEvent, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accountants, "EPSILONS", points)
    accountants.delta_curve.cache_clear()
    mu = gaussian_mu((event,))
    accountants.delta_curve.cache_clear()
    epsilons = np.linspace(0, total_epsilon((event,), 1e-10), 3001)
    deltas = loss_distribution(merged((event,)), FINE).deltas(epsilons)
    slack = 1e-13  # of both computations
    assert (gaussian_deltas(1 / mu, epsilons) >= deltas - slack).all()
    if points == POINTS:
        assert (gaussian_deltas(1 / (0.99 * mu), epsilons) < deltas).any()
    alphas = np.geomspace(1e-9, 1, 300)
    assert (trade_off((event,), alphas) >= gaussian_trade_off(mu, alphas) - LEAST_DELTA).all()


def test_every_part_counts() -> None:
    parts = (POISSON, TrainingEvent(0.2, 1.5, 10))
    alone = [assess_risk((part,), 1000) for part in parts]
    both = assess_risk(parts, 1000)
    assert both.mu == pytest.approx(assess_risk(parts[::-1], 1000).mu)
    assert all(both.stated > one.stated and both.mu > one.mu for one in alone)


def test_the_risk_of_a_search_is_that_of_all_its_trials() -> None:
    alone = assess_risk((POISSON,), 1000)
    search = assess_risk(Search(trials_of(10), ((POISSON,),)), 1000)
    for one, of_all in zip(alone.attacks, search.attacks, strict=True):
        assert of_all.true_positive_rate > one.true_positive_rate
    assert search.mu > alone.mu


def test_epsilons_beside_the_risk_are_at_the_deltas_that_are_named() -> None:
    deltas = (1e-5, 1e-6, 1000**-1.1)
    expected = tuple((delta, total_epsilon((POISSON,), delta)) for delta in deltas)
    assert assess_risk((POISSON,), 1000).epsilons == expected


# The edges.


def test_one_record_has_a_delta_of_one() -> None:
    assert assess_risk((POISSON,), 1).epsilons[-1] == (1.0, 0.0)


@pytest.mark.parametrize("others", [(), (POISSON,)])
def test_without_noise_nothing_is_ruled_out(others: Sequence[TrainingEvent]) -> None:
    found = assess_risk((*others, TrainingEvent(0.1, 0.0, 1)), 1000)
    assert [attack.true_positive_rate for attack in found.attacks] == [1, 1, 1]
    assert found.mu == math.inf
    assert found.statement.endswith("any training record: no noise was added.")
    assert found.values()["mu"] is None
    json.dumps(found.values(), allow_nan=False)


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.01, "1%"), (0.0168501, "1.686%"), (0.013832001, "1.384%"), (0.5, "50%"), (1.0, "100%")],
)
def test_shares_are_rounded_up(share: float, said: str) -> None:
    assert percent(share) == said


# What is shown.


def test_the_report_counts_every_part_of_a_run() -> None:
    earlier, event = TrainingEvent(0.1, 2.0, 7), TrainingEvent(0.1, 1.5, 3)
    spent = Account(earlier=(done(earlier),), event=event, begun=3, secure=False)
    plan = resolve({"dataset": "digits", "sigma": 6}).plan
    assert guarantee_of(DescribedRun(plan, spent))["risk"] == assess_risk((earlier, event), 1437)
    baseline = replace(spent, earlier=(), event=TrainingEvent(0.1, 0.0, 3))
    plan = resolve({"dataset": "digits", "no_dp": True}).plan
    assert guarantee_of(DescribedRun(plan, baseline))["risk"] is None
