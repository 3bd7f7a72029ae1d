"""What an attacker can learn: closed forms, simulated attacks, and what is shown of it."""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import beta as beta_distribution
from scipy.stats import norm

from dpmac_cli.accounting import accountants
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
from dpmac_cli.accounting.statements import UNIT, format_epsilon
from dpmac_cli.config.resolve import resolve
from dpmac_cli.errors import InputError
from dpmac_cli.release.guarantee import privacy
from dpmac_cli.release.sentences import Case
from dpmac_cli.runs.ledger import Spent
from tests.digits_runs import train_digits
from tests.tiers import rest_long
from tests.typed import dpmac

pytestmark = pytest.mark.privacy

Losses = NDArray[np.float64]
ALPHAS = np.concatenate([np.geomspace(1e-6, 0.05, 40), np.linspace(0.05, 0.999, 60)])
POISSON = TrainingEvent(0.1, 1.0, 20)
ALLOCATED = TrainingEvent(0.1, 1.0, 20, "random-allocation", 10)
MNIST = TrainingEvent(256 / 60_000, 1.0, 1175)
SIMULATED = 200_000
#: Few records and much noise: cheap to price.
SMALL = "--dataset-size 40 --batch-size 8 --sigma 6 --epochs 2"


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


@pytest.mark.parametrize(
    "event", rest_long([POISSON, TrainingEvent(0.01, 0.05, 100), ALLOCATED, MNIST], short=2)
)
def test_curves_are_convex_and_never_above_guessing(event: TrainingEvent) -> None:
    alphas = np.linspace(0.001, 0.999, 200)
    curve = trade_off((event,), alphas)
    assert (np.diff(curve) <= 0).all()
    assert (np.diff(curve, 2) >= -1e-12).all()
    assert (curve >= 0).all()
    assert (curve <= 1 - alphas + 1e-12).all()


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


def test_true_positive_rates_are_those_of_the_best_attack_on_a_gaussian() -> None:
    found = assess_risk((TrainingEvent(1.0, 2.0, 4),), 1000)
    rates = [attack.true_positive_rate for attack in found.attacks]
    exact = 1 - gaussian_trade_off(1.0, np.array(FALSE_POSITIVE_RATES))
    assert [attack.false_positive_rate for attack in found.attacks] == [0.001, 0.01, 0.1]
    assert rates == pytest.approx(exact, abs=1e-4)
    assert (rates >= exact).all()
    assert found.stated == rates[1]


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


@pytest.mark.parametrize(("sigma", "steps"), rest_long([(1.0, 1), (10.0, 25), (0.4, 1)], short=2))
def test_mu_of_full_batches_is_that_of_the_mechanism(sigma: float, steps: int) -> None:
    exact = math.sqrt(steps) / sigma
    assert exact <= gaussian_mu((TrainingEvent(1.0, sigma, steps),)) <= 1.005 * exact


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


def test_the_least_delta_is_the_documented_one() -> None:
    assert LEAST_DELTA == 1e-10
    page = (Path(__file__).parents[1] / "docs" / "accounting.md").read_text(encoding="utf-8")
    assert "1e-10" in page.partition("## What an attacker can learn")[2].partition("\n## ")[0]


def test_epsilons_are_those_of_the_accountant() -> None:
    found = assess_risk((MNIST,), 60_000)
    assert [delta for delta, _ in found.epsilons] == [1e-5, 1e-6, 60_000**-1.1]
    assert all(epsilon == total_epsilon((MNIST,), delta) for delta, epsilon in found.epsilons)


def test_every_part_counts() -> None:
    parts = (POISSON, TrainingEvent(0.2, 1.5, 10))
    alone = [assess_risk((part,), 1000) for part in parts]
    both = assess_risk(parts, 1000)
    assert both.mu == pytest.approx(assess_risk(parts[::-1], 1000).mu)
    assert all(both.stated > one.stated and both.mu > one.mu for one in alone)


# The edges.


def test_without_a_step_an_attacker_can_only_guess() -> None:
    for events in ((), (TrainingEvent(0.1, 1.0, 0),)):
        found = assess_risk(events, 1000)
        assert found.mu == 0
        for attack in found.attacks:
            assert attack.true_positive_rate == pytest.approx(attack.false_positive_rate)
            assert attack.posteriors == pytest.approx(PRIORS)


@pytest.mark.parametrize("others", [(), (POISSON,)])
def test_without_noise_nothing_is_ruled_out(others: Sequence[TrainingEvent]) -> None:
    found = assess_risk((*others, TrainingEvent(0.1, 0.0, 1)), 1000)
    assert [attack.true_positive_rate for attack in found.attacks] == [1, 1, 1]
    assert found.mu == math.inf
    assert found.statement.endswith("any training record: no noise was added.")
    assert found.values()["gaussian_mu"] is None
    json.dumps(found.values(), allow_nan=False)


def test_an_epsilon_that_rules_out_nothing_is_said_to() -> None:
    found = assess_risk((TrainingEvent(0.5, 0.01, 1000),), 1000)
    assert found.stated == pytest.approx(1)
    assert "epsilon is too large" in found.statement
    assert found.mu == math.inf
    json.dumps(found.values(), allow_nan=False)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (POISSON, "detects a given {} with probability"),
        (TrainingEvent(0.1, 0.0, 1), "may detect any {}: no noise was added."),
        (TrainingEvent(0.5, 0.01, 1000), "may detect any {}: epsilon is too large"),
    ],
)
def test_the_statement_is_about_the_unit_of_privacy(event: TrainingEvent, said: str) -> None:
    assert said.format("training record") in assess_risk((event,), 1000).statement
    assert said.format("unit") in assess_risk((event,), 1000, UNIT).statement


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.01, "1%"), (0.0168501, "1.686%"), (0.013832001, "1.384%"), (0.5, "50%"), (1.0, "100%")],
)
def test_shares_are_rounded_up(share: float, said: str) -> None:
    assert percent(share) == said


def test_noise_that_cannot_be_priced_is_refused() -> None:
    events = (TrainingEvent(0.1, 1e-9, 1),)
    with pytest.raises(InputError, match="is not supported"):
        assess_risk(events, 1000)
    with pytest.raises(InputError, match="is not supported"):
        trade_off(events, [0.1])


# What is shown.


def account(line: str) -> Any:
    return dpmac("account", *shlex.split(line), columns=120)


def test_the_screen_and_json_say_what_the_library_does() -> None:
    found = assess_risk((TrainingEvent(0.2, 6.0, 10, "poisson", 5),), 40)
    shown = account(f"{SMALL} --risk").stdout
    assert found.statement in shown.replace("\n", " ")
    assert f"mu {format_epsilon(found.mu)}, for delta down to 1e-10" in shown
    for attack in found.attacks:
        cells = (attack.false_positive_rate, attack.true_positive_rate, *attack.posteriors)
        assert list(map(percent, cells)) in [line.split() for line in shown.splitlines()]
    rows = json.loads(account(f"{SMALL} --risk --json").stdout)["rows"]
    assert rows[0]["risk"] == json.loads(json.dumps(found.values()))
    assert "risk" not in json.loads(account(f"{SMALL} --json").stdout)["rows"][0]


def test_a_table_has_columns_for_it() -> None:
    line = SMALL.replace("sigma 6", "sigma 6,8,0")
    head, *rows = account(f"{line} --risk").stdout.splitlines()
    assert head.split() == ["epsilon", "sigma", "TPR", "at", "1%", "FPR", "mu"]
    for sigma, row in zip((6.0, 8.0, 0.0), rows, strict=False):
        found = assess_risk((TrainingEvent(0.2, sigma, 10, "poisson", 5),), 40)
        assert row.split()[2:] == [percent(found.stated), format_epsilon(found.mu)]


def test_without_noise_the_screen_says_so() -> None:
    shown = account(f"{SMALL} --risk".replace("sigma 6", "sigma 0")).stdout
    assert shown.endswith("\nAn attacker may detect any training record: no noise was added.\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--plot a.png", "--plot draws the trade-off curve of --risk: add --risk."),
        ("--risk --accountant rdp", "add --accountant pld"),
        ("--risk --accountant all", "add --accountant pld"),
        ("--risk --plot a.gif", "--plot a.gif must be a file in a folder that exists"),
        ("--risk --plot nowhere/a.png", "--plot nowhere/a.png must be"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: str, said: str) -> None:
    result = account(f"{SMALL} {flags}")
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("kind", rest_long(["png", "svg"]))
def test_the_curve_is_drawn(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"curve.{kind}"
    line = f"{SMALL} --risk --plot {path}".replace("sigma 6", "sigma 6,0")
    assert account(line).exit_code == 0
    assert path.read_bytes()[:5] == {"png": b"\x89PNG\r", "svg": b"<?xml"}[kind]


def test_report_card_and_account_agree(tmp_path: Path) -> None:
    finished = train_digits(out=tmp_path / "run", steps=3)
    kept = json.loads((finished.folder / "report.json").read_text())["privacy"]["risk"]
    assert kept["statement"] in (finished.folder / "model-card.md").read_text()
    assert json.loads(account(f"{finished.folder} --risk --json").stdout)["rows"][0]["risk"] == kept


def test_the_report_counts_every_part_of_a_run() -> None:
    earlier, event = TrainingEvent(0.1, 2.0, 7), TrainingEvent(0.1, 1.5, 3)
    spent = Spent((earlier,), event, base=0, begun=3, seeded=False, secure=False)
    plan = resolve({"dataset": "digits", "sigma": 6}).plan
    found = privacy(Case(plan, spent)).risk
    assert found is not None
    assert found.model_dump(mode="json") == assess_risk((earlier, event), 1437).values()
    baseline = replace(spent, earlier=(), event=TrainingEvent(0.1, 0.0, 3))
    assert privacy(Case(resolve({"dataset": "digits", "no_dp": True}).plan, baseline)).risk is None
