"""Resumed and forked runs draw with new keys, and count everything that was begun before."""

import base64
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.errors import DivergedError, InputError
from dpmac_cli.randomness.keystream import STREAMS, Keys, make_keys
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.release import run
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import RunEvent, finish
from dpmac_cli.runs import checkpoint, folder, ledger
from dpmac_cli.runs.loop import Evaluated
from dpmac_cli.runs.session import Reduced, Started, Update
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.storage import files
from dpmac_cli.studies.grid import plan
from dpmac_cli.studies.results import collect, finished_report
from tests.conftest import OPTIMIZER_NAMES
from tests.digits_runs import RATE, SIGMA, after, contents, digits_config
from tests.tiers import rest_long

STEPS = 21


class Killed(BaseException):
    """In the place of SIGKILL: nothing handles it, and nothing is written after it."""


def kill(events: Iterator[RunEvent], when: Callable[[RunEvent], bool]) -> None:
    """Leave a run as a kill would: at once, with nothing more written."""
    next(event for event in events if when(event))
    events.close()  # type: ignore[attr-defined]


def weights(where: Path) -> bytes:
    return (where / folder.MODEL).read_bytes()


def start(**flags: Any) -> Any:
    return digits_config(**{"steps": STEPS, "seed": 7, "checkpoint_every": "4", **flags})


@pytest.mark.privacy
@pytest.mark.parametrize("optimizer", rest_long(reversed(OPTIMIZER_NAMES)))
def test_a_run_stopped_anywhere_ends_and_counts_each_step_once(optimizer: str) -> None:
    settings = {"optimizer": optimizer, "physical_batch": 50, "kappa": "tracked", "phi": "tracked"}
    whole = finish(run.train(start(**settings)))
    stopped = finish(run.train(start(**settings), after(1)))
    for done in (2, 4, 5, 12, 13):  # a checkpoint every 4 steps, an epoch every 12
        stopped = finish(run.resume(stopped.folder, {}, after(done - counted(stopped))))
        assert stopped.state == "interrupted"
        assert counted(stopped) == done
    last = finish(run.resume(stopped.folder, {}))
    assert last.state == "finished"
    assert counted(last) == STEPS
    assert last.report["privacy"]["epsilon"] == whole.report["privacy"]["epsilon"]
    assert last.report["hyperparameters"]["steps"] == STEPS


def counted(finished: Finished) -> int:
    steps: int = finished.report["privacy"]["steps"]
    return steps


@pytest.mark.privacy
def test_a_killed_run_continues_from_its_state_and_counts_the_lost_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = finish(run.train(start()))
    kill_in(10, start(out="killed"), monkeypatch)
    saved = checkpoint.newest(Path("killed"))
    assert saved.step == 8
    started, *_, last = run.resume(Path("killed"), {})
    assert isinstance(started, Started)
    assert isinstance(last, Finished)
    before, after = (each.report["privacy"]["epsilon"] for each in (whole, last))
    assert before < after
    [note] = [note for note in started.notes if "counted twice" in note]
    said = f"{format_epsilon(before)} -> {format_epsilon(after)}"
    assert note == f"2 of 21 steps are counted twice: epsilon {said}."
    assert [event["steps"] for event in last.report["privacy"]["events"]] == [10, 13]
    assert last.report["hyperparameters"]["steps"] == STEPS


def kill_in(step: int, plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a run in a step, reserving none ahead."""
    take = Trainer.step

    def taken(trainer: Trainer) -> None:
        if trainer.state.step == step - 1:
            raise Killed
        take(trainer)

    monkeypatch.setattr(ledger, "SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", taken)
        with pytest.raises(Killed):
            finish(run.train(plan))


@pytest.mark.privacy
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_run_for_an_epsilon_keeps_to_it(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends earlier by the steps that were lost, or by the epoch that was begun."""
    settings = {"sampler": sampler, "epsilon": 1.0, "steps": 36, "batch_size": 128, "seed": None}
    kill_in(10, start(out="run", **settings), monkeypatch)
    started, *_, last = run.resume(Path("run"), {})
    assert isinstance(started, Started)
    assert isinstance(last, Finished)
    assert last.state == "finished"
    spent = last.report["privacy"]
    assert 0.9 < spent["epsilon"] <= spent["epsilon_planned"] <= 1
    steps = 34 if sampler == "poisson" else 8 + 24
    assert last.report["hyperparameters"]["steps"] == steps
    what = "2 of 36 steps are" if sampler == "poisson" else "1 of 3 epochs is"
    end = f"training ends after step {steps}, to stay within the budget."
    assert f"{what} counted twice: {end}" in started.notes
    with pytest.raises(InputError, match="is finished"):
        finish(run.resume(Path("run"), {}))


@pytest.mark.privacy
def test_a_run_for_an_epsilon_is_finished_in_a_study_after_a_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = {"dataset": "digits", "optimizers": "dp-sgd", "epsilon": "1", "steps": "36"}
    grid = plan({**flags, "batch_size": "128", "seeds": "1", "device": "cpu"}, None, Path("study"))
    [planned] = grid.runs
    kill_in(10, planned.plan, monkeypatch)
    assert finished_report(planned) is None
    finish(run.resume(planned.folder, {}))
    report = finished_report(planned)
    assert report is not None
    assert 0 < report["hyperparameters"]["steps"] < 36
    assert collect(grid, {}).epsilon <= 1


@pytest.mark.privacy
def test_a_run_whose_budget_is_spent_ends_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    kill_in(STEPS, start(out="run", epsilon=1.0, seed=None), monkeypatch)
    (Path("run") / checkpoint.FOLDER / ledger.FILE).unlink()  # all steps count
    last = finish(run.resume(Path("run"), {}))
    assert last.state == "finished"
    assert last.report["hyperparameters"]["steps"] == 20
    assert last.report["privacy"]["epsilon"] <= 1
    assert weights(last.folder)


@pytest.mark.privacy
@pytest.mark.parametrize(
    "sampler", [name for name, sampling in SAMPLERS.items() if sampling.once_an_epoch]
)
def test_a_record_has_one_place_in_each_epoch_that_is_counted(
    sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume begins an epoch of its own, and what was left of the last is not taken."""
    draws = Draws(monkeypatch)
    finish(run.train(start(out="run", sampler=sampler, steps=36), after(15)))
    begun = len(draws.batches)
    last = finish(run.resume(Path("run"), {}))
    assert begun == 15
    parts = [draws.batches[first : first + 12] for first in (0, 12, 15, 27)]
    del parts[1][3:]
    for epoch in parts:
        places = Counter(record for batch in epoch for record in batch)
        assert set(places.values()) == {1}
    events = [TrainingEvent(**event) for event in last.report["privacy"]["events"]]
    assert sum(event.compositions for event in events) == 4


@pytest.mark.privacy
def test_no_key_is_on_disk_or_used_in_two_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are found in any form that a file could have them in."""
    made: list[Keys] = []

    def make(*args: Any, **options: Any) -> Keys:
        made.append(make_keys(*args, **options))
        return made[-1]

    monkeypatch.setattr("dpmac_cli.runs.train.make_keys", make)
    events = run.train(start(out="run", seed=None, cover_scores=True))
    for event in events:
        if isinstance(event, Update):
            check_no_key(made)
        if isinstance(event, Update) and event.event.step >= 10:
            break
    events.close()  # type: ignore[attr-defined]
    finish(run.resume(Path("run"), {}, after(3)))
    finish(run.resume(Path("run"), {}))
    finish(run.fork(Path("run"), {"steps": "24", "out": "forked"}))
    check_no_key(made)
    assert len(made) == 4
    for name in STREAMS:  # the seed of initial weights, which no record changes, is kept
        if name != "init":
            assert len({getattr(keys, name) for keys in made}) == 4, name


def check_no_key(made: Sequence[Keys]) -> None:
    secret = [getattr(keys, name) for keys in made for name in STREAMS if name != "init"]
    forms = [
        form for key in secret for form in (key, key.hex().encode(), base64.b64encode(key)[:42])
    ]
    for path in Path().rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(form in content for form in forms), path


@pytest.mark.privacy
def test_a_seed_gives_each_session_other_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = Draws(monkeypatch)
    for out in ("one", "other"):
        finish(run.train(start(out=out), after(6)))
        finish(run.resume(Path(out), {"seed": 7}))
    noise, batches = draws.noise, draws.batches
    first, second = batches[:STEPS], batches[STEPS:]
    assert first == second  # the same sessions of the same seed
    assert len(set(first)) == STEPS
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(noise[:STEPS], 2))
    assert weights(Path("one")) == weights(Path("other"))


class Draws:
    """Every draw that training makes, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noise: list[Tensor] = []
        self.batches: list[tuple[int, ...]] = []
        at = Noise.at

        def recorded_at(noise: Noise, step: int) -> Any:
            normals = at(noise, step)
            standard_normal = normals.standard_normal

            def recorded(like: Tensor, at_once: int | None = None) -> Tensor:
                self.noise.append(standard_normal(like, at_once))
                return self.noise[-1].clone()

            normals.standard_normal = recorded  # type: ignore[method-assign]
            return normals

        def recording(draw: Callable[..., Any]) -> Callable[..., Any]:
            def drawn(sampler: Any, step: int) -> Any:
                batch = draw(sampler, step)
                self.batches.append(tuple(batch))
                return batch

            return drawn

        monkeypatch.setattr(Noise, "at", recorded_at)
        monkeypatch.setattr(KeyedSampler, "draw", recording(KeyedSampler.draw))


CHANGES: tuple[Mapping[str, str], ...] = (
    {"lr": "0.01"},
    {"steps": "30"},
    {"sigma": "7"},
    {"physical_batch": "64"},
)


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("sampler", "change"),
    [
        *(("poisson", change) for change in CHANGES),
        *((sampler, CHANGES[0]) for sampler in SAMPLERS if sampler != "poisson"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_fork_reuses_no_draw(
    sampler: str, change: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = Draws(monkeypatch)
    finish(run.train(start(out="run", sampler=sampler)))
    kept = Path("run/checkpoint/step-000000020.safetensors")
    (Path("run/checkpoint/step-000000021.safetensors")).unlink()
    assert kept.exists()
    before = len(draws.noise)
    finished = finish(run.fork(Path("run"), {**change, "out": "forked"}))
    assert len(draws.noise) == len(draws.batches) > before == STEPS
    for drawn in draws.noise[before:]:
        assert not any(torch.equal(drawn, old) for old in draws.noise[:before])
    assert not set(draws.batches[before:]) & set(draws.batches[:before])
    # Step 21 was shown by the run, and taken again by its fork.
    events = finished.report["privacy"]["events"]
    after = finished.report["hyperparameters"]["steps"] - 20
    assert [event["steps"] for event in events] == [21, after]
    assert finished.report["privacy"]["steps"] == 21 + after


@pytest.mark.privacy
def test_epsilon_covers_every_ancestor_of_a_fork() -> None:
    first = finish(run.train(start(out="run")))
    before = contents(first.folder)
    second = finish(run.fork(first.folder, {"steps": "40", "sigma": "8", "out": "second"}))
    third = finish(run.fork(second.folder, {"steps": "50", "out": "third"}))
    events = (
        TrainingEvent(RATE, SIGMA, 21, "poisson", 12),
        TrainingEvent(RATE, 8.0, 19, "poisson", 12),
        TrainingEvent(RATE, 8.0, 10, "poisson", 12),
    )
    price = third.report["privacy"]
    assert [TrainingEvent(**event) for event in price["events"]] == list(events)
    assert price["epsilon"] == total_epsilon(events, 1e-5) > second.report["privacy"]["epsilon"]
    lines = files.read_lines(third.folder / folder.METRICS)
    assert lines[-1]["epsilon"] == price["epsilon"]
    assert "noise multiplier 6 and 29" in price["statement"]
    assert contents(first.folder) == before
    assert {first.folder, second.folder, third.folder} == set(map(Path, ("run", "second", "third")))


@pytest.mark.privacy
@pytest.mark.parametrize(
    "sampler", [name for name, sampling in SAMPLERS.items() if sampling.once_an_epoch]
)
def test_forks_pay_for_the_epochs_that_each_began(sampler: str) -> None:
    """Left and begun in the middle of one, where an epoch has 12 steps."""
    first = finish(run.train(start(out="run", sampler=sampler), after(15)))
    two = TrainingEvent(RATE, SIGMA, 24, sampler, 12)
    assert first.report["privacy"]["epsilon"] == total_epsilon((two,), 1e-5)
    last = finish(run.fork(first.folder, {"lr": "0.01", "out": "forked"}))
    events = [
        TrainingEvent(RATE, SIGMA, 15, sampler, 12),
        TrainingEvent(RATE, SIGMA, 6, sampler, 12),
    ]
    price = last.report["privacy"]
    assert [TrainingEvent(**event) for event in price["events"]] == events
    # Two and one; a run that was never left would pay for two.
    assert price["epsilon"] == total_epsilon((replace(two, steps=36),), 1e-5)
    lines = files.read_lines(last.folder / folder.METRICS)
    assert lines[-1]["epsilon"] == price["epsilon"]


@pytest.mark.privacy
def test_steps_shown_after_the_checkpoint_are_paid_for_even_after_two_kills() -> None:
    config = start(out="run", epochs=4, steps=None, checkpoint_every="10")
    # The first epoch's line, of step 12, is shown; the checkpoint is of step 10.
    kill(run.train(config), lambda e: isinstance(e, Update) and isinstance(e.event, Evaluated))
    where = Path("run")
    assert [line["step"] for line in files.read_lines(where / folder.METRICS)] == [12]
    kill(run.resume(where, {}), lambda e: isinstance(e, Started))
    finished = finish(run.fork(where, {"lr": "0.002", "out": "forked"}))
    assert finished.report["privacy"]["events"][0]["steps"] >= 12


@pytest.mark.privacy
def test_that_a_run_diverged_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told after step 12, past the last checkpoint, and is computed from the records."""

    def check_finite(trainer: Trainer) -> None:
        if trainer.state.step >= 12:
            raise DivergedError(trainer.state.step)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "check_finite", check_finite)
        with pytest.raises(DivergedError, match="after step 12"):
            finish(run.train(start(out="run", checkpoint_every="10")))
    finished = finish(run.fork(Path("run"), {"lr": "0.0001", "out": "forked"}))
    assert [event["steps"] for event in finished.report["privacy"]["events"]] == [12, STEPS - 10]


@pytest.mark.privacy
def test_no_checkpoint_of_an_earlier_session_stays() -> None:
    """Without the ledger, going back to it would forget the steps of this session."""
    first = finish(run.train(start(out="run"), after(6)))
    kill(run.resume(first.folder, {}), lambda event: isinstance(event, Started))
    (left,) = (first.folder / checkpoint.FOLDER).glob("step-*")
    assert len(checkpoint.newest(first.folder).record["spent"]["earlier"]) == 1
    left.write_bytes(b"")
    with pytest.raises(InputError, match="cannot be resumed"):
        finish(run.resume(first.folder, {}))


@pytest.mark.privacy
@pytest.mark.parametrize("lost", [False, True], ids=["ledger", "no ledger"])
def test_a_fork_from_an_older_checkpoint_is_charged_what_its_parent_began(lost: bool) -> None:
    """Its parent's newest checkpoint is damaged, and the ledger ahead of the one before."""
    first = finish(run.train(start(out="run"), after(15)))
    kept = first.folder / checkpoint.FOLDER
    (kept / "step-000000015.safetensors").write_bytes(b"")
    if lost:
        (kept / ledger.FILE).unlink()
    before = contents(first.folder)
    started, *_, last = run.fork(first.folder, {"lr": "0.02", "out": "forked"})
    assert isinstance(started, Started)
    assert isinstance(last, Finished)
    assert started.done == 12
    assert any("step-000000015.safetensors" in note for note in started.notes)
    assert any(ledger.FILE in note for note in started.notes) == lost
    assert [event["steps"] for event in last.report["privacy"]["events"]] == [
        STEPS if lost else 15,
        STEPS - 12,
    ]
    assert contents(first.folder) == before


@pytest.mark.privacy
@pytest.mark.parametrize("out", ["run", "../{here}/run", "link"])
def test_a_fork_never_replaces_its_parent(out: str, tmp_path: Path) -> None:
    first = finish(run.train(start(out="run"), after(6)))
    Path("link").symlink_to("run")
    before = contents(first.folder)
    with pytest.raises(InputError, match=r"is the run to fork\. Use a new folder"):
        finish(run.fork(first.folder, {"out": out.format(here=tmp_path.name), "force": True}))
    assert contents(first.folder) == before


@pytest.mark.privacy
def test_a_fork_killed_at_any_write_is_charged_for_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever of it can be resumed or forked in turn."""
    first = finish(run.train(start(out="run"), after(6)))
    before = contents(first.folder)
    resumed = 0
    for left in range(12):
        ticks, replace = iter(range(left)), os.replace

        def killing(*args: Any) -> None:
            if next(ticks, None) is None:  # noqa: B023
                raise Killed
            replace(*args)  # noqa: B023

        out = f"forked-{left}"
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killing)
            with pytest.raises(Killed):
                finish(run.fork(first.folder, {"lr": "0.02", "out": out}))
        assert contents(first.folder) == before
        try:
            last = finish(run.resume(out, {}))
        except InputError:
            assert not any(Path(out, checkpoint.FOLDER).glob("step-*"))
            continue
        resumed += 1
        events = last.report["privacy"]["events"]
        kept, *further = [event["steps"] for event in events]
        assert kept == 6
        assert STEPS - 6 <= sum(further) < STEPS  # steps may have begun before the kill
    assert resumed > 4


@pytest.mark.privacy
@pytest.mark.parametrize("change", [{"isolate": True}, {"seed": 0}, {"ema": 0.9}])
def test_a_fork_that_begins_otherwise_is_refused(change: Mapping[str, Any]) -> None:
    first = finish(run.train(start(out="run"), after(3)))
    with pytest.raises(InputError, match=f"--{next(iter(change))} cannot change in a fork"):
        finish(run.fork(first.folder, {**change, "out": "forked"}))


def test_a_run_that_spent_its_budget_is_finished() -> None:
    first = finish(run.train(start(out="run", max_epsilon=0.15)))
    assert first.state == "budget-spent"
    with pytest.raises(InputError, match="is finished"):
        finish(run.resume(first.folder, {}))


@pytest.mark.privacy
def test_a_budget_covers_what_a_fork_inherits() -> None:
    first = finish(run.train(start(out="run")))
    spent = first.report["privacy"]["epsilon"]
    budget = round(1.2 * spent, 4)
    flags = {"steps": "60", "max_epsilon": str(budget), "out": "forked"}
    last = finish(run.fork(first.folder, flags))
    assert last.state == "budget-spent"
    assert spent < last.report["privacy"]["epsilon"] <= budget


@pytest.mark.privacy
def test_that_memory_ran_out_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says something about the size of a batch."""
    calls, of = iter(range(1, 10**9)), ClippedChunkSum.of

    def scarce(clipped_sum: ClippedChunkSum, x: Tensor, *args: Any) -> None:
        if next(calls) > 10 and len(x) > 50:
            raise MemoryError
        of(clipped_sum, x, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ClippedChunkSum, "of", scarce)
        events = run.train(start(out="run", physical_batch=100, checkpoint_every="1"))
        reduced = next(event for event in events if isinstance(event, Reduced))
        kill(events, lambda event: isinstance(event, Update))
    assert 1 < reduced.step < 20
    state = checkpoint.newest(Path("run")).record["state"]
    assert state.keys() == {"step", "kappa_star"}
    finished = finish(run.resume(Path("run"), {}))
    assert finished.report["machine"]["physical_batch"] == 100


def test_a_finished_run_has_nothing_to_go_on_with() -> None:
    first = finish(run.train(start(out="run")))
    before = weights(first.folder)
    with pytest.raises(InputError, match=r"finished: it took 21 of 21 steps.*--fork run --out NEW"):
        finish(run.resume(first.folder, {}))
    assert weights(first.folder) == before


def test_fewer_steps_than_were_taken_are_refused() -> None:
    first = finish(run.train(start(out="run"), after(15)))
    words = r"has already taken 15 steps, but 2 are requested.*--steps .above 15"
    with pytest.raises(InputError, match=words):
        finish(run.fork(first.folder, {"steps": "2", "out": "forked"}))


@pytest.mark.parametrize(
    "change",
    [{"optimizer": "dp-sgd"}, {"sampler": "random-allocation"}, {"epsilon": "3"}, {"no_dp": True}],
    ids=lambda change: next(iter(change)),
)
def test_what_makes_another_run_cannot_be_changed(change: Mapping[str, Any]) -> None:
    first = finish(run.train(start(out="run"), after(3)))
    with pytest.raises(InputError, match="cannot change in a fork"):
        finish(run.fork(first.folder, {**change, "out": "forked"}))
    assert not Path("forked").exists()


@pytest.mark.privacy
@pytest.mark.parametrize(
    "change",
    [*CHANGES, {"epochs": "9"}, {"max_epsilon": "9"}, {"out": "other"}],
    ids=lambda change: next(iter(change)),
)
def test_a_resume_that_changes_anything_is_refused(change: Mapping[str, str]) -> None:
    """A fork has a folder of its own for that."""
    first = finish(run.train(start(out="run"), after(3)))
    before = contents(Path("run"))
    with pytest.raises(InputError, match=r"would change the run.*--fork run --out NEW"):
        finish(run.resume(first.folder, change))
    assert contents(Path("run")) == before


def test_repeating_what_the_run_is_changes_nothing() -> None:
    first = finish(run.train(start(out="run"), after(3)))
    same = {"dataset": "digits", "optimizer": "dp-macadam", "sampler": "poisson"}
    last = finish(run.resume(first.folder, same))
    assert counted(last) == STEPS


def test_the_last_two_checkpoints_are_kept() -> None:
    first = finish(run.train(start(out="run")))
    where = first.folder / checkpoint.FOLDER
    assert {path.name for path in where.iterdir()} == {
        ledger.FILE,
        "step-000000020.safetensors",
        "step-000000021.safetensors",
    }


@pytest.mark.parametrize(
    ("steps", "seconds", "cost", "due"),
    [
        (20, 1.0, 0.01, True),
        (20, 1.0, 0.1, False),  # a tenth of the time would go to checkpoints
        (19, 1.0, 0.01, False),
        (19, 60.0, 9.0, True),
    ],
)
def test_a_checkpoint_is_due_every_minute_and_every_fiftieth_of_the_steps(
    steps: int, seconds: float, cost: float, due: bool
) -> None:
    interval = digits_config(steps=1000).checkpoints
    assert interval.due(steps, seconds, cost) == due


@pytest.mark.parametrize("damage", rest_long(["flip", "cut", "empty", "text"]))
def test_the_newest_whole_checkpoint_serves(damage: str) -> None:
    first = finish(run.train(start(out="run"), after(6)))
    newest = first.folder / checkpoint.FOLDER / "step-000000006.safetensors"
    content = bytearray(newest.read_bytes())
    content[-50] ^= 1
    newest.write_bytes(
        {"cut": bytes(content[:-9]), "flip": bytes(content), "empty": b"", "text": b"x" * 99}[
            damage
        ]
    )
    assert checkpoint.newest(first.folder).record["state"]["step"] == 4
    assert counted(finish(run.resume(first.folder, {}))) == STEPS + 2


def test_no_whole_checkpoint_is_named() -> None:
    first = finish(run.train(start(out="run"), after(6)))
    for path in (first.folder / checkpoint.FOLDER).glob("step-*"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"step-000000006.*step-000000004"):
        finish(run.resume(first.folder, {}))
    checkpoint.discard(first.folder)
    with pytest.raises(InputError, match=r"contains no checkpoint.*--force"):
        finish(run.resume(first.folder, {}))


def test_a_run_killed_before_its_first_step_costs_nothing() -> None:
    kill(run.train(start(out="run")), lambda event: True)
    started, *_, last = run.resume(Path("run"), {})
    assert isinstance(started, Started)
    assert not any("counted twice" in note for note in started.notes)
    assert isinstance(last, Finished)
    assert [event["steps"] for event in last.report["privacy"]["events"]] == [STEPS]


def test_a_checkpoint_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", 5)
        finish(run.train(start(out="run"), after(3)))
    with pytest.raises(InputError, match=r"another version of dpmac, format 5.*Start a new one"):
        finish(run.resume(Path("run"), {}))


@pytest.mark.privacy
def test_a_folder_in_use_is_refused() -> None:
    """Of two sessions at a time, neither would count the other."""
    events = run.train(start(out="run"))
    next(events)
    with pytest.raises(InputError, match="in use by another dpmac process"):
        finish(run.resume(Path("run"), {}))
    with pytest.raises(InputError, match="in use by another dpmac process"):
        finish(run.train(start(out="run", force=True)))


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a run folder: it contains no config\.yaml"):
        finish(run.resume(tmp_path, {}))


def test_the_record_is_json() -> None:
    first = finish(run.train(start(out="run"), after(3)))
    saved = checkpoint.newest(first.folder)
    assert json.loads(json.dumps(saved.record)) == saved.record
    assert saved.tensors.keys() >= {"theta", "m", "v", "centre", "inverse", "factor", "s"}


@pytest.mark.parametrize("when", [12, 21], ids=["an epoch's end", "the last step"])
@pytest.mark.parametrize("where", rest_long(["before", "after"]))
def test_a_run_killed_about_a_checkpoint_keeps_every_line(
    when: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved once it is scored: saved before, it would go on without its score."""
    settings = {"checkpoint_every": "3"}
    save = checkpoint.save

    def killed(run: Path, step: int, *rest: Any) -> Path:
        if step == when and where == "before":
            raise Killed
        path = save(run, step, *rest)
        if step == when:
            raise Killed
        return path

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", killed)
        with pytest.raises(Killed):
            finish(run.train(start(out="killed", **settings)))
    last = finish(run.resume(Path("killed"), {}))
    lines = files.read_lines(last.folder / folder.METRICS)
    assert [line["step"] for line in lines] == [12, 21]
    assert lines[-1]["epsilon"] == last.report["privacy"]["epsilon"]


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["discard", "save"])
def test_a_resume_that_is_killed_as_it_begins_forgets_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = finish(run.train(start(out="run"), after(6)))

    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, name, killed)
        with pytest.raises(Killed):
            finish(run.resume(first.folder, {}))
    last = finish(run.resume(first.folder, {}))
    assert [event["steps"] for event in last.report["privacy"]["events"] if event["steps"]] == [
        6,
        15,
    ]
    assert all(folder.vouched(last.folder, published) for published in folder.PUBLISHED)


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["discard", "save", "clear"])
def test_a_fork_killed_as_it_begins_leaves_its_parent_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = finish(run.train(start(out="run"), after(6)))
    before = contents(first.folder)

    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folder if name == "clear" else checkpoint, name, killed)
        with pytest.raises(Killed):
            finish(run.fork(first.folder, {"lr": "0.02", "out": "forked"}))
    assert contents(first.folder) == before


@pytest.mark.privacy
def test_a_fork_of_an_interrupted_run_inherits_its_settings() -> None:
    first = finish(run.train(start(out="run"), after(6)))
    last = finish(run.fork(first.folder, {"lr": "0.02", "out": "forked"}))
    assert [event["steps"] for event in last.report["privacy"]["events"]] == [6, 15]
    assert last.report["hyperparameters"]["lr"] == 0.02
    assert "lr: 0.02\n" in (last.folder / folder.CONFIG).read_text()
    lines = files.read_lines(last.folder / folder.METRICS)
    assert [line["step"] for line in lines] == [6, 12, 21]


@pytest.mark.privacy
def test_steps_ahead_of_a_run_that_is_stopped_again_are_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step 12 was shown; the run is killed, resumed from step 8, and stopped at step 9."""
    monkeypatch.setattr(ledger, "SECONDS", 0.0)  # no step is reserved ahead
    config = start(out="run", checkpoint_every="8")
    kill(run.train(config), lambda e: isinstance(e, Update) and isinstance(e.event, Evaluated))
    stopped = finish(run.resume(Path("run"), {}, after(1)))
    lines = files.read_lines(stopped.folder / folder.METRICS)
    assert [line["step"] for line in lines] == [9]
    assert [event["steps"] for event in stopped.report["privacy"]["events"]] == [12, 1]
    assert lines[0]["epsilon"] == stopped.report["privacy"]["epsilon"]
    last = finish(run.fork(stopped.folder, {"lr": "0.02", "out": "forked"}))
    assert last.report["privacy"]["events"][0]["steps"] == 12
