"""dpmac tune: nothing but the best of a secret number of trials is left, however it ends."""

import json
import math
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpmac_cli.accounting.selection import Search, Trials
from dpmac_cli.config.account import Question
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.data.dataset import Data
from dpmac_cli.errors import DivergedError, InputError, ModelError, RunError
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.private import make_private
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.recount import recount
from dpmac_cli.release.run import finish, train
from dpmac_cli.runs import folder
from dpmac_cli.storage import files
from dpmac_cli.studies import tune as tuning
from dpmac_cli.studies.search import RUNNING, Dimension, SearchSpace
from dpmac_cli.studies.tune import carry_out_search, covered_score
from tests.test_search import space_of
from tests.typed import dpmac, process

pytestmark = pytest.mark.privacy

OUT = Path("out")
#: Scores that no other number in a file is by chance.
SCORES = [0.31415926, 0.27182818, 0.57721566, 0.16180339, 0.41421356]


class Killed(BaseException):
    """Stands for a kill: no handler of the package expects it."""


def space() -> SearchSpace:
    return space_of(Dimension("lr", ("0.1", "1"), between=True), trials=Trials(3, 12))


class Trainer:
    """Replaces training: writes the files of a run with the next score, or diverges at None."""

    def __init__(self, scores: list[float | None]) -> None:
        self.scores, self.rates = list(scores), list[str]()

    def __call__(self, plan: TrainPlan, stop: Callable[[], bool], data: Data) -> Iterator[Finished]:
        del data
        assert plan.settings.out is not None
        where = plan.settings.out
        assert not where.exists()
        folder.make_folder(where)
        folder.checkpoints(where)
        (where / folder.CHECKPOINTS / "step").write_text("state")
        self.rates.append(str(plan.optimizer.lr))
        if stop():
            yield Finished({}, where, "interrupted")
            return
        score = self.scores.pop(0)
        if score is None:
            raise DivergedError(1)
        report = {"privacy": {"covered_scores": {"released": 1}}, "test": {"accuracy": score}}
        for name in folder.PUBLISHED:
            text = json.dumps(report) if name == folder.REPORT else f"{score}"
            files.write_atomically(where / name, text.encode())
            os.utime(where / name, (1e9, 1e9))
        folder.seal(where)
        print(score)  # noqa: T201  (as a network may)
        yield Finished(report, where, "finished")


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of trials to draw, from the front."""
    numbers = [3, 3]
    monkeypatch.setattr(Trials, "draw", lambda _: numbers.pop(0))
    return numbers


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    fake = Trainer([*SCORES, *SCORES])
    monkeypatch.setattr(tuning, "train", fake)
    return fake


def assert_only_the_winner_is_left(score: float) -> None:
    assert {path.name for path in OUT.iterdir()} == {*folder.PUBLISHED, folder.SUMS, folder.LOCK}
    found = b"\n".join(path.read_bytes() for path in OUT.iterdir())
    assert str(score).encode() in found
    for other in SCORES:
        assert other == score or str(other).encode() not in found
    assert all(folder.vouched(OUT, name) for name in folder.PUBLISHED)


def test_only_the_best_trial_is_left(
    draws: list[int], trained: Trainer, capfd: pytest.CaptureFixture[str]
) -> None:
    done = finish(carry_out_search(space()))
    assert (done.folder, done.report["test"]["accuracy"]) == (OUT, max(SCORES[:3]))
    assert len(trained.rates) == len(set(trained.rates)) == 3  # as many as were drawn
    assert draws == [3]
    assert_only_the_winner_is_left(max(SCORES[:3]))
    assert capfd.readouterr() == ("", "")  # what networks print may tell trials apart


def test_an_earlier_trial_may_win(trained: Trainer) -> None:
    trained.scores = [0.57721566, None, 0.27182818]
    finish(carry_out_search(space()))
    assert_only_the_winner_is_left(0.57721566)


def test_the_published_files_are_new_ones(
    trained: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their times, and the numbers of their inodes, do not tell which trial won."""
    seen = set[int]()

    def watched(*args: Any) -> Iterator[Finished]:
        for event in trained(*args):
            written = [path for path in event.folder.iterdir() if path.is_file()]
            seen.update(path.stat().st_ino for path in written)
            kept.extend(path.open("rb") for path in written)
            yield event

    kept: list[Any] = []  # open files keep their inodes
    monkeypatch.setattr(tuning, "train", watched)
    finish(carry_out_search(space()))
    assert min(path.stat().st_mtime for path in OUT.iterdir()) > 1.5e9
    assert seen.isdisjoint(path.stat().st_ino for path in OUT.iterdir())
    for file in kept:
        file.close()


def test_nothing_else_is_visible_while_it_goes_on(
    trained: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(*args: Any) -> Iterator[Finished]:
        for event in trained(*args):
            assert {path.name for path in OUT.iterdir()} == {RUNNING, folder.LOCK}
            assert [path.name for path in (OUT / RUNNING).iterdir()] == ["trial"]  # no loser
            assert stat.S_IMODE((OUT / RUNNING).stat().st_mode) == 0o700
            yield event

    monkeypatch.setattr(tuning, "train", watched)
    finish(carry_out_search(space()))


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Kill a search at one of its writes, moves and removals; returns how many there were."""
    count = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            count[0] += 1
            if count[0] >= number:  # nor does anything clean up
                raise Killed
            return function(*args, **more)

        return call

    monkeypatch.setattr(files, "write_atomically", counted(files.write_atomically))
    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))
    return count


def test_a_search_that_is_killed_at_any_moment_is_started_again_and_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, number = space(), 0
    while True:
        number += 1
        where = tmp_path / str(number)
        where.mkdir()
        os.chdir(where)
        with monkeypatch.context() as patch:
            patch.setattr(Trials, "draw", lambda _: 3)
            patch.setattr(tuning, "train", Trainer([*SCORES, *SCORES]))
            with patch.context() as killing:
                count = kill_at(killing, number)
                try:
                    finish(carry_out_search(of))
                    break
                except Killed:
                    pass
            patch.setattr(tuning, "train", Trainer([*SCORES, *SCORES]))
            if any((OUT / name).exists() for name in folder.PUBLISHED):  # released in part
                with pytest.raises(InputError):
                    finish(carry_out_search(of))
                continue
            finish(carry_out_search(of))
            assert_only_the_winner_is_left(max(SCORES[:3]))
    assert count[0] > 20


@pytest.mark.parametrize("failure", [OSError(28, "No space left"), RunError("memory"), Killed()])
def test_a_search_that_fails_leaves_nothing(
    failure: BaseException, trained: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10))

    def failing(*args: Any) -> Iterator[Finished]:
        if next(calls) == 1:
            raise failure
        yield from trained(*args)

    monkeypatch.setattr(tuning, "train", failing)
    with pytest.raises(type(failure)):
        finish(carry_out_search(space()))
    assert {path.name for path in OUT.iterdir()} == {folder.LOCK}


def test_a_search_that_is_stopped_leaves_nothing(trained: Trainer) -> None:
    with pytest.raises(KeyboardInterrupt):
        finish(carry_out_search(space(), lambda: len(trained.rates) == 2))
    assert {path.name for path in OUT.iterdir()} == {folder.LOCK}
    finish(carry_out_search(space()))
    assert len(trained.rates) == 5


def test_the_copy_of_a_trial_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint says that its cost is not that of one run."""

    def copied(plan: TrainPlan, *args: Any) -> Iterator[Any]:
        yield from train(plan, *args)
        assert plan.settings.out is not None
        shutil.copytree(plan.settings.out, "copy")
        raise RunError("memory ran out")

    monkeypatch.setattr(tuning, "train", copied)
    with pytest.raises(RunError):
        finish(carry_out_search(space()))
    for flags in (["--resume", "copy"], ["--fork", "copy", "--out", "new", "--steps", "9"]):
        result = dpmac("train", *flags)
        assert result.exit_code == 2
        assert "is a trial of a search" in result.output


def test_if_every_trial_diverges_nothing_is_left(trained: Trainer) -> None:
    trained.scores = [None, None, None]
    with pytest.raises(RunError, match="diverged"):
        finish(carry_out_search(space()))
    assert {path.name for path in OUT.iterdir()} == {folder.LOCK}


def test_a_folder_with_other_files_is_refused(draws: list[int], trained: Trainer) -> None:
    OUT.mkdir()
    (OUT / "file").write_text("mine")
    (OUT / RUNNING).mkdir()
    with pytest.raises(InputError, match="do not belong"):
        finish(carry_out_search(space()))
    assert draws == [3, 3]
    assert trained.rates == []


@pytest.mark.parametrize("covered", [None, {"released": 0}])
def test_only_a_covered_score_can_decide(covered: Any) -> None:
    report = {"privacy": {"covered_scores": covered}, "test": {"accuracy": 0.5}}
    with pytest.raises(ValueError, match="covered"):
        covered_score(report, "accuracy")


def test_a_trial_without_a_score_loses_and_lower_errors_win() -> None:
    privacy = {"covered_scores": {"released": 1}}
    for test, metric, better in (
        ({"accuracy": None}, "accuracy", -math.inf),
        ({"accuracy": 0.25}, "accuracy", 0.25),
        ({"mae": 0.25}, "mae", -0.25),
    ):
        assert covered_score({"privacy": privacy, "test": test}, metric) == better


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SearchSpace]:
    """A real search with three trials, once for all tests that read its files."""
    where = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr(Trials, "draw", lambda _: 3)
        of = space()
        finish(carry_out_search(of))
    return where / OUT, of


def test_the_report_charges_the_whole_search(published: tuple[Path, SearchSpace]) -> None:
    run, of = published
    report = json.loads((run / folder.REPORT).read_text())
    privacy, whole = report["privacy"], of.epsilon
    one = of.search.trial_epsilon(1e-5)
    assert privacy["epsilon"] == whole > one == privacy["search"]["epsilon_of_a_trial"]
    lines = files.read_lines(run / folder.METRICS)
    assert {line["epsilon"] for line in lines} == {whole}
    assert lines[-1]["test_accuracy"] == report["test"]["accuracy"]  # the score that decided
    rows, stored, again = recount(run, Question())
    assert stored == again == rows[0].epsilon == whole
    assert isinstance(rows[0].done, Search)
    (first, *_) = privacy["risk"]["epsilons"]
    assert (first["delta"], first["epsilon"]) == (1e-5, whole)
    card = (run / folder.CARD).read_text()
    for said in ("best of a random number K", "lr=0.1:1", "Covered: epsilon"):
        assert said in card
    assert "whole search" in privacy["statement"]


def test_what_is_published_does_not_tell_the_number_of_trials(
    published: tuple[Path, SearchSpace],
) -> None:
    run, of = published
    report = json.loads((run / folder.REPORT).read_text())
    search, trials = report["privacy"]["search"], of.search.trials
    assert (search["mean_trials"], search["most_trials"]) == (trials.mean, trials.most)
    known = {"mean_trials", "most_trials", "log_weight", "epsilon_of_a_trial", "space"}
    assert set(search) == known | {"candidates", "statement"}
    assert not (run / folder.CHECKPOINTS).exists()


def test_no_measured_time_of_the_winner_is_published(published: tuple[Path, SearchSpace]) -> None:
    """The first trial of a process is slower: times would tell whether it won."""
    run, _ = published
    timings = json.loads((run / folder.REPORT).read_text())["timings"]
    assert len(timings) == 4
    assert {*timings.values()} == {None}
    assert {line["seconds"] for line in files.read_lines(run / folder.METRICS)} == {None}


def test_the_published_run_cannot_be_trained_further(published: tuple[Path, SearchSpace]) -> None:
    run, _ = published
    assert dpmac("train", "--fork", run, "--out", "new", "--steps", "9").exit_code == 2
    assert dpmac("train", "--resume", run).exit_code == 2
    model = load_model(run).model
    with pytest.raises(ModelError, match="result of a search"):
        make_private(model, "digits", sigma=6, steps=3)


def test_a_report_without_its_search_is_found_out(
    published: tuple[Path, SearchSpace], tmp_path: Path
) -> None:
    run, _ = published
    report = json.loads((run / folder.REPORT).read_text())
    report["privacy"]["search"]["candidates"][0][0]["noise_multiplier"] *= 2
    (tmp_path / folder.REPORT).write_text(json.dumps(report))
    done = dpmac("account", tmp_path)
    assert done.exit_code == 2
    assert "trial of the search" in done.stderr


FLAGS = (
    *("tune", "--dataset", "digits", "--model", "linear", "--steps", "3", "--epsilon", "0.5"),
    *("--lr", "0.1:1", "--trials", "2", "--device", "cpu", "--out", "out"),
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


def test_a_flag_that_is_gone_says_what_to_type_instead() -> None:
    refused = dpmac("tune", "--dataset", "digits", "--search", "lr=0.1,1")
    assert refused.exit_code == 2
    assert "Write the values at the settings" in " ".join(refused.output.split())


@pytest.mark.long
def test_the_command_shows_a_plan_and_no_trial(draws: list[int]) -> None:
    shown = []
    for number in (1, 4):
        draws[:] = [number]
        done = dpmac(*FLAGS, "--out", f"out{number}")
        assert done.exit_code == 0, done.stderr
        lines = (done.stdout + done.stderr).replace(f"out{number}", "out").splitlines()
        # The settings and the score are those of the winner.
        shown.append([line for line in lines if not line.startswith(("settings:", "test "))])
        (score, *_) = [line for line in lines if line.startswith("test accuracy ")]
        report = json.loads((Path(f"out{number}") / folder.REPORT).read_text())
        assert score.split()[2] == f"{report['test']['accuracy']:.2%}"
    assert shown[0] == shown[1]
    (whole,) = [line.split()[5] for line in shown[0] if line.startswith("search and model")]
    assert 0.49 < float(whole) <= 0.5
    assert any("from 1 to 8" in line for line in shown[0])


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_killed_leaves_no_score_in_sight(number: int) -> None:
    running = process(*FLAGS, "--trials", "900")
    deadline = time.monotonic() + 300
    while not any(OUT.glob(f"{RUNNING}/*/{folder.METRICS}")):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(number)
    output, errors = running.communicate(timeout=60)
    left = {path.name for path in OUT.iterdir()}
    if number == signal.SIGKILL:
        assert running.returncode == -9
        assert left == {RUNNING, folder.LOCK}
        assert stat.S_IMODE((OUT / RUNNING).stat().st_mode) == 0o700
        again = dpmac(*FLAGS, "--dry-run")
        assert "started again" in again.stderr
    else:
        assert running.returncode == 130
        assert left == {folder.LOCK}
        assert "no epsilon was spent" in errors
    assert "accuracy" not in output + errors
