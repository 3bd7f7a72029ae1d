"""dpmac runs, as typed and as seen."""

import fcntl
import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dpmac_cli.cli.runs import _print
from dpmac_cli.config.yaml_file import HEADER
from dpmac_cli.errors import DivergedError, InputError
from dpmac_cli.release import run
from dpmac_cli.release.run import finish
from dpmac_cli.runs import folder
from dpmac_cli.runs.session import Update
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.storage import files
from tests.digits_runs import SEED, after, contents, digits_config, train_digits
from tests.typed import dpmac, hooked, loading


def diverge(trainer: Trainer) -> None:
    if trainer.state.step:
        raise DivergedError(trainer.state.step)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that ended in different ways, some of them in a folder below."""
    root = tmp_path_factory.mktemp("study") / "runs"
    train_digits(out=root / "run-2", optimizer="dp-sgd", lr=0.5)
    train_digits(out=root / "run-10", seed=SEED)
    train_digits(out=root / "sub" / "runs" / "baseline", no_dp=True)
    train_digits(out=root / "spent", max_epsilon=0.06)
    finish(run.train(digits_config(out=root / "stopped", steps=20), after(2)))
    cut = run.train(digits_config(out=root / "killed", steps=30))
    next(event for event in cut if isinstance(event, Update) and event.event.step > 12)
    cut.close()  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "check_finite", diverge)
        with pytest.raises(DivergedError):
            train_digits(out=root / "diverged", optimizer="dp-sgd")
    return root


def listed(*args: str | Path) -> list[dict[str, Any]]:
    """What --json prints."""
    result = dpmac("runs", *args, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)["runs"]
    assert isinstance(found, list)
    return found


def shown(entries: list[dict[str, Any]], width: int) -> str:
    """What a terminal so wide shows."""
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    _print(out, entries)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_every_run_is_listed_as_it_ended(study: Path) -> None:
    found = {Path(entry["folder"]).name: entry for entry in listed(study)}
    assert {name: entry["state"] for name, entry in found.items()} == {
        "run-2": "finished",
        "run-10": "finished",
        "baseline": "finished",
        "spent": "budget-spent",
        "stopped": "interrupted",
        "killed": "cut-off",
        "diverged": "diverged",
    }
    for name in ("run-2", "run-10", "spent", "stopped"):
        report = json.loads((study / name / "report.json").read_text())
        assert found[name]["epsilon"] == report["privacy"]["epsilon"]
        assert found[name]["score"] == report["test"][found[name]["metric"]]
        assert found[name]["optimizer"] == report["optimizer"]
        assert (found[name]["delta"]) == 1e-5
        assert found[name]["seeded"] is (name == "run-10")
    line = files.read_lines(study / "killed" / "metrics.jsonl")[-1]
    assert found["killed"]["epsilon"] == line["epsilon"]
    assert found["killed"]["score"] == line["test_accuracy"]
    assert found["killed"]["seeded"] is None
    baseline = found["baseline"]
    assert (baseline["private"], baseline["epsilon"], baseline["delta"]) == (False, None, None)
    assert all(entry["dataset"] == "digits" for entry in found.values())
    assert all(entry["changed"].endswith("+00:00") for entry in found.values())


def test_a_table_for_people(study: Path) -> None:
    result = dpmac("runs", study)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = (line.removeprefix(f"{study}/") for line in result.stdout.splitlines())
    rows = {line.split()[0]: line for line in lines}
    report = json.loads((study / "run-2" / "report.json").read_text())
    assert "dp-sgd" in rows["run-2"]
    assert f"{report['test']['accuracy']:.2%} finished" in rows["run-2"]
    assert "no privacy" in rows["sub/runs/baseline"]
    seeded = rows["run-10"].split()[3]
    assert seeded.endswith("*")
    assert "* with --seed: no privacy against anyone who knows the seed" in result.stdout
    assert "epsilon at delta 1e-05" in result.stdout
    assert "diverged, cut-off: as of the last epoch" in result.stdout


@pytest.mark.privacy
def test_an_epsilon_is_rounded_up() -> None:
    entry = {**LONGEST, "epsilon": 1.00011, "seeded": False, "audit": False}
    assert " 1.001 " in shown([entry], 80)
    assert " infinite " in shown([{**entry, "epsilon": None}], 80)  # as in a report
    assert " - " in shown([{**entry, "epsilon": None, "seeded": None}], 80)


def test_bad_usage_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = dpmac("runs", "file")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "file is a file. Use a folder of runs, or none for runs/." in result.stderr


@pytest.mark.parametrize("args", [(), ("empty",)], ids=str)
def test_where_there_are_none_it_says_how_to_make_one(args: tuple[str, ...]) -> None:
    Path("empty").mkdir()
    result = dpmac("runs", *args)
    assert (result.exit_code, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    assert f"no runs in {(args or ('runs',))[0]} yet" in line
    assert "dpmac train --dataset digits" in line
    assert listed(*args) == []


def test_a_folder_that_is_not_there_is_named() -> None:
    Path("empty").mkdir()
    result = dpmac("runs", "empty", "nowhere", "runs/x")
    assert (result.exit_code, result.stdout) == (2, "")
    for name in ("nowhere", "runs/x"):
        assert f"{name} does not exist. Use a folder of runs, or none for runs/." in result.stderr


def test_the_folders_of_a_study_and_of_one_run(study: Path) -> None:
    (only,) = listed(study / "sub")
    assert Path(only["folder"]).name == "baseline"
    assert str(study / "run-2") in dpmac("runs", study / "run-2").stdout
    both = listed(study / "run-2", study / "sub", study / "run-2")
    assert sorted(Path(entry["folder"]).name for entry in both) == ["baseline", "run-2"]


def test_links_are_not_followed_round_in_circles(study: Path) -> None:
    Path("runs").mkdir()
    Path("runs/round").symlink_to(Path.cwd())
    Path("runs/mine").symlink_to(study / "run-2")
    assert [entry["folder"] for entry in listed()] == ["runs/mine"]


# Damaged and foreign


def spoil(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoiled(where: Path) -> None:
        (where / name).write_bytes(change((where / name).read_bytes()))

    return spoiled


def only_the_checkpoint(where: Path) -> None:
    for name in (*folder.PUBLISHED, folder.SUMS):
        (where / name).unlink()


def no_settings(where: Path) -> None:
    for name in (folder.REPORT, folder.SUMS):
        (where / name).unlink()
    (where / folder.CONFIG).write_text(HEADER)


def settings_edited(where: Path) -> None:
    (where / folder.REPORT).unlink()
    folder.seal(where, (folder.CONFIG,))
    spoil(folder.CONFIG, lambda old: old + b"\nlr: 1")(where)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "report edited": spoil(folder.REPORT, lambda old: old + b" "),
    "report cut": spoil(folder.REPORT, lambda old: old[:50]),
    "report no JSON": spoil(folder.REPORT, lambda old: b"[" * 10_000),
    "all gone but the checkpoint": only_the_checkpoint,
    "no settings": no_settings,
    "settings edited": settings_edited,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_run_is_shown_as_such(damage: Callable[[Path], None]) -> None:
    where = train_digits(out="runs/run", steps=1).folder
    damage(where)
    (entry,) = listed()
    assert (entry["state"], entry["epsilon"]) == ("damaged", None)
    assert "damaged" in dpmac("runs").stdout


def test_what_is_no_run_is_left_out(study: Path) -> None:
    for name in ("thesis/report.json", "weights/model.safetensors", "odd/report.json"):
        Path("runs", name).parent.mkdir(parents=True)
        Path("runs", name).write_bytes(b'{"privacy": 3}' if "odd" in name else b"\x00\xff")
    Path("runs/other").mkdir()
    Path("runs/other/config.yaml").write_text("lr: 3\n")
    Path("runs/mine").symlink_to(study / "run-2")
    assert [entry["folder"] for entry in listed()] == ["runs/mine"]


def test_a_folder_that_may_not_be_read_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    Path("runs").mkdir()
    monkeypatch.setattr(Path, "iterdir", refused)
    assert listed() == []


def test_a_report_from_before_a_run_went_on_is_not_its_last_word() -> None:
    where = finish(run.train(digits_config(steps=40), after(3))).folder
    assert [entry["state"] for entry in listed()] == ["interrupted"]
    going = run.resume(where, {})
    next(event for event in going if isinstance(event, Update) and event.event.step > 24)
    (entry,) = listed()
    assert entry["state"] == "running"
    going.close()  # type: ignore[attr-defined]
    (entry,) = listed()
    assert entry["state"] == "cut-off"
    lines = files.read_lines(where / "metrics.jsonl")
    assert entry["epsilon"] == lines[-1]["epsilon"]


def test_a_published_copy_is_a_run_too(study: Path) -> None:
    for kept in (folder.PUBLISHED, (folder.REPORT, folder.MODEL)):
        copy = Path("runs", f"copy-{len(kept)}")
        copy.mkdir(parents=True)
        for name in kept:
            (copy / name).write_bytes((study / "run-2" / name).read_bytes())
    assert [entry["state"] for entry in listed()] == ["finished", "finished"]


@pytest.mark.privacy
def test_a_report_that_cannot_be_read_is_not_overlooked(study: Path) -> None:
    report = json.loads((study / "run-2" / folder.REPORT).read_bytes())
    Path("runs/newer").mkdir(parents=True)
    Path("runs/newer", folder.REPORT).write_text(json.dumps({**report, "schema_version": 99}))
    assert [entry["state"] for entry in listed()] == ["damaged"]


# Looking disturbs nothing


def test_looking_changes_nothing_and_loads_no_torch(study: Path, tmp_path: Path) -> None:
    before = contents(study)
    done = hooked(loading("torch", "matplotlib", "scipy.stats", "sklearn"), "runs", str(study))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "loaded").read_text() == ""
    assert contents(study) == before


@pytest.mark.privacy
def test_nothing_private_is_looked_at(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    read = Path.read_bytes

    def watched(path: Path) -> bytes:
        opened.append(str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", watched)
    assert listed(study)
    assert opened
    assert not [path for path in opened if "checkpoint" in path or "PRIVATE" in path]


def test_who_holds_a_run_is_seen(tmp_path: Path) -> None:
    assert not folder.in_use(tmp_path)
    with folder.locked(tmp_path):
        assert folder.in_use(tmp_path)
    assert not folder.in_use(tmp_path)


def test_a_look_that_lasts_a_little_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / folder.LOCK).touch()
    handle = os.open(tmp_path / folder.LOCK, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    assert not folder.in_use(tmp_path)  # who else looks does not make it a run
    timer = threading.Timer(0.06, os.close, [handle])
    timer.start()
    with folder.locked(tmp_path):
        pass
    timer.join()


def test_a_run_that_runs_still_shuts_others_out(tmp_path: Path) -> None:
    with (
        folder.locked(tmp_path),
        pytest.raises(InputError, match="in use by another"),
        folder.locked(tmp_path),
    ):
        pass


# How it looks

LONGEST: dict[str, Any] = {
    "folder": "runs/fashion-mnist-dp-macadambc-0123456789ab",
    "state": "budget-spent",
    "changed": "2026-11-27T00:00:00+00:00",
    "dataset": "fashion-mnist",
    "optimizer": "dp-macadambc",
    "private": True,
    "epsilon": 0.123456,
    "delta": 1e-5,
    "metric": "accuracy",
    "score": 1.0,
    "seeded": True,
    "audit": True,
}


def test_a_run_is_a_line_of_80_columns() -> None:
    lines = shown([LONGEST, {**LONGEST, "epsilon": 2.0}], 80).splitlines()
    assert max(map(len, lines)) <= 80
    _, first, second, *_ = lines
    for part in ("runs/", "fashion-mnist dp-macadambc", "0.1235*!", "100.00%", "budget-spent"):
        assert part in first
    assert first.rstrip().endswith("2026-11-27")
    assert "2*!" in second


def test_names_are_whole_where_no_terminal_limits_them(study: Path) -> None:
    lines = dpmac("runs", study, columns=60).stdout.splitlines()
    names = {Path(line.split()[0]).name for line in lines[1:]}
    assert {"diverged", "killed", "run-2"} <= names
    assert max(map(len, lines)) > 60


def test_deltas_that_differ_are_said_to() -> None:
    other = {**LONGEST, "delta": 1e-6}
    assert "do not compare" in shown([LONGEST, other], 80)


def test_the_score_of_a_run_that_predicts_numbers_is_named() -> None:
    other = {**LONGEST, "metric": "mae", "score": 3.5}
    assert "MAE 3.500" in shown([LONGEST, other], 200)
    assert "100.00%" in shown([LONGEST, other], 200)
