"""dpmac train, as typed and as seen."""

import errno
import json
import os
import re
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dpmac_cli import __version__
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli.app import COMMANDS
from dpmac_cli.config.fields import flag_name
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.release.run import train
from dpmac_cli.release.scoring import score
from dpmac_cli.runs.session import Update
from tests.digits_runs import SEED, after, contents, digits_config, train_digits
from tests.typed import dpmac, process, shell

DIGITS = ("train", "--dataset", "digits", "--sigma", "6", "--steps", "3")
#: As the specification lists them.
FLAGS = (
    *(
        "--optimizer",
        "--sigma",
        "--delta",
        "--epochs",
        "--steps",
        "--batch-size",
        "--physical-batch",
    ),
    *("--lr", "--clip-norm", "--beta1", "--beta2", "--gamma", "--gamma-prime", "--h1"),
    *("--h2", "--kappa", "--phi", "--model", "--device", "--seed", "--data-dir"),
    *("--out", "--config", "--json", "--quiet", "--no-dp", "--force"),
    *("--debug", "--dataset", "--epsilon", "--max-epsilon"),
)


def test_help_lists_the_commands_and_version_is_told() -> None:
    result = dpmac("--help")
    assert result.exit_code == 0
    assert {"train", "eval", "--version"} <= set(result.stdout.split())
    assert dpmac("--version").stdout == f"dpmac {__version__}\n"


def test_help_lists_every_flag_and_exit_code() -> None:
    result = dpmac("train", "--help")
    assert result.exit_code == 0
    words = set(result.stdout.split())
    assert set(FLAGS) <= words
    assert {f"--{flag_name(name)}" for name in SETTINGS} <= words
    for code in ("0 done", "2 usage", "3 privacy", "4 the", "130 interrupted"):
        assert code in result.stdout


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_the_words_of_users_and_no_types_of_the_program(command: str) -> None:
    """Placeholders such as N and FILE, and none for a switch."""
    shown = dpmac(*command.split(), "--help").stdout
    assert "Show this message and exit." in shown
    assert re.findall(r"<(?!path>)\w+>|\b(?:BOOL\w*|INT\w*|FLOAT|STR|STRICT\w*)\b", shown) == []


def test_plain_lines_where_there_is_no_terminal() -> None:
    flags = ("--epochs", "2", "--optimizer", "dp-adam", "--sigma", "1.5")
    result = dpmac("train", "--dataset", "digits", *flags)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert lines[0].startswith("dp-adam on digits: 1,437 records, mlp-small with 4,810 parameters")
    assert lines[1].startswith("sigma 1.5, expected batch 128, 24 steps (epochs: 2)")
    epochs = [line for line in lines if line.startswith("epoch")]
    assert [line.split()[:4] for line in epochs] == [
        ["epoch", "1", "step", "12"],
        ["epoch", "2", "step", "24"],
    ]
    assert all("epsilon" in line and "test accuracy" in line for line in epochs)
    assert lines[-5].endswith("on 360 samples")
    assert lines[-4].startswith("privacy epsilon 1.6")
    assert lines[-3].startswith("An attacker who accepts 1 false alarm in 100 detects a given")
    run = "runs/digits-dp-adam-1"
    assert lines[-2] == (
        f"{run}: model.safetensors, model-card.md, report.json, metrics.jsonl, config.yaml, "
        "SHA256SUMS"
    )
    assert lines[-1] == f"next: dpmac eval {run}, dpmac report {run}"


@pytest.mark.privacy
def test_nothing_unnoised_and_no_seed_on_the_screen() -> None:
    result = dpmac(*DIGITS, "--seed", str(SEED))
    assert result.exit_code == 0
    assert not re.search(r"loss|norm|clipped|drawn|finite", result.output)
    assert str(SEED) not in result.output
    assert "no privacy against anyone who knows the seed" in result.stdout


@pytest.mark.privacy
def test_no_privacy_is_said_at_the_start_and_at_the_end() -> None:
    lines = dpmac("train", "--dataset", "digits", "--epochs", "1", "--no-dp").stdout.splitlines()
    assert [line.startswith("NO PRIVACY") for line in lines].count(True) == 2
    (epoch,) = [line for line in lines if line.startswith("epoch")]
    assert "no privacy" in epoch
    assert not any("epsilon" in line for line in lines)


def test_quiet_prints_nothing() -> None:
    # A note, of a flag without effect, is silenced too.
    result = dpmac(*DIGITS, "--quiet", "--clip-norm", "3", "--out", "run")
    assert (result.exit_code, result.output) == (0, "")
    assert "no effect" in dpmac(*DIGITS, "--clip-norm", "3").stderr


@pytest.mark.parametrize("flags", [(), ("--quiet",)], ids=str)
def test_json_is_the_report_and_nothing_else(flags: Sequence[str]) -> None:
    result = dpmac(*DIGITS, "--json", "--out", "run", *flags)
    assert result.exit_code == 0
    assert result.stdout == Path("run/report.json").read_text()
    assert bool(result.stderr) == ("--quiet" not in flags)


def test_flags_win_over_the_file() -> None:
    Path("my.yaml").write_text("dataset: digits\nsteps: 3\nsigma: 2\noptimizer: dp-sgd\n")
    result = dpmac("train", "--config", "my.yaml", "--sigma", "4", "--json")
    report = json.loads(result.stdout)
    assert (report["optimizer"], report["privacy"]["noise_multiplier"]) == ("dp-sgd", 4.0)


@pytest.mark.privacy
def test_a_spent_budget_is_exit_code_3_with_everything_written() -> None:
    result = dpmac(*DIGITS, "--max-epsilon", "0.06", "--out", "run")
    assert result.exit_code == 3
    assert "--max-epsilon 0.06 allows 1 of 3 steps" in result.stdout
    assert "stopped: epsilon would exceed --max-epsilon" in result.stderr
    report = json.loads(Path("run/report.json").read_text())
    assert report["privacy"]["epsilon"] <= 0.06
    assert report["state"] == "budget-spent"


def test_an_existing_run_is_kept_without_force() -> None:
    assert dpmac(*DIGITS, "--out", "run").exit_code == 0
    before = contents(Path("run"))
    refused = dpmac(*DIGITS, "--out", "run")
    assert (refused.exit_code, contents(Path("run"))) == (2, before)
    assert "--force" in refused.stderr
    assert dpmac(*DIGITS, "--out", "run", "--force").exit_code == 0
    assert contents(Path("run")) != before


def test_debug_shows_where_it_failed() -> None:
    Path("file").write_text("")
    assert "Traceback" not in dpmac(*DIGITS, "--out", "file").output
    shown = dpmac(*DIGITS, "--out", "file", "--debug")
    assert "Traceback" in shown.stderr
    assert shown.exit_code == 2


def test_a_bug_is_admitted_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("dpmac_cli.runs.train.choose_device", fail)
    result = dpmac(*DIGITS)
    assert result.exit_code == 1
    assert "ZeroDivisionError: oh" in result.stderr
    assert "--debug" in result.stderr
    assert "Traceback" not in result.output


# Forks


def test_a_fork_goes_to_a_new_folder_and_says_what_it_is_of() -> None:
    parent = train_digits(out="parent", steps=3).folder
    before = contents(parent)
    result = dpmac("train", "--fork", "parent", "--epochs", "1", "--lr", "0.01")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("dp-macadam on digits: 1,437 records")
    assert lines[1].startswith("sigma 6, expected batch 128, 12 steps (epochs: 1)")
    assert lines[2] == "unit of privacy: one image"
    assert lines[3] == "continuing after step 3, with new noise"
    assert lines[-2].startswith("runs/digits-dp-macadam-1: model.safetensors")
    assert contents(parent) == before
    report = json.loads(Path("runs/digits-dp-macadam-1/report.json").read_text())
    assert [event["steps"] for event in report["privacy"]["events"]] == [3, 9]
    assert report["hyperparameters"]["lr"] == 0.01
    assert f"privacy epsilon {format_epsilon(report['privacy']['epsilon'])} at" in result.stdout


def test_a_fork_takes_out_json_and_quiet() -> None:
    train_digits(out="parent", steps=3)
    flags = ("--fork", "parent", "--steps", "5", "--out", "new", "--json", "--quiet")
    result = dpmac("train", *flags)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == Path("new/report.json").read_text()


@pytest.mark.privacy
def test_a_fork_whose_budget_is_spent_is_exit_code_3() -> None:
    train_digits(out="parent", steps=3, max_epsilon=0.06)
    more = dpmac("train", "--fork", "parent", "--max-epsilon", "0.09", "--out", "more")
    assert more.exit_code == 3
    assert "dpmac train --fork more --out NEW --max-epsilon MORE" in more.stderr
    report = json.loads(Path("more/report.json").read_text())
    assert (report["state"], report["privacy"]["epsilon"] <= 0.09) == ("budget-spent", True)
    less = dpmac("train", "--fork", "parent", "--max-epsilon", "0.05", "--out", "less")
    assert less.exit_code == 3
    assert "allows no further step" in less.stderr
    assert not Path("less").exists()


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--config", "my.yaml"), "--fork uses the settings of the run: leave out --config"),
        (("--resume", "parent"), "--resume and --fork contradict each other: give one"),
        ((), "parent has already taken 3 steps, but 3 are requested. Set --epochs"),
        (("--lr", "0.01"), "or --steps (above 3)"),
        (("--steps", "5", "--out", "parent"), "--out parent is the run to fork"),
        (("--steps", "5", "--out", "parent", "--force"), "--out parent is the run to fork"),
        (("--steps", "5", "--out", "other"), "--out other already contains a run"),
        (("--steps", "5", "--optimizer", "dp-sgd"), "--optimizer cannot change in a fork"),
        (("--steps", "5", "--seed", "3"), "--seed cannot change in a fork. Start a new run"),
        (("--steps", "5", "--epsilon", "1"), "--epsilon cannot change in a fork"),
        (("--steps", "5", "--canaries", "20"), "--canaries cannot change in a fork"),
        (("--stepz", "5"), "No such option"),
    ],
)
def test_forks_that_are_refused(flags: Sequence[str], said: str) -> None:
    Path("my.yaml").write_text("dataset: digits\nsteps: 5\n")
    train_digits(out="parent", steps=3)
    train_digits(out="other", steps=1)
    before = contents(Path())
    result = dpmac("train", "--fork", "parent", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert contents(Path()) == before


@pytest.mark.privacy
def test_an_audit_run_is_not_forked() -> None:
    for out, steps in (("stopped", 1), ("finished", 3)):
        list(train(digits_config(out=out, canaries=20, steps=3), after(steps)))
        result = dpmac("train", "--fork", out, "--steps", "9", "--out", "new")
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{out} is an audit run, which can neither be resumed nor forked" in result.stderr
        assert "Start a new run" in result.stderr
    assert not Path("new").exists()


def test_no_run_to_fork_is_named() -> None:
    Path("empty").mkdir()
    for name in ("empty", "nowhere"):
        result = dpmac("train", "--fork", name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"--fork {name} is not a run folder" in result.stderr


@pytest.mark.privacy
def test_a_run_in_use_is_not_forked_and_one_that_was_killed_is() -> None:
    events = train(digits_config(out="parent", steps=30, checkpoint_every="1"))
    next(event for event in events if isinstance(event, Update) and event.event.step >= 3)
    busy = dpmac("train", "--fork", "parent", "--steps", "40", "--out", "new")
    assert (busy.exit_code, busy.stdout) == (2, "")
    assert "The run folder parent is in use by another dpmac process" in busy.stderr
    assert not Path("new").exists()
    events.close()  # type: ignore[attr-defined]
    free = dpmac("train", "--fork", "parent", "--steps", "40", "--out", "new")
    assert (free.exit_code, free.stderr) == (0, "")


def test_what_a_run_says_to_type_forks_it() -> None:
    train_digits(out="parent", steps=3)
    said = dpmac("train", "--resume", "parent")
    assert said.exit_code == 2
    assert "dpmac train --fork parent --out NEW --epochs N (N above 0)" in said.stderr
    assert dpmac("train", "--fork", "parent", "--out", "NEW", "--epochs", "1").exit_code == 0
    changed = dpmac("train", "--resume", "NEW", "--lr", "0.01", "--epochs", "2")
    assert changed.exit_code == 2
    command = changed.stderr.split("dpmac ")[-1].split()
    assert command[:5] == ["train", "--fork", "NEW", "--out", "NEW"]
    command[4] = "third"
    assert dpmac(*command).exit_code == 0
    assert json.loads(Path("third/report.json").read_text())["hyperparameters"]["lr"] == 0.01


@pytest.mark.real_data
def test_two_steps_on_mnist(real_data_dir: Path) -> None:
    args = ("--dataset", "mnist", "--sigma", "0.8", "--data-dir", str(real_data_dir))
    result = dpmac("train", *args, "--steps", "2", "--json", "--quiet")
    report = json.loads(result.stdout)
    assert (report["model"]["name"], report["model"]["parameters"]) == ("mlp", 795_010)
    assert report["test"]["samples"] == 10_000
    assert report["privacy"]["sampling_rate"] == 256 / 60_000
    assert 0 < report["privacy"]["epsilon"] < 1.4470


# Processes of their own


@pytest.mark.long
def test_a_signal_ends_the_run_with_everything_written() -> None:
    signals = (signal.SIGINT, signal.SIGTERM)
    flags = ("train", "--dataset", "digits", "--epochs", "5000", "--sigma", "50")
    started = {number: process(*flags, "--out", number.name) for number in signals}
    for number, running in started.items():
        assert running.stdout is not None
        assert any(line.startswith("epoch") for line in running.stdout)
        running.send_signal(number)
    for number, running in started.items():
        _, said = running.communicate(timeout=60)
        assert running.returncode == 130
        assert f"interrupted; the run so far is in {number.name}" in said
        assert "Traceback" not in said
        report = json.loads(Path(number.name, "report.json").read_text())
        assert report["state"] == "interrupted"
        assert report["privacy"]["epsilon"] < report["privacy"]["epsilon_planned"]
        result = score(Path(number.name), None, None, "cpu").result
        assert result.accuracy == report["test"]["accuracy"]


@pytest.mark.long
def test_exit_codes_of_real_processes() -> None:
    run = str(train_digits(out="run").folder)
    commands: Mapping[int, tuple[str, ...]] = {
        0: (*DIGITS, "--out", "quiet", "--quiet"),
        2: (*DIGITS, "--delta", "0"),
        3: (*DIGITS, "--max-epsilon", "0.001"),
        4: ("eval", run, "--dataset", "mnist"),
    }
    started = {code: process(*command) for code, command in commands.items()}
    for code, running in started.items():
        out, said = running.communicate(timeout=60)
        assert (running.returncode, out) == (code, "")
        assert said.startswith("error: ") == bool(code)
        assert "Traceback" not in said
    assert sorted(os.listdir()) == ["quiet", "run"]


@pytest.mark.long
@pytest.mark.parametrize("where", ["| true", "| head -2 > /dev/null", ">&-", "> /dev/full"])
def test_a_display_that_is_lost_costs_only_itself(where: str) -> None:
    done = shell(f"dpmac {' '.join(DIGITS)} --steps 30 --out run {where}")
    full = where == "> /dev/full"  # nobody chose not to read it, so that it is said at the end
    said = "error: standard output: No space left on device. Free some space. "
    said += "The terminal output is lost; all files were written.\n"
    assert (done.returncode, done.stdout) == (2 if full else 0, "")
    assert done.stderr == (said if full else "")
    report = json.loads(Path("run/report.json").read_text())
    assert report["state"] == "finished"
    assert score(Path("run"), None, None, "cpu").result.accuracy == report["test"]["accuracy"]


@pytest.mark.long
def test_a_result_that_is_lost_is_a_failure() -> None:
    done = shell(f"dpmac {' '.join(DIGITS)} --quiet --json --out run > /dev/full")
    assert done.returncode == 2
    assert "standard output" in done.stderr
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert shell("dpmac eval run > /dev/full").returncode == 2
    enough = shell("dpmac eval run | head -1")
    assert (enough.returncode, enough.stderr) == (0, "")
    assert enough.stdout.startswith("run/model.safetensors on digits: accuracy")


@pytest.mark.parametrize("name", ["step-000000003.safetensors", "model.safetensors", "report.json"])
def test_a_full_disk_names_the_file_and_the_way_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkstemp

    def full(prefix: str, **rest: Any) -> tuple[int, str]:
        if name in prefix:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return make(prefix=prefix, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", full)
        result = dpmac(*DIGITS, "--out", "run")
    assert result.exit_code == 2
    assert f"{name}: No space left on device" in result.stderr
    assert re.search(r"last checkpoint \(step [0-3]\): dpmac train --resume run", result.stderr)
    assert dpmac("train", "--resume", "run").exit_code == 0
    assert json.loads(Path("run/report.json").read_text())["state"] == "finished"
