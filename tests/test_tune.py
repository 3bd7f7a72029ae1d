"""dpmac tune: nothing but the best of a secret number of trials is left, however it ends."""

import contextlib
import json
import logging
import math
import os
import random
import re
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chisquare, kstest

from dpmac_cli import files, progress
from dpmac_cli.accounting.selection import Search, Trials, trials_of
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import tune as command
from dpmac_cli.cli.account import recount
from dpmac_cli.cli.question import Question
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.sources import HEADER
from dpmac_cli.errors import INTERRUPTED, DivergedError, InputError, ModelError, RunError
from dpmac_cli.models.dataset import Data
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.private import make_private
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import train_plan
from dpmac_cli.runs import folder, new_folder
from dpmac_cli.runs import train as running
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.studies import tune as tuning
from dpmac_cli.studies.search import (
    RESTARTED,
    Dimension,
    SearchSpace,
    events_of_trial,
    plan_search,
    secret_place,
)
from dpmac_cli.studies.tune import carry_out_search, covered_score
from tests.digits_runs import metrics_of, report_of
from tests.helpers import unread
from tests.typed import dpmac

pytestmark = pytest.mark.promise("search")

OUT = Path("out")
#: Scores that no other number in a file is by chance.
SCORES = [0.31415926, 0.27182818, 0.57721566, 0.16180339, 0.41421356]


class Killed(BaseException):
    """Stands for a kill: no handler of the package expects it."""


def space() -> SearchSpace:
    return space_of(Dimension("lr", ("0.1", "1"), between=True), trials=Trials(3, 12))


#: Time of what there was before a search, and of what it made before it ended, in seconds.
EARLIER, DURING = 1e9, 1.1e9


class Trainer:
    """Replaces training: writes the files of a run with the next score, or diverges at None."""

    def __init__(self, scores: list[float | None]) -> None:
        self.scores, self.rates = list(scores), list[str]()

    def __call__(self, plan: Plan, stop: Callable[[], bool], data: Data) -> Iterator[Run]:
        del data
        assert plan.settings.out is not None
        where = plan.settings.out
        assert not where.exists()
        new_folder.make_folder(where)
        folder.checkpoints(where)
        (where / folder.CHECKPOINTS / folder.STATE).write_text("state")
        self.rates.append(str(plan.optimizer.lr))
        if stop():
            yield Run({"state": "interrupted"}, where, unread)
            return
        score = self.scores.pop(0)
        if score is None:
            raise DivergedError(1)
        report = {"events": [{"records": "test"}], "scores": {"accuracy": {"value": score}}}
        for name in folder.PUBLISHED:
            text = json.dumps(report) if name == folder.REPORT else f"{score}"
            files.write_atomically(where / name, text.encode())
        folder.seal(where)
        print(score)  # noqa: T201  (as a network may)
        yield Run(report, where, unread)


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of trials to draw, from the front."""
    numbers = [3, 3]
    monkeypatch.setattr(Trials, "draw", lambda _: numbers.pop(0))
    return numbers


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    fake = Trainer([*SCORES, *SCORES])
    monkeypatch.setattr(tuning, "train_plan", fake)
    return fake


def assert_only_the_winner_is_left(score: float) -> None:
    assert {path.name for path in OUT.iterdir()} == {*folder.PUBLISHED, folder.SUMS}
    assert [path.name for path in Path().iterdir()] == [OUT.name]
    assert not secret_place(OUT).exists()
    found = b"\n".join(path.read_bytes() for path in OUT.iterdir())
    assert str(score).encode() in found
    for other in SCORES:
        assert other == score or str(other).encode() not in found
    assert folder.is_published(OUT)


def test_only_the_best_trial_is_left(
    draws: list[int], trained: Trainer, capfd: pytest.CaptureFixture[str]
) -> None:
    done = carry_out_search(space())
    assert (done.folder, done.report["scores"]["accuracy"]["value"]) == (OUT, max(SCORES[:3]))
    assert len(trained.rates) == len(set(trained.rates)) == 3  # as many as were drawn
    assert draws == [3]
    assert_only_the_winner_is_left(max(SCORES[:3]))
    assert capfd.readouterr() == ("", "")  # what networks print may tell trials apart


def test_an_earlier_trial_may_win(trained: Trainer) -> None:
    trained.scores = [0.57721566, None, 0.27182818]
    carry_out_search(space())
    assert_only_the_winner_is_left(0.57721566)


@pytest.mark.promise("said")
def test_a_search_without_a_result_says_what_it_cost(trained: Trainer) -> None:
    trained.scores = [None] * 3
    searched = space()
    cost = f"the search cost epsilon {format_epsilon(searched.epsilon)} at delta"
    with pytest.raises(RunError, match=rf"diverged, so it has no model.*{cost}"):
        carry_out_search(searched)


def test_nothing_else_is_visible_while_it_goes_on(
    trained: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(*args: Any) -> Iterator[Run]:
        for event in trained(*args):
            secret = secret_place(OUT)
            assert not [*Path().iterdir()]
            assert {path.name for path in secret.iterdir()} == {"trial", folder.LOCK}  # no loser
            assert stat.S_IMODE(secret.stat().st_mode) == 0o700
            yield event

    monkeypatch.setattr(tuning, "train_plan", watched)
    carry_out_search(space())


def changed() -> Iterator[Path]:
    """Yield the current folder, and what is in it, if its time is not from before the search."""
    for path in (Path.cwd(), *Path.cwd().rglob("*")):
        if path.stat().st_mtime != EARLIER:
            yield path


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("out", ["out", "empty", "there/out", "new/deep/out"])
def test_no_time_in_a_folder_tells_when_the_search_began(
    out: str, left: bool, trained: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the end, also of a lock, of folders above, and of what a kill has left."""
    for name in ("there", "empty"):
        Path(name).mkdir()
    if left:
        secret = secret_place(Path(out))
        (secret / "trial").mkdir(parents=True)
        for file in (
            secret / folder.LOCK,
            secret / "trial" / folder.CONFIG,
            Path("empty", folder.LOCK),
        ):
            file.touch()
    for path in [*changed()]:
        os.utime(path, (EARLIER, EARLIER))

    def aged(*args: Any) -> Iterator[Run]:
        yield from trained(*args)
        for path in [*changed()]:
            os.utime(path, (DURING, DURING))

    monkeypatch.setattr(tuning, "train_plan", aged)
    carry_out_search(replace(space(), out=Path(out)))
    times = {path: path.stat().st_mtime for path in changed()}
    assert min(times.values()) > DURING
    assert {Path(out).absolute(), *Path(out).absolute().iterdir()} <= times.keys()
    assert len([*Path(out).iterdir()]) == len(folder.PUBLISHED) + 1
    assert not secret_place(Path(out)).exists()


def test_a_search_is_refused_at_once_where_its_folder_cannot_be_made(trained: Trainer) -> None:
    Path("file").touch()
    with pytest.raises(InputError, match="file/out cannot be written"):
        carry_out_search(replace(space(), out=Path("file/out")))
    assert not trained.rates
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_two_searches_for_one_folder_are_refused(
    trained: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(*args: Any) -> Iterator[Run]:
        with pytest.raises(InputError, match="in use by another"):
            carry_out_search(space())
        return trained(*args)

    monkeypatch.setattr(tuning, "train_plan", again)
    carry_out_search(space())
    assert_only_the_winner_is_left(max(SCORES[:3]))


class Telling:
    """Trains as usual, but only the last trial does not diverge, and each says which it is."""

    def __init__(self, trials: int) -> None:
        self.left = trials

    def __call__(self, plan: Plan, stop: Callable[[], bool], data: Data) -> Iterator[Any]:
        self.left -= 1
        said = f"trial {self.left}"
        print(said)  # noqa: T201  (as a network may)
        print(said, file=sys.stderr)  # noqa: T201
        logging.getLogger("network").critical(said)
        for done in range(3):
            progress.report(done, 2, Path(said), said)
        yield from train_plan(plan, stop, data)
        if self.left:
            raise DivergedError(1)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch, unvalidated: None) -> None:
    """Give all trials the same setting and the same keys, so that any of them has one result."""
    del unvalidated
    monkeypatch.setattr(Dimension, "draw", lambda *_: "0.5")
    monkeypatch.setattr(running, "make_keys", lambda _, **more: make_keys(7, **more))


@pytest.mark.usefixtures("alike")
def test_no_file_of_a_search_depends_on_the_number_of_trials(
    draws: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every byte, name, size and mode is the same, and nothing was logged."""
    found = []
    for number in (1, 4):
        draws[:] = [number]
        monkeypatch.setattr(tuning, "train_plan", Telling(number))
        run = carry_out_search(space())
        files_of = {p.name: (p.stat().st_mode, p.read_bytes()) for p in OUT.iterdir()}
        found.append((run.report, files_of))
        shutil.rmtree(OUT)
    assert found[0] == found[1]
    assert not caplog.records


def on_the_screen(text: str) -> set[str]:
    """The lines that were shown on a terminal, however often, without the bars that move."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return {re.sub(r"[━\s]+", " ", line) for line in re.split(r"[\r\n]", plain)}


@pytest.mark.usefixtures("alike", "uncalibrated")
@pytest.mark.parametrize("how", ["a file", "--quiet", "--json", "terminal", "stopped", "killed"])
def test_no_screen_or_log_tells_the_number_of_trials(
    how: str, draws: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = list[Any]()
    for number in (1, 4):
        draws[:] = [number]
        trials = Telling(number)
        monkeypatch.setattr(tuning, "train_plan", trials)
        if how == "terminal":
            monkeypatch.setenv("FORCE_COLOR", "1")
        if how == "killed":
            secret_place(OUT).mkdir(parents=True, exist_ok=True)
        with monkeypatch.context() as patch:
            if how == "stopped":  # in the last trial
                last = contextlib.nullcontext(lambda of=trials: of.left == 0)
                patch.setattr(command, "stop_request", lambda of=last: of)
            done = dpmac(*FLAGS, *[how] * how.startswith("--"))
        assert done.exit_code == (INTERRUPTED if how == "stopped" else 0), done.stderr
        assert (RESTARTED in done.stderr) == (how == "killed")
        shown.append([done.stdout, done.stderr])
        if how == "terminal":
            shown[-1] = list(map(on_the_screen, shown[-1]))
            assert any("searching" in line for line in shown[-1][1])
        assert [path.name for path in Path().iterdir()] == ["out"] * (how != "stopped")
        shutil.rmtree(OUT, ignore_errors=True)
    assert shown[0] == shown[1]
    assert not caplog.records


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
            patch.setattr(tuning, "train_plan", Trainer([*SCORES, *SCORES]))
            with patch.context() as killing:
                count = kill_at(killing, number)
                try:
                    carry_out_search(of)
                    break
                except Killed:
                    pass
            patch.setattr(tuning, "train_plan", Trainer([*SCORES, *SCORES]))
            if any((OUT / name).exists() for name in folder.PUBLISHED):  # released in part
                with pytest.raises(InputError):
                    carry_out_search(of)
                continue
            carry_out_search(of)
            assert_only_the_winner_is_left(max(SCORES[:3]))
    assert count[0] > 20


def test_a_search_that_is_stopped_leaves_nothing(trained: Trainer) -> None:
    with pytest.raises(KeyboardInterrupt):
        carry_out_search(space(), lambda: len(trained.rates) == 2)
    assert not [*Path().iterdir()]
    assert not secret_place(OUT).exists()
    carry_out_search(space())
    assert len(trained.rates) == 5


@pytest.mark.parametrize("moment", ["plan_search", "carry_out_search"])
def test_ctrl_c_says_what_is_left_at_any_moment(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command if moment == "plan_search" else tuning, moment, pressed)
    made = dpmac("tune", "--dataset", "digits", "--epsilon", "3", "--out", "tuned")
    assert made.exit_code == INTERRUPTED
    printed = " ".join(made.stderr.split())
    assert "Nothing of the search was released, so no epsilon was spent." in printed
    assert "To start it again, repeat the command." in printed
    assert not Path("tuned").exists()


def test_the_copy_of_a_trial_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint says that its cost is not that of one run."""

    def copied(plan: Plan, *args: Any) -> Iterator[Any]:
        yield from train_plan(plan, *args)
        assert plan.settings.out is not None
        shutil.copytree(plan.settings.out, "copy")
        raise RunError("memory ran out")

    monkeypatch.setattr(tuning, "train_plan", copied)
    with pytest.raises(RunError):
        carry_out_search(space())
    for flags in (["--resume", "copy"], ["--resume", "copy", "--out", "new", "--steps", "9"]):
        result = dpmac("train", *flags)
        assert result.exit_code == 2
        assert "is a trial of a search" in result.output


@pytest.mark.parametrize("events", [[], [{"records": "training"}]])
def test_only_a_covered_score_can_decide(events: Any) -> None:
    report = {"events": events, "scores": {"accuracy": {"value": 0.5}}}
    with pytest.raises(ValueError, match="covered"):
        covered_score(report, "accuracy")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SearchSpace]:
    """A real search with three trials, once for all tests that read its files."""
    where = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr(Trials, "draw", lambda _: 3)
        of = space()
        carry_out_search(of)
    return where / OUT, of


def test_the_report_charges_the_whole_search(published: tuple[Path, SearchSpace]) -> None:
    run, of = published
    report = report_of(run)
    whole, one = of.epsilon, of.search.trial_epsilon(1e-5)
    assert report["epsilon"] == whole > one
    assert f"One trial alone costs epsilon {format_epsilon(one)}." in report["sentences"]["search"]
    lines = metrics_of(run)
    assert {line["epsilon"] for line in lines} == {whole}
    assert (
        lines[-1]["test_accuracy"] == report["scores"]["accuracy"]["value"]
    )  # the score that decided
    rows, stored, again, _ = recount(run, Question())
    assert stored == again == rows[0].epsilon == whole
    assert isinstance(rows[0].done, Search)
    (first, *_) = report["risk"]["epsilons"]
    assert first == [1e-5, whole]
    card = (run / folder.CARD).read_text()
    for said in ("best of a random number K", "lr=0.1:1", "Covered: epsilon"):
        assert said in card
    assert "whole search" in report["sentences"]["guarantee"]


def test_what_is_published_does_not_tell_the_number_of_trials(
    published: tuple[Path, SearchSpace],
) -> None:
    run, of = published
    report = report_of(run)
    search, trials = report["search"], of.search.trials
    assert search["trials"] == {"mean": trials.mean, "most": trials.most}
    assert set(search) == {"trials", "space", "candidates"}
    assert not (run / folder.CHECKPOINTS).exists()


def test_no_measured_time_of_the_winner_is_published(published: tuple[Path, SearchSpace]) -> None:
    """The first trial of a process is slower: times would tell whether it won."""
    run, _ = published
    assert report_of(run)["environment"]["seconds"] is None
    assert {line["seconds"] for line in metrics_of(run)} == {None}


def test_the_published_run_cannot_be_trained_further(published: tuple[Path, SearchSpace]) -> None:
    run, _ = published
    assert dpmac("train", "--resume", run, "--out", "new", "--steps", "9").exit_code == 2
    assert dpmac("train", "--resume", run).exit_code == 2
    model = load_model(run).model
    with pytest.raises(ModelError, match="result of a search"):
        make_private(model, "digits", sigma=6, steps=3)


FLAGS = (
    *("tune", "--dataset", "digits", "--model", "linear", "--steps", "3", "--epsilon", "0.5"),
    *("--lr", "0.1:1", "--trials", "2", "--device", "cpu", "--out", "out"),
)


def test_the_command_shows_a_plan_and_no_trial(draws: list[int]) -> None:
    shown = []
    for number in (1, 4):
        draws[:] = [number]
        done = dpmac(*FLAGS, "--out", f"out{number}")
        assert done.exit_code == 0, done.stderr
        lines = (done.stdout + done.stderr).replace(f"out{number}", "out").splitlines()
        # The settings and the score are those of the winner.
        shown.append([line for line in lines if not line.startswith(("settings ", "test "))])
        (score, *_) = [line for line in lines if line.startswith("test accuracy ")]
        report = report_of(f"out{number}")
        assert score.split()[2] == f"{report['scores']['accuracy']['value']:.2%}"
    assert shown[0] == shown[1]
    (whole,) = [line.split()[5] for line in shown[0] if line.startswith("search and model")]
    assert 0.49 < float(whole) <= 0.5
    assert any("from 1 to 8" in line for line in shown[0])


GIVEN = {"dataset": "digits", "model": "linear", "steps": "3", "sigma": "6", "device": "cpu"}


def space_of(*dimensions: Dimension, trials: Trials | None = None) -> SearchSpace:
    """A space whose trials have a noise that is cheap to price."""
    shared: dict[str, Any] = {**GIVEN, "cover_scores": True}
    plan = resolve(shared).plan
    space = tuple(dimension.text for dimension in dimensions)
    return SearchSpace(
        shared=shared,
        data=None,
        dimensions=dimensions,
        search=Search(trials or trials_of(3), (events_of_trial(plan),), space),
        plans=(plan,),
        out=Path("out"),
    )


def test_settings_are_drawn_independently_with_replacement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = space_of(Dimension("clip_norm", ("1", "2")), Dimension("beta1", ("0.1", "0.2")))
    monkeypatch.setattr(SearchSpace, "plan_of", lambda _, setting: setting)
    found: Any = [(space.trial(), space.trial()) for _ in range(400)]
    same = sum(one == other for one, other in found)
    assert 60 < same < 140  # a quarter of them
    joint = Counter((d["clip_norm"], d["beta1"]) for pair in found for d in pair)
    assert len(joint) == 4
    assert chisquare(list(joint.values())).pvalue > 1e-4


@pytest.mark.parametrize(
    "given",
    [{"delta": "1e-5,1e-6"}, {"dataset": "digits,mnist"}, {"class_weights": ["1,2", "2,1"]}],
)
def test_what_the_cost_or_the_records_depend_on_is_not_drawn(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="a search cannot draw this setting"):
        plan_search({"dataset": "digits", "model": "linear", "lr": "0.1,1", **given})


def test_no_seed_of_a_program_decides_the_settings() -> None:
    space = space_of(Dimension("lr", ("1e-9", "1"), between=True))
    found = []
    for _ in range(2):
        random.seed(0)
        found.append([space.trial().optimizer.lr for _ in range(2)])
    assert found[0] != found[1]


def test_a_range_is_drawn_evenly_in_the_logarithm_and_never_left() -> None:
    ends = Dimension("lr", ("1.2345e-4", "0.87654"), between=True)
    source = random.Random(0)
    drawn = [float(ends.draw(source)) for _ in range(2000)]
    assert 1.2345e-4 <= min(drawn) < max(drawn) <= 0.87654
    low, high = math.log(1.2345e-4), math.log(0.87654)
    assert kstest([(math.log(d) - low) / (high - low) for d in drawn], "uniform").pvalue > 1e-3


@pytest.mark.parametrize("delta", [1e-8, 1e-3])
def test_a_search_is_calibrated_and_charged_at_its_own_delta(delta: float) -> None:
    given = {"dataset": "digits", "model": "linear", "epsilon": 0.3, "device": "cpu"}
    given |= {"batch_size": "1437", "steps": "3", "trials": 4, "lr": "0.01:1", "delta": delta}
    space = plan_search(given)
    again = Search(space.search.trials, space.search.candidates).epsilon(delta)
    assert 0.99 * 0.3 < space.epsilon == again <= 0.3


def test_a_trial_with_another_cost_is_refused() -> None:
    space = space_of(Dimension("lr", ("0.1", "1")))
    assert events_of_trial(space.plan_of({"lr": "1"})) in space.search.candidates
    with pytest.raises(ValueError, match="candidates"):
        space.plan_of({"lr": "1", "batch_size": "9"})


def test_a_trial_without_covered_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="covered"):
        events_of_trial(resolve(GIVEN).plan)


def test_search_and_model_together_meet_the_target() -> None:
    given = {"dataset": "digits", "model": "linear", "epsilon": 0.3, "device": "cpu"}
    given["batch_size"] = "1437"  # cheap to price
    space = plan_search({**given, "trials": 4, "lr": "0.01:1", "steps": [3, 12]})
    assert 0.995 * 0.3 < space.epsilon <= 0.3
    assert len(space.search.candidates) == 2
    for setting in ({"lr": "0.3", "steps": "3"}, {"lr": "0.01", "steps": "12"}):
        plan = space.plan_of(setting)
        assert plan.search is not None
        assert Search(space.search.trials, (events_of_trial(plan),)).epsilon(1e-5) <= 0.3
        assert {e.records for e in events_of_trial(plan)} == {"training", "test"}


@pytest.mark.usefixtures("uncalibrated")
def test_without_settings_to_draw_the_rate_is_drawn_near_its_default() -> None:
    given = {"dataset": "digits", "model": "linear", "epsilon": 3, "device": "cpu"}
    space = plan_search(given, written("trials: 5"))
    rate = resolve(given).plan.optimizer.lr
    (only,) = space.dimensions
    assert (only.name, only.between, space.search.trials.mean) == ("lr", True, 5)
    assert list(map(float, only.values)) == pytest.approx([rate / 2, rate * 2], rel=1e-3)
    with pytest.raises(InputError, match="needs a setting to draw"):
        plan_search(given, written("lr: 0.3"))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("seed: 5", "how many trials"),  # every trial would have the same noise and batches
        ("sigma: 0.3", "calibrated"),
        ("max-epsilon: 1", "calibrated"),
        ("canaries: 20", "audit"),
    ],
)
def test_what_a_search_decides_cannot_be_set_in_a_file_either(line: str, why: str) -> None:
    file = written(f"{line}\nforce: false\nepsilon: 3\n")
    with pytest.raises(InputError, match=why):
        plan_search({"dataset": "digits", "model": "linear", "lr": "0.1,1"}, file)


FILE = """\
dataset: digits
model: linear
epsilon: 1
device: cpu
trials: 4
out: found
lr: 1e-2:1
clip-norm: [0.1, 1]
steps: 3,12
"""


def written(text: str = FILE) -> Path:
    file = Path("search.yaml")
    file.write_text(text)
    return file


def test_a_file_of_a_search_does_not_run_code() -> None:
    Path("net.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(InputError, match="is code"):
        plan_search({}, written("dataset: digits\nmodel: ['net.py:N', linear]\n"))


@pytest.mark.usefixtures("uncalibrated")
def test_a_file_is_read_once() -> None:
    """Trials that are drawn after it was edited would not be like the others."""
    space = plan_search({}, written())
    setting = {"lr": "1", "clip_norm": "1", "steps": "3"}
    plan = space.plan_of(setting)
    written(FILE.replace("linear", "mlp"))
    assert plan == space.plan_of(setting)


def test_no_advice_names_a_flag_that_a_search_does_not_have(trained: Trainer) -> None:
    """Its scores are always covered, and it replaces nothing."""
    said = list[str]()
    with pytest.raises(InputError) as failure:
        plan_search({"dataset": "digits", "model": "linear", "metric": "auroc"})
    said += str(failure.value).splitlines()
    carry_out_search(space())
    (OUT / folder.CONFIG).write_text(HEADER)
    with pytest.raises(InputError) as failure:
        carry_out_search(space())
    said += str(failure.value).splitlines()
    assert [" or dpmac train without --cover-scores" in text for text in said] == [True, False]
    assert "Use accuracy, or" in said[0]
    assert "already contains a run. Use another folder." in said[1]
    assert not [text for text in said if "eave out" in text or "--force" in text]
    assert len(trained.rates) == 3


@pytest.mark.parametrize("name", ["seed", "canaries"])
def test_a_setting_of_0_is_a_setting(name: str) -> None:
    """With the seed 0, which equals False, all trials would have the same noise and batches."""
    with pytest.raises(InputError, match=f"{name} cannot be set in a search"):
        plan_search({"dataset": "digits", "model": "linear", name: 0, "lr": [0.1, 1]})
