"""The lower bound on epsilon: true as often as it says, near the truth, read from whole files."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.stats import binom, norm

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.errors import InputError
from dpmac_cli.release import audit
from dpmac_cli.release.audit import Audit, as_likely, chance, curve_bound, lower_bound, read_audit
from dpmac_cli.runs import folder
from dpmac_cli.storage import files

DELTA = 1e-5


def odds(epsilon: float) -> float:
    return 1 / (1 + math.exp(-epsilon))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 30), st.integers(0, 40), st.sampled_from([0.0, DELTA, 1e-3]))
def test_more_right_guesses_prove_more(guesses: int, others: int, delta: float) -> None:
    m = guesses + others
    bounds = [lower_bound(m, guesses, right, delta) for right in range(guesses + 1)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0
    assert all(0 <= bound < math.inf for bound in bounds)


@pytest.mark.parametrize("guesses", [1, 2, 7, 20, 101, 1000])
def test_without_delta_all_right_is_a_power(guesses: int) -> None:
    """p^r = 5%."""
    p = 0.05 ** (1 / guesses)
    expected = max(0.0, math.log(p / (1 - p)))
    assert lower_bound(guesses, guesses, guesses, 0.0) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("guesses", "right"), [(0, 0), (1, 0), (1, 1), (7, 0), (7, 3), (100, 50)])
def test_guesses_no_better_than_chance_prove_nothing(guesses: int, right: int) -> None:
    assert lower_bound(100, guesses, right, DELTA) == 0


@pytest.mark.privacy
def test_the_bound_ends_where_the_theorem_does() -> None:
    """As the theorem is written: each term by itself, at the bound and a little above it."""
    m, r, v, delta = 60, 41, 33, 1e-3

    def by_hand(epsilon: float) -> float:
        p = odds(epsilon)
        mass = [math.comb(r, k) * p**k * (1 - p) ** (r - k) for k in range(r + 1)]
        alpha = max(sum(mass[v - i : v]) / i for i in range(1, v + 1))
        return sum(mass[v:]) + 2 * m * delta * alpha

    bound = lower_bound(m, r, v, delta)
    assert by_hand(bound) == pytest.approx(0.05, abs=1e-7)
    assert by_hand(bound + 1e-6) > 0.05
    for epsilon in (0.0, 0.7, bound, 4.0):
        assert chance(epsilon, m, r, v, delta) == pytest.approx(min(1, by_hand(epsilon)))


@pytest.mark.privacy
@pytest.mark.parametrize("delta", [0.0, 0.05])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("guesses", [10, 51, 400])
def test_a_true_claim_is_contradicted_once_in_twenty(
    epsilon: float, delta: float, guesses: int
) -> None:
    """Randomized response, which tells a coin outright with probability delta."""
    bound = cache(lambda right: lower_bound(guesses, guesses, right, delta))
    rng = np.random.default_rng(5)
    told = rng.random((4000, guesses)) < delta
    right = (told | (rng.random((4000, guesses)) < odds(epsilon))).sum(1)
    broken = sum(bound(int(v)) > epsilon for v in right)
    assert broken <= binom.ppf(0.999, 4000, 0.05)


def test_many_guesses_come_near_the_truth() -> None:
    right = np.random.default_rng(0).binomial(100_000, odds(1.0))
    assert 0.95 < lower_bound(100_000, 100_000, int(right), 1e-9) < 1.0


# The bound for a trade-off curve.


def gaussian(mu: float) -> Callable[[float], float]:
    """The trade-off curve of mu-Gaussian DP."""
    return lambda alpha: float(norm.cdf(norm.ppf(1 - alpha) - mu))


def most_likely(mu: float, m: int, r: int, v: int) -> float:
    """The largest probability of v right guesses or more of r, by linear programming.

    Over the probabilities p_0, ..., p_r, with W >= f(1 - R) at 400 tangents of the curve.
    """
    counts = np.arange(r + 1)
    slopes, ends = [], []
    for alpha in norm.cdf(np.linspace(-6, 6, 400)):
        z = norm.ppf(1 - alpha)
        slope = -norm.pdf(z - mu) / norm.pdf(z)
        for j in range(1, r + 1):
            # f(alpha) + slope (1 - R_j - alpha) <= W_(j-1)
            row = -slope * np.where(counts >= j, counts, 0) / m
            row -= np.where(counts >= j - 1, r - counts, 0) / m
            slopes.append(row)
            ends.append(-norm.cdf(z - mu) - slope * (1 - alpha))
    found = linprog(
        -(counts >= v).astype(float), A_ub=slopes, b_ub=ends, A_eq=np.ones((1, r + 1)), b_eq=[1]
    )
    assert found.success
    return float(-found.fun)


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("mu", "m", "r", "v"), [(0.5, 10, 10, 8), (1.0, 20, 8, 7), (2.0, 12, 12, 12), (0.2, 40, 9, 9)]
)
def test_the_bound_for_a_curve_is_the_largest_that_the_theorem_leaves(
    mu: float, m: int, r: int, v: int
) -> None:
    most = most_likely(mu, m, r, v)
    assert as_likely(gaussian(mu), m, r, v, most * 0.999)
    assert not as_likely(gaussian(mu), m, r, v, most * 1.01)


@pytest.mark.privacy
@pytest.mark.parametrize("mu", [0.2, 1.0])
@pytest.mark.parametrize(("m", "r"), [(200, 200), (1000, 100)])
def test_a_true_curve_is_contradicted_once_in_twenty_at_most(mu: float, m: int, r: int) -> None:
    """Canaries that do not disturb one another: the best that an attack can have."""
    rng = np.random.default_rng(1)
    refused = cache(lambda right: not as_likely(gaussian(mu), m, r, right))
    broken = 0
    for _ in range(2000):
        coins = rng.integers(0, 2, m)
        order = np.argsort(rng.normal(size=m) + mu * coins)
        broken += refused(int(coins[order[-r // 2 :]].sum() + (1 - coins[order[: r // 2]]).sum()))
    assert broken <= binom.ppf(0.999, 2000, 0.05)


@pytest.mark.long
def test_many_canaries_come_near_the_truth_of_a_curve() -> None:
    """Of one Gaussian mechanism with sigma 1: epsilon 4.38 at delta 1e-5."""
    event = (TrainingEvent(1.0, 1.0, 1),)
    rng = np.random.default_rng(0)
    coins = rng.integers(0, 2, 100_000)
    order = np.argsort(rng.normal(size=len(coins)) + coins)
    right = int(coins[order[-250:]].sum() + (1 - coins[order[:250]]).sum())
    bound = curve_bound(event, DELTA, len(coins), 500, right)
    assert 0.65 * total_epsilon(event, DELTA) < bound < total_epsilon(event, DELTA)
    assert bound > lower_bound(len(coins), 500, right, DELTA)
    assert curve_bound(event, DELTA, len(coins), 500, 250) == 0


# Guesses.


def an_audit(**other: Any) -> Audit:
    """Eight canaries, five guesses: three in, of which one is not, and two out."""
    coins = (False, False, True, True, False, True, False, True)
    scores = (-9.0, -8.0, 0.0, 0.1, 0.2, 3.0, 4.0, 5.0)
    return replace(Audit(1.0, DELTA, 5, scores, coins), **other)


@pytest.mark.parametrize(
    ("guesses", "right"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (6, 4), (8, 4)]
)
def test_the_highest_are_guessed_in_and_the_lowest_out(guesses: int, right: int) -> None:
    assert an_audit(guesses=guesses).right == right
    shuffled = np.random.default_rng(3).permutation(8)
    found = an_audit(guesses=guesses)
    mixed = replace(
        found,
        scores=tuple(found.scores[i] for i in shuffled),
        coins=tuple(found.coins[i] for i in shuffled),
    )
    assert mixed.right == right


@pytest.mark.privacy
def test_a_claim_holds_up_to_the_bound() -> None:
    count = 200
    right = Audit(1.0, DELTA, count, tuple(map(float, range(count))), (True,) * count)
    assert right.right == count // 2
    sharp = replace(right, coins=tuple(i >= count // 2 for i in range(count)))
    assert sharp.right == count
    bound = sharp.lower_bound
    assert bound > 3
    assert not replace(sharp, claimed=bound * (1 - 1e-6)).holds
    assert replace(sharp, claimed=bound * (1 + 1e-6)).holds
    assert replace(sharp, claimed=None).holds


@pytest.mark.privacy
@pytest.mark.long
def test_a_claim_with_its_events_holds_up_to_the_bound_of_its_curve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "curve_bound", cache(audit.curve_bound))  # of seconds
    count, events = 1000, (TrainingEvent(0.01, 1.0, 100),)
    coins = tuple(bool(i % 4) == (i >= count // 2) for i in range(count))  # 3 of 4 are right
    found = Audit(1.0, DELTA, 200, tuple(map(float, range(count))), coins, events)
    assert found.right == 150
    assert found.curve_bound > found.lower_bound > 0.3
    assert replace(found, claimed=found.curve_bound * 1.001).holds
    assert not replace(found, claimed=found.curve_bound * 0.999).holds


# Files.


def write(values: Any) -> Path:
    run = Path("run")
    run.mkdir(exist_ok=True)
    (run / folder.CONFIG).write_text("")
    text = values if isinstance(values, str) else json.dumps(values)
    (run / folder.AUDIT).write_text(text)
    return run


@pytest.mark.parametrize("claimed", [1.0, None])
def test_what_is_written_is_read(claimed: float | None) -> None:
    found = an_audit(claimed=claimed)
    assert read_audit(write(json.loads(files.to_json(found.as_json())))) == found


Change = Callable[[dict[str, Any]], object]
BROKEN: tuple[Change, ...] = (
    lambda values: values.clear(),
    lambda values: values.pop("scores"),
    lambda values: values.update(schema_version="1"),
    lambda values: values.update(guesses=0),
    lambda values: values.update(guesses=9),
    lambda values: values.update(guesses=2.5),
    lambda values: values.update(guesses=None),
    lambda values: values.update(delta=0),
    lambda values: values.update(claimed=-1),
    lambda values: values["coins"].append(True),
    lambda values: values["coins"].__setitem__(0, 2),
    lambda values: values["scores"].__setitem__(0, math.nan),
    lambda values: values["scores"].__setitem__(0, "much"),
    lambda values: values.update(scores=3),
)


@pytest.mark.parametrize("change", BROKEN)
def test_an_audit_that_is_not_as_written_is_refused(change: Change) -> None:
    values = json.loads(files.to_json(an_audit().as_json()))
    change(values)
    with pytest.raises(InputError, match=r"audit\.json is not an audit written by dpmac"):
        read_audit(write(values))


def test_an_audit_of_a_newer_version_is_refused() -> None:
    with pytest.raises(InputError, match=r"newer dpmac \(format 2; this version supports 1\)"):
        read_audit(write({**an_audit().as_json(), "schema_version": 2}))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000])
def test_what_is_no_audit_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not an audit"):
        read_audit(write(text))


@pytest.mark.privacy
def test_a_damaged_audit_is_noticed() -> None:
    run = write(json.loads(files.to_json(an_audit().as_json())))
    folder.seal(run)
    assert read_audit(run) == an_audit()
    write({**an_audit().as_json(), "guesses": 4})
    with pytest.raises(InputError, match="does not match its checksum"):
        read_audit(run)


def test_a_run_without_an_audit_is_told_how_to_get_one() -> None:
    with pytest.raises(InputError, match=r"nowhere does not exist\. Use the folder of an audit"):
        read_audit(Path("nowhere"))
    Path("other").mkdir()
    with pytest.raises(InputError, match=r"not a run folder: it contains no audit\.json"):
        read_audit(Path("other"))
    run = write({})
    (run / folder.AUDIT).unlink()
    with pytest.raises(InputError, match=r"not an audit run, or has not ended.* --canaries 1000"):
        read_audit(run)
    with pytest.raises(InputError, match=r"config\.yaml is not an audit .*Use the folder of an"):
        read_audit(run / folder.CONFIG)
