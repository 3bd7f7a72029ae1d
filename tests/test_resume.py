"""Resumed runs draw with new keys, and count everything that was begun before."""

import base64
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from dpmac_cli import resume
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.accounting.places import overflow_of
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.errors import InputError
from dpmac_cli.models.weights import unpacked
from dpmac_cli.randomness.keystream import STREAMS, Keys, make_keys
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import finish, resume_folder, train_plan
from dpmac_cli.runs import checkpoint, folder, ledger
from dpmac_cli.runs.ledger import done
from dpmac_cli.runs.prepare import PreparedRun
from dpmac_cli.runs.session import Started, Update
from dpmac_cli.runs.train import _check_same, _lost
from dpmac_cli.runs.trainer import Trainer
from tests.digits_runs import RATE, SIGMA, after, contents, digits_config, read_lines, report_of
from tests.helpers import tiny_data, tiny_model
from tests.tiers import rest_long
from tests.typed import dpmac

STEPS = 21
CHECKPOINT, LEDGER = (Path("run/checkpoint", name) for name in ("state.safetensors", ledger.FILE))


class Killed(BaseException):
    """In the place of SIGKILL: nothing handles it, and nothing is written after it."""


def weights(where: Path) -> bytes:
    return (where / folder.MODEL).read_bytes()


def start(**flags: Any) -> Any:
    return digits_config(**{"steps": STEPS, "seed": 7, "checkpoint_every": "4", **flags})


@pytest.mark.promise("resume")
def test_a_killed_run_continues_from_its_state_and_counts_the_lost_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = finish(train_plan(start()))
    kill_in(10, start(out="killed"), monkeypatch)
    saved = checkpoint.read(Path("killed"))
    assert saved.step == 8
    started, *_, last = resume_folder(Path("killed"), {})
    assert isinstance(started, Started)
    assert isinstance(last, Run)
    before, after = (each.report["epsilon"] for each in (whole, last))
    assert before < after
    [note] = [note for note in started.notes if "counted twice" in note]
    said = f"{format_epsilon(before)} -> {format_epsilon(after)}"
    assert note == f"2 of 21 steps are counted twice: epsilon {said}."
    assert [event["steps"] for event in last.report["events"]] == [10, 13]
    assert last.report["network"]["steps"] == STEPS


def test_only_steps_of_the_last_part_are_counted_twice() -> None:
    plan = start(out="run", steps=20)
    event = plan.event.first
    was = Account(earlier=(done(event(5)),), event=event(15), base=5, begun=9)
    now = Account(earlier=was.past, event=event(13), base=7, begun=7)
    [note] = _lost(plan, was, now)
    assert note.startswith("2 of 20 steps are counted twice")


@pytest.mark.promise("resume")
def test_a_run_is_not_resumed_with_other_public_weights() -> None:
    model = tiny_model()
    first, second = (
        PreparedRun(model=model, trained=model, data=tiny_data(), pretrained=sha256).compared
        for sha256 in ("a", "b")
    )
    with pytest.raises(InputError, match="The public weights are not those"):
        _check_same(second, first)


@pytest.mark.promise("faults")
def test_a_checkpoint_whose_weights_were_altered_is_not_resumed() -> None:
    finish(train_plan(start(out="run", steps=2), after(1)))
    path = checkpoint.path_in(Path("run"))
    tensors, header = unpacked(path.read_bytes())
    path.write_bytes(save({**tensors, "theta": tensors["theta"] + 1}, header))
    with pytest.raises(InputError, match="is damaged"):
        checkpoint.read(Path("run"))


def kill_in(step: int, plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a run in a step, reserving none ahead."""
    draw = Trainer._draw

    def drawn(trainer: Trainer) -> Any:
        if trainer.state.step == step - 1:
            raise Killed
        return draw(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_draw", drawn)
        with pytest.raises(Killed):
            finish(train_plan(plan))


@pytest.mark.promise("resume")
@pytest.mark.parametrize("sampler", rest_long(["poisson", "random-allocation"]))
def test_a_run_for_an_epsilon_keeps_to_it(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends earlier by the steps that were lost, or by the epoch that was begun."""
    settings = {"sampler": sampler, "epsilon": 1.0, "steps": 36, "batch_size": 128, "seed": None}
    if sampler == "poisson":
        settings["batch_size"] = 1437  # cheap to price
    kill_in(10, start(out="run", **settings), monkeypatch)
    started, *_, last = resume_folder(Path("run"), {})
    assert isinstance(started, Started)
    assert isinstance(last, Run)
    assert last.state == "finished"
    assert 0.9 < last.report["epsilon"] <= 1
    steps = 34 if sampler == "poisson" else 8 + 24
    assert last.report["network"]["steps"] == steps
    what = "2 of 36 steps are" if sampler == "poisson" else "1 of 3 epochs is"
    end = f"training ends after step {steps}, to stay within the budget."
    assert f"{what} counted twice: {end}" in started.notes
    calibrated = "the epsilon of 1 that the run was calibrated for"
    assert f"{calibrated} allows {steps} of 36 steps." in started.notes
    assert not any("max-epsilon" in note for note in started.notes)
    with pytest.raises(InputError, match="is finished"):
        resume(Path("run"), {})


@pytest.mark.promise("resume")
@pytest.mark.parametrize("out", ["run", "longer"])
def test_a_resumed_run_has_the_noise_that_it_began_with(
    out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never calibrated again: another version of an accountant may find other noise."""
    plan = start(out="run", model="linear", epsilon=5.0, steps=36, batch_size=1437, seed=None)
    sigma = plan.event.noise_multiplier
    finish(train_plan(plan, after(2)))
    asked = Path("run", folder.CONFIG).read_text()
    assert "epsilon: 5.0\n" in asked
    assert f"# Noise multiplier sigma: {sigma!r}\n" in asked
    monkeypatch.setattr("dpmac_cli.config.plan.calibrate_noise", lambda *_, **__: 100.0)
    last = resume(Path("run"), {} if out == "run" else {"out": out, "steps": "40"})
    *events, histogram = last.report["events"]
    assert [event["noise_multiplier"] for event in events] == [sigma, sigma]
    assert histogram["histogram"]
    kept = Path(out, folder.CONFIG).read_text()
    assert kept == asked if out == "run" else f"sigma: {sigma!r}\n" in kept


@pytest.mark.promise("resume")
@pytest.mark.parametrize("most", ["", "5"])
def test_a_resumed_run_names_the_budget_that_ends_it(
    most: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps to its --epsilon. A larger --max-epsilon ends nothing, and one not given neither."""
    settings = {"epsilon": 1.0, "steps": 36, "batch_size": 1437, "seed": None, "out": "run"}
    kill_in(10, start(**settings, **({"max_epsilon": most} if most else {})), monkeypatch)
    result = dpmac("train", "--resume", "run")
    assert result.exit_code == 0, result.output
    assert "note: the epsilon of 1 that the run was calibrated for allows 34 of 36" in result.stdout
    assert "max-epsilon" not in result.output
    assert report_of("run")["state"] == "finished"


@pytest.mark.promise("resume")
@pytest.mark.parametrize(
    "sampler", [name for name, sampling in SAMPLERS.items() if sampling.once_an_epoch]
)
def test_a_record_has_one_place_in_each_epoch_that_is_counted(
    sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume begins an epoch of its own, and what was left of the last is not taken."""
    draws = Draws(monkeypatch)
    finish(train_plan(start(out="run", sampler=sampler, steps=36), after(15)))
    begun = len(draws.batches)
    last = resume(Path("run"), {})
    assert begun == 15
    parts = [draws.batches[first : first + 12] for first in (0, 12, 15, 27)]
    del parts[1][3:]
    for epoch in parts:
        places = Counter(record for batch in epoch for record in batch)
        assert set(places.values()) == {1}
    events = [TrainingEvent(**event) for event in last.report["events"]]
    assert sum(event.compositions for event in events) == 4


@pytest.mark.promise("resume")
def test_no_key_is_on_disk_or_used_in_two_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are found in any form that a file could have them in."""
    made: list[Keys] = []

    def make(*args: Any, **options: Any) -> Keys:
        made.append(make_keys(*args, **options))
        return made[-1]

    monkeypatch.setattr("dpmac_cli.runs.train.make_keys", make)
    events = train_plan(start(out="run", seed=None, cover_scores=True))
    for event in events:
        if isinstance(event, Update):
            check_no_key(made)
        if isinstance(event, Update) and event.step >= 10:
            break
    events.close()  # type: ignore[attr-defined]
    finish(resume_folder(Path("run"), {}, after(3)))
    resume(Path("run"), {})
    resume(Path("run"), {"steps": "24", "out": "longer"})
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


@pytest.mark.promise("resume")
def test_a_seed_gives_each_session_other_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 9 is lost, and taken again."""
    draws = Draws(monkeypatch)
    for out in ("one", "other"):
        kill_in(10, start(out=out), monkeypatch)
        resume(Path(out), {"seed": 7})
    noise, batches, count = draws.noise, draws.batches, STEPS + 1
    first, second = batches[:count], batches[count:]
    assert first == second  # the same sessions of the same seed
    assert len(set(first)) == count
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(noise[:count], 2))
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

            def recorded(like: Tensor) -> Tensor:
                self.noise.append(standard_normal(like))
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


@pytest.mark.promise("resume")
@pytest.mark.parametrize("change", [{"lr": "0.01"}, {"steps": "30"}, {"physical_batch": "64"}])
def test_a_resume_into_another_folder_reuses_no_draw(
    change: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 21 was shown by the run, and is taken again in another folder from step 20."""
    draws, save = Draws(monkeypatch), checkpoint.save
    with monkeypatch.context() as patch:
        patch.setattr(
            checkpoint,
            "save",
            lambda run, state, ranges, record: (
                record["state"]["step"] < 21 and save(run, state, ranges, record)
            ),
        )
        finish(train_plan(start(out="run")))
    before = len(draws.noise)
    finished = resume(Path("run"), {**change, "out": "longer"})
    assert len(draws.noise) == len(draws.batches) > before == STEPS
    for drawn in draws.noise[before:]:
        assert not any(torch.equal(drawn, old) for old in draws.noise[:before])
    assert not set(draws.batches[before:]) & set(draws.batches[:before])
    after = finished.report["network"]["steps"] - 20
    assert [event["steps"] for event in finished.report["events"]] == [21, after]


@pytest.mark.promise("price")
def test_a_smaller_delta_covers_the_random_places_of_the_run_before() -> None:
    """Which had as few as 1e-5 allows."""
    first = finish(train_plan(start(out="run")))
    tiny = {"steps": "25", "delta": "1e-17", "out": "second"}
    assert resume(first.folder, tiny).report["epsilon"] is None
    alone = finish(train_plan(start(out="alone", delta="1e-17")))
    assert alone.report["epsilon"] < 100


@pytest.mark.promise("resume")
def test_epsilon_covers_every_ancestor_of_a_run_in_another_folder() -> None:
    first = finish(train_plan(start(out="run")))
    before = contents(first.folder)
    second = resume(first.folder, {"steps": "40", "sigma": "8", "out": "second"})
    third = resume(second.folder, {"steps": "50", "out": "third"})
    events = (
        TrainingEvent(RATE, SIGMA, 21, "poisson", 12, overflow=overflow_of(1e-5)),
        TrainingEvent(RATE, 8.0, 19, "poisson", 12, overflow=overflow_of(1e-5)),
        TrainingEvent(RATE, 8.0, 10, "poisson", 12, overflow=overflow_of(1e-5)),
    )
    price = third.report
    assert [TrainingEvent(**event) for event in price["events"]] == list(events)
    assert price["epsilon"] == total_epsilon(events, 1e-5) > second.report["epsilon"]
    lines = read_lines(third.folder / folder.METRICS)
    assert lines[-1]["epsilon"] == price["epsilon"]
    assert all(line["epsilon"] > second.report["epsilon"] for line in lines[-2:])
    assert "noise multiplier 6 and 29" in price["sentences"]["guarantee"]
    assert contents(first.folder) == before
    assert {first.folder, second.folder, third.folder} == set(map(Path, ("run", "second", "third")))


@pytest.mark.promise("resume")
def test_a_budget_covers_what_a_run_in_another_folder_inherits() -> None:
    first = finish(train_plan(start(out="run")))
    spent = first.report["epsilon"]
    budget = round(1.2 * spent, 4)
    flags = {"steps": "60", "max_epsilon": str(budget), "out": "longer"}
    last = resume(first.folder, flags)
    assert last.state == "budget-spent"
    assert spent < last.report["epsilon"] <= budget


@pytest.mark.promise("resume")
def test_that_memory_ran_out_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says something about the size of a batch."""
    calls, of = iter(range(1, 10**9)), ClippedChunkSum.of

    def scarce(clipped_sum: ClippedChunkSum, x: Tensor, *args: Any) -> None:
        if next(calls) > 10 and len(x) > 50:
            raise MemoryError
        of(clipped_sum, x, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ClippedChunkSum, "of", scarce)
        events = train_plan(start(out="run", physical_batch=100, checkpoint_every="1"))
        updates = (event for event in events if isinstance(event, Update))
        reduced = next(update for update in updates if update.chunk is not None)
        events.close()  # type: ignore[attr-defined]
    assert 1 < reduced.step < 20
    state = checkpoint.read(Path("run")).record.state.model_dump()
    assert state.keys() == {"step", "kappa_star"}
    finished = resume(Path("run"), {})
    assert finished.report["settings"]["physical_batch"] == 100


@pytest.mark.promise("resume")
def test_a_folder_in_use_is_refused() -> None:
    """Of two sessions at a time, neither would count the other."""
    events = train_plan(start(out="run"))
    next(events)
    with pytest.raises(InputError, match="in use by another dpmac process"):
        resume(Path("run"), {})
    with pytest.raises(InputError, match="in use by another dpmac process"):
        finish(train_plan(start(out="run", force=True)))


def damage(where: Path) -> None:
    where.write_bytes(where.read_bytes()[:-9])


def alter(ledger: Path) -> None:
    ledger.write_text(
        ledger.read_text().replace('"noise_multiplier": 6.0', '"noise_multiplier": 9.0')
    )


def age(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes().replace(b'"version\\": 9', b'"version\\": 8'))


REFUSALS: tuple[tuple[str, Callable[[], object], dict[str, Any], str], ...] = (
    (
        "here",
        lambda: None,
        {"lr": "0.01"},
        "--lr cannot change in a resume.*--resume run --out NEW",
    ),
    ("here", lambda: None, {"force": True}, "--force cannot change in a resume"),
    ("here", lambda: None, {"optimizer": "dp-sgd"}, "--optimizer cannot .*Start a new run"),
    ("elsewhere", lambda: None, {"optimizer": "dp-sgd"}, "--optimizer cannot change in a resume"),
    ("elsewhere", lambda: None, {"epsilon": 3}, "--epsilon cannot change in a resume"),
    ("elsewhere", lambda: None, {"isolate": True}, "--isolate cannot change in a resume"),
    ("elsewhere", lambda: None, {"seed": 0}, "--seed cannot change in a resume"),
    ("elsewhere", lambda: None, {"ema": 0.9}, "--ema cannot change in a resume"),
    ("elsewhere", lambda: None, {"unit": "clinic"}, "--unit cannot change in a resume"),
    ("elsewhere", lambda: None, {"test_fraction": 0.3}, "--test-fraction cannot change in a resu"),
    ("elsewhere", lambda: None, {"split_seed": 1}, "--split-seed cannot change in a resume"),
    (
        "elsewhere",
        lambda: None,
        {"steps": "2"},
        r"has already taken 21 steps, but 2.*--steps .above 21",
    ),
    (
        "elsewhere",
        lambda: None,
        {"out": "run", "force": True},
        "is the run to resume. Leave --out out",
    ),
    ("here", lambda: None, {}, r"finished: it took 21 of 21 steps.*--resume run --out NEW"),
    (
        "elsewhere",
        CHECKPOINT.unlink,
        {"steps": "30"},
        "no checkpoint.*--force and --out run",
    ),
    ("elsewhere", lambda: damage(CHECKPOINT), {"steps": "30"}, "state.safetensors is damaged"),
    ("here", lambda: age(CHECKPOINT), {}, r"another version of dpmac \(format 8.* reads 9\)"),
    ("elsewhere", LEDGER.unlink, {"steps": "30"}, "spent.json is missing or damaged"),
    ("elsewhere", lambda: alter(LEDGER), {"steps": "30"}, "spent.json is missing or damaged"),
    ("here", lambda: damage(LEDGER), {}, "spent.json is missing or damaged"),
    ("here", lambda: damage(Path("run/config.yaml")), {}, "config.yaml was edited or damaged"),
    ("here", lambda: shutil.rmtree("run"), {}, "is not a run folder: it contains no config"),
)


@pytest.mark.promise("resume")
def test_what_cannot_be_resumed_is_refused() -> None:
    finish(train_plan(start(out="kept")))
    for where, change, flags, said in REFUSALS:
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree("kept", "run")
        change()
        before = contents(Path("run")) if Path("run").exists() else None
        given = flags if where == "here" else {"out": "longer", **flags}
        with pytest.raises(InputError, match=said):
            resume(Path("run"), given)
        assert before is None or contents(Path("run")) == before, said
        assert not Path("longer").exists()
