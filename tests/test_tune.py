"""dpmac tune: what a search keeps secret, on disk, on screen and in time, however it ends."""

import io
import json
import math
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from dpmac_cli.accounting.selection import Search, Trials
from dpmac_cli.cli import console
from dpmac_cli.cli import tune as command
from dpmac_cli.config.plan import ChosenFolder, TrainPlan
from dpmac_cli.data.dataset import Data, Split, overlap
from dpmac_cli.data.loaders import load_data
from dpmac_cli.errors import DivergedError, InputError, ModelError, RunError
from dpmac_cli.models.encoders import FILES, POOLING, TextEncoder
from dpmac_cli.models.registry import parse_model
from dpmac_cli.release.listing import find_runs
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.private import make_private
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.report_file import recount
from dpmac_cli.release.run import finish, train
from dpmac_cli.release.scoring import score
from dpmac_cli.runs import folder
from dpmac_cli.storage import files
from dpmac_cli.studies import search_state
from dpmac_cli.studies import tune as tuning
from dpmac_cli.studies.public_records import check_public
from dpmac_cli.studies.search_state import SECRET, SecretFolder
from dpmac_cli.studies.trial_files import check_files, file_sums
from dpmac_cli.studies.trial_scores import PublicScore, covered_score
from dpmac_cli.studies.tune import Searching, TunePlan, carry_out_search
from dpmac_cli.tasks.classification import Classification
from tests.test_search_space import asked, space_of
from tests.typed import dpmac, process

pytestmark = pytest.mark.privacy

OUT, CPU = Path("out"), torch.device("cpu")
#: Scores that no other number in a file is by chance.
SCORES = [0.31415926, 0.27182818, 0.57721566, 0.16180339, 0.41421356]
#: Score of all trials after these.
WORST = 0.01234567


class Killed(BaseException):
    """Stands for a kill: no handler of the package expects it."""


def plan_of(*, stop_early: bool = True, longest: float = 1000.0, lr: str = "0.1..1") -> TunePlan:
    space = space_of(f"lr={lr}", trials=Trials(3, 12))
    return TunePlan(space=space, out=OUT, stop_early=stop_early, expected=1.0, longest=longest)


class Trainer:
    """Replaces training: writes the files of a run with the next score, or diverges at None."""

    def __init__(self, scores: list[float | None]) -> None:
        self.scores, self.rates, self.begun = list(scores), list[str](), 0

    def __call__(self, plan: TrainPlan, stop: Callable[[], bool], data: Data) -> Iterator[Finished]:
        del data
        assert isinstance(plan.run.folder, ChosenFolder)
        where = plan.run.folder.path
        folder.make_folder(where)
        folder.private_folder(where)
        (where / folder.CHECKPOINTS / "step").write_text("keys")
        self.begun += 1
        if stop():
            yield Finished({}, where, "interrupted")
            return
        score = self.scores[0] if self.scores else WORST
        if score is None:
            self.scores.pop(0)
            raise DivergedError(1)
        lines = json.dumps({"test_accuracy": score}) + "\n"
        report = {"privacy": {"covered_scores": {"released": 1}}, "test": {"accuracy": score}}
        texts = {folder.METRICS: lines, folder.REPORT: json.dumps(report)}
        for name in folder.PUBLISHED:
            files.write_atomically(where / name, texts.get(name, f"{score}").encode())
        folder.seal(where)
        del self.scores[:1]
        self.rates.append(str(plan.optimizer.hyper.lr))
        yield Finished(report, where, "finished")


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of trials to draw, from the front."""
    numbers = [3]
    monkeypatch.setattr(Trials, "draw", lambda _: numbers.pop(0))
    return numbers


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    fake = Trainer(list(SCORES))
    monkeypatch.setattr(tuning, "train", fake)
    return fake


def everything(root: Path = OUT) -> bytes:
    """All that is below a folder: names and contents."""
    parts = [str(path).encode() for path in root.rglob("*")]
    return b"\n".join(parts + [p.read_bytes() for p in root.rglob("*") if p.is_file()])


def assert_only_the_winner_is_left(score: float) -> None:
    left = {path.name for path in OUT.iterdir()}
    assert left == {*folder.PUBLISHED, folder.SUMS, folder.LOCK}
    found = everything()
    assert str(score).encode() in found
    for other in SCORES:
        assert other == score or str(other).encode() not in found
    assert all(folder.vouched(OUT, name) for name in folder.PUBLISHED)


def test_only_the_best_trial_is_left(draws: list[int], trained: Trainer) -> None:
    *events, last = carry_out_search(plan_of())
    assert isinstance(last, Finished)
    assert last.folder == OUT
    assert all(type(event) is Searching for event in events)
    assert len(trained.rates) == 3  # as many as were drawn
    assert len(set(trained.rates)) == 3
    assert draws == []
    assert_only_the_winner_is_left(max(SCORES[:3]))


def test_an_earlier_trial_may_win(
    draws: list[int], trained: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    del draws
    trained.scores = [0.57721566, None, 0.27182818]
    assert isinstance([*carry_out_search(plan_of())][-1], Finished)
    assert_only_the_winner_is_left(0.57721566)


def test_nothing_else_is_visible_while_it_goes_on(draws: list[int], trained: Trainer) -> None:
    del draws, trained
    for _ in carry_out_search(plan_of()):
        seen = {path.name for path in OUT.iterdir()}
        if SECRET in seen:
            assert seen == {SECRET, folder.LOCK}
            assert stat.S_IMODE((OUT / SECRET).stat().st_mode) == 0o700
            for name in (search_state.FILE, search_state.NOTE):
                assert stat.S_IMODE((OUT / SECRET / name).stat().st_mode) == 0o600


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Kill a search at one of its writes, moves and removals; returns how many there were."""
    count = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                raise Killed
            return function(*args, **more)

        return call

    monkeypatch.setattr(files, "write_atomically", counted(files.write_atomically))
    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))
    return count


def test_a_search_that_is_killed_at_any_moment_is_resumed_and_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, number = plan_of(), 0
    while True:
        number += 1
        where = tmp_path / str(number)
        where.mkdir()
        os.chdir(where)
        numbers, fake = [3, 5, 5], Trainer(list(SCORES))
        with monkeypatch.context() as patch:
            patch.setattr(Trials, "draw", lambda _, numbers=numbers: numbers.pop(0))
            patch.setattr(tuning, "train", fake)
            with patch.context() as killing:
                count = kill_at(killing, number)
                try:
                    list(carry_out_search(plan))
                    over = True
                except Killed:
                    over = False
            if over:
                break
            begun = (OUT / SECRET / search_state.FILE).exists()
            ended = not begun and (OUT / folder.SUMS).exists()
            if ended:
                assert not (OUT / SECRET).exists() or not any((OUT / SECRET).iterdir())
                with pytest.raises(InputError, match="already contains a run"):
                    list(carry_out_search(plan))
            else:
                if not begun:  # killed before the first trial: the number was never used
                    assert fake.begun == 0
                    numbers[:] = [3]
                list(carry_out_search(plan))
            assert numbers in ([5, 5], [])  # the number of trials was drawn once
            assert len(fake.rates) in (3, 4)  # one trial may have been begun again
        if len(fake.rates) == 3:
            assert_only_the_winner_is_left(max(SCORES[:3]))
    assert count[0] > 20


def test_a_trial_that_is_stopped_is_begun_again_with_its_settings(
    draws: list[int], trained: Trainer
) -> None:
    plan, asked = plan_of(), [False]
    events = carry_out_search(plan, lambda: asked[0])
    asked[0] = True
    with pytest.raises(KeyboardInterrupt):
        list(events)
    state = SecretFolder(OUT).read()
    assert state is not None
    assert state.setting is not None
    drawn = state.setting["lr"]
    list(carry_out_search(plan))
    assert trained.rates[0] == str(float(drawn))
    assert draws == []
    assert_only_the_winner_is_left(max(SCORES[:3]))


@pytest.mark.parametrize("failure", [OSError(28, "No space left"), RunError("memory"), Killed()])
def test_a_search_that_fails_shows_no_score_and_can_be_resumed(
    failure: BaseException, draws: list[int], trained: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10))

    def failing(*args: Any) -> Iterator[Finished]:
        if next(calls) == 1:
            raise failure
        yield from trained(*args)

    monkeypatch.setattr(tuning, "train", failing)
    with pytest.raises(type(failure)):
        list(carry_out_search(plan_of()))
    assert {path.name for path in OUT.iterdir()} == {SECRET, folder.LOCK}
    list(carry_out_search(plan_of()))
    assert draws == []
    assert_only_the_winner_is_left(max(SCORES[:3]))


def test_no_command_shows_or_continues_a_trial(
    draws: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    draws[:] = [2]
    copies = [Path("copy")]

    def copied(*args: Any) -> Iterator[Any]:
        if copies:  # after the first trial, which is the best so far
            yield from train(*args)
            shutil.copytree(OUT / SECRET / "current", copies.pop())
            return
        raise RunError("memory ran out")

    monkeypatch.setattr(tuning, "train", copied)
    with pytest.raises(RunError):
        list(carry_out_search(plan_of()))
    best = OUT / SECRET / "best"
    score = json.loads((best / folder.REPORT).read_bytes())["test"]["accuracy"]
    for roots in ([OUT], [OUT / SECRET], [best]):
        assert find_runs(roots) == []
    for words in (
        *(("report", best), ("card", best), ("account", best), ("eval", best)),
        *(("predict", best, "--data", "digits"), ("train", "--resume", best)),
        *(("train", "--fork", best, "--out", "new", "--steps", "9"), ("runs", OUT)),
    ):
        result = dpmac(*words)
        assert result.exit_code == (0 if words[0] == "runs" else 2), words
        assert f"{score:.2%}" not in result.output
        assert words[0] in ("runs", "predict") or "is a trial of a search" in result.output
    for flags in (["--resume", "copy"], ["--fork", "copy", "--out", "new", "--steps", "9"]):
        result = dpmac("train", *flags)
        assert result.exit_code == 2
        assert "is a trial of a search" in result.output


def test_if_every_trial_diverges_nothing_is_left(draws: list[int], trained: Trainer) -> None:
    del draws
    trained.scores = [None, None, None]
    with pytest.raises(RunError, match="diverged"):
        list(carry_out_search(plan_of()))
    assert {path.name for path in OUT.iterdir()} == {folder.LOCK}


class FakeTime:
    """A clock that only sleeping and training move."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def ended_at(
    number: int,
    plan: TunePlan,
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[int], float] = lambda _: 7.0,
) -> tuple[float, list[Searching], Trainer]:
    """When a search ends of which ``number`` trials count, by how long each trial takes."""
    where = Path(f"{number}")
    where.mkdir()
    clock, fake = FakeTime(), Trainer([*SCORES])

    def slow(*args: Any) -> Iterator[Finished]:
        clock.now += seconds(fake.begun)
        yield from fake(*args)

    with monkeypatch.context() as patch:
        patch.chdir(where)
        patch.setattr(tuning, "time", clock)
        patch.setattr(tuning, "train", slow)
        patch.setattr(Trials, "draw", lambda _: number)
        *events, _ = carry_out_search(plan)
    return clock.now, [event for event in events if isinstance(event, Searching)], fake


@pytest.mark.parametrize("early", [False, True])
def test_the_time_of_the_end_does_not_depend_on_the_number_of_trials(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(stop_early=early, longest=100.0)
    found = [ended_at(number, plan, monkeypatch) for number in (1, 5)]
    assert {event.longest for _, events, _ in found for event in events} == {100.0}
    ends = [end for end, *_ in found]
    assert (ends == [7.0, 35.0]) if early else ends == pytest.approx([100.0, 100.0])


@pytest.mark.parametrize("later", [10.0, 25.0, 100.0])
def test_slow_trials_move_the_end_of_a_search_however_many_count(
    later: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first trial takes as long as announced; later ones do not."""
    plan, seen = plan_of(stop_early=False, longest=51.0), set()
    for number in (1, 4, 6, 12):
        end, events, _ = ended_at(
            number, plan, monkeypatch, lambda begun: later if begun else 51 / 12
        )
        shown = tuple((round(event.seconds, 3), event.longest) for event in events)
        seen.add((round(end, 3), shown))
    [(end, _)] = seen  # all that is ever shown, too
    assert end == 51 * math.ceil((51 / 12 + 11 * later) / 51)


def test_trials_that_do_not_count_are_trained_and_never_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(stop_early=False)
    for number in (1, 2, 3):
        _, _, fake = ended_at(number, plan, monkeypatch)
        assert len(fake.rates) == plan.most == 12
        report = json.loads((Path(f"{number}") / OUT / folder.REPORT).read_bytes())
        assert report["test"]["accuracy"] == max(SCORES[:number])


def test_the_display_moves_on_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """However rare events are, which tells where trials begin."""
    clock, shown = FakeTime(), list[str]()
    screen = Console(file=io.StringIO(), force_terminal=True)

    made = list[Progress]()
    bar = console.bar

    def kept(*columns: Any, **more: Any) -> Progress:
        made.append(bar(*columns, **more, get_time=clock.monotonic, auto_refresh=False))
        return made[0]

    def events() -> Iterator[Searching | Finished]:
        yield Searching(3.0, 40.0)
        for seconds in (3.5, 4.0, 9.0, 9.5):
            clock.now += 1.0
            [task] = made[0].tasks
            shown.append(str(command._Passed()(task)))
            yield Searching(seconds, 40.0)
        yield Finished({}, OUT, "finished")

    monkeypatch.setattr(console, "bar", kept)
    command._follow(events(), screen, plan_of())
    assert shown == [f"0:00:0{second} of 0:00:40" for second in (4, 5, 6, 7)]


def test_time_before_a_stop_counts(
    draws: list[int], trained: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    del draws, trained
    clock = FakeTime()
    monkeypatch.setattr(tuning, "time", clock)
    plan = plan_of(stop_early=False, longest=40.0)
    with pytest.raises(KeyboardInterrupt):
        list(carry_out_search(plan, lambda: clock.now > 15))  # while it waits
    list(carry_out_search(plan))
    assert clock.now == pytest.approx(40.0, abs=0.5)  # not 15 and another 40


def test_the_files_do_not_tell_when_the_winner_was_trained(
    draws: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    del draws
    fake = Trainer([0.5, 0.25, 0.125])

    def long_ago(*args: Any) -> Iterator[Finished]:
        for event in fake(*args):
            for path in event.folder.iterdir():
                os.utime(path, (1e9, 1e9))
            yield event

    monkeypatch.setattr(tuning, "train", long_ago)
    list(carry_out_search(plan_of()))
    assert min(path.stat().st_mtime for path in OUT.iterdir()) > 1.5e9


def test_another_search_or_other_records_are_refused(
    draws: list[int], trained: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    del draws, trained
    with pytest.raises(KeyboardInterrupt):
        list(carry_out_search(plan_of(), lambda: True))
    with pytest.raises(InputError, match="another search"):
        list(carry_out_search(plan_of(lr="0.2..1")))
    for name, what in (("record_sums", "data"), ("declared_sums", "constants")):
        with monkeypatch.context() as patch:
            patch.setattr(tuning, name, lambda *_, what=what: {what: "others"})
            with pytest.raises(InputError, match="are not those that the search started with"):
                list(carry_out_search(plan_of()))
    (OUT / SECRET / search_state.FILE).write_text("{")
    with pytest.raises(InputError, match="drawn again"):
        list(carry_out_search(plan_of()))


@pytest.mark.parametrize("file", ["net.py", "weights.safetensors"])
def test_code_or_weights_that_change_end_a_search(
    file: str, draws: list[int], trained: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later trials would not be like the earlier ones, which the proof needs."""
    plan = plan_of()
    [of] = plan.space.plans
    if file == "net.py":
        network = replace(of.network, model=parse_model("net.py:Net"))
    else:
        network = replace(of.network, pretrained=Path(file))
    space = replace(plan.space, plans=(replace(of, network=network),))
    plan, path = replace(plan, space=space), Path(file)
    path.write_text("original")

    def edited(*args: Any) -> Iterator[Finished]:
        yield from trained(*args)
        path.write_text("edited")

    monkeypatch.setattr(tuning, "train", edited)
    for again in (False, True):  # within a call, and between two
        with pytest.raises(InputError, match=f"{file} changed since the search started"):
            list(carry_out_search(plan))
        assert len(trained.rates) == 1, again
    monkeypatch.setattr(tuning, "train", trained)
    path.write_text("original")
    list(carry_out_search(plan))
    assert draws == []
    assert_only_the_winner_is_left(max(SCORES[:3]))


def test_every_file_of_an_encoder_that_changes_ends_a_search(tmp_path: Path) -> None:
    """Also its vocabulary, and how the vectors of tokens are pooled."""
    [of] = plan_of().space.plans
    # A folder of the user's; its form was read before.
    encoder = object.__new__(TextEncoder)
    object.__setattr__(encoder, "kind", "my-encoder")
    object.__setattr__(encoder, "folder", tmp_path)
    plans = [replace(of, network=replace(of.network, features=encoder))]
    (tmp_path / POOLING).parent.mkdir()
    for name in FILES:
        (tmp_path / name).write_text("original")
    before = file_sums(plans)
    check_files(plans, before)
    for name in FILES:
        (tmp_path / name).write_text("edited")
        with pytest.raises(InputError, match=f"{name} changed since the search started"):
            check_files(plans, before)
        (tmp_path / name).write_text("original")


def test_a_folder_of_somebody_else_is_not_taken_for_a_search(draws: list[int]) -> None:
    file = OUT / SECRET / "results.csv"
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(InputError, match="do not belong"):
        list(carry_out_search(plan_of()))
    assert file.read_text() == "mine"
    assert draws == [3]


def test_a_folder_with_other_files_is_refused(draws: list[int], trained: Trainer) -> None:
    OUT.mkdir()
    (OUT / "file").write_text("mine")
    with pytest.raises(InputError, match="do not belong"):
        list(carry_out_search(plan_of()))
    assert draws == [3]
    assert trained.begun == 0


@pytest.mark.parametrize("covered", [None, {"released": 0}])
def test_only_a_covered_score_can_decide(covered: Any) -> None:
    OUT.mkdir()
    (OUT / folder.REPORT).write_text(json.dumps({"privacy": {"covered_scores": covered}}))
    (OUT / folder.METRICS).write_text('{"test_accuracy": 0.5}\n')
    with pytest.raises(ValueError, match="covered"):
        covered_score(OUT, "accuracy")


def test_a_trial_without_a_score_loses_and_lower_errors_win() -> None:
    OUT.mkdir()
    covered = {"privacy": {"covered_scores": {"released": 1}}}
    (OUT / folder.REPORT).write_text(json.dumps(covered))
    for line, metric, better in (
        ('{"test_accuracy": null}', "accuracy", -math.inf),
        ('{"test_accuracy": 0.25}', "accuracy", 0.25),
        ('{"test_mae": 0.25}', "mae", -0.25),
    ):
        (OUT / folder.METRICS).write_text(f'{{"test_accuracy": 1}}\n{line}\n')
        assert covered_score(OUT, metric) == better


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TunePlan]:
    """A real search with three trials, once for all tests that read its files."""
    where = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr(Trials, "draw", lambda _: 3)
        plan = plan_of()
        *_, last = carry_out_search(plan)
        assert isinstance(last, Finished)
    return where / OUT, plan


def test_the_report_charges_the_whole_search(published: tuple[Path, TunePlan]) -> None:
    run, plan = published
    report = json.loads((run / folder.REPORT).read_text())
    privacy, whole = report["privacy"], plan.space.epsilon
    one = plan.space.search.trial_epsilon(1e-5)
    assert privacy["epsilon"] == whole > one == privacy["search"]["epsilon_of_a_trial"]
    assert {line["epsilon"] for line in files.read_lines(run / folder.METRICS)} == {whole}
    rows, stored, again = recount(run, {})
    assert stored == again == rows[0].epsilon == whole
    assert isinstance(rows[0].done, Search)
    (first, *_) = privacy["risk"]["epsilons"]
    assert (first["delta"], first["epsilon"]) == (1e-5, whole)
    card = (run / folder.CARD).read_text()
    for said in ("best of a random number K", "lr=0.1..1", "--stop-early", "Covered: epsilon"):
        assert said in card
    assert "whole search" in privacy["statement"]


def test_what_is_published_does_not_tell_the_number_of_trials(
    published: tuple[Path, TunePlan],
) -> None:
    run, plan = published
    report = json.loads((run / folder.REPORT).read_text())
    search, trials = report["privacy"]["search"], plan.space.search.trials
    assert (search["mean_trials"], search["most_trials"]) == (trials.mean, trials.most)
    known = {"mean_trials", "most_trials", "log_weight", "epsilon_of_a_trial", "space"}
    assert set(search) == known | {"candidates", "scored_on", "stop_early", "statement", "time"}
    times = {path.stat().st_mtime for path in run.iterdir() if path.name != folder.LOCK}
    assert max(times) - min(times) < 1  # not those of the trial that won
    assert not (run / folder.CHECKPOINTS).exists()


def test_no_measured_time_of_the_winner_is_published(published: tuple[Path, TunePlan]) -> None:
    """The first trial of a process is slower: times would tell whether it won."""
    run, _ = published
    timings = json.loads((run / folder.REPORT).read_text())["timings"]
    assert len(timings) == 4
    assert {*timings.values()} == {None}
    assert {line["seconds"] for line in files.read_lines(run / folder.METRICS)} == {None}


def test_the_published_run_cannot_be_trained_further(published: tuple[Path, TunePlan]) -> None:
    run, _ = published
    assert dpmac("train", "--fork", run, "--out", "new", "--steps", "9").exit_code == 2
    assert dpmac("train", "--resume", run).exit_code == 2
    model = load_model(run).model
    with pytest.raises(ModelError, match="result of a search"):
        make_private(model, "digits", sigma=6, steps=3)


def test_a_report_without_its_search_is_found_out(
    published: tuple[Path, TunePlan], tmp_path: Path
) -> None:
    run, _ = published
    report = json.loads((run / folder.REPORT).read_text())
    report["privacy"]["search"]["candidates"][0][0]["noise_multiplier"] *= 2
    (tmp_path / folder.REPORT).write_text(json.dumps(report))
    done = dpmac("account", tmp_path)
    assert done.exit_code == 2
    assert "trial of the search" in done.stderr


@pytest.mark.usefixtures("uncalibrated")
def test_public_records_decide_without_noise(
    draws: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best trial on them wins, whatever its covered score; epsilon is that of the trials."""
    draws[:] = [3]
    data = load_data("digits", Path(), CPU)
    x, y = data.test.images[:200].numpy(), data.test.labels[:200].numpy()
    random = np.random.default_rng(0)
    noisy = np.clip(x + random.integers(-1, 2, x.shape), 0, 16).astype(np.float32)
    held: dict[str, Any] = {
        "x": noisy,
        "y": y,
        "x_test": noisy,
        "y_test": y,
        "low": 0.0,
        "high": 16.0,
    }
    np.savez("public.npz", **held)
    plain = x.astype(np.float32)
    np.savez("private.npz", **held | {"x": plain, "x_test": plain})
    given: dict[str, Any] = {"dataset": "private.npz", "model": "linear", "steps": 3, "epsilon": 3}
    own = {"trials": 2, "most_trials": 3, "stop_early": True, "score_on": "public.npz"}
    _, space = asked({**given, "device": "cpu"}, own, ["lr=0.01..1:log"], None)
    scores = list[float]()

    class Recorded(PublicScore):
        def __call__(self, run: Path, metric: str) -> float:
            scores.append(super().__call__(run, metric))
            return scores[-1]

    monkeypatch.setattr(tuning, "PublicScore", Recorded)
    monkeypatch.setattr(tuning, "covered_score", None)
    plan = TunePlan(space=space, out=OUT, stop_early=True, expected=1.0, longest=1.0)
    done = finish(carry_out_search(plan))
    assert len(set(scores)) > 1
    assert score(OUT, "public.npz", device="cpu").result.accuracy == max(scores)
    search = done.report["privacy"]["search"]
    assert search["scored_on"] == "public"
    assert "declared public" in search["statement"]
    assert done.report["privacy"]["epsilon"] == space.epsilon
    assert "settings scored on" in (OUT / folder.CARD).read_text()


def test_private_records_cannot_decide_as_public_ones() -> None:
    own: dict[str, Any] = {"trials": 2, "score_on": "digits"}
    given: dict[str, Any] = {"dataset": "digits", "model": "linear", "steps": 3, "device": "cpu"}
    with pytest.raises(InputError, match="private data itself"):
        asked(given, own, ["lr=0.1,1"], None)
    with pytest.raises(InputError, match="same classes and shape"):
        asked(given, own | {"score_on": "mnist"}, ["lr=0.1,1"], None)
    plan = plan_of()
    with pytest.raises(InputError, match="same records"):
        PublicScore(plan.space.data, CPU, load_data("digits", Path(), CPU))


def images(count: int, seed: int, labels: int = 2) -> Data:
    """Made-up records, of which the first three quarters are trained on."""
    x = torch.rand(count, 1, 2, 2, generator=torch.Generator().manual_seed(seed))
    y, cut, one = torch.arange(count) % labels, 3 * count // 4, torch.ones(1, 1, 1)
    train, test = Split(x[:cut], y[:cut]), Split(x[cut:], y[cut:])
    return Data(train, test, one, torch.zeros_like(one), Classification(("a", "b")))


def taken(data: Data, rows: Tensor) -> Data:
    """Some records of a dataset, in some order, split and labelled otherwise."""
    x, half = torch.cat([data.train.images, data.test.images])[rows], len(rows) // 2
    y = torch.zeros(len(rows), dtype=torch.long)
    return replace(data, train=Split(x[:half], y[:half]), test=Split(x[half:], y[half:]))


def test_copies_of_private_records_in_another_order_are_not_public() -> None:
    private, other = images(400, 0), images(400, 1)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(2))
    assert overlap(private, private) == overlap(taken(private, order), private) == 1
    assert overlap(taken(private, order[:30]), private) == 1
    assert overlap(other, private) == 0
    mixed = torch.cat([private.train.images[:100], other.train.images])
    some = replace(other, train=Split(mixed, torch.zeros(len(mixed), dtype=torch.long)))
    for public in (taken(private, order), taken(private, order[:30]), some):
        with pytest.raises(InputError, match=r"--on x\.csv has the same records.*Leave out --on"):
            check_public("--on x.csv", public, private, "a search on it costs privacy")
    check_public("--on x.csv", other, private, "")
    rounded = replace(other, train=Split(other.train.images.round(), other.train.labels))
    assert overlap(rounded, replace(private, train=rounded.train)) == 0, "equal by chance"


FLAGS = (
    *("tune", "--dataset", "digits", "--model", "linear", "--steps", "3", "--epsilon", "0.5"),
    *("--search", "lr=0.1..1:log", "--trials", "2", "--device", "cpu", "--out", "out"),
)


def test_a_dry_run_shows_the_plan_and_writes_nothing() -> None:
    shown = dpmac(*FLAGS, "--dry-run", "--quiet")
    assert shown.exit_code == 0, shown.output
    assert "search and model together: epsilon 0.4" in shown.stdout
    assert "writing" not in shown.stdout
    refused = dpmac(*FLAGS, "--dry-run", "--json")
    assert refused.exit_code == 2
    assert "--dry-run and --json contradict each other" in refused.stderr
    assert not OUT.exists()


@pytest.mark.long
def test_the_command_shows_a_plan_and_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    for number in (1, 4):
        monkeypatch.setattr(Trials, "draw", lambda _, number=number: number)
        done = dpmac(*FLAGS, "--stop-early", "--out", f"out{number}")
        assert done.exit_code == 0, done.stderr
        lines = (done.stdout + done.stderr).replace(f"out{number}", "out").splitlines()
        # Times are measured, and the settings and the score are those of the winner.
        of_winner = ("time:", "settings:", "test ")
        shown.append([line for line in lines if not line.startswith(of_winner)])
        (score, *_) = [line for line in lines if line.startswith("test accuracy ")]
        report = json.loads((Path(f"out{number}") / folder.REPORT).read_text())
        assert score.split()[2] == f"{report['test']['accuracy']:.2%}"
    assert shown[0] == shown[1]
    (whole,) = [line.split()[5] for line in shown[0] if line.startswith("search and model")]
    assert 0.49 < float(whole) <= 0.5
    assert any("from 1 to 8" in line for line in shown[0])
    assert "writing out" in shown[0]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_killed_leaves_no_score_in_sight(number: int) -> None:
    running = process(*FLAGS)
    deadline = time.monotonic() + 300
    while not any(OUT.glob(f"{SECRET}/*/report.json")):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(number)
    output, errors = running.communicate(timeout=60)
    assert running.returncode == (-9 if number == signal.SIGKILL else 130)
    assert {path.name for path in OUT.iterdir()} == {SECRET, folder.LOCK}
    assert stat.S_IMODE((OUT / SECRET).stat().st_mode) == 0o700
    state = json.loads((OUT / SECRET / search_state.FILE).read_text())
    scores = [
        str(files.read_lines(run / folder.METRICS)[-1]["test_accuracy"])
        for run in (OUT / SECRET).iterdir()
        if run.is_dir() and files.read_lines(run / folder.METRICS)
    ]
    assert not any(score in output + errors for score in scores)
    again = dpmac(*FLAGS, "--stop-early")
    assert again.exit_code == 2  # another search: the time of its end was promised to be hidden
    assert json.loads((OUT / SECRET / search_state.FILE).read_text()) == state
