"""Pictures: whole files, the same bytes each time, lines that can be told apart."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from dpmac_cli.plots import COLOURS, DASHES, new_figure, write_figure


def draw(path: Path) -> bytes:
    figure, (panel,) = new_figure(1)
    panel.plot([0, 1], [2, 3], label="a line")
    panel.legend()
    write_figure(figure, path)
    return path.read_bytes()


@pytest.mark.parametrize("name", ["a.png", "a.PNG", "a.svg"])
def test_a_picture_is_whole_and_the_same_again(name: str, tmp_path: Path) -> None:
    first = draw(tmp_path / name)
    assert draw(tmp_path / name) == first
    if name.endswith("svg"):
        assert ElementTree.fromstring(first).tag.endswith("svg")
    else:
        assert first.startswith(b"\x89PNG\r\n\x1a\n")
        assert first.endswith(b"IEND\xaeB`\x82")


def test_no_two_lines_look_alike() -> None:
    _, (panel,) = new_figure(1)
    most = len(COLOURS) * len(DASHES)
    drawn = [panel.plot([0, 1], [2, 3])[0] for _ in range(most)]
    styles = [(line.get_color(), line.get_linestyle()) for line in drawn]
    assert len(set(styles)) == most
    # The first few differ in both, for those who see no colour.
    assert len({dash for _, dash in styles[:4]}) == 4
    assert len({colour for colour, _ in styles[:7]}) == 7
