"""dpmac compare, as typed and as seen: grids on digits, disturbed and undisturbed."""

import csv
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dpmac_cli.runs import checkpoint
from tests.typed import dpmac, hooked, loading, process

COMMON = ("compare", "--dataset", "digits", "--sigma", "6", "--device", "cpu")
SMALL = (
    *COMMON,
    *("--jobs", "1", "--optimizers", "dp-sgd,dp-macadam", "--seeds", "2", "--steps", "3"),
)
LONG = (*COMMON, "--optimizers", "dp-sgd,dp-macadam", "--seeds", "2", "--epochs", "30")
OFTEN = ("--checkpoint-every", "5", "--jobs", "2")


def completed(*args: str) -> str:
    """Type a command in a process of its own: what it printed."""
    running = process(*args)
    output, errors = running.communicate(timeout=300)
    assert running.returncode == 0, errors
    return output


def table(out: Path) -> list[dict[str, Any]]:
    """The rows of a comparison, without what a clock decides."""
    rows = json.loads((out / "compare.json").read_text())["rows"]
    return [{k: v for k, v in row.items() if k != "training_seconds"} for row in rows]


def children(command: int) -> list[int]:
    """Processes of a command that train a run: of the server that forks them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                line = (entry / "cmdline").read_text()
            except OSError:
                continue
            if "multiprocessing.forkserver" in line:
                parents[int(entry.name)] = int(fields[1])
    return [pid for pid, parent in parents.items() if parents.get(parent) == command]


def wait_for_steps(out: Path) -> None:
    """Until some run is under way and has been saved."""
    deadline = time.monotonic() + 60
    while not any(
        checkpoint.read(path.parents[1]).step
        for path in out.glob("runs/*/checkpoint/state.safetensors")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_a_grid_becomes_a_table(tmp_path: Path) -> None:
    out = tmp_path / "study"
    result = dpmac(*SMALL, "--out", str(out), "--jobs", "2", columns=80)
    assert result.exit_code == 0, result.output
    rows = table(out)
    assert [(row["optimizer"], row["seeds"]) for row in rows] == [("dp-sgd", 2), ("dp-macadam", 2)]
    for row in rows:
        values = list(row["values"].values())
        assert row["mean"] == pytest.approx(sum(values) / 2)
        assert row["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
        assert row["sigma"] == 6
        assert 0 < row["epsilon"] < 1
        assert f"{100 * row['mean']:.2f} ± {100 * row['std']:.2f}" in result.output
    assert "costs epsilon" in result.output
    for name in ("compare.csv", "compare.md"):
        assert (out / name).stat().st_size > 100
    with (out / "compare.csv").open() as file:
        assert [line["optimizer"] for line in csv.DictReader(file)] == ["dp-sgd", "dp-macadam"]
    assert max(map(len, result.output.splitlines()[:8])) <= 80


@pytest.mark.long
def test_finished_runs_are_found_again_and_never_run_twice(tmp_path: Path) -> None:
    out = tmp_path / "study"
    first = dpmac(*SMALL, "--out", str(out))
    # The command takes a signal to pytest, such as that of timeout, as a request to stop.
    assert first.exit_code == 0, first.output
    models = {p: p.stat().st_mtime_ns for p in out.rglob("model.safetensors")}
    before = table(out)
    again = dpmac(*SMALL, "--out", str(out))
    assert "4 of them found finished" in again.output
    assert {p: p.stat().st_mtime_ns for p in out.rglob("model.safetensors")} == models
    more = dpmac(*SMALL[:-4], "--seeds", "3", "--steps", "3", "--out", str(out))
    assert "4 of them found finished" in more.output
    assert len(list(out.rglob("model.safetensors"))) == 6
    assert [row["optimizer"] for row in table(out)] == [row["optimizer"] for row in before]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long comparison that nothing happened to."""
    out = tmp_path_factory.mktemp("compare") / "whole"
    completed(*LONG, *OFTEN, "--out", str(out))
    return out


def assert_went_on(hurt: Path, undisturbed: Path) -> None:
    """All runs are finished, with other noise, and no run costs less than it would have."""
    for row, whole in zip(table(hurt), table(undisturbed), strict=True):
        for name in ("optimizer", "sigma", "seeds", "failures"):
            assert row[name] == whole[name]
        assert row["epsilon"] >= whole["epsilon"] * (1 - 1e-6)


@pytest.mark.long
def test_a_killed_worker_fails_and_the_same_command_goes_on(
    undisturbed: Path, tmp_path: Path
) -> None:
    hurt = tmp_path / "hurt"
    running = process(*LONG, *OFTEN, "--out", str(hurt))
    wait_for_steps(hurt)
    os.kill(children(running.pid)[0], signal.SIGKILL)
    _, errors = running.communicate(timeout=300)
    assert running.returncode == 4, errors
    assert "its process died (signal 9)" in " ".join(errors.split())
    completed(*LONG, *OFTEN, "--out", str(hurt))
    assert_went_on(hurt, undisturbed)


@pytest.mark.long
def test_interrupted_it_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "study"
    running = process(*LONG, *OFTEN, "--out", str(out))
    wait_for_steps(out)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=180)
    assert running.returncode == 130
    assert "run the same command to resume" in errors
    assert "Traceback" not in errors


@pytest.mark.long
def test_what_fails_for_one_reason_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    net = f"{tmp_path / 'net.py'}:Net"
    running = process(*SMALL, "--out", str(tmp_path / "study"), "--model", net)
    lines = running.communicate(timeout=300)[1].splitlines()
    [line] = [line for line in lines if line.startswith("failed: ")]
    assert re.match(rf"failed: digits-dp-sgd-\w+ \(seed 0\) and 3 more: --model {net}: ", line)


def test_a_dry_run_trains_nothing(tmp_path: Path) -> None:
    varied = ("--lr", "0.1,0.2", "--out", str(tmp_path / "study"), "--dry-run")
    result = hooked(loading("torch"), *SMALL, *varied)
    assert result.returncode == 0, result.stderr
    assert "8 runs" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("dp-")]
    assert rows[0] == ["dp-sgd", "lr", "0.1", "6", "0.09005", "3", "2"]
    assert len(rows) == 4
    assert not (tmp_path / "study").exists()
    assert Path("loaded").read_text() == ""
