"""Words are readable on a dark screen and on a light one."""

import re
from pathlib import Path

import pytest

import dpmac_cli.cli
from dpmac_cli.cli.console import stdout

#: On white, or on black, many terminals show these too faintly to be read.
FAINT = ("yellow", "green", "cyan", "blue", "white", "black", "bright")


@pytest.mark.parametrize(
    "path", sorted(Path(dpmac_cli.cli.__path__[0]).glob("*.py")), ids=lambda path: path.name
)
def test_no_words_are_in_a_colour_that_some_screen_hides(path: Path) -> None:
    text = path.read_text()
    found = re.findall(rf"[\"'](?:bold |dim )?({'|'.join(FAINT)})\w*[\"']", text)
    assert not found


def test_the_time_that_is_left_is_not_either() -> None:
    assert str(stdout().get_style("progress.remaining")) == "dim"
