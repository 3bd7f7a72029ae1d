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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpmac_cli.errors import InputError
from dpmac_cli.release import run
from dpmac_cli.release.run import finish
from dpmac_cli.runs import checkpoint, folder
from dpmac_cli.runs.session import Started
from dpmac_cli.studies import executor
from dpmac_cli.studies import local as workers
from dpmac_cli.studies.executor import Ended, Moved, Result, carry_out
from dpmac_cli.studies.grid import Grid, Run, plan
from dpmac_cli.studies.local import Pool, share_data, train_run
from dpmac_cli.studies.results import collect
from dpmac_cli.studies.tables import as_json
from tests.digits_runs import a_run, after, digits_config, train_digits
from tests.typed import ENVIRONMENT, dpmac, hooked, loading, process

SETTINGS = {
    **{"dataset": "digits", "sigma": "6", "device": "cpu", "seeds": "2", "epochs": "20"},
    **{"optimizers": "dp-sgd,dp-macadam", "checkpoint_every": "5"},
}
FLAGS = [
    "compare",
    *(part for k, v in SETTINGS.items() for part in (f"--{k.replace('_', '-')}", v)),
]
ONE_RUN = ("--optimizers", "dp-sgd", "--seeds", "1", "--epochs", "1")
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
    ended = [
        event
        for event in carry_out(
            Pool(grid.runs, 1, share_data(grid.runs)), grid.runs, range(4), never
        )
        if isinstance(event, Ended)
    ]
    assert ended == [Ended(number) for number in range(4)]
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


def ray_workers() -> list[int]:
    """Processes of the cluster that have a run in hand."""
    mark = f"{MARK}={os.getpid()}".encode()
    return [pid for pid in processes(b"ray::_train") if mark in environ(pid)]


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
    return {path.parent for path in out.glob("runs/*/checkpoint/step-0*[1-9]*.safetensors")}


def under_way(out: Path) -> bool:
    """Whether some run has been saved after its first steps."""
    return bool(saved(out))


@pytest.mark.long
def test_on_ray_a_killed_worker_fails_and_the_same_command_goes_on(
    local: dict[str, Any], cluster: str, tmp_path: Path
) -> None:
    out = tmp_path / "study"
    flags = ("--executor", "ray", "--cluster", cluster, "--out", str(out), "--json")
    running = process(*FLAGS, *flags)
    wait_for(lambda: under_way(out))
    os.kill(ray_workers()[0], signal.SIGKILL)
    output, errors = running.communicate(timeout=300)
    assert running.returncode == 4, errors
    assert "its process died (WorkerCrashedError)" in " ".join(errors.split())
    running = process(*FLAGS, *flags)
    output, errors = running.communicate(timeout=300)
    assert running.returncode == 0, errors
    assert table(json.loads(output)) == written(out)
    assert_went_on(out, local)


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


@pytest.mark.privacy
def test_ray_is_told_to_report_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    need("ray")
    from dpmac_cli.studies import ray_cluster  # noqa: PLC0415

    told: list[str] = []

    def init(*_: Any, **__: Any) -> None:
        told.append(os.environ["RAY_USAGE_STATS_ENABLED"])
        raise RuntimeError("not here")

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(InputError, match="not here"), ray_cluster.connected(None):
        pass
    assert told == ["0"]
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"


class Scripted:
    """An executor whose jobs have these results, by the numbers of their runs.

    A job without one ends as soon as it is asked to stop.
    """

    slots = 2

    def __init__(self, runs: Sequence[Run], results: dict[int, Result]) -> None:
        self.runs, self.results, self.started = runs, results, list[int]()

    def train(self, run: Run, stop: threading.Event) -> Result:
        number = self.runs.index(run)
        self.started.append(number)
        if number not in self.results:
            stop.wait()
        return self.results.get(number, (None, number))


def test_a_run_whose_process_dies_has_failed_and_others_go_on(tmp_path: Path) -> None:
    runs = grid_in(tmp_path, seeds="2", epochs="1").runs
    dies = Scripted(runs, {0: ("signal 9", None), 1: ("failed", 3)})
    events = {str(event) for event in carry_out(dies, runs, [0, 1], never)}
    assert len(events) == 3
    assert any("its process died (signal 9)" in event for event in events)
    assert events >= {str(Moved(1, 3, None)), str(Ended(1, "failed"))}


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


def test_asked_to_stop_no_run_is_started_any_more(tmp_path: Path) -> None:
    runs = grid_in(tmp_path, epochs="1").runs
    asked = Scripted(runs, {})
    ended = list(carry_out(asked, runs, [0, 1, 2], lambda: len(asked.started) == 2))
    assert sorted(asked.started) == [0, 1]
    assert sorted(str(event) for event in ended) == sorted(
        map(str, (Ended(0), Moved(1, 1, None), Ended(1)))
    )
    assert list(carry_out(Scripted(runs, {}), runs, [0], lambda: True)) == []


def test_jobs_that_are_left_are_asked_to_stop(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    class Together(Scripted):
        def train(self, run: Run, stop: threading.Event) -> Result:
            both.wait()
            return super().train(run, stop)

    runs = grid_in(tmp_path, epochs="1").runs
    left = Together(runs, {0: ("failed", 3)})
    events = carry_out(left, runs, [0, 1], never)
    assert next(events) == Moved(0, 3, None)
    del events  # waits for the other one, which ends once it is asked to
    assert sorted(left.started) == [0, 1]


def test_a_process_killed_after_its_run_was_finished_is_no_failure(tmp_path: Path) -> None:
    runs = grid_in(tmp_path, seeds="1", epochs="1", optimizers="dp-sgd").runs
    assert train_run(runs[0], None, never) == (None, runs[0].plan.privacy.steps)
    *_, last = carry_out(Scripted(runs, {0: ("job 7_0", None)}), runs, [0], never)
    assert last == Ended(0)


@pytest.mark.long
def test_neither_is_loaded_unless_asked_for() -> None:
    done = hooked(loading("ray"), *FLAGS, *ONE_RUN, "--quiet")
    assert done.returncode == 0, done.stderr
    assert Path("loaded").read_text() == ""


@pytest.mark.long
def test_a_cluster_that_is_not_there_is_told_at_once_and_nothing_is_left() -> None:
    need("ray")
    for where in ("127.0.0.1:1", "ray://127.0.0.1:1", "nonsense"):
        result = dpmac(*FLAGS, "--executor", "ray", "--cluster", where, "--out", "study")
        assert result.exit_code == 2
        assert f"No Ray cluster can be used at {where} (" in result.output
        assert not Path("study").exists()


@pytest.mark.long
@pytest.mark.privacy
def test_a_ray_of_our_own_tells_nobody_leaves_signals_alone_and_begins_no_more_than_it_should() -> (
    None
):
    need("ray")
    script = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *args: None)
before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
from pathlib import Path
from dpmac_cli.studies import ray_cluster
from dpmac_cli.studies.executor import Ended, carry_out
with ray_cluster.connected(None):
    after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    from dpmac_cli.config.resolve import resolve
    from dpmac_cli.studies.grid import Run
    plan = resolve(dataset="digits", sigma=6, device="cpu", out="run").plan
    begun = []
    class Counted(ray_cluster.Tasks):
        def train(self, run, stop):
            begun.append(0)
            return super().train(run, stop)
    runs = [Run(plan, Path("run"), 0, {}, 6.0)] * 3
    for answers in (iter([]), iter([False])):
        stop = lambda: next(answers, True)
        events = list(carry_out(Counted(runs, 1), runs, range(3), stop))
        print(begun, [event.failure for event in events if isinstance(event, Ended)])
    print(before == after, flush=True)
    sys.stdin.read()
"""
    env = {k: v for k, v in ENVIRONMENT.items() if k != "RAY_ADDRESS"}
    env |= {"RAY_USAGE_STATS_ENABLED": "1", MARK: f"own-{os.getpid()}"}
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    with subprocess.Popen(command, text=True, env=env, stdin=pipe, stdout=pipe) as running:
        assert running.stdout is not None
        lines = [running.stdout.readline().strip() for _ in range(3)]
        assert lines == ["[] []", "[0] [None]", "True"]
        mark = f"{MARK}=own-{os.getpid()}".encode()
        started = [pid for pid in processes(b"ray/") if mark in environ(pid)]
        pages = [pid for pid in processes(b"dashboard.py") if pid in started]
        assert len(started) >= 3
        assert all(b"RAY_USAGE_STATS_ENABLED=0" in environ(pid) for pid in started)
        for pid in pages:
            assert b"--disable-frontend" in Path(f"/proc/{pid}/cmdline").read_bytes()
        running.communicate()
    assert running.returncode == 0


def test_a_folder_that_is_not_seen_here_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "GRACE", 0.3)
    there = tmp_path / "elsewhere"
    config = a_run(digits_config(), there)
    steps = config.plan.privacy.steps
    unseen = str(executor._failure(config, (None, steps), False))
    assert f"its folder {there} is not visible here" in unseen
    assert "a folder on shared storage" in unseen
    assert executor._failure(config, (None, steps), True) is None
    train_digits(out=there)
    assert executor._failure(config, (None, steps), False) is None


def test_a_run_goes_on_on_the_device_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which GPU it had before says nothing of those it finds elsewhere."""
    config = digits_config(out="run", steps=6)
    assert finish(run.train(config, after(3))).state == "interrupted"
    saved = checkpoint.newest(Path("run"))
    record = {**saved.record, "config": {**saved.record["config"], "device": "cuda:7"}}
    monkeypatch.setattr(checkpoint, "newest", lambda where: replace(saved, record=record))
    started, *_ = workers._events(a_run(config), None, never)
    assert isinstance(started, Started)
    assert started.done == 3


def test_a_run_takes_a_gpu_where_it_is_to_run_on_one() -> None:
    need("ray")
    from dpmac_cli.errors import InputError  # noqa: PLC0415
    from dpmac_cli.studies.ray_cluster import resource  # noqa: PLC0415

    both = {"CPU": 4.0, "GPU": 2.0}
    assert [resource(device, both) for device in ("auto", "cpu", "cuda")] == ["GPU", "CPU", "GPU"]
    assert resource("auto", {"CPU": 4.0}) == "CPU"
    with pytest.raises(InputError, match="has no GPU"):
        resource("cuda", {"CPU": 4.0})
