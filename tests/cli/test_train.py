"""dpmac train, as typed and as seen."""

import io
import math
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from dpmac_cli import load
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli.display import RunDisplay
from dpmac_cli.config.flags import flag_name
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.release.run import Run
from dpmac_cli.runs.session import Started, Update
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.metrics import Compared
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.training.evaluation import Evaluation
from tests.digits_runs import SEED, contents, digits_config, report_of, train_digits
from tests.helpers import unread
from tests.typed import dpmac, process, shell, started

DIGITS = ("train", "--dataset", "digits", "--sigma", "6", "--steps", "3")


def test_help_lists_every_flag_and_exit_code() -> None:
    result = dpmac("train", "--help")
    assert result.exit_code == 0
    words = set(result.stdout.split())
    assert {f"--{flag_name(name)}" for name in SETTINGS} <= words
    for code in ("0 done", "2 usage", "3 privacy", "4 the", "130 interrupted"):
        assert code in result.stdout


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
    beside = r" \(a constant prediction: {}\)".format
    assert re.fullmatch(r"test accuracy \S+ on 360 samples" + beside("12.22%"), lines[-6])
    assert re.fullmatch(r"test log loss \S+" + beside("2.291"), lines[-5])
    assert lines[-4].startswith("privacy epsilon 1.6")
    assert lines[-3].startswith("An attacker who accepts 1 false alarm in 100 detects a given")
    run = "runs/digits-dp-adam-1"
    assert lines[-2] == (
        f"{run}: model.safetensors, model-card.md, report.json, metrics.jsonl, config.yaml, "
        "SHA256SUMS"
    )
    assert lines[-1] == f"next: dpmac eval {run}, dpmac report {run}"


@pytest.mark.promise("published")
def test_nothing_unnoised_and_no_seed_on_the_screen() -> None:
    result = dpmac(*DIGITS, "--seed", str(SEED))
    assert result.exit_code == 0
    assert not re.search(r"(?<!log )loss|norm|clipped|drawn|finite", result.output)
    assert str(SEED) not in result.output
    assert "no privacy against anyone who knows the seed" in result.stdout


@pytest.mark.promise("said")
def test_no_privacy_is_said_at_the_start_and_at_the_end() -> None:
    lines = dpmac("train", "--dataset", "digits", "--epochs", "1", "--no-dp").stdout.splitlines()
    assert [line.startswith("NO PRIVACY") for line in lines].count(True) == 2
    (epoch,) = [line for line in lines if line.startswith("epoch")]
    assert "no privacy" in epoch
    assert not any("epsilon" in line for line in lines)


@pytest.mark.parametrize("flags", [(), ("--quiet",)], ids=str)
def test_json_is_the_report_and_nothing_else(flags: Sequence[str]) -> None:
    result = dpmac(*DIGITS, "--json", "--out", "run", *flags)
    assert result.exit_code == 0
    assert result.stdout == Path("run/report.json").read_text()
    assert bool(result.stderr) == ("--quiet" not in flags)


@pytest.mark.promise("target")
def test_a_spent_budget_is_exit_code_3_with_everything_written() -> None:
    result = dpmac(*DIGITS, "--max-epsilon", "0.06", "--out", "run")
    assert result.exit_code == 3
    assert "--max-epsilon 0.06 allows 1 of 3 steps" in result.stdout
    assert "stopped: epsilon would exceed --max-epsilon" in result.stderr
    report = report_of("run")
    assert report["epsilon"] <= 0.06
    assert report["state"] == "budget-spent"


def test_a_bug_is_admitted_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("dpmac_cli.runs.train.choose_device", fail)
    result = dpmac(*DIGITS)
    assert result.exit_code == 1
    assert "ZeroDivisionError: oh" in result.stderr
    assert "--debug" in result.stderr
    assert "Traceback" not in result.output


# Resumed into another folder


def test_a_run_resumed_into_another_folder_says_what_it_continues() -> None:
    parent = train_digits(out="parent", steps=3).folder
    before = contents(parent)
    result = dpmac(
        "train", "--resume", "parent", "--out", "longer", "--epochs", "1", "--lr", "0.01"
    )
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("dp-macadam on digits: 1,437 records")
    assert lines[1].startswith("sigma 6, expected batch 128, 12 steps (epochs: 1)")
    assert lines[2] == "unit of privacy: one image"
    assert lines[3] == "continuing after step 3, with new noise"
    assert lines[-2].startswith("longer: model.safetensors")
    assert contents(parent) == before
    report = report_of("longer")
    assert [event["steps"] for event in report["events"]] == [3, 9]
    assert report["settings"]["lr"] == 0.01
    assert f"privacy epsilon {format_epsilon(report['epsilon'])} at" in result.stdout


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
        report = report_of(number.name)
        assert report["state"] == "interrupted"
        result = load(Path(number.name), device="cpu").score(None, data_dir=None)
        assert result.accuracy == report["scores"]["accuracy"]["value"]


@pytest.mark.long
@pytest.mark.parametrize("where", ["| head -2 > /dev/null", ">&-", "> /dev/full"])
def test_a_display_that_is_lost_costs_only_itself(where: str) -> None:
    done = shell(f"dpmac {' '.join(DIGITS)} --steps 30 --out run {where}")
    full = where == "> /dev/full"  # nobody chose not to read it, so that it is said at the end
    said = "error: standard output: No space left on device. Free some space. "
    said += "The terminal output is lost; all files were written.\n"
    assert (done.returncode, done.stdout) == (2 if full else 0, "")
    assert done.stderr == (said if full else "")
    report = report_of("run")
    assert report["state"] == "finished"
    assert (
        load(Path("run"), device="cpu").score(None, data_dir=None).accuracy
        == report["scores"]["accuracy"]["value"]
    )


def said(*updates: Update) -> str:
    """What is printed in a long run, on one line."""
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    display, where = RunDisplay(console), Path("runs/some-run")
    plan, size = digits_config(steps=58_800), (582_346, 582_346)
    display.show(Started(plan=plan, folder=where, parameters=size, done=0, steps=58_800))
    for update in updates:
        display.show(update)
    display.close()
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


@pytest.mark.parametrize(
    ("planned", "times"), [(10.01, 1), (10.0, 0), (math.inf, 0), (None, 0)], ids=str
)
def test_a_weak_guarantee_is_remarked_on_once(planned: float | None, times: int) -> None:
    text = said(*(Update(step=n, seconds=0.1, epsilon=planned, planned=planned) for n in (1, 2)))
    assert text.count("note: epsilon will be 10.01. Above 10") == times


@pytest.mark.parametrize(("pace", "times"), [(1.0, 1), (0.01, 0)])
def test_a_slow_run_says_once_how_long_it_takes_and_what_is_faster(pace: float, times: int) -> None:
    text = said(
        *(
            Update(step=step, seconds=5 + pace * step, epsilon=1.0, planned=1.0)
            for step in range(1, 3000, 100)
        )
    )
    assert text.count("at this pace, training takes 16.3 hours more. Faster: fewer") == times
    assert text.count("--backbone") == times


# Notes on models that learned little: true of the run, and with what can be done in it.


def shown_of(result: Compared, **flags: Any) -> str:
    """What is printed at the end of a run with these results, on one line."""
    console = Console(width=1000, file=io.StringIO())
    display, plan = RunDisplay(console), digits_config(steps=1, **flags)
    display.show(Started(plan=plan, folder=Path("run"), parameters=(9, 9), done=0, steps=1))
    task = Classification(("no", "yes"))
    found = Evaluation(0.0, torch.zeros(2, 2), torch.zeros(2), task)
    found.__dict__["compared"] = result
    display.show(
        Update(step=1, seconds=0.1, epsilon=1.0, planned=1.0, evaluated=True, result=found)
    )
    display.close()
    report = {
        "settings": {"cover_scores": False},
        "data": {"classes": []},
        "network": {"operating_point": None},
        "delta": None,
        "scores": {"accuracy": {"value": 0.5}, "samples": 2},
        "sentences": {},
        "state": "interrupted",
    }
    display.show(Run(report, Path("run"), unread))
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def classified(scores: list[float], truth: list[int], threshold: float = 1.0) -> Compared:
    """Return the results of a classifier of two classes that says "yes" above a threshold."""
    shares = np.array([[1 - score, score] for score in scores], np.float32)
    guess = (shares[:, 1] > threshold).astype(int)
    return Compared(np.array(truth), guess, np.arange(len(truth)), shares)


CHANCE = classified([0.1, 0.2] * 200, [0, 0, 0, 1, 1, 0, 0, 0] * 50)


@pytest.mark.parametrize(
    ("flags", "said", "unsaid"),
    [
        ({"model": "mlp-small"}, "too much noise: use a smaller --sigma", "--epsilon 3"),
        ({"model": "mlp-small"}, "or a smaller network (--model linear)", "--model than"),
        ({"model": "mlp-small", "sigma": None, "epsilon": 1}, "a larger --epsilon", "--sigma"),
        ({"model": "linear"}, "too much noise", "--model"),
        ({"model": "linear", "no_dp": True}, "another --lr or --model than linear.", "noise"),
        ({"model": "mlp-small", "no_dp": True}, "another --lr or --model.", "noise"),
    ],
)
def test_a_model_that_learned_nothing_has_a_remedy_of_its_run(
    flags: dict[str, Any], said: str, unsaid: str
) -> None:
    text = shown_of(CHANCE, **flags)
    note = text.partition("note: 300 of 400 test samples are classified correctly")[2]
    note = note.partition("test accuracy")[0]
    assert said in note
    assert unsaid not in note


@pytest.mark.parametrize("no_dp", [False, True])
def test_a_classifier_that_ranks_is_not_said_to_have_learned_nothing(no_dp: bool) -> None:
    """It never says "yes", and its probabilities tell most of those who are."""
    ranked = classified([0.1, 0.1, 0.3, 0.4] * 100, [0, 0, 1, 0] * 100)
    text = shown_of(ranked, no_dp=no_dp)
    assert "(AUROC 66.67%): compare them with your own threshold" in text
    assert "noise" not in text.partition("note: 300 of 400")[2]


def test_a_classifier_that_finds_a_rare_class_is_not_compared_with_the_largest() -> None:
    """With class weights, 50 of 100 are right, where one class alone has 75."""
    found = classified([0.1, 0.6, 0.9, 0.6] * 25, [0, 0, 1, 0] * 25, 0.5)
    assert shown_of(found).count("note: ") == 0


@pytest.mark.parametrize("loss", ["mse", "huber", "quantile:0.9", "quantile:0.1"])
def test_numbers_are_compared_with_the_best_number_for_the_loss(loss: str) -> None:
    """Costs are skewed: the best number for one loss is bad for another."""
    cost = np.random.default_rng(0).exponential(20.0, 4000).clip(0, 200)
    task = Regression(("cost",), 0.0, 200.0)
    best = {"mse": cost.mean(), "huber": np.median(cost)}
    number = best.get(loss, np.quantile(cost, float(loss.partition(":")[2] or 0.5)))
    for moved, learned in ((0.0, False), (0.1, True)):
        guess = number + moved * (cost - cost.mean())
        compared = Compared(cost, guess, np.arange(4000), np.zeros((4000, 0), np.float32))
        found = task.remark(compared, loss)
        assert (found is None) == learned


@pytest.mark.long
def test_a_training_does_not_load_the_compiler_of_torch() -> None:
    """Its import takes a second of CPU time, a sixth of the shortest training."""
    program = """
import sys
from dpmac_cli import train
train(dataset="digits", epochs=1, sigma=1.0, out="run")
assert "torch._dynamo" not in sys.modules
"""
    done = started(program)
    assert done.returncode == 0, done.stderr
