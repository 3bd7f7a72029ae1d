"""Runs that replace others: no file of an older run survives, whatever is killed and when."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from dpmac_cli import make_private, resume
from dpmac_cli.cli.account import recount
from dpmac_cli.cli.question import Question
from dpmac_cli.errors import InputError
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs import folder
from dpmac_cli.studies.grid import plan
from dpmac_cli.studies.results import collect
from dpmac_cli.studies.search import secret_place
from dpmac_cli.studies.tune import TRIAL, tune
from dpmac_cli.studies.written import write_comparison
from tests.digits_runs import SIGMA, after, digits_config, train_digits
from tests.tiers import rest_long
from tests.typed import dpmac

#: Files that hold nothing of a run.
NOTHING = (folder.LOCK,)


def older(out: Path) -> dict[str, bytes]:
    """An audit run with little noise, in a study: every file that a run may have."""
    train_digits(out=out, sigma=9, steps=5, seed=1, canaries=10, checkpoint_every=1)
    (out / ".report.json.abcdefgh.part").write_bytes(b"part")
    return contents(out)


def contents(out: Path) -> dict[str, bytes]:
    """The files of a run by their names, without those that hold nothing."""
    files = (path for path in out.rglob("*") if path.is_file() and path.name not in NOTHING)
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in files
        if not path.name.endswith(".part")
    }


def published(out: Path) -> None:
    """A loop in a program that publishes what it trained."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    private = make_private(network, "digits", sigma=SIGMA, steps=2, device="cpu")
    list(private)
    private.publish(out, force=out.exists())


def trained(out: Path) -> None:
    train_digits(out=out, force=True, seed=2, steps=2)


def typed(out: Path) -> None:
    flags = ("--dataset", "digits", "--sigma", "6", "--steps", "2", "--device", "cpu")
    assert dpmac("train", *flags, "--out", str(out), "--force").exit_code == 0


def resumed_from_another(out: Path) -> None:
    parent = out.with_name("parent")
    if not parent.exists():
        finish(train_plan(digits_config(out=parent, steps=2), after(1)))
    resume(parent, {"out": out, "force": True, "steps": 3})


WAYS = pytest.mark.parametrize("replace", [published, trained, typed, resumed_from_another])


@pytest.mark.promise("ledger")
@WAYS
def test_nothing_of_an_older_run_survives(replace: Callable[[Path], None], tmp_path: Path) -> None:
    before = older(tmp_path / "run")
    replace(tmp_path / "run")
    replace(tmp_path / "fresh")
    now = contents(tmp_path / "run")
    assert now.keys() == contents(tmp_path / "fresh").keys()
    assert not set(now.values()) & set(before.values())


# Nothing but a run's own files is removed.

#: Files that dpmac does not write, some of them with names that begin or end like those of dpmac.
FOREIGN = (
    *("checkpoint/thesis.tex", "checkpoint/sub/state.safetensors", "checkpoint/.thesis.tex.part"),
    *("checkpoint/state.safetensors.bak", "notes.txt", "sub/report.json", ".download.part"),
)


def resumed(out: Path) -> None:
    resume(out, {})


#: Every door by which a run takes the place of another or goes on.
DOORS = (published, trained, typed, resumed_from_another, resumed)


def unfinished(out: Path) -> Path:
    """Return the folder of a run that was stopped."""
    finish(train_plan(digits_config(out=out, steps=4, seed=1), after(2)))
    return out


@pytest.mark.promise("ledger")
@pytest.mark.parametrize("replace", DOORS)
def test_what_dpmac_did_not_write_stays(replace: Callable[[Path], None], tmp_path: Path) -> None:
    out = unfinished(tmp_path / "run")
    for name in FOREIGN:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(name)
    replace(out)
    assert {name: (out / name).read_text() for name in FOREIGN} == {name: name for name in FOREIGN}


@pytest.mark.promise("ledger")
@pytest.mark.parametrize("replace", [door for door in DOORS if door != resumed])
def test_a_link_is_removed_and_never_followed(
    replace: Callable[[Path], None], tmp_path: Path
) -> None:
    """Behind one is the folder of checkpoints of another run, behind others are its files."""
    other, out = unfinished(tmp_path / "other"), unfinished(tmp_path / "run")
    (other / "checkpoint" / "thesis.tex").write_text("mine")
    (other / "checkpoint" / ".state.safetensors.abcdefgh.part").write_text("of a run in use")
    for place in (out / "checkpoint").iterdir():
        place.unlink()
    (out / "checkpoint").rmdir()
    (out / "checkpoint").symlink_to(other / "checkpoint")
    for name in (folder.REPORT, folder.CARD):
        (out / name).unlink()
        (out / name).symlink_to(other / name)
    before = every_file(other)
    replace(out)
    assert every_file(other) == before
    assert not (out / "checkpoint").is_symlink()
    assert not (out / folder.REPORT).is_symlink()


def every_file(root: Path) -> dict[str, bytes | str]:
    """Return the content of every file below a folder, and where each link leads."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.promise("ledger")
@pytest.mark.parametrize("name", ["report.json", "checkpoint/spent.json", "checkpoint"])
def test_what_is_in_the_way_is_named_and_stays(name: str, tmp_path: Path) -> None:
    """The name of a file of dpmac is taken by a folder, or that of a folder by a file."""
    out = unfinished(tmp_path / "run")
    shutil.rmtree(out / "checkpoint") if "checkpoint" in name else (out / name).unlink()
    if name == "checkpoint":
        (out / name).write_text("mine")
    else:
        (out / name).mkdir(parents=True)
        (out / name / "thesis.tex").write_text("mine")
    before = every_file(out)
    for replace in (published, trained, resumed_from_another):
        with pytest.raises(InputError) as caught:
            replace(out)
        said = str(caught.value)
        assert str(out / name) in said
        assert "dpmac did not write it" in said
        assert every_file(out) == before


def test_a_folder_of_weights_is_no_run(tmp_path: Path) -> None:
    """Networks of Hugging Face have a model.safetensors, too."""
    for name in (folder.MODEL, "config.json", folder.REPORT):
        (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match="do not belong to a run"):
        folder.check_chosen_folder(tmp_path, force=True)


@pytest.mark.promise("ledger")
def test_a_killed_search_is_removed_without_what_is_not_its_own(tmp_path: Path) -> None:
    trial = secret_place(tmp_path / "run") / TRIAL
    trial.mkdir(parents=True)
    unfinished(trial)
    (trial / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match=r"did not write \(thesis\.tex\)"):
        searched(tmp_path / "run")
    assert (trial / "thesis.tex").read_text() == "mine"
    (trial / "thesis.tex").rename(tmp_path / "thesis.tex")
    searched(tmp_path / "run")
    assert not trial.parent.exists()
    (tmp_path / "mine").mkdir()
    secret_place(tmp_path / "next").symlink_to(tmp_path / "mine")
    (tmp_path / "thesis.tex").rename(tmp_path / "mine" / "thesis.tex")
    searched(tmp_path / "next")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "mine"


def searched(out: Path) -> Run:
    """A search with two trials on average."""
    return tune(dataset="digits", epsilon=9, steps=2, trials=2, out=out, device="cpu")


@pytest.mark.promise("ledger")
def test_a_published_loop_is_not_resumed_from_the_run_that_it_replaced(tmp_path: Path) -> None:
    """The report would say one epsilon, and a run resumed from it another, of other weights."""
    train_digits(out=tmp_path / "run", steps=4, seed=1)
    published(tmp_path / "run")
    for given in ({}, {"out": tmp_path / "x"}):
        with pytest.raises(InputError, match="contains no checkpoint"):
            resume(tmp_path / "run", given)


class KilledError(BaseException):
    """The process ends."""


@contextmanager
def killed_at(call: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """End the process at some change of the disk; nothing is changed after that."""
    calls = [0]

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] >= call:
                raise KilledError
            return change(*args, **options)

        return changed

    with monkeypatch.context() as patched:
        for name in ("replace", "unlink", "rmdir"):
            patched.setattr(os, name, dying(getattr(os, name)))
        try:
            yield calls
        except KilledError:
            calls[0] = -1


@pytest.mark.promise("ledger")
@pytest.mark.parametrize("replace", rest_long([trained, published, resumed_from_another]))
def test_a_kill_leaves_no_mixture_of_two_runs(
    replace: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the ledger of the new run may be there before all files of the older one are gone."""
    replace(tmp_path / "fresh")  # and the run that is resumed into it
    ledger, out = f"{folder.CHECKPOINTS}/{folder.LEDGER}", tmp_path / "run"
    before = older(tmp_path / "older")
    for call in range(1, 200):
        shutil.copytree(tmp_path / "older", out)
        with killed_at(call, monkeypatch) as calls:
            replace(out)
        now = contents(out)
        kinds = {name: before.get(name) == content for name, content in now.items()}
        kinds.pop(ledger, None)
        assert len(set(kinds.values())) < 2, (call, kinds)
        if all(kinds.values()) and not any(name.endswith(".safetensors") for name in now):
            for given in ({}, {"out": tmp_path / "x"}):
                with pytest.raises(InputError):
                    resume(out, given)
        if calls[0] >= 0:
            return
        shutil.rmtree(out)
    pytest.fail("it never ended")


@pytest.mark.promise("ledger")
def test_a_kill_leaves_no_earlier_report_beside_a_later_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one, of a run that was stopped, has a smaller epsilon."""
    finish(train_plan(digits_config(out=tmp_path / "early", steps=6, seed=1), after(2)))
    early, out = contents(tmp_path / "early"), tmp_path / "run"
    model = early[folder.MODEL]
    for call in range(1, 60):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "early", out)
        with killed_at(call, monkeypatch) as calls:
            resume(out, {})
        now = contents(out)
        if now.get(folder.MODEL) not in (None, model):
            assert now.get(folder.REPORT) != early[folder.REPORT]
            assert now.get(folder.CARD) != early[folder.CARD]
        if calls[0] >= 0:
            assert recount(out, Question())[1] > 0
            return
    pytest.fail("it never ended")


@pytest.mark.promise("ledger")
def test_a_kill_leaves_no_files_of_two_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"dataset": "digits", "sigma": "6", "seeds": "1", "steps": "1"}
    one, two = (
        plan({**flags, "optimizers": name}, None, tmp_path / "runs")
        for name in ("dp-sgd", "dp-adam")
    )
    later = collect(two, {})
    for call in range(1, 60):
        write_comparison(collect(one, {}), tmp_path)
        before = contents(tmp_path)
        with killed_at(call, monkeypatch) as calls:
            write_comparison(later, tmp_path)
        now = contents(tmp_path)
        read = [name for name in ("compare.md", "compare.json") if name in now]
        assert len({before[name] == now[name] for name in read}) < 2
        if calls[0] >= 0:
            return
    pytest.fail("it never ended")
