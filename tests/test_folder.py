"""Files are whole or not there, and nothing is overwritten by surprise."""

import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpmac_cli.errors import InputError
from dpmac_cli.runs import folder
from dpmac_cli.storage import files
from tests.digits_runs import contents, train_digits


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
        files.write_atomically(file, b"new")
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
    files.write_atomically(file, b"whole")
    # The same folder, hence the same file system: only there is a rename atomic.
    assert seen == [(False, b"whole", tmp_path)]
    assert contents(tmp_path) == {"report.json": b"whole"}


@pytest.mark.parametrize("mode", [files.PUBLIC_MODE, files.PRIVATE_MODE])
def test_files_get_their_mode(tmp_path: Path, mode: int) -> None:
    files.write_atomically(tmp_path / "whole", b"", mode)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_has_no_nan_and_no_infinity(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.to_json({"loss": value})


def test_new_folders_are_numbered_and_never_reused(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    (root / "x-2").mkdir(parents=True)
    assert [folder.new_folder(root, "x").name for _ in range(3)] == ["x-1", "x-3", "x-4"]


def test_a_file_in_the_place_of_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("runs", "link"):
        with pytest.raises(InputError, match=f"{name} is a file"):
            folder.new_folder(tmp_path / name, "x")


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
    with pytest.raises(InputError, match="do not belong to a run"):
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
    ours = (*folder.SEALED, folder.SUMS)
    for name in (*ours, "notes.txt", "plot.png"):
        (tmp_path / name).write_text(name)
    for name in (folder.CHECKPOINTS, "branch-of-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    before = contents(tmp_path)
    with pytest.raises(InputError, match="add --force"):
        folder.check_chosen_folder(tmp_path, force=False)
    assert contents(tmp_path) == before
    folder.check_chosen_folder(tmp_path, force=True)
    assert contents(tmp_path) == before, "a check changes nothing"
    folder.clear(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"notes.txt", "plot.png", "branch-of-mine"}


def test_what_a_failed_start_leaves_can_be_replaced(tmp_path: Path) -> None:
    kept = folder.checkpoints(tmp_path)
    folder.check_chosen_folder(tmp_path, force=False)
    (kept / folder.LEDGER).write_text("{}")
    with pytest.raises(InputError, match="add --force"):
        folder.check_chosen_folder(tmp_path, force=False)
    folder.check_chosen_folder(tmp_path, force=True)


#: Umasks that let everyone in, that are usual, and that let nobody else in.
UMASKS = (0o000, 0o002, 0o022, 0o077)


@pytest.fixture(params=UMASKS, ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_every_file_of_a_run_is_known_to_be_one(tmp_path: Path) -> None:
    """What clears a run or names what was written must leave nothing out."""
    finished = train_digits(out="run", canaries=100)
    written = {path.name for path in finished.folder.iterdir()}
    assert written == {*folder.SEALED, folder.CHECKPOINTS, folder.SUMS, folder.LOCK}
    folder.clear(finished.folder)
    left = {path.name for path in finished.folder.iterdir()}
    assert left == {folder.LOCK}


def test_what_a_kill_left_half_written_is_no_run_and_goes(tmp_path: Path) -> None:
    (tmp_path / folder.CHECKPOINTS).mkdir()
    for place in (tmp_path, tmp_path / folder.CHECKPOINTS):
        (place / f".{folder.CONFIG}.x1y2{files.PART}").write_text("half")
    (tmp_path / ".mine").write_text("mine")
    with folder.locked(tmp_path):
        assert set(contents(tmp_path)) == {folder.LOCK, ".mine", folder.CHECKPOINTS}
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / f".{folder.CONFIG}.x1y2{files.PART}").write_text("half")
    folder.check_chosen_folder(tmp_path / "begun", force=False)


# Checksums


def test_sha256sum_checks_what_was_sealed(tmp_path: Path) -> None:
    for name in (*folder.SEALED, "plot.png"):
        (tmp_path / name).write_text(f"{name} of a run")
    folder.seal(tmp_path)
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", folder.SUMS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert checked.stdout.splitlines() == [f"{name}: OK" for name in folder.SEALED]
    for name in folder.SEALED:
        assert folder.vouched(tmp_path, name) is True
        (tmp_path / name).write_text("other")
        assert folder.vouched(tmp_path, name) is False
        (tmp_path / name).unlink()
        assert folder.vouched(tmp_path, name) is False
    (tmp_path / folder.SUMS).unlink()
    assert folder.vouched(tmp_path, folder.REPORT) is None


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b'{"n": 1}\n\xff\n[2]\n' + b"[" * 99_999 + b'\n\n{"n": 3}\n{"n"')
    assert files.read_lines(file) == [{"n": 1}, {"n": 3}]
    assert files.read_lines(tmp_path / "nothing") == []
