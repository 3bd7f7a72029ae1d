"""Help, mistakes and prices come at once: nothing loads torch before there is a run."""

import os
import signal
from pathlib import Path

import pytest

from dpmac_cli.cli.app import COMMANDS, Place, load_command
from tests.tiers import rest_long
from tests.typed import hooked, loading

SLOW = ("torch", "torchvision", "sklearn", "scipy.stats", "jinja2", "numpy")


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        *rest_long([([name, "--help"], 0) for name in COMMANDS], short=2),
        (["train", "--sigma", "-1"], 2),
        (["train", "--config", "nowhere.yaml"], 2),
        (["eval", "nowhere", "--dataset", "mnits"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_torch_stays_unloaded(args: list[str], code: int, tmp_path: Path) -> None:
    done = hooked(loading(*SLOW), *args)
    assert done.returncode == code
    assert (tmp_path / "loaded").read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["typer", "torch"])
def test_a_signal_while_starting_ends_it_quietly(module: str, number: int, tmp_path: Path) -> None:
    hook = (
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder())"
    )
    flags = ("--dataset", "mnist", "--sigma", "1", "--data-dir", str(tmp_path))
    done = hooked(hook, "train", *flags)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted.\n")
    assert os.listdir() == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_end_changes_nothing(number: int) -> None:
    hook = f"atexit.register(lambda: os.kill(os.getpid(), {int(number)}))"
    flags = ("--dataset", "digits", "--sigma", "6", "--steps", "3", "--quiet", "--out", "run")
    done = hooked(hook, "train", *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert Path("run/report.json").exists()


def test_the_list_of_commands_waits_for_none_of_them(tmp_path: Path) -> None:
    done = hooked(loading("pydantic", "yaml", "dpmac_cli.config", "dpmac_cli.cli.train"), "--help")
    assert all(f" {name} " in done.stdout for name in COMMANDS)
    assert (tmp_path / "loaded").read_text() == ""


@pytest.mark.parametrize(("name", "place"), COMMANDS.items(), ids=[*COMMANDS])
def test_the_list_of_commands_has_the_beginnings_of_their_help(name: str, place: Place) -> None:
    assert " ".join(str(load_command(name).help).partition("\n\n")[0].split()) == place.summary


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_lists_its_exit_codes(name: str) -> None:
    text = " ".join(str(load_command(name).help).split())
    assert "Exit codes: 0 done, 1 a bug in dpmac, 2 usage" in text
