"""The lower bound on epsilon: true as often as it says, near the truth, read from whole files."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.stats import binom, norm
from torch import Tensor
from typer.testing import Result

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.dp.clipping import clipped_sum as per_sample
from dpmac_cli.dp.mechanism import GaussianMechanism, ellipsoid
from dpmac_cli.errors import InputError
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.release import audit, run, sentences
from dpmac_cli.release.audit import Audit, as_likely, curve_bound, read_audit
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.run import finish
from dpmac_cli.runs import checkpoint, folder
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.canaries import Canaries
from tests import secret_search
from tests.digits_runs import SEED, after, contents, digits_config, run_trainer, train_digits
from tests.helpers import (
    CLIP_LIMIT,
    DIMENSION,
    Batches,
    Spy,
    in_chunks_of,
    make_trainer,
    place,
    walk,
)
from tests.tiers import pairs_short
from tests.typed import dpmac

DELTA = 1e-5
EVENTS = (TrainingEvent(0.01, 1.0, 100),)


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


@pytest.mark.promise("audit")
@pytest.mark.parametrize(
    ("mu", "m", "r", "v"), [(0.5, 10, 10, 8), (1.0, 20, 8, 7), (2.0, 12, 12, 12), (0.2, 40, 9, 9)]
)
def test_the_bound_for_a_curve_is_the_largest_that_the_theorem_leaves(
    mu: float, m: int, r: int, v: int
) -> None:
    most = most_likely(mu, m, r, v)
    assert as_likely(gaussian(mu), m, r, v, most * 0.999)
    assert not as_likely(gaussian(mu), m, r, v, most * 1.01)


@pytest.mark.promise("audit")
@pytest.mark.parametrize(("mu", "m", "r"), [(0.2, 200, 200), (1.0, 1000, 100)])
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


# Guesses.


def an_audit(**other: Any) -> Audit:
    """Eight canaries, five guesses: three in, of which one is not, and two out."""
    coins = (False, False, True, True, False, True, False, True)
    scores = (-9.0, -8.0, 0.0, 0.1, 0.2, 3.0, 4.0, 5.0)
    values = {"claimed": 1.0, "delta": DELTA, "guesses": 5, "scores": scores, "coins": coins}
    return Audit(**{**values, "events": EVENTS, **other})


@pytest.mark.parametrize(
    ("guesses", "right"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (6, 4), (8, 4)]
)
def test_the_highest_are_guessed_in_and_the_lowest_out(guesses: int, right: int) -> None:
    found = an_audit(guesses=guesses)
    backwards = an_audit(guesses=guesses, scores=found.scores[::-1], coins=found.coins[::-1])
    assert found.right == backwards.right == right


@pytest.mark.promise("audit")
def test_a_claim_with_its_events_holds_up_to_the_bound_of_its_curve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "curve_bound", cache(audit.curve_bound))
    monkeypatch.setattr(audit, "FACTORS", np.geomspace(1 / 4, 4, 17).tolist())  # seconds less
    count = 1000
    coins = tuple(bool(i % 4) == (i >= count // 2) for i in range(count))  # 3 of 4 are right
    events = (TrainingEvent(0.5, 2.0, 4),)  # cheap to price with any noise
    values = {"guesses": 200, "scores": tuple(map(float, range(count))), "coins": coins}
    found = an_audit(**values, events=events)
    assert found.right == 150
    assert found.curve_bound == audit.curve_bound(events, DELTA, count, 200, 150) > 0.3
    above, below = found.curve_bound * 1.001, found.curve_bound * 0.999
    assert an_audit(**values, events=events, claimed=above).holds
    assert not an_audit(**values, events=events, claimed=below).holds


# Files.


# As typed.

DIGITS = (
    *("train", "--dataset", "digits", "--sigma", "6", "--steps", "3", "--seed", "1"),
    *("--canaries", "100"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """An audit run, and what was seen of it."""
    out = tmp_path_factory.mktemp("audit") / "run"
    result = dpmac(*DIGITS, "--out", out)
    assert result.exit_code == 0, result.output
    return out, result


@pytest.mark.promise("audit")
def test_an_audit_run_says_so_everywhere(trained: tuple[Path, Result]) -> None:
    out, seen = trained
    lines = seen.stdout.splitlines()
    assert any(line.startswith("AUDIT: 100 canaries,") for line in lines[:4])
    assert sentences.AUDIT_RUN in lines
    assert f"next: dpmac eval --audit {out}, dpmac report {out}" in lines
    assert lines[-2].endswith("audit.json")
    report = json.loads((out / folder.REPORT).read_text())
    header = load_model(out).facts
    for facts in (report, header):
        assert facts["sentences"]["audit_run"] == sentences.AUDIT_RUN
        assert facts["settings"]["canaries"] == 100
    assert f"**{sentences.AUDIT_RUN}**" in (out / folder.CARD).read_text()


@pytest.mark.promise("audit")
def test_the_report_prices_the_rate_at_which_records_and_canaries_were_drawn(
    trained: tuple[Path, Result],
) -> None:
    out, _ = trained
    [event] = json.loads((out / folder.REPORT).read_text())["events"]
    assert event["sampling_rate"] == 128 / (1437 + 50)
    again = dpmac("account", out)
    assert again.exit_code == 0
    assert "0.0860" in again.stdout


@pytest.mark.promise("audit")
def test_a_claim_that_the_attack_contradicts_is_exit_code_4(
    trained: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "curve_bound", lambda *_: 2.5)  # takes seconds
    kept: dict[str, Any] = json.loads((trained[0] / folder.AUDIT).read_text())
    scores = [1.0 if coin else -1.0 for coin in kept["coins"]]
    (tmp_path / folder.CONFIG).write_text("")
    text = json.dumps({**kept, "guesses": 40, "scores": scores})
    (tmp_path / folder.AUDIT).write_text(text)
    told, found = (dpmac("eval", tmp_path, "--audit", *flags) for flags in ((), ("--json",)))
    assert (told.exit_code, found.exit_code) == (4, 4)
    assert "40 of 40 guesses right" in told.stdout
    assert "The attack contradicts the claim" in told.stdout
    assert "training has a bug" in told.stdout
    body = json.loads(found.stdout)
    assert (body["right"], body["holds"]) == (40, False)
    assert body["curve_bound"] == 2.5 > body["claimed_epsilon"]
    assert told.stderr == found.stderr == ""


# Canaries: records like any other to the training, found again in what it releases or not.


RECORDS, COUNT, RATE = 40, 10, 0.2
CPU = torch.device("cpu")


def gradients(seed: int = 0, count: int = COUNT) -> Canaries:
    """Canaries of the tiny task, all of them in."""
    canaries = gradients_of(seed, count)
    canaries.coins.fill_(True)
    return canaries


def gradients_of(seed: int | None, count: int = 60) -> Canaries:
    """Canaries by their coins."""
    return Canaries(
        trained=torch.ones(DIMENSION, dtype=torch.bool),
        rate=RATE,
        batch=RATE * RECORDS,
        first=RECORDS,
        count=count,
        inputs=1,
        keys=make_keys(seed),
    )


def spied(name: str, canaries: Canaries | None, *batches: list[int], **more: Any) -> Trainer:
    """A trainer that takes given batches, canary i being record 40 + i."""
    mechanism = Spy(1.0, 8)
    hooks = [] if canaries is None else [canaries]
    return make_trainer(name, mechanism, sampler=Batches(*batches), hooks=hooks, **more)


def canaries_of(trainer: Trainer) -> Any:
    """The canaries of a trainer."""
    (canaries,) = trainer.hooks
    return canaries


def whitened(trainer: Trainer, batch: list[int]) -> Tensor:
    """The clipped sum of a batch as the mechanism gets it, in whitened space."""
    rows = np.array(batch, np.int64)
    for hook in trainer.hooks:
        rows = hook.records(rows)
    clipped = trainer._clip_and_sum(rows)
    return clipped.double() / trainer.state.region.scale


# What they add.


@pytest.mark.promise("audit")
@pytest.mark.parametrize(
    ("name", "centre", "chunk", "others"),
    pairs_short(
        ["dp-sgd", "dp-macadam", "adaclip"], ["own", "far out"], [3, 1000], [[], [0, 1, 2, 3, 45]]
    ),
)
def test_a_canary_moves_the_sum_by_no_more_than_a_record_may(
    name: str, centre: str, chunk: int, others: list[int]
) -> None:
    """In an empty batch too, and beside others and each other."""
    made = {}
    for canary in (None, 40, 41, 49):
        trainer = spied(name, gradients(), [0, 5, 9, 40], plan=in_chunks_of(chunk))
        walk(trainer, 4)
        if centre == "far out" and not trainer.state.region.is_ball:
            generator = torch.Generator().manual_seed(3)
            b = torch.rand(DIMENSION, generator=generator, dtype=torch.float64) + 0.1
            place(trainer, ellipsoid(30 * b / math.sqrt(DIMENSION), b))
        batch = others if canary is None else sorted([*others, canary])
        made[canary] = whitened(trainer, batch)
        added = canaries_of(trainer)
        if canary is not None:
            moved = made[canary] - made[None]
            where = int(added._coordinates[canary - RECORDS])
            assert moved.norm() <= 1
            assert moved.norm() == pytest.approx(CLIP_LIMIT, rel=1e-6)  # each is beyond the bound
            expected = added._added[canary - RECORDS].item()
            assert moved[where].item() == pytest.approx(expected, rel=1e-6)
            assert abs(expected) > (0.9 if (canary - RECORDS) % 2 == 0 else 0.6)


@pytest.mark.promise("audit")
@pytest.mark.parametrize("name", ["dp-sgd", "dp-macadam"])
def test_a_canary_is_clipped_by_the_function_that_clips_records(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a build that clips wrongly has canaries that show it."""
    weights = per_sample.clip_weights

    def twice(*args: Any) -> tuple[Tensor, Tensor]:
        c, valid = weights(*args)
        return 2 * c, valid

    monkeypatch.setattr(per_sample, "clip_weights", twice)
    trainer = spied(name, gradients(), [0])
    assert whitened(trainer, [40]).norm().item() == pytest.approx(2 * CLIP_LIMIT, rel=1e-6)


# Who is drawn.


@pytest.mark.promise("audit")
@pytest.mark.parametrize("secure", [False, True])
def test_records_and_canaries_are_drawn_at_the_rate_that_is_priced(secure: bool) -> None:
    config = digits_config(canaries=1000, batch_size=100, secure=secure)
    trainer = run_trainer(config, steps=3)
    canaries, sampler = canaries_of(trainer), trainer.sampler
    assert sampler is not None
    rate = 100 / (1437 + 500)
    assert config.event.first(3).sampling_rate == rate
    steps, counts = 400, np.zeros(2437, np.int64)
    for step in range(1, steps + 1):
        counts[canaries.records(sampler.draw(step))] += 1
        counts[canaries._met + 1437] += 1
    coins = canaries.coins.numpy()
    assert (counts[1437:][~coins] == 0).all()
    assert (counts[1437:][coins] > 0).all()
    for group in (counts[:1437], counts[1437:][coins]):
        assert abs(group.mean() - rate * steps) < 5 * math.sqrt(
            rate * (1 - rate) * steps / len(group)
        )
        high = binom.ppf(1 - 1e-7, steps, rate)
        assert group.max() <= high


@pytest.mark.promise("audit")
def test_coins_are_fair_and_independent_of_all_that_is_public() -> None:
    made = [gradients_of(seed) for seed in range(200)]
    coins = np.stack([canaries.coins.numpy() for canaries in made])
    assert abs(coins.mean() - 0.5) < 5 * 0.5 / math.sqrt(coins.size)
    reach = np.stack([canaries._reach.numpy() > 1 for canaries in made])
    assert abs((coins == reach).mean() - 0.5) < 5 * 0.5 / math.sqrt(coins.size)
    one, other = gradients_of(None), gradients_of(None)
    assert not torch.equal(one.coins, other.coins)
    assert not torch.equal(one._coordinates, other._coordinates)
    assert len(torch.unique(one._coordinates)) == 60


# Stopped and resumed.


@pytest.mark.promise("audit")
def test_no_coin_is_in_a_checkpoint() -> None:
    stopped = finish(run.train(digits_config(canaries=50, steps=4), after(2)))
    assert checkpoint.read(stopped.folder).tensors.keys() >= {"theta", "m", "v"}
    assert not any("canar" in name for name in checkpoint.read(stopped.folder).tensors)


@pytest.mark.promise("audit")
def test_an_audit_run_can_be_neither_changed_nor_resumed() -> None:
    stopped = finish(run.train(digits_config(canaries=50, steps=4), after(2)))
    before = contents(stopped.folder)
    with pytest.raises(InputError, match="is an audit run, which cannot be resumed"):
        finish(run.resume(stopped.folder))
    for change in ({"lr": "0.01"}, {"canaries": "60"}):
        with pytest.raises(InputError, match="Start a new run"):
            finish(run.resume(stopped.folder, {**change, "out": "longer"}))
    assert not Path("longer").exists()
    assert contents(stopped.folder) == before


# What is published.


@pytest.mark.promise("audit")
def test_no_secret_is_in_what_an_audit_publishes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The coins and scores of canaries are, at the end; of records and draws, nothing."""
    secrets = secret_search.record(monkeypatch, tmp_path, SEED)
    # No batch is as small as a count of the confusion matrix, which is of 36 records of each class.
    config = digits_config(seed=SEED, batch_size=130, steps=2, out=tmp_path / "run", canaries=53)
    where = finish(run.train(config)).folder
    assert (where / folder.AUDIT).exists()
    assert secrets.found(where) == []


# Does it find what it is for?

#: Claims 0.760. Of 20 seeds, sound runs proved 0.00 to 0.43 (mean 0.18, deviation 0.11), and runs
#: with half the noise 1.14 to 1.62 (1.36, 0.13): the claim is five and four deviations away.
ATTACK: dict[str, Any] = {
    "canaries": 2000,
    "sigma": 1.0,
    "batch_size": 10,
    "steps": 1200,
    "optimizer": "dp-sgd",
    "seed": 0,
}


class Weak:
    """Half of the noise that it is handed on as."""

    def __init__(self, noise: Any) -> None:
        self._noise = noise

    def standard_normal(self, like: Tensor) -> Tensor:
        drawn: Tensor = self._noise.standard_normal(like)
        return drawn / 2


def half_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    release: Any = GaussianMechanism.release
    monkeypatch.setattr(
        GaussianMechanism,
        "release",
        lambda self, clipped, region, noise: release(self, clipped, region, Weak(noise)),
    )


def no_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = per_sample.clip_weights

    def ones(*args: Any) -> tuple[Tensor, Tensor]:
        c, valid = weights(*args)
        return torch.ones_like(c), valid

    monkeypatch.setattr(per_sample, "clip_weights", ones)


def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch


@pytest.mark.long
@pytest.mark.promise("audit")
@pytest.mark.parametrize(
    ("bug", "low", "high"), [(untouched, 0, 0.6), (half_the_noise, 0.9, 4), (no_clipping, 4, 15)]
)
def test_the_attack_tells_broken_builds_from_sound_ones(
    bug: Callable[[pytest.MonkeyPatch], None],
    low: float,
    high: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug(monkeypatch)
    found = read_audit(train_digits(**ATTACK).folder)
    assert found.claimed == pytest.approx(0.7601, abs=1e-4)
    assert low <= found.curve_bound <= high
    assert found.holds == (bug is untouched)


@pytest.mark.promise("audit")
def test_the_bound_has_the_confidence_that_is_said() -> None:
    # 15 or more of 20 fair coins have a probability of 2.07%, 14 or more one of 5.77%.
    bounds = [curve_bound((TrainingEvent(1.0, 5.0, 1),), 1e-5, 20, 20, v) for v in (14, 15)]
    assert bounds[0] == 0 < bounds[1]
