"""Words are readable on a dark screen and on a light one."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dpmac_cli.cli
from dpmac_cli.cli.app import app
from dpmac_cli.cli.console import stdout

#: On white, or on black, many terminals show these too faintly to be read.
FAINT = ("yellow", "green", "cyan", "blue", "white", "black", "bright")
#: What a terminal is sent for these.
CODES = r"\x1b\[[0-9;]*\b(?:3[02346-7]|9[0-7])[0-9;]*m"


@pytest.mark.parametrize(
    "path", sorted(Path(dpmac_cli.cli.__path__[0]).glob("*.py")), ids=lambda path: path.name
)
def test_no_words_are_in_a_colour_that_some_screen_hides(path: Path) -> None:
    text = path.read_text()
    found = re.findall(rf"[\"'](?:bold |dim )?({'|'.join(FAINT)})\w*[\"']", text)
    assert not found


@pytest.mark.parametrize("typed", ["--help", "train --help", "trian", "train --sigm 1"])
def test_typers_words_are_not_either(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.FORCE_TERMINAL", True)
    env = {"TERM": "xterm", "COLUMNS": "80", "NO_COLOR": None}
    said = CliRunner().invoke(app, typed.split(), env=env, color=True).output
    assert "\x1b[1" in said
    assert not re.findall(CODES, said)


def test_the_time_that_is_left_is_not_either() -> None:
    assert str(stdout().get_style("progress.remaining")) == "dim"
