"""The grid of a study, carried out here and by Ray: one table, whoever did it."""

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dpmac_cli.runs import checkpoint, folder
from dpmac_cli.studies.grid import Grid, Run, plan
from dpmac_cli.studies.local import LostJobError, Pool, carry_out, share_data
from dpmac_cli.studies.results import as_json, collect
from tests.typed import ENVIRONMENT, dpmac, process

SETTINGS = {
    **{"dataset": "digits", "sigma": "6", "device": "cpu", "seeds": "2", "epochs": "20"},
    **{"optimizers": "dp-sgd,dp-macadam", "checkpoint_every": "5"},
}
FLAGS = [
    "compare",
    *(part for k, v in SETTINGS.items() for part in (f"--{k.replace('_', '-')}", v)),
]
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
#: Of the processes of that cluster.
MARK = "DPMAC_TEST_CLUSTER"


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


def grid_in(out: Path, **changes: str) -> Grid:
    """The study of these tests."""
    return plan({**SETTINGS, **changes}, None, out / "runs")


def table(values: dict[str, Any]) -> dict[str, Any]:
    """A comparison without what a clock decides."""
    rows = [{k: v for k, v in row.items() if k != "training_seconds"} for row in values["rows"]]
    return {**values, "rows": rows}


def never() -> bool:
    """Nobody asks the runs to stop."""
    return False


def written(out: Path) -> dict[str, Any]:
    return table(json.loads((out / "compare.json").read_text()))


def assert_went_on(out: Path, undisturbed: dict[str, Any]) -> None:
    """All runs are finished, with other noise, and no run costs less than it would have."""
    for row, whole in zip(written(out)["rows"], undisturbed["rows"], strict=True):
        for name in ("optimizer", "sigma", "seeds", "failures"):
            assert row[name] == whole[name]
        assert row["epsilon"] >= whole["epsilon"] * (1 - 1e-6)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The table of a pool of processes here that nothing happened to."""
    grid = grid_in(tmp_path_factory.mktemp("local"))
    pool = Pool(grid.runs, 1, share_data(grid.runs))
    ended = [event.failure for event in carry_out(pool, grid.runs, range(4), never)]
    assert ended == [None] * 4
    return table(as_json(collect(grid, {})))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of two nodes with a CPU each."""
    need("ray")
    env = {**ENVIRONMENT, MARK: str(os.getpid()), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", TWO_NODES]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env=env, **pipes) as running:  # type: ignore[call-overload]
        try:
            yield running.stdout.readline().strip()
        finally:
            running.stdin.close()
            running.wait(60)


def processes(name: bytes) -> list[int]:
    """Those whose command line holds a name."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if name in command:
                found.append(int(entry.name))
    return found


def environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def wait_for(condition: Callable[[], Any]) -> Any:
    """Until something holds: what."""
    deadline = time.monotonic() + 180  # a guard against hanging, not a bound
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def saved(out: Path) -> set[Path]:
    """The checkpoint folders of the runs that were saved after their first steps."""
    return {
        path.parent
        for path in out.glob("runs/*/checkpoint/state.safetensors")
        if checkpoint.read(path.parents[1]).step
    }


def under_way(out: Path) -> bool:
    """Whether some run has been saved after its first steps."""
    return bool(saved(out))


@pytest.mark.long
def test_on_ray_a_failed_run_leaves_the_others_and_interrupted_ones_go_on(
    local: dict[str, Any], cluster: str, tmp_path: Path
) -> None:
    out = tmp_path / "study"
    broken, first, *later = grid_in(out).runs
    broken.folder.mkdir(parents=True)
    (broken.folder / "thesis.txt").write_text("chapter 1")
    flags = ("--executor", "ray", "--cluster", cluster, "--out", str(out), "--jobs", "1")
    running = process(*FLAGS, *flags)
    wait_for(lambda: under_way(out))
    running.send_signal(signal.SIGTERM)  # which Ray would like to have for itself
    output, errors = running.communicate(timeout=180)
    assert running.returncode == 130, errors
    assert "files that do not belong to a run" in output
    assert "run the same command to resume" in errors
    assert "Traceback" not in errors
    report = json.loads((first.folder / folder.REPORT).read_text())
    assert report["state"] == "interrupted"
    assert not any(run.folder.exists() for run in later)
    (broken.folder / "thesis.txt").unlink()
    running = process(*FLAGS, *flags[:-2])
    output, errors = running.communicate(timeout=300)
    assert running.returncode == 0, errors
    assert_went_on(out, local)


class Scripted:
    """An executor whose jobs have these results, by the numbers of their runs.

    A job without one ends as soon as it is asked to stop.
    """

    slots = 2

    def __init__(self, runs: Sequence[Run], results: dict[int, str | Exception | None]) -> None:
        self.runs, self.results, self.started = runs, results, list[int]()

    def train(self, run: Run, stop: threading.Event) -> str | None:
        number = self.runs.index(run)
        self.started.append(number)
        if number not in self.results:
            stop.wait()
        result = self.results.get(number)
        if isinstance(result, Exception):
            raise result
        return result


def test_a_run_whose_process_dies_has_failed_and_others_go_on(tmp_path: Path) -> None:
    runs = grid_in(tmp_path, seeds="2", epochs="1").runs
    dies = Scripted(runs, {0: LostJobError("signal 9"), 1: "failed"})
    events = {event.number: event.failure for event in carry_out(dies, runs, [0, 1], never)}
    assert events[1] == "failed"
    assert "its process died (signal 9)" in str(events[0])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--executor", "cloud"], "there is no executor 'cloud'. Known: local, ray"),
        (["--executor", "slurm"], "Submit dpmac train as an array of jobs"),
        (["--slurm", "time=60"], "Submit dpmac train as an array of jobs"),
        (["--jobs", "0"], "--jobs must be at least 1 and at most 1,024, not 0"),
        (["--cluster", "auto"], "Add --executor ray"),
    ],
)
def test_an_executor_that_cannot_be_is_refused(flags: list[str], words: str) -> None:
    result = dpmac(*FLAGS, *flags)
    assert result.exit_code == 2
    assert words in " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda asked: None if asked == "ray" else find(asked)
    )
    result = dpmac(*FLAGS, "--executor", "ray", "--out", "study")
    assert result.exit_code == 2
    assert "needs ray, which is not installed: pip install 'dpmac[ray]'" in result.output
    assert not Path("study").exists()


@pytest.mark.long
def test_a_cluster_that_is_not_there_is_told_at_once_and_nothing_is_left() -> None:
    need("ray")
    for where in ("127.0.0.1:1", "ray://127.0.0.1:1", "nonsense"):
        result = dpmac(*FLAGS, "--executor", "ray", "--cluster", where, "--out", "study")
        assert result.exit_code == 2
        assert f"No Ray cluster can be used at {where} (" in result.output
        assert not Path("study").exists()
