"""What a shell is told when Tab is pressed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpmac_cli.cli.app import COMMANDS, app
from dpmac_cli.config.fields import flag_name
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.models.registry import MODELS
from dpmac_cli.optim import OPTIMIZERS
from tests.typed import ENVIRONMENT, loading


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


def test_every_setting_with_choices_offers_them() -> None:
    chosen = {name: setting for name, setting in SETTINGS.items() if setting.choices}
    assert len(chosen) > 10
    for name, setting in chosen.items():
        line = f"dpmac train --{flag_name(name)} "
        assert sorted(offered(line)) == sorted(setting.choices), name


@pytest.mark.parametrize("line", ["dpmac train --optimizer dp-m", "dpmac eval --dataset "])
def test_the_answer_is_quick_and_loads_no_torch(line: str, tmp_path: Path) -> None:
    hook = loading("torch", "matplotlib", "scipy.stats", "sklearn")
    script = (
        f"import atexit, sys\n{hook}\nsys.argv = ['dpmac']\n"
        "from dpmac_cli.__main__ import main\nmain()\n"
    )
    began = time.process_time() + os.times().children_user
    done = subprocess.run(
        [sys.executable, "-c", script], env=asked(line), capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert (tmp_path / "loaded").read_text() == ""
    # Of the processor: a busy machine shall not fail it.
    assert time.process_time() + os.times().children_user - began < 2


def test_a_shell_can_be_told_how_to_ask() -> None:
    help_ = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout
    assert "--install-completion" in help_
    assert "--show-completion" in help_
