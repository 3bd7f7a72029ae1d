"""Whatever is killed, lost or changed, a run states no less than what it has spent."""

import functools
import hashlib
import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpmac_cli import resume
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.errors import InputError
from dpmac_cli.release.report import events_of
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import RunEvent, finish, resume_folder, train_plan
from dpmac_cli.runs import checkpoint, folder, ledger, prepare, trainer
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.studies import results as compare
from dpmac_cli.studies.grid import Grid, plan
from dpmac_cli.studies.local import arguments, clear_the_way
from dpmac_cli.studies.results import collect
from dpmac_cli.training import private_scores
from dpmac_cli.training.private_scores import PrivateScore
from tests.digits_runs import RATE, after, digits, digits_config
from tests.tiers import rest_long

STEPS, EPOCH = 20, 12
RUN = Path("run")
ELSEWHERE = {"lr": "0.01", "out": "longer"}
SCORED = {"cover_scores": True}


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that is read once, and steps that are reserved one by one."""

    monkeypatch.setattr(prepare, "read_again", lambda _: digits())
    torch.set_num_threads(1)


class Killed(BaseException):
    """In the place of SIGKILL."""


class Truth:
    """What was really released, and a kill at a chosen release or write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released: dict[str, float] = {}
        self.scores: dict[str, float] = {}
        self.left: float = math.inf
        release, replace = GaussianMechanism.release, os.replace

        def released(mechanism: GaussianMechanism, *args: Any) -> Any:
            private = release(mechanism, *args)
            told = hashlib.sha256(private.value.numpy().tobytes()).hexdigest()
            self.released[told] = mechanism.noise_multiplier
            self.tick()
            return private

        def replaced(*args: Any) -> None:
            self.tick()
            replace(*args)
            self.tick()

        def scored(*args: Any) -> PrivateScore:
            score = private_scores.release_score(*args)
            self.scores[repr(score)] = args[1].noise_multiplier
            self.tick()
            return score

        monkeypatch.setattr(GaussianMechanism, "release", released)
        monkeypatch.setattr(trainer, "release_score", scored)
        monkeypatch.setattr(os, "replace", replaced)

    def tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    @contextmanager
    def killed_after(self, ticks: float) -> Iterator[None]:
        self.left = ticks
        try:
            yield
        finally:
            self.left = math.inf

    def epsilon(self) -> float:
        steps, scores = Counter(self.released.values()), Counter(self.scores.values())
        training = (TrainingEvent(RATE, s, n, "poisson", EPOCH) for s, n in steps.items())
        tested = (TrainingEvent(1.0, s, n) for s, n in scores.items())
        return max(total_epsilon(tuple(training), 1e-5), total_epsilon(tuple(tested), 1e-5))


def start(**flags: Any) -> Any:
    defaults = {"steps": STEPS, "seed": 7, "checkpoint_every": "4", "optimizer": "dp-adam"}
    return digits_config(**{**defaults, "out": "run", "model": "mlp-small", **flags})


def counted(report: Any, records: str = "training") -> int:
    events = report["events"]
    return sum(event["steps"] for event in events if event["records"] == records)


def has_checkpoint(where: Path) -> bool:
    return checkpoint.path_in(where).exists()


def lose(draw: random.Random, where: Path) -> bool:
    """Delete or cut short some files; whether any is."""
    kept = where / folder.CHECKPOINTS / ledger.FILE
    names = (folder.METRICS, folder.REPORT, folder.SUMS, folder.CONFIG)
    files = [checkpoint.path_in(where), kept, *(where / name for name in names)]
    lost = [file for file in files if file.exists() and draw.random() < 0.25]
    for file in lost:
        content = file.read_bytes()
        file.write_bytes(content[: draw.randrange(len(content) + 1)])
        if draw.random() < 0.5:
            file.unlink()
    return bool(lost)


@pytest.mark.promise("ledger")
@pytest.mark.parametrize(
    ("seed", "scores"),
    [
        *rest_long(((seed, {}) for seed in range(12)), short=2),
        *rest_long(((seed, SCORED) for seed in (*range(25, 31), *range(37, 41))), short=2),
    ],
)
def test_epsilon_is_never_below_what_was_spent(
    seed: int, scores: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, truth = random.Random(seed), Truth(monkeypatch)
    kills, lost, steps, where = 0, False, STEPS, RUN
    begin: Callable[[], Iterator[RunEvent]] = functools.partial(train_plan, start(**scores))
    for attempt in range(6):
        ended: Run | None = None
        try:
            with truth.killed_after(draw.choice([*draw.choices(range(60), k=3), math.inf])):
                ended = finish(begin())
        except Killed:
            kills += 1
        except InputError as failure:
            if "cannot be resumed" in str(failure):
                return
            if "edited or damaged" in str(failure):
                (where / folder.CONFIG).unlink()  # as the message says
        if ended is not None:
            assert ended.report["epsilon"] >= truth.epsilon() * (1 - 1e-9)
            if not lost:
                released = len(truth.released)
                assert released <= counted(ended.report) <= released + kills
                told = len(truth.scores)
                assert told <= counted(ended.report, "test") <= told + kills
        if has_checkpoint(Path(f"run-{attempt - 1}")):
            where = Path(f"run-{attempt - 1}")
        if not has_checkpoint(where):
            return
        lost |= draw.random() < 0.5 and lose(draw, where)
        longer = {"steps": str(steps := steps + 4)}
        change = draw.choice([{}, {}, {"lr": "0.01"}, {"sigma": draw.choice("78")}, longer])
        stop = after(draw.randrange(1, 9)) if draw.random() < 0.5 else lambda: False
        begin = functools.partial(resume_folder, where, {}, stop)
        if change:
            begin = functools.partial(
                resume_folder, where, {**change, "out": f"run-{attempt}"}, stop
            )


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Truth:
    """A run that was killed in its 15th step: after a checkpoint of step 12, and its line."""
    truth = Truth(monkeypatch)
    release = GaussianMechanism.release

    def released(*args: Any) -> Any:
        private = release(*args)
        if len(truth.released) == 15:
            raise Killed
        return private

    with monkeypatch.context() as patch:
        patch.setattr(GaussianMechanism, "release", released)
        with pytest.raises(Killed):
            finish(train_plan(start()))
    return truth


@pytest.mark.promise("ledger")
def test_a_resume_is_charged_what_was_begun_before(killed: Truth) -> None:
    """Also by a session that only the ledger knows, because it was killed before it was saved."""
    spent = ledger.read_ledger(RUN)
    assert spent is not None
    assert (checkpoint.read(RUN).step, spent.begun) == (12, 15)
    part = ledger.Ledger(run=RUN, earlier=spent.past, event=spent.event, base=12, begun=14)
    part.record()
    stopped = finish(resume_folder(RUN, {}, after(1)))
    assert stopped.report["network"]["steps"] == 13
    assert [event["steps"] for event in stopped.report["events"]] == [15, 2, 1]
    last = resume(RUN, ELSEWHERE)
    assert [event["steps"] for event in last.report["events"]][:3] == [15, 2, 1]
    assert last.report["epsilon"] >= killed.epsilon() * (1 - 1e-9)


@pytest.mark.promise("ledger")
@pytest.mark.usefixtures("killed")
def test_the_ledger_of_an_earlier_session_is_refused() -> None:
    """A backup puts it back, and it does not know the steps since."""
    file = RUN / folder.CHECKPOINTS / ledger.FILE
    before = file.read_bytes()
    finish(resume_folder(RUN, {}, after(1)))
    file.write_bytes(before)
    for continued in (resume_folder(RUN), resume_folder(RUN, ELSEWHERE)):
        with pytest.raises(InputError, match=r"spent\.json is missing or damaged"):
            finish(continued)


@pytest.mark.promise("ledger")
@pytest.mark.parametrize("steps", [99, 400])
def test_a_step_is_reserved_before_it_begins(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, ahead = Trainer._draw, []

    def begun(trainer: Trainer) -> Any:
        spent = ledger.read_ledger(RUN)
        assert spent is not None
        ahead.append(spent.begun - trainer.state.step)
        return draw(trainer)

    monkeypatch.setattr(Trainer, "_draw", begun)
    finish(train_plan(start(steps=steps), after(10)))
    assert len(ahead) == 10
    assert min(ahead) == 1
    assert max(ahead) == 1 + steps // 100
    spent = ledger.read_ledger(RUN)
    assert spent is not None
    assert spent.begun == 10  # what was not begun is given back


@pytest.fixture
def study(tmp_path: Path) -> Grid:
    """One run of a comparison."""
    settings = {"dataset": "digits", "optimizers": "dp-adam", "sigma": "6", "steps": str(STEPS)}
    return plan({**settings, "seeds": "1", "device": "cpu", "model": "mlp-small"}, None, tmp_path)


def attempt(study: Grid, monkeypatch: pytest.MonkeyPatch, kill: int) -> None:
    """Train a study's run from the start, in the place of one before, and kill it in a step."""
    steps, release = itertools.count(1), GaussianMechanism.release

    def released(*args: Any) -> Any:
        if next(steps) == kill:
            raise Killed
        return release(*args)

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(GaussianMechanism, "release", released)
        list(train_plan(study.runs[0].plan, data=digits()))


def counted_in(study: Grid) -> list[int]:
    """The steps of the events that a study is charged for."""
    [run] = study.runs
    events = list(compare._events(study.runs))
    assert collect(study, {}).epsilon == total_epsilon(tuple(events), 1e-5)
    assert all(event == replace(events[-1], steps=event.steps) for event in events)
    assert run.plan.event.steps == STEPS
    return [event.steps for event in events]


@pytest.mark.promise("ledger")
@pytest.mark.parametrize("lost", [(folder.STATE,), (folder.STATE, folder.LEDGER)])
def test_a_study_begins_no_run_again_of_which_steps_have_begun(
    lost: tuple[str, ...], study: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would forget them. A run is resumed, or has failed, and is charged in full."""
    [one] = study.runs
    attempt(study, monkeypatch, kill=15)
    assert counted_in(study) == [STEPS]
    assert "--resume" in arguments(one, "cpu")
    for name in lost:
        (one.folder / folder.CHECKPOINTS / name).unlink()
    before = {file: file.read_bytes() for file in one.folder.rglob("*") if file.is_file()}
    with pytest.raises(InputError, match="has steps of this run, but no checkpoint"):
        clear_the_way(one)
    assert before == {file: file.read_bytes() for file in before}
    assert counted_in(study) == [STEPS]


@pytest.mark.promise("ledger")
def test_a_study_begins_a_run_again_that_was_killed_before_its_first_step(
    study: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each file that is moved to its place."""
    [one] = study.runs
    for kill in itertools.count(1):
        calls, move = itertools.count(1), os.replace

        def moved(*args: Any) -> None:
            if next(calls) == kill:  # noqa: B023  (called in this turn alone)
                raise Killed
            move(*args)  # noqa: B023  (the same)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", moved)
            attempt(study, monkeypatch, kill=1)
        clear_the_way(one)
        if "--resume" in arguments(one, "cpu"):
            assert kill > 1
            return
        assert all(map(folder.is_leftover, one.folder.iterdir()))


@pytest.mark.promise("ledger")
def test_a_kill_while_a_run_is_replaced_leaves_no_checkpoint_beside_another_ledger(
    study: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each file that is moved to its place or removed."""
    where = study.runs[0].folder
    checkpoints = where / folder.CHECKPOINTS
    attempt(study, monkeypatch, kill=15)
    calls, kill, replaced = 0, 0, False
    while calls >= kill:
        calls, kill = 0, kill + 1
        old, saved = (
            ledger.read_ledger(where),
            {file.read_bytes() for file in checkpoints.iterdir()},
        )
        text = (checkpoints / ledger.FILE).read_bytes()

        def killing(do: Callable[..., Any]) -> Any:
            def called(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == kill:  # noqa: B023
                    raise Killed
                return do(*args, **kwargs)

            return called

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killing(os.replace))
            patch.setattr(Path, "unlink", killing(Path.unlink))
            attempt(study, monkeypatch, kill=1)
        assert ledger.read_ledger(where) is not None
        # No checkpoint of the run before may be resumed beside it. Where no step of that had begun,
        # it is the same as that of the new one.
        if (checkpoints / ledger.FILE).read_bytes() != text and (old is None or old.begun > 0):
            replaced = True
            assert not saved & {file.read_bytes() for file in checkpoints.glob("state.*")}
    assert replaced


@pytest.mark.promise("ledger")
def test_a_killed_run_beside_a_study_is_charged_with_its_score() -> None:
    """It is released once somebody resumes the run."""
    events = train_plan(start(**SCORED))
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert [event.records for event in events_of(RUN)] == ["training", "test"]
    assert ledger.begun_events(RUN, (), whole=True) == events_of(RUN)


@pytest.mark.promise("ledger")
def test_a_killed_run_beside_a_study_is_charged_with_all_that_it_inherits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its report is removed as it is resumed."""
    finish(train_plan(start(), after(6)))
    events = resume_folder(RUN, {})
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert [event.steps for event in events_of(RUN)] == [6, STEPS - 6]
    finish(resume_folder(RUN, {}, after(2)))
    assert [event.steps for event in events_of(RUN)] == [6, 2]
    events = resume_folder(RUN, {})
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert [event.steps for event in events_of(RUN)] == [6, 2, STEPS - 8]
