"""dpmac compare, as typed and as seen: grids on digits, disturbed or not, here and by Ray."""

import contextlib
import csv
import importlib
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.progress import Progress

from dpmac_cli.cli.compare import StudyDisplay
from dpmac_cli.cli.console import TimeLeft
from dpmac_cli.errors import InputError
from dpmac_cli.release.plots import COLOURS
from dpmac_cli.runs import checkpoint
from dpmac_cli.runs.lock import locked
from dpmac_cli.studies import local
from dpmac_cli.studies.grid import Grid, Run, plan
from dpmac_cli.studies.local import Job, Look, carry_out, reason
from tests.cli.test_faults import file_size_limit, unprivileged
from tests.digits_runs import report_of
from tests.test_card import page_of, pictures
from tests.typed import ENVIRONMENT, Here, dpmac, process

COMMON = ("compare", "--dataset", "digits", "--sigma", "6", "--device", "cpu")
SMALL = (
    *COMMON,
    *("--jobs", "1", "--optimizers", "dp-sgd,dp-macadam", "--seeds", "2", "--steps", "3"),
)
#: Two runs, where it does not matter which.
PAIR = (*COMMON, *("--optimizers", "dp-macadam", "--seeds", "2", "--steps", "3"))
LONG = (
    *(*COMMON, "--optimizers", "dp-sgd,dp-macadam", "--seeds", "2", "--epochs", "30"),
    *("--checkpoint-every", "5"),
)
ONE, TWO = ("--jobs", "1"), ("--jobs", "2")


def completed(*args: str) -> str:
    """Type a command in a process of its own: what it printed."""
    running = process(*args)
    output, errors = running.communicate(timeout=600)
    assert running.returncode == 0, errors
    return output


def table(out: Path) -> list[dict[str, Any]]:
    """The rows of a comparison, without what a clock decides."""
    rows = json.loads((out / "compare.json").read_text())["rows"]
    return [{k: v for k, v in row.items() if k != "training_seconds"} for row in rows]


def children(command: int) -> list[int]:
    """Processes of a command, each of which trains a run."""
    found = list[int]()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == command and "\0train\0" in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], Any]) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + 180  # a guard against hanging, not a bound
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def wait_for_steps(out: Path) -> None:
    """Wait until some run is under way and has been saved."""
    wait_for(
        lambda: any(
            checkpoint.read(path.parents[1]).step
            for path in out.glob("runs/*/checkpoint/state.safetensors")
        )
    )


@pytest.mark.long
@pytest.mark.usefixtures("studies_here")
def test_a_grid_becomes_a_table(tmp_path: Path) -> None:
    out = tmp_path / "study"
    figure = tmp_path / "study.svg"
    flags = ("--out", str(out), "--jobs", "2", "--plot", str(figure))
    result = dpmac(*SMALL, *flags, columns=80)
    assert result.exit_code == 0, result.output
    assert figure.read_bytes().startswith(b"<?xml")
    rows = table(out)
    assert [(row["optimizer"], row["seeds"]) for row in rows] == [("dp-sgd", 2), ("dp-macadam", 2)]
    for row in rows:
        values = list(row["values"].values())
        assert row["mean"] == pytest.approx(sum(values) / 2)
        assert row["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
        assert row["sigma"] == 6
        assert 0 < row["epsilon"] < 1
        assert f"{100 * row['mean']:.2f} ± {100 * row['std']:.2f}" in result.output
    assert "no epsilon bounds anything learnt from all of them" in " ".join(result.output.split())
    for name in ("compare.csv", "compare.md"):
        assert (out / name).stat().st_size > 100
    with (out / "compare.csv").open() as file:
        assert [line["optimizer"] for line in csv.DictReader(file)] == ["dp-sgd", "dp-macadam"]
    assert "4 runs; seeds 0, 1 in each cell (--seeds)" in result.output
    assert max(map(len, result.output.splitlines()[:8])) <= 80
    # Run runs are found again and never run twice.
    models = {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}
    more = dpmac(*SMALL[:-4], "--seeds", "3", "--steps", "3", "--out", str(out))
    assert "4 of them found finished" in more.output
    assert len(list(out.rglob("model.safetensors"))) == 6
    assert {path: path.stat().st_mtime_ns for path in models} == models
    assert [row["optimizer"] for row in table(out)] == [row["optimizer"] for row in rows]


@pytest.mark.long
@pytest.mark.usefixtures("studies_here")
def test_runs_that_were_trained_by_their_commands_are_the_study_s(tmp_path: Path) -> None:
    """On a cluster without Ray, for example."""
    study = (*SMALL, "--out", str(tmp_path / "my study"))

    def commands() -> list[str]:
        planned: list[str] = json.loads(dpmac(*study, "--dry-run", "--json").output)["commands"]
        return planned

    lines = commands()
    assert len(lines) == 4
    for line in lines[:3]:
        trained = dpmac(*shlex.split(line)[1:])
        assert (trained.exit_code, trained.output) == (0, "")
    assert commands() == lines[3:]
    assert "4 runs, 3 of them found finished" in dpmac(*study).output
    assert commands() == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long comparison that nothing happened to."""
    out = tmp_path_factory.mktemp("compare") / "whole"
    completed(*LONG, *TWO, "--out", str(out))
    return out


def assert_went_on(hurt: Path, undisturbed: Path) -> None:
    """All runs are finished, with other noise, and no run costs less than it would have."""
    for row, whole in zip(table(hurt), table(undisturbed), strict=True):
        for name in ("optimizer", "sigma", "seeds", "failures"):
            assert row[name] == whole[name]
        assert row["epsilon"] >= whole["epsilon"] * (1 - 1e-6)


@pytest.mark.long
def test_after_a_signal_and_a_killed_worker_the_same_command_goes_on(
    undisturbed: Path, tmp_path: Path
) -> None:
    hurt = tmp_path / "hurt"
    running = process(*LONG, *TWO, "--out", str(hurt))
    wait_for_steps(hurt)
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=600)
    assert running.returncode == 130
    assert "stopping: each run finishes its step and saves" in output
    assert "run the same command to resume" in errors
    assert "Traceback" not in errors
    running = process(*LONG, *TWO, "--out", str(hurt))
    os.kill(wait_for(lambda: children(running.pid))[0], signal.SIGKILL)
    _, errors = running.communicate(timeout=600)
    assert running.returncode == 4, errors
    assert "its process died (signal 9)" in " ".join(errors.split())
    completed(*LONG, *TWO, "--out", str(hurt))
    assert_went_on(hurt, undisturbed)


#: Seconds until a study is killed. docs/data/study_kills.json has many more.
MOMENTS = (
    pytest.param(0.0, marks=pytest.mark.long),
    pytest.param(1.5, marks=pytest.mark.weekly),
    pytest.param(4.0, marks=pytest.mark.long),
    pytest.param(7.0, marks=pytest.mark.weekly),
)


@pytest.mark.parametrize("after", MOMENTS)
def test_a_killed_study_loses_no_finished_run_and_repeats_none(
    after: float, undisturbed: Path, tmp_path: Path
) -> None:
    """Its commands go on, and the next study waits for those that have begun."""
    hurt = tmp_path / "hurt"
    running = process(*LONG, *TWO, "--out", str(hurt))
    wait_for(lambda: children(running.pid))
    time.sleep(after)
    running.kill()
    running.communicate()
    finished = {sums: sums.stat().st_mtime_ns for sums in hurt.glob("runs/*/SHA256SUMS")}
    completed(*LONG, *TWO, "--out", str(hurt))
    assert finished == {sums: sums.stat().st_mtime_ns for sums in finished}
    assert table(hurt) == table(undisturbed)


@pytest.mark.long
def test_the_page_of_a_comparison_has_its_table_and_a_picture(
    undisturbed: Path, tmp_path: Path
) -> None:
    text = page_of(undisturbed, tmp_path)
    assert "<td>dp-macadam</td>" in text
    assert "no epsilon bounds anything learnt from all of them" in " ".join(text.split())
    (picture,) = pictures(text)
    colors = re.findall(r"#[0-9a-f]{6}", ElementTree.tostring(picture).decode())
    # That of dp-macadam, whatever it is compared with.
    assert COLOURS[4].lower() in {color.lower() for color in colors}


@pytest.mark.usefixtures("studies_here")
def test_what_fails_for_one_reason_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    net = f"{tmp_path / 'net.py'}:Net"
    lines = dpmac(*SMALL, "--out", str(tmp_path / "study"), "--model", net).stderr.splitlines()
    [line] = [line for line in lines if line.startswith("failed: ")]
    assert re.match(rf"failed: digits-dp-sgd-\w+ \(seed 0\) and 3 more: --model {net}: ", line)


def screen() -> Console:
    """A terminal of 80 columns, whose text is kept."""
    return Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)


def text_on(terminal: Console) -> str:
    """What was printed on a terminal."""
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


def test_the_screen_has_seeds_failures_and_a_request_to_stop(tmp_path: Path) -> None:
    terminal = screen()
    grid = grid_in(tmp_path)
    first, second, *_ = grid.runs
    display = StudyDisplay(terminal, grid, grid.runs)
    display.show(Look((first,), ((second, "no memory"),)), stopping=False)
    for _ in range(2):
        display.show(Look((first,), ()), stopping=True)
    display.close()
    text = text_on(terminal)
    assert "4 runs; seeds 0, 1 in each cell (--seeds)" in text
    assert "seed 1: failed: no memory" in text
    assert text.count("stopping: each run finishes its step and saves") == 1


def test_a_bar_has_the_time_that_is_left_once_it_is_known() -> None:
    clock, column = itertools.count(1.0), TimeLeft()
    bar = Progress(column, console=screen(), get_time=lambda: next(clock))
    number = bar.add_task("", total=100)
    [task] = bar.tasks
    assert column.render(task).plain == ""
    for _ in range(3):
        bar.advance(number, 10)
    assert column.render(task).plain == "0:07 left"
    bar.update(number, completed=100)
    assert column.render(task).plain == "finishing"


# Executors.


#: Starts two machines' worth of Ray, says where, and ends with whoever reads it.
TWO_NODES = """
import os, sys
from ray.cluster_utils import Cluster
cluster = Cluster()
try:
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False)
    print(cluster.address, flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
"""


def need(module: str) -> None:
    """An extra is installed. On CI its absence is a failure; elsewhere a skip."""
    if importlib.util.find_spec(module) is not None:
        # Here, and not within a command: submitit configures logging as it is imported, absl then
        # closes its stream, and that is pytest's unless it stands as the standard one.
        importlib.import_module(module)
        return
    reason = f"{module} is not installed: pip install -e '.[dev]'"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def grid_in(out: Path) -> Grid:
    """The study of :data:`LONG`."""
    flags = (flag[2:].replace("-", "_") for flag in LONG[1::2])
    return plan(dict(zip(flags, LONG[2::2], strict=True)), None, out / "runs")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of two nodes with a CPU each."""
    need("ray")
    env = {**ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", TWO_NODES]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env=env, **pipes) as running:  # type: ignore[call-overload]
        try:
            yield running.stdout.readline().strip()
        finally:
            running.stdin.close()
            running.wait(60)


@pytest.mark.long
def test_on_ray_a_failed_run_leaves_the_others_and_interrupted_ones_go_on(
    undisturbed: Path, cluster: str, tmp_path: Path
) -> None:
    out = tmp_path / "study"
    broken, first, *later = grid_in(out).runs
    broken.folder.mkdir(parents=True)
    (broken.folder / "thesis.txt").write_text("chapter 1")
    flags = ("--executor", "ray", "--cluster", cluster, "--out", str(out), "--jobs", "1")
    running = process(*LONG, *flags)
    wait_for_steps(out)
    running.send_signal(signal.SIGTERM)  # which Ray would like to have for itself
    output, errors = running.communicate(timeout=600)
    assert running.returncode == 130, errors
    assert "files that do not belong to a run" in output
    assert "run the same command to resume" in errors
    assert "Traceback" not in errors
    report = report_of(first.folder)
    assert report["state"] == "interrupted"
    assert not any(run.folder.exists() for run in later)
    (broken.folder / "thesis.txt").unlink()
    running = process(*LONG, *flags[:-2])
    output, errors = running.communicate(timeout=600)
    assert running.returncode == 0, errors
    assert_went_on(out, undisturbed)


@pytest.mark.long
def test_seeded_runs_on_two_workers_of_ray_are_those_trained_here(
    cluster: str, tmp_path: Path
) -> None:
    """To the last bit of every weight."""
    here, there = tmp_path / "here", tmp_path / "there"
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(local, "Command", Here)
        assert dpmac(*PAIR, *ONE, "--out", str(here)).exit_code == 0
    workers = ("--executor", "ray", "--cluster", cluster, *TWO)
    completed(*PAIR, *workers, "--out", str(there))
    models = sorted(path.relative_to(here) for path in here.glob("runs/*/model.safetensors"))
    assert len(models) == 2
    for model in models:
        assert (here / model).read_bytes() == (there / model).read_bytes()
    assert table(here) == table(there)


# Disks.


@pytest.mark.long
@pytest.mark.usefixtures("studies_here")
def test_a_full_disk_is_said_once_for_all_runs(tmp_path: Path) -> None:
    with file_size_limit() as limit:
        limit(3000)
        result = dpmac(*PAIR, *ONE, "--out", str(tmp_path / "study"))
    assert result.exit_code in (2, 4), result.output
    [line] = [line for line in result.stderr.splitlines() if "Free some space" in line]
    assert line.startswith(("error: ", "failed: "))
    assert "File too large" in line
    assert "Traceback" not in result.output
    again = dpmac(*PAIR, *ONE, "--out", str(tmp_path / "study"))
    assert again.exit_code == 0, again.output


def test_a_folder_that_may_not_be_written_to_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "study" / "runs").mkdir(parents=True)
    places = (tmp_path, tmp_path / "study", tmp_path / "study" / "runs")
    for place in places:
        place.chmod(0o555)
    try:
        with unprivileged():
            results = [dpmac(*SMALL, "--out", str(tmp_path / name)) for name in ("new", "study")]
    finally:
        for place in places:
            place.chmod(0o755)
    for result in results:
        assert result.exit_code == 2
        [line] = result.stderr.splitlines()
        assert "Permission denied" in line
        assert "Make it writable" in line


class Scripted:
    """An executor of jobs that end at once, for the reasons of their runs."""

    slots = 2

    def __init__(self, reasons: Mapping[Run, str | InputError]) -> None:
        self.reasons, self.started = reasons, list[Run]()

    def start(self, run: Run) -> Job:
        self.started.append(run)
        reason = self.reasons[run]
        if isinstance(reason, InputError):
            raise reason
        return mock.Mock(ended=lambda: True, failure=lambda: reason)


def ended(looks: Iterable[Look]) -> dict[Run, str | None]:
    """Why runs failed."""
    return {run: why for look in looks for run, why in look.ended}


def test_a_run_that_fails_or_cannot_be_started_leaves_the_others(tmp_path: Path) -> None:
    first, second, third, *_ = grid_in(tmp_path).runs
    executor = Scripted({first: "one", second: InputError("{out} two"), third: "three"})
    whys = ended(carry_out(executor, (first, second, third), lambda: False))
    assert whys == {first: "one", second: "--out two", third: "three"}


def test_a_run_that_another_process_trains_is_waited_for(tmp_path: Path) -> None:
    """Of a study that was killed, for example. If it ends without a result, it is trained here."""
    first, second, *_ = grid_in(tmp_path).runs
    executor = Scripted({first: "one", second: "two"})
    first.folder.mkdir(parents=True)
    with locked(first.folder):
        looks = carry_out(executor, (first, second), lambda: False)
        for look in itertools.islice(looks, 5):
            assert first in look.running
        assert executor.started == [second]
    assert ended(looks) == {first: "one"}


def test_reasons_of_failures_are_those_that_the_command_said() -> None:
    assert reason(-9, "") == "its process died (signal 9). If memory ran out, use fewer jobs."
    assert reason(2, "a warning\nerror: one\nsecond line\nerror: two\n") == "one\nsecond line\ntwo"
    assert reason(1, "Traceback\nKeyError: 'a'\n") == "KeyError: 'a'"
    assert reason(7, "") == "its process ended with exit code 7."


def test_a_second_study_in_a_folder_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "study"
    out.mkdir()
    (out / "runs").mkdir()
    with locked(out):
        result = dpmac(*SMALL, "--out", str(out))
    assert result.exit_code == 2
    assert "is in use by another dpmac process" in result.output


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda asked: None if asked == "ray" else find(asked)
    )
    result = dpmac(*LONG, "--executor", "ray", "--out", "study")
    assert result.exit_code == 2
    assert "needs ray, which is not installed: pip install 'dpmac[ray]'" in result.output
    assert not Path("study").exists()


def test_a_cluster_that_is_not_there_is_told_at_once_and_nothing_is_left() -> None:
    need("ray")
    for where in ("127.0.0.1:1", "ray://127.0.0.1:1", "nonsense"):
        result = dpmac(*LONG, "--executor", "ray", "--cluster", where, "--out", "study")
        assert result.exit_code == 2
        assert f"No Ray cluster can be used at {where} (" in result.output
        assert not Path("study").exists()
