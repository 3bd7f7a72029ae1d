"""One judge over the doors: what is promised of a training holds however it is started.

A train door is resumed after each step that fails, so ``fails`` makes one of its resumes, too.
"""

import contextlib
import copy
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dpmac_cli import ArrayData, load, make_private, total_epsilon
from dpmac_cli.dp.clipping.clipped_sum import clip_limit
from dpmac_cli.dp.mechanism import GRID, SecureMechanism
from dpmac_cli.randomness.sampling import SeededDraws
from tests.doors import BATCH, DOORS, NETWORKS, RECORDS, STEPS, Move, facts, train_by
from tests.helpers import assert_deviation_of

pytestmark = pytest.mark.usefixtures("unvalidated")
every_door = pytest.mark.parametrize("door", DOORS)
#: The train door is resumed twice from the same checkpoint.
TWICE = (4, 6)


def noise_of(moves: list[Move]) -> Any:
    """What moved a network without gradients, over lr C / B; shape (steps, d)."""
    return np.stack([move.change for move in moves])


@pytest.mark.promise("noise")
@every_door
@pytest.mark.parametrize("secure", [False, True])
def test_noise_has_the_stated_deviation_and_is_independent(door: str, secure: bool) -> None:
    """Of the expected batch size, not of the one that was drawn, also after every resume."""
    trained = train_by(door, "still", sigma=1.5, secure=secure, fails=TWICE)
    assert len({len(move.drawn) for move in trained.moves}) > 1
    noise = noise_of(trained.moves) / 1.5
    assert_deviation_of(noise.reshape(-1), 1.0, least=1e-7)
    products = np.corrcoef(noise)[np.triu_indices(len(noise), 1)]
    assert np.abs(products).max() < 6 / np.sqrt(RECORDS)


@pytest.mark.promise("sampling")
@every_door
@pytest.mark.parametrize("secure", [False, True])
def test_a_step_uses_who_was_drawn_clipped_and_divided_by_the_expected_batch(
    door: str, secure: bool
) -> None:
    """Every record that is drawn moves its coordinate by lr C / B, and nothing else moves."""
    trained = train_by(door, "marking", sigma=3.0, noisy=False, secure=secure)
    for move in trained.moves:
        expected = np.isin(np.arange(RECORDS), move.drawn) * clip_limit(BATCH)
        np.testing.assert_allclose(np.abs(move.change), expected, atol=1e-4)
    sizes = [len(move.drawn) for move in trained.moves]
    assert len({tuple(move.drawn) for move in trained.moves}) == len(sizes) >= STEPS
    assert abs(np.mean(sizes) - BATCH) < 6 * np.sqrt(BATCH / len(sizes))
    assert len(set(sizes)) > 1


@pytest.mark.promise("sampling")
@every_door
def test_each_epoch_of_random_allocation_uses_every_record_once(door: str) -> None:
    """Of every session: one that continues begins an epoch."""
    settings: dict[str, Any] = {"steps": 2 * RECORDS // BATCH, "sampler": "random-allocation"}
    trained = train_by(door, "still", sigma=3.0, fails=(4,), **settings)
    per_epoch = RECORDS // BATCH
    for session in {move.session for move in trained.moves}:
        drawn = [move.drawn for move in trained.moves if move.session == session]
        for begin in range(0, len(drawn), per_epoch):
            epoch = drawn[begin : begin + per_epoch]
            places = Counter(np.concatenate(epoch).tolist())
            assert set(places.values()) == {1}
            assert len(epoch) < per_epoch or len(places) == RECORDS
    [kind] = {event.sampler for event in trained.events}
    assert kind == "random-allocation"


@pytest.mark.promise("secure")
@every_door
def test_secure_noise_and_batches_come_from_a_cipher_and_sums_lie_on_the_grid(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums, whitened = [], SecureMechanism.whitened

    def kept(*given: Any) -> Any:
        total = whitened(*given)
        sums.append(total.clone())
        return total

    def insecure(*_: Any) -> None:
        raise AssertionError("batches are drawn by a generator that is not cryptographic")

    monkeypatch.setattr(SecureMechanism, "whitened", kept)
    monkeypatch.setattr(SeededDraws, "__init__", insecure)
    trained = train_by(door, "still", sigma=1.5, secure=True, fails=TWICE)
    assert len(sums) == len(trained.moves)
    for total in sums:
        assert total.div(GRID).frac().eq(0).all()
    for move in trained.moves:
        assert move.step.noise is not None
        assert move.step.noise._secure


@pytest.mark.promise("failed")
@every_door
def test_every_step_that_began_is_charged(door: str) -> None:
    """Also those that failed, in the events and in epsilon."""
    trained = train_by(door, "still", sigma=3.0, fails=TWICE)
    assert trained.begun > len(trained.moves)
    assert trained.charged == trained.begun
    assert trained.epsilon == pytest.approx(total_epsilon(trained.events, 1e-5))
    assert {event.noise_multiplier for event in trained.events} == {3.0}
    assert {event.sampling_rate for event in trained.events} == {BATCH / RECORDS}


@pytest.mark.promise("resume")
def test_a_seed_gives_every_resume_noise_and_batches_of_its_own() -> None:
    """Of ``train``; a program has no seed."""
    trained = train_by("train", "still", sigma=3.0, seed=5, fails=TWICE)
    numbers = [move.number for move in trained.moves]
    assert len(set(numbers)) < len(numbers)
    noise = noise_of(trained.moves)
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(noise, 2))
    assert len({tuple(move.drawn) for move in trained.moves}) == len(numbers)


UNITS = [name for name in DOORS if "Step" not in name]


@pytest.mark.promise("unit")
@pytest.mark.parametrize("door", UNITS)
def test_every_record_of_a_unit_is_used_at_some_step(door: str) -> None:
    """A step uses two records of each of 40 units of five, and not always the same."""
    settings: dict[str, Any] = {"records_per_unit": 2, "sigma": 6.0, "steps": 30}
    trained = train_by(door, "marking", noisy=False, **settings)
    used = set[int]()
    for move in trained.moves:
        now = np.flatnonzero(np.abs(move.change) > 0.1)
        assert Counter((now // 5).tolist()) == dict.fromkeys(move.drawn.tolist(), 2)
        assert np.abs(move.change[now]) == pytest.approx(clip_limit(BATCH) / np.sqrt(2), abs=1e-4)
        used |= set(now.tolist())
    assert len(used) > 0.9 * RECORDS


@pytest.mark.promise("said")
@every_door
def test_the_statement_is_of_the_unit_that_is_protected(door: str) -> None:
    units = door in UNITS
    given: dict[str, Any] = {"records_per_unit": 2} if units else {}
    trained = train_by(door, "still", sigma=3.0, **given)
    unit = "unit with all of its training records" if units else "training record"
    assert f"Adding or removing any one {unit} changes" in trained.statement


IN_TWO_DOORS = pytest.mark.parametrize("door", ["train", "make_private"])


@pytest.mark.promise("validated")
@IN_TWO_DOORS
@pytest.mark.parametrize("ema", [None, 0.5])
def test_the_weights_that_are_scored_are_those_that_are_published(
    door: str, ema: float | None
) -> None:
    """The average, if there is one: after these steps it is far from the last weights."""
    average: dict[str, Any] = {} if ema is None else {"ema": ema}
    settings: dict[str, Any] = {"sigma": 3.0, "optimizer": "dp-adam", "lr": 3.0, **average}
    trained = train_by(door, "marking", **settings)
    folder = Path("run" if door == "train" else "loop")
    step = trained.moves[-1].step
    held = load_file(folder / "model.safetensors")["weight"]
    wanted = step.state.theta if step.state.average is None else step.state.average
    assert held.equal(wanted)
    if door == "make_private" or ema is not None:
        assert (step.state.average is None) == (ema is None), "only what was asked for"
    reported = json.loads((folder / "report.json").read_text())["scores"]["loss"]
    data = ArrayData(**facts({}))
    assert load(folder, network=NETWORKS["marking"]).score(data).loss == pytest.approx(reported)


@pytest.mark.promise("validated")
@pytest.mark.parametrize("kind", ["numbers", "pixels"])
@pytest.mark.parametrize("standardise", [None, "half"])
def test_a_program_has_the_network_that_was_trained(kind: str, standardise: str | None) -> None:
    """On records as it gives them, in the loop, in scores, predictions and the code of the card."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 400)
    x = 3 + rng.random((400, 6)) * 2 + y[:, None]
    given: dict[str, Any] = {"low": 3, "high": 6, "classes": ["no", "yes"]}
    net: nn.Module = nn.Sequential(nn.Linear(6, 2))
    if kind == "pixels":
        x = np.clip(rng.normal(100 + 40 * y[:, None, None], 30, (400, 8, 8)), 0, 255)
        x, given = x.astype(np.uint8), {"classes": ["no", "yes"]}
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    data = ArrayData(x, y, x, y, **given)
    asked: dict[str, Any] = {} if standardise is None else {"standardise": standardise}
    private = make_private(net, data, sigma=3, steps=40, batch_size=200, device="cpu", **asked)
    list(private)
    folder = private.publish("loop").folder
    inputs = torch.from_numpy(x).float()
    inputs = inputs.reshape(len(x), -1, *x.shape[1:]) if kind == "pixels" else inputs
    with torch.no_grad():
        found = net(private.standardise(inputs) if asked else inputs).argmax(1).numpy()
    assert private.evaluate().accuracy == pytest.approx((found == y).mean())
    if standardise is None:
        assert private.standardise(inputs).equal(inputs)
    else:
        assert float(private.standardise(inputs).abs().max()) <= 1.0001
    predicted = load(folder, network=lambda *_: copy.deepcopy(net)).predict(x).predicted
    assert predicted == [("no", "yes")[k] for k in found]
    scored = load(folder, network=lambda *_: copy.deepcopy(net)).score(data)
    assert scored.accuracy == private.evaluate().accuracy
    [code] = re.findall(r"```python\n(.*?)```", (folder / "model-card.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with contextlib.chdir(folder):
        exec(code, names)
    raw = torch.from_numpy(x) if kind == "numbers" else inputs.to(torch.uint8)
    assert names["predict"](raw.float() if kind == "numbers" else raw).tolist() == found.tolist()
