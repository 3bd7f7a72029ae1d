"""Runs that replace others: no file of an older run survives, whatever is killed and when."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from dpmac_cli import make_private
from dpmac_cli.cli.account import Question, recount
from dpmac_cli.errors import InputError
from dpmac_cli.release.run import finish, fork, resume, train
from dpmac_cli.runs import folder
from dpmac_cli.studies.grid import plan
from dpmac_cli.studies.results import collect, write_comparison
from tests.digits_runs import SIGMA, after, digits_config, train_digits
from tests.tiers import rest_long
from tests.typed import dpmac

#: Files that hold nothing of a run.
NOTHING = (folder.LOCK,)


def older(out: Path) -> dict[str, bytes]:
    """An audit run with little noise, in a study: every file that a run may have."""
    train_digits(out=out, sigma=9, steps=5, seed=1, canaries=10, checkpoint_every=1)
    (out / folder.CHECKPOINTS / "state.safetensors.bak").write_bytes(b"keys")
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
    private = make_private(network, "digits", sigma=SIGMA, steps=2, seed=3, device="cpu")
    list(private)
    private.publish(out, force=out.exists())


def trained(out: Path) -> None:
    train_digits(out=out, force=True, seed=2, steps=2)


def typed(out: Path) -> None:
    flags = ("--dataset", "digits", "--sigma", "6", "--steps", "2", "--device", "cpu")
    assert dpmac("train", *flags, "--out", str(out), "--force").exit_code == 0


def forked(out: Path) -> None:
    parent = out.with_name("parent")
    if not parent.exists():
        finish(train(digits_config(out=parent, steps=2), after(1)))
    finish(fork(parent, {"out": out, "force": True, "steps": 3}))


WAYS = pytest.mark.parametrize("replace", [published, trained, typed, forked])


@pytest.mark.promise("ledger")
@WAYS
def test_nothing_of_an_older_run_survives(replace: Callable[[Path], None], tmp_path: Path) -> None:
    before = older(tmp_path / "run")
    replace(tmp_path / "run")
    replace(tmp_path / "fresh")
    now = contents(tmp_path / "run")
    assert now.keys() == contents(tmp_path / "fresh").keys()
    assert not set(now.values()) & set(before.values())


@pytest.mark.promise("ledger")
def test_a_published_loop_is_not_forked_from_the_run_that_it_replaced(tmp_path: Path) -> None:
    """The report would say one epsilon, and its fork another, from other weights."""
    train_digits(out=tmp_path / "run", steps=4, seed=1)
    published(tmp_path / "run")
    for go_on in (resume, fork):
        with pytest.raises(InputError, match="contains no checkpoint"):
            finish(go_on(tmp_path / "run", {"out": tmp_path / "x"} if go_on is fork else {}))


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
@pytest.mark.parametrize("replace", rest_long([trained, published, forked]))
def test_a_kill_leaves_no_mixture_of_two_runs(
    replace: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the ledger of the new run may be there before all files of the older one are gone."""
    replace(tmp_path / "fresh")  # and the parent of a fork
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
            for go_on in (resume, fork):
                with pytest.raises(InputError):
                    finish(go_on(out, {"out": tmp_path / "x"} if go_on is fork else {}))
        if calls[0] >= 0:
            return
        shutil.rmtree(out)
    pytest.fail("it never ended")


@pytest.mark.promise("ledger")
def test_a_kill_leaves_no_earlier_report_beside_a_later_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one, of a run that was stopped, has a smaller epsilon."""
    finish(train(digits_config(out=tmp_path / "early", steps=6, seed=1), after(2)))
    early, out = contents(tmp_path / "early"), tmp_path / "run"
    model = early[folder.MODEL]
    for call in range(1, 60):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "early", out)
        with killed_at(call, monkeypatch) as calls:
            finish(resume(out, {}))
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
