"""Every command: its help, completion, and what it loads before there is a run."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich import progress
from typer.testing import CliRunner

from dpmac_cli import __version__
from dpmac_cli.cli import console
from dpmac_cli.cli.app import COMMANDS, app, load_command
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.networks import MODELS
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.runs import environment
from tests.typed import ENVIRONMENT, started

SLOW = ("torch", "torchvision", "sklearn", "scipy.stats", "jinja2", "numpy")


STARTED = (
    ("--help", 0),
    ("--version", 0),
    *((f"{name} --help", 0) for name in COMMANDS),
    ("train --sigma -1", 2),
    ("train --config nowhere.yaml", 2),
    ("eval nowhere --dataset mnits", 2),
)
DRY_RUN = (
    "compare --dataset digits --sigma 6 --device cpu --optimizers dp-sgd,dp-macadam --seeds 2 "
    "--steps 3 --lr 0.1,0.2 --out study --dry-run"
)


def test_torch_stays_unloaded() -> None:
    """By help and mistakes with all that is slow to load; by a dry run, which prices runs."""
    ran = started(
        "import shlex, sys\n"
        "from typer.testing import CliRunner\n"
        "from dpmac_cli.cli.app import app\n"
        "def loaded(*modules): return [m for m in modules if m in sys.modules]\n"
        f"for line, code in {STARTED!r}:\n"
        "    result = CliRunner().invoke(app, shlex.split(line))\n"
        f"    assert (result.exit_code, loaded{SLOW!r}) == (code, []), line\n"
        f"result = CliRunner().invoke(app, shlex.split({DRY_RUN!r}))\n"
        "assert (result.exit_code, loaded('torch')) == (0, []), result.output\n"
        "print(result.stdout)"
    )
    assert ran.returncode == 0, ran.stderr
    assert "8 runs" in ran.stdout
    rows = [line.split() for line in ran.stdout.splitlines() if line.startswith("dp-")]
    assert rows[0] == ["dp-sgd", "lr", "0.1", "6", "0.09005", "3", "2"]
    assert len(rows) == 4
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("module", "number"), [("typer", signal.SIGINT), ("torch", signal.SIGTERM)]
)
def test_a_signal_while_starting_ends_it_quietly(module: str, number: int, tmp_path: Path) -> None:
    hook = (
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder())"
    )
    flags = ["--dataset", "mnist", "--sigma", "1", "--data-dir", str(tmp_path)]
    done = started(
        f"import os, sys\n{hook}\nsys.argv = {['dpmac', 'train', *flags]!r}\n"
        "from dpmac_cli.__main__ import main\nmain()"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted.\n")
    assert os.listdir() == []


@pytest.mark.parametrize(("name", "summary"), COMMANDS.items(), ids=[*COMMANDS])
def test_the_list_of_commands_has_the_beginnings_of_their_help(name: str, summary: str) -> None:
    assert " ".join(str(load_command(name).help).partition("\n\n")[0].split()) == summary


def asked(line: str) -> dict[str, str]:
    """The environment in which bash asks how a line may go on."""
    words = line.split(" ")
    variables = {"_DPMAC_COMPLETE": "complete_bash", "COMP_WORDS": line}
    return {**ENVIRONMENT, **variables, "COMP_CWORD": str(len(words) - 1)}


def offered(line: str) -> list[str]:
    """How a line may go on, asked in this process."""
    result = CliRunner().invoke(app, [], prog_name="dpmac", env=asked(line))
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dpmac ", [*COMMANDS]),
        ("dpmac train --optimizer ", list(OPTIMIZERS)),
        ("dpmac train --optimizer dp-ad", ["dp-adam", "dp-adambc"]),
        ("dpmac train --optimizer dp-sgd,dp-ad", []),
        ("dpmac train --dataset ", list(DATASETS)),
        ("dpmac train --model w", [name for name in MODELS if name.startswith("w")]),
        ("dpmac compare --optimizers dp-sgd,dp-adam", ["dp-sgd,dp-adam", "dp-sgd,dp-adambc"]),
        ("dpmac compare --optimizers a", ["all", "adaclip"]),
        ("dpmac compare --kappa paper,e", ["paper,exact"]),
        ("dpmac compare --executor ", ["local", "ray"]),
        ("dpmac account --accountant ", ["pld", "rdp", "all"]),
        ("dpmac eval --dataset cifar", ["cifar10", "cifar100"]),
    ],
)
def test_names_are_offered(line: str, words: list[str]) -> None:
    assert sorted(offered(line)) == sorted(words)


def printed(*args: str) -> str:
    done = CliRunner().invoke(app, ["env", *args])
    assert done.exit_code == 0
    return done.stdout


def test_env_has_what_a_bug_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    monkeypatch.setenv("DPMAC_DATA_DIR", "somewhere")
    found = json.loads(printed("--json"))
    assert (found["dpmac"], found["torch"]) == (__version__, torch.__version__)
    assert found["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert found["threads"] == torch.get_num_threads()
    assert found["environment variables"]["MKL_CBWR"] == "AUTO"
    assert found["data"] == "somewhere"
    assert found["processor"]
    assert "BLAS" in found["build of torch"]
    lines = printed().splitlines()
    assert [line.partition(":")[0] for line in lines if line[0] != " "] == [*found]


def test_env_tries_the_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def alike(run: Any, base: torch.Tensor, chunk: int) -> bool:
        return base.dtype != torch.float64

    monkeypatch.setattr(environment, "chunks_alike", alike)
    *_, single, double = printed().splitlines()
    assert single == "  float32: none"
    assert double.startswith("  float64: On this device, ")


def test_a_bar_that_is_not_shown_ends_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rich is older than 14.3, it would."""
    ended = list[progress.Progress]()
    monkeypatch.setattr(progress.Progress, "stop", ended.append)
    console.bar(console=console.stdout()).stop()
    assert not ended
