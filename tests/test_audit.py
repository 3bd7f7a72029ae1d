"""The lower bound on epsilon: true as often as it says, near the truth, read from whole files."""

import json
import math
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy.optimize import linprog
from scipy.stats import binom, norm
from sklearn.datasets import load_digits
from torch import Tensor
from typer.testing import Result

from dpmac_cli import ArrayData, from_dataframe, resume, train
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config.facts import InMemoryData
from dpmac_cli.config.records import Numbers, Table
from dpmac_cli.config.settings import Settings
from dpmac_cli.data import arrays, held_out
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.crafted import crafted_records
from dpmac_cli.data.dataset import Split
from dpmac_cli.data.read import read
from dpmac_cli.dp.clipping import clipped_sum as per_sample
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.errors import InputError
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.release import audit, sentences
from dpmac_cli.release.audit import (
    Guesses,
    as_likely,
    contradicts,
    curve_bound,
    read_audit,
    verdict,
)
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.report import read_report
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs import checkpoint, folder
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.tasks.classification import Classification
from tests import secret_search
from tests.digits_runs import (
    SEED,
    after,
    contents,
    digits,
    digits_config,
    run_trainer,
    train_digits,
)
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


def guesses_of(**other: Any) -> Guesses:
    """Eight canaries, five guesses: three in, of which one is not, and two out."""
    coins = (False, False, True, True, False, True, False, True)
    scores = (-9.0, -8.0, 0.0, 0.1, 0.2, 3.0, 4.0, 5.0)
    return Guesses(**{"guesses": 5, "scores": scores, "coins": coins, **other})


@pytest.mark.parametrize(
    ("guesses", "right"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (6, 4), (8, 4)]
)
def test_the_highest_are_guessed_in_and_the_lowest_out(guesses: int, right: int) -> None:
    found = guesses_of(guesses=guesses)
    backwards = guesses_of(guesses=guesses, scores=found.scores[::-1], coins=found.coins[::-1])
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
    found = guesses_of(guesses=200, scores=tuple(map(float, range(count))), coins=coins)
    assert found.right == 150
    proven = verdict(found, events, DELTA, None)["curve_bound"]
    assert proven == audit.curve_bound(events, DELTA, count, 200, 150) > 0.3
    assert verdict(found, events, DELTA, proven * 1.001)["holds"]
    assert not verdict(found, events, DELTA, proven * 0.999)["holds"]


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
    audited = json.loads((out / folder.AUDIT).read_text())
    assert audited.keys() == {"version", "guesses", "scores", "coins"}  # the claim is the report's
    assert (len(audited["coins"]), audited["guesses"]) == (100, 50)
    header = load_model(out).facts.values()
    for facts in (report, header):
        assert facts["sentences"]["audit_run"] == sentences.AUDIT_RUN
        assert facts["settings"]["canaries"] == 100
    assert f"**{sentences.AUDIT_RUN}**" in (out / folder.CARD).read_text()


@pytest.mark.promise("audit")
def test_the_claim_of_an_audit_is_that_of_the_report(trained: tuple[Path, Result]) -> None:
    report = read_report(trained[0])
    _, claim = read_audit(trained[0])
    assert (claim.epsilon, claim.delta) == (report.epsilon, report.delta)
    assert claim.training == tuple(event for event in report.events if event.trains)


@pytest.mark.promise("audit")
def test_a_report_of_a_run_without_a_guarantee_makes_no_claim(
    trained: tuple[Path, Result], tmp_path: Path
) -> None:
    shutil.copy(trained[0] / folder.AUDIT, tmp_path)
    report = train_digits(no_dp=True, out=tmp_path / "baseline").folder / folder.REPORT
    shutil.copy(report, tmp_path)
    with pytest.raises(InputError, match=r"audit\.json is not an audit written by dpmac \(delta"):
        read_audit(tmp_path)


@pytest.mark.promise("audit")
def test_the_report_prices_the_rate_at_which_records_and_canaries_were_drawn(
    trained: tuple[Path, Result],
) -> None:
    out, _ = trained
    [event] = json.loads((out / folder.REPORT).read_text())["events"]
    assert event["sampling_rate"] == 128 / (1437 + 100)
    again = dpmac("account", out)
    assert again.exit_code == 0
    assert "0.08366" in again.stdout


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
    shutil.copy(trained[0] / folder.REPORT, tmp_path)
    told, found = (dpmac("eval", tmp_path, "--audit", *flags) for flags in ((), ("--json",)))
    assert (told.exit_code, found.exit_code) == (4, 4)
    assert "40 of 40 guesses right" in told.stdout
    assert "The attack contradicts the claim" in told.stdout
    assert "training has a bug" in told.stdout
    body = json.loads(found.stdout)
    assert (body["right"], body["holds"]) == (40, False)
    assert body["curve_bound"] == 2.5 > body["claimed_epsilon"]
    assert told.stderr == found.stderr == ""


# Crafted records: like any other to the training, and found again in what it releases or not.


def rows(count: int = 60, **declared: Any) -> ArrayData:
    """Rows of three columns with a range each, and two classes."""
    rng = np.random.default_rng(3)
    x, low, high = rng.random((count, 3)), [0, -1, 5], [1, 1, 9]
    y = np.arange(count) % 2
    return ArrayData(x, y, classes=["a", "b"], low=low, high=high, **declared)


def table() -> InMemoryData:
    """A table with columns of every kind."""
    count = 60
    kinds = ("number", "category", "boolean", "date")
    columns: dict[str, dict[str, Any]] = {
        "low": {"range": [0, 9]},
        "job": {"categories": ["nurse", "clerk"]},
        **{f"open {kind}": {"type": kind} for kind in kinds},
    }
    cells = {
        "low": np.arange(count) % 9,
        "job": np.array(["nurse", "clerk", None] * 20, object),
        "open number": np.arange(count),
        "open category": [f"place {n % 7}" for n in range(count)],
        "open boolean": np.arange(count) % 2 == 0,
        "open date": [f"2024-01-{1 + n % 28:02}" for n in range(count)],
        "y": np.arange(count) % 2,
    }
    columns["job"]["missing"] = "input"
    schema = {"columns": columns, "label": {"column": "y", "classes": ["0", "1"]}}
    return from_dataframe(pd.DataFrame(cells), schema)


def numbers() -> ArrayData:
    """Rows with a number to predict."""
    x = np.random.default_rng(3).random((60, 2))
    return ArrayData(x, x.sum(1), low=0, high=1, target_low=0, target_high=2)


def folder_of_images(where: Path) -> Path:
    """A folder of images, which are read from a file of rows."""
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (where / label).mkdir(parents=True)
        for number in range(30):
            pixels = rng.integers(0, 256, (8, 8), np.uint8)
            Image.fromarray(pixels).save(where / label / f"{number}.png")
    return where


SOURCES: dict[str, Callable[[], Any]] = {
    "images": lambda: ArrayData(np.zeros((60, 8, 8, 3), np.uint8), np.arange(60) % 2),
    "a folder": lambda: folder_of_images(Path("pictures")),
    "rows": rows,
    "a table": table,
    "numbers": numbers,
    "units": lambda: rows(unit=np.arange(60) // 3),
    "digits": lambda: "digits",
}


@pytest.mark.promise("audit")
@pytest.mark.parametrize("kind", SOURCES)
def test_crafted_records_are_added_by_their_coins_and_counted_by_nobody(kind: str) -> None:
    settings = Settings(dataset=SOURCES[kind]())
    plain, audited = read(settings), read(settings.replace(canaries=40))
    made = audited.crafted
    assert made is not None
    assert audited.facts.public == plain.facts.public
    included = int(made.coins.sum())
    assert len(audited.train.y) == len(plain.train.y) + included
    assert audited.test is not None
    assert plain.test is not None
    assert len(audited.test.y) == len(plain.test.y)
    first = np.asarray(inputs_at(audited.train.x, slice(len(plain.train.y))))
    assert (first == inputs_at(plain.train.x, slice(None))).all()
    added = inputs_at(audited.train.x, slice(len(plain.train.y), None))
    assert (added == made.records.x[made.coins]).all()
    assert (audited.train.y[len(plain.train.y) :] == made.records.y[made.coins]).all()
    assert len(np.unique(made.records.x.reshape(40, -1), axis=0)) > 30
    if plain.train.unit is not None:
        assert audited.train.unit is not None
        assert len(np.unique(audited.train.unit)) == len(np.unique(plain.train.unit)) + included


def inputs_at(x: Any, places: slice) -> Any:
    """Return some inputs, also those of a file."""
    return x.read(places) if isinstance(x, Rows) else x[places]


OPEN_LABELS: tuple[dict[str, Any], ...] = (
    {"column": "y", "classes": ["0", "1"]},
    {"column": "y", "type": "number"},
)


@pytest.mark.promise("audit")
@pytest.mark.parametrize("label", OPEN_LABELS)
def test_no_crafted_record_depends_on_another_record(label: dict[str, Any]) -> None:
    """Also where no range is declared: a record that changed others would count many times."""
    x, y = 20.0 + np.arange(60), np.arange(60) % 2
    schema = {"columns": {"income": {"type": "number"}}, "label": label}
    frame = pd.DataFrame({"income": x, "y": y})
    made = list[Any]()
    for records in (frame, frame.drop(index=7), frame.assign(income=3 * x)):
        data = from_dataframe(records.reset_index(drop=True), schema)
        audited = read(Settings(dataset=data, canaries=40, seed=SEED, test_fraction=0))
        assert audited.crafted is not None
        made.append(audited.crafted)
    for other in made[1:]:
        assert (made[0].records.x == other.records.x).all()
        assert (made[0].records.y == other.records.y).all()
        assert (made[0].coins == other.coins).all()


@pytest.mark.promise("audit")
def test_crafted_inputs_are_as_a_row_of_a_table_may_be() -> None:
    found = read(Settings(dataset=table(), canaries=200))
    assert found.crafted is not None
    assert isinstance(found.facts.records, Table)
    x = found.crafted.records.x
    for kind, part in found.facts.records.parts:
        if kind == "one-hot":
            assert (x[:, part].sum(1) == 1).all()
        elif kind in ("flag", "boolean"):
            assert {*x[:, part].ravel().tolist()} == {0, 1}
        elif kind in ("hashed", "open"):
            assert (x[:, part] == np.rint(x[:, part])).all()
        else:
            assert 0 <= x[:, part].min() < 1
            assert 8 < x[:, part].max() <= 9


@pytest.mark.promise("audit")
def test_coins_are_fair_and_those_of_a_seed_are_its_own() -> None:
    coins = [made_with(seed) for seed in range(100)]
    assert abs(np.mean(coins) - 0.5) < 5 * 0.5 / math.sqrt(np.size(coins))
    assert (made_with(3) == coins[3]).all()
    assert not (made_with(None) == made_with(None)).all()


def made_with(seed: int | None) -> Any:
    """Return the coins of crafted records."""
    of = Classification(("a", "b"))
    records = Numbers(shape=(2,), low=(0, 0), high=(1, 1))
    like = Split(np.zeros((4, 2)), np.zeros(4, np.int64))
    return crafted_records(records, of, 60, like, seed).coins


@pytest.mark.promise("audit")
@pytest.mark.parametrize("secure", [False, True])
def test_records_are_drawn_at_the_rate_of_all_places(secure: bool) -> None:
    config = digits_config(canaries=1000, batch_size=100, secure=secure)
    trainer = run_trainer(config, steps=3)
    crafted, sampler = trainer.data.crafted, trainer.sampler
    assert crafted is not None
    assert sampler is not None
    rate = 100 / (1437 + 1000)
    assert config.event.first(3).sampling_rate == rate
    assert config.event.steps_per_epoch == 25
    count = 1437 + int(crafted.coins.sum())
    assert len(trainer.data.train) == count
    steps, counts = 400, np.zeros(count, np.int64)
    for step in range(1, steps + 1):
        counts[sampler.draw(step)] += 1
    assert abs(counts.mean() - rate * steps) < 5 * math.sqrt(rate * steps / count)
    assert counts[1437:].min() > 0
    assert counts.max() <= binom.ppf(1 - 1e-7, steps, rate)


@pytest.mark.promise("audit")
def test_data_without_the_crafted_records_of_a_plan_is_refused() -> None:
    with pytest.raises(InputError, match="epsilon was computed for"):
        run_trainer(digits_config(canaries=50), data=digits())


# Stopped and resumed.


@pytest.mark.promise("audit")
def test_no_coin_is_in_a_checkpoint() -> None:
    stopped = finish(train_plan(digits_config(canaries=50, steps=4), after(2)))
    assert checkpoint.read(stopped.folder).tensors.keys() >= {"theta", "m", "v"}
    assert not any("canar" in name for name in checkpoint.read(stopped.folder).tensors)


@pytest.mark.promise("audit")
def test_an_audit_run_can_be_neither_changed_nor_resumed() -> None:
    stopped = finish(train_plan(digits_config(canaries=50, steps=4), after(2)))
    before = contents(stopped.folder)
    with pytest.raises(InputError, match="is an audit run, which cannot be resumed"):
        resume(stopped.folder)
    for change in ({"lr": "0.01"}, {"canaries": "60"}):
        with pytest.raises(InputError, match="Start a new run"):
            resume(stopped.folder, {**change, "out": "longer"})
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
    where = finish(train_plan(config)).folder
    assert (where / folder.AUDIT).exists()
    assert secrets.found(where) == []


# Does it find what it is for?


class Weak:
    """A tenth of the noise that it is handed on as."""

    def __init__(self, noise: Any) -> None:
        self._noise = noise

    def standard_normal(self, like: Tensor) -> Tensor:
        drawn: Tensor = self._noise.standard_normal(like)
        return drawn / 10


def a_tenth_of_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    release: Any = GaussianMechanism.release
    monkeypatch.setattr(
        GaussianMechanism,
        "release",
        lambda self, clipped, region, noise: release(self, clipped, region, Weak(noise)),
    )


def clipped_at_ten_times_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = per_sample.clip_weights

    def larger(*args: Any) -> tuple[Tensor, Tensor]:
        c, valid = weights(*args)
        return (10 * c).clamp(max=1), valid

    monkeypatch.setattr(per_sample, "clip_weights", larger)


def each_record_is_used_ten_times(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = KeyedSampler.draw
    monkeypatch.setattr(KeyedSampler, "draw", lambda self, step: np.repeat(draw(self, step), 10))


def the_reader_repeats_records(monkeypatch: pytest.MonkeyPatch) -> None:
    train_and_test = held_out.train_and_test

    def repeated(*args: Any) -> Any:
        (train, *tests), (keys, *others) = train_and_test(*args)
        ten = np.repeat(np.arange(len(train.y)), 10)
        return [train.at(ten), *tests], [[keys[row] for row in ten], *others]

    monkeypatch.setattr(arrays, "train_and_test", repeated)


def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch


BUGS = (
    *(a_tenth_of_the_noise, clipped_at_ten_times_the_norm, each_record_is_used_ten_times),
    *(the_reader_repeats_records, untouched),
)


@pytest.mark.promise("audit")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_two_hundred_crafted_records_find_a_broken_build_in_one_run(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    x, y = load_digits(return_X_y=True)
    data = ArrayData(x, y, low=0, high=16, classes=[*"0123456789"])
    settings: dict[str, Any] = {"epsilon": 3, "canaries": 200, "device": "cpu", "out": "run"}
    finished = train(dataset=data, **settings)
    found, claim = read_audit(finished.folder)
    assert (len(found.coins), found.guesses) == (200, 100)
    assert contradicts(claim.training, 200, 100, found.right) == (bug is not untouched)


@pytest.mark.weekly
@pytest.mark.promise("audit")
def test_of_twenty_honest_runs_at_most_two_are_rejected() -> None:
    rejected = 0
    for seed in range(20):
        settings: dict[str, Any] = {"epsilon": 3, "canaries": 200, "seed": seed, "device": "cpu"}
        config = resolve(dataset="digits", out=f"run-{seed}", **settings)
        found, claim = read_audit(finish(train_plan(config)).folder)
        rejected += contradicts(claim.training, 200, found.guesses, found.right)
    assert rejected <= 2


@pytest.mark.promise("audit")
def test_the_bound_has_the_confidence_that_is_said() -> None:
    # 15 or more of 20 fair coins have a probability of 2.07%, 14 or more one of 5.77%.
    bounds = [curve_bound((TrainingEvent(1.0, 5.0, 1),), 1e-5, 20, 20, v) for v in (14, 15)]
    assert bounds[0] == 0 < bounds[1]
