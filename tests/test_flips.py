"""A byte that changes in any file of a run is noticed, or makes no difference."""

import json
import random
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dpmac_cli.data.dataset import Data
from dpmac_cli.errors import InputError
from dpmac_cli.release import run, scoring
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import RunEvent
from dpmac_cli.release.scoring import score
from dpmac_cli.runs import folder, ledger, prepare
from dpmac_cli.runs.session import Started
from dpmac_cli.storage import files
from dpmac_cli.studies import local
from dpmac_cli.studies import results as compare
from dpmac_cli.studies.grid import Run, plan
from tests.digits_runs import after, digits, digits_config
from tests.tiers import rest_long

PLACES = 12
STOPPED, STEPS = 14, 16
NEWEST, BEFORE = "checkpoint/step-000000014.safetensors", "checkpoint/step-000000012.safetensors"
LEDGER = f"checkpoint/{ledger.FILE}"
FILES = (*folder.PUBLISHED, folder.SUMS, NEWEST, BEFORE, LEDGER)
#: What a run is compared by, beside its weights.
Result = dict[str, Any]


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set, which takes longer to read than these runs to train."""

    def loading(*_: Any, **__: Any) -> Generator[Any, None, Data]:
        yield from ()
        return digits()

    monkeypatch.setattr(prepare, "loading", loading)
    monkeypatch.setattr(scoring, "load_data", lambda *args, **kwargs: digits())


def finish(events: Iterator[RunEvent]) -> tuple[Started, Finished]:
    first, *_, last = events
    assert isinstance(first, Started)
    assert isinstance(last, Finished)
    return first, last


def result(where: Path) -> Result:
    report = json.loads((where / folder.REPORT).read_bytes())
    lines = files.read_lines(where / folder.METRICS)
    # The score where the run was stopped may be its best.
    best = ("best_accuracy", "best_epoch")
    return {
        "privacy": report["privacy"],
        "test": {key: value for key, value in report["test"].items() if key not in best},
        "metrics": [
            {key: value for key, value in line.items() if key != "seconds"}
            for line in lines
            if line["step"] != STOPPED
        ],
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped on the way, and the same run undisturbed."""
    root = tmp_path_factory.mktemp("flips")
    torch.set_num_threads(1)
    settings: Any = {"steps": STEPS, "seed": 7, "checkpoint_every": "6"}
    finish(run.train(digits_config(out=root / "whole", **settings)))
    finish(run.train(digits_config(out=root / "stopped", **settings), after(STOPPED)))
    return root


def beginning_with(name: str) -> list[str]:
    """Return the names of all files, one of them first."""
    return sorted(FILES, key=lambda each: each != name)


def count_of(file: Path) -> int:
    """How many bytes of a file are tried."""
    return min(PLACES, len(file.read_bytes()))


def flipped(source: Path, name: str, seed: int) -> Iterator[Path]:
    """Copies of a folder, in each of which one byte of one file is another."""
    draw = random.Random(seed)
    content = (source / name).read_bytes()
    for place in sorted(draw.sample(range(len(content)), min(PLACES, len(content)))):
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree(source, "copy")
        changed = bytes([content[place] ^ draw.randrange(1, 256)])
        (Path("copy") / name).write_bytes(content[:place] + changed + content[place + 1 :])
        yield Path("copy")


def test_the_files_of_a_run_are_these(runs: Path) -> None:
    found = {str(p.relative_to(runs / "stopped")) for p in (runs / "stopped").rglob("*")}
    assert found == {*FILES, folder.LOCK, folder.CHECKPOINTS}


@pytest.mark.privacy
@pytest.mark.parametrize("name", rest_long(beginning_with(folder.MODEL)))
def test_a_flipped_byte_changes_no_score(name: str, runs: Path) -> None:
    expected = score(runs / "stopped", None, None, "cpu").result
    right = refused = 0
    for where in flipped(runs / "stopped", name, seed=1):
        try:
            found = score(where, None, None, "cpu").result
        except InputError as failure:
            refused += folder.MODEL in str(failure)
        else:
            right += (found.loss, found.accuracy) == (expected.loss, expected.accuracy)
    assert right + refused == count_of(runs / "stopped" / name)
    assert (refused > PLACES / 2) == (name == folder.MODEL)


@pytest.mark.privacy
@pytest.mark.parametrize("name", rest_long(beginning_with(LEDGER)))
def test_a_flipped_byte_makes_no_resumed_run_cheaper(name: str, runs: Path) -> None:
    whole = result(runs / "whole")["privacy"]
    refused = noted = 0
    for where in flipped(runs / "stopped", name, seed=2):
        try:
            started, finished = finish(run.resume(where, {}))
        except InputError as failure:
            refused += f"{folder.CONFIG} and its checksum in {folder.SUMS}" in str(failure)
            (where / folder.CONFIG).unlink()  # as the message says
            started, finished = finish(run.resume(where, {}))
        damaged = any("damaged" in note for note in started.notes)
        noted += damaged
        privacy = finished.report["privacy"]
        assert (privacy["steps"], privacy["epsilon"]) >= (whole["steps"], whole["epsilon"])
        assert privacy["steps"] == STEPS or damaged or name == folder.METRICS
        assert all(folder.vouched(where, published) for published in folder.PUBLISHED)
    count = count_of(runs / "stopped" / name)
    # A checksum file has a line for each of four files, of which the configuration's counts.
    assert refused == {folder.CONFIG: count}.get(name, refused if name == folder.SUMS else 0)
    assert noted == {NEWEST: noted, LEDGER: noted}.get(name, 0)
    assert noted > count / 2 or name not in (NEWEST, LEDGER)


@pytest.mark.privacy
@pytest.mark.parametrize("name", rest_long([LEDGER, NEWEST, folder.METRICS]))
def test_a_flipped_byte_makes_no_fork_cheaper(name: str, runs: Path) -> None:
    for where in flipped(runs / "stopped", name, seed=3):
        started, finished = finish(run.fork(where, {"lr": "0.01", "out": "forked", "force": True}))
        left, _ = finished.report["privacy"]["events"]
        lost = any(ledger.FILE in note for note in started.notes)
        # A step of a line may be read as another one, which is then charged, up to the last.
        assert left["steps"] == (STEPS if lost else max(STOPPED, left["steps"])) <= STEPS
        assert left["steps"] == STOPPED or name == folder.METRICS or lost


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of a comparison."""
    root = tmp_path_factory.mktemp("study")
    torch.set_num_threads(1)
    flags = {"dataset": "digits", "optimizers": "dp-adam", "sigma": "6", "steps": "14"}
    [planned] = plan({**flags, "seeds": "1", "device": "cpu"}, None, root).runs
    assert list(local._events(planned, digits(), lambda: False))
    assert compare.finished_report(planned) is not None
    return planned


@pytest.mark.privacy
@pytest.mark.parametrize("name", rest_long([folder.SUMS, *folder.PUBLISHED]))
def test_a_flipped_byte_changes_no_table(name: str, study: Run) -> None:
    expected = result(study.folder)
    shutil.copytree(study.folder, "before")
    again = 0
    for where in flipped(Path("before"), name, seed=4):
        shutil.rmtree(study.folder)
        shutil.copytree(where, study.folder)
        report = compare.finished_report(study)
        if report is None:
            again += 1
            if folder.vouched(study.folder, folder.CONFIG) is False and name == folder.SUMS:
                with pytest.raises(InputError, match="and its checksum in"):
                    list(local._events(study, digits(), lambda: False))
                (study.folder / folder.CONFIG).unlink()  # as the message says
            assert list(local._events(study, digits(), lambda: False))
        assert result(study.folder) == expected
    shutil.rmtree(study.folder)
    shutil.copytree("before", study.folder)
    assert again == {folder.REPORT: PLACES, folder.METRICS: PLACES}.get(
        name, again if name == folder.SUMS else 0
    )
    assert again > 0 or name not in (folder.SUMS, folder.METRICS)
