"""Files are whole or not there, and nothing is overwritten by surprise."""

import json
import math
import os
from pathlib import Path

import pytest

from dpmac_cli import folder
from dpmac_cli.errors import InputError
from tests.digits_runs import contents


@pytest.mark.parametrize("failing", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize(
    "error", [OSError("disk full"), KeyboardInterrupt()], ids=["full", "ctrl-c"]
)
def test_a_crash_in_the_middle_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException
) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(b"old")

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(type(error)):
        folder.write_atomically(file, b"new")
    assert contents(tmp_path) == {"report.json": b"old"}


def test_a_file_appears_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.json"
    replace, seen = os.replace, []

    def watch(partial: Path, final: Path) -> None:
        seen.append((file.exists(), Path(partial).read_bytes(), Path(partial).parent))
        replace(partial, final)

    monkeypatch.setattr(os, "replace", watch)
    folder.write_atomically(file, b"whole")
    # The same folder, hence the same file system: only there is a rename atomic.
    assert seen == [(False, b"whole", tmp_path)]
    assert contents(tmp_path) == {"report.json": b"whole"}


@pytest.mark.parametrize("mode", [folder.PUBLIC_MODE, folder.PRIVATE_MODE])
def test_files_get_their_mode(tmp_path: Path, mode: int) -> None:
    folder.write_atomically(tmp_path / "whole", b"", mode)
    folder.append_line(tmp_path / "lines", {"a": 1}, mode)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_has_no_nan_and_no_infinity(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        folder.to_json({"loss": value})
    with pytest.raises(ValueError, match="JSON"):
        folder.append_line(tmp_path / "lines", {"loss": value})


def test_lines_are_appended(tmp_path: Path) -> None:
    for number in range(3):
        folder.append_line(tmp_path / "lines", {"n": number})
    lines = (tmp_path / "lines").read_text().splitlines()
    assert [json.loads(line)["n"] for line in lines] == [0, 1, 2]


def test_new_folders_are_numbered_and_never_reused(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    (root / "x-2").mkdir(parents=True)
    assert [folder.new_folder(root, "x").name for _ in range(3)] == ["x-1", "x-3", "x-4"]


def test_a_file_in_the_place_of_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(InputError, match="runs"):
        folder.new_folder(tmp_path / "runs", "x")


def test_a_chosen_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    for chosen in (tmp_path / "a" / "b", tmp_path / "a" / "b"):
        folder.check_chosen_folder(chosen, force=False)
        assert folder.make_folder(chosen).is_dir()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "names", [["thesis.tex"], ["config.yaml"], ["thesis.tex", "sub/report.json"]]
)
def test_folders_that_are_not_runs_are_refused_even_with_force(
    tmp_path: Path, names: list[str], force: bool
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(InputError, match="not a run's"):
        folder.check_chosen_folder(tmp_path, force)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_no_folder(tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        folder.check_chosen_folder(tmp_path / "file", force)
    with pytest.raises(InputError, match="cannot be written to"):
        folder.make_folder(tmp_path / "file" / "below")
    assert contents(tmp_path) == {"file": b"mine"}


def test_force_removes_the_files_of_the_run_and_no_others(tmp_path: Path) -> None:
    for name in (*folder.FILES, "notes.txt", "plot.png"):
        (tmp_path / name).write_text(name)
    before = contents(tmp_path)
    with pytest.raises(InputError, match="add --force"):
        folder.check_chosen_folder(tmp_path, force=False)
    assert contents(tmp_path) == before
    folder.check_chosen_folder(tmp_path, force=True)
    assert contents(tmp_path) == before, "a check changes nothing"
    folder.clear(tmp_path)
    assert contents(tmp_path) == {"notes.txt": b"notes.txt", "plot.png": b"plot.png"}
