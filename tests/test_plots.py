"""Pictures: whole files, the same bytes each time, lines that can be told apart."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from dpmac_cli.plots import COLOURS, DASHES, new_figure, write_figure
from dpmac_cli.tasks.classified import draw_curves
from dpmac_cli.tasks.metrics import Answers


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


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        draw(tmp_path / "nowhere" / "a.png")


def test_no_two_lines_look_alike() -> None:
    _, (panel,) = new_figure(1)
    most = len(COLOURS) * len(DASHES)
    drawn = [panel.plot([0, 1], [2, 3])[0] for _ in range(most)]
    styles = [(line.get_color(), line.get_linestyle()) for line in drawn]
    assert len(set(styles)) == most
    # The first few differ in both, for those who see no colour.
    assert len({dash for _, dash in styles[:4]}) == 4
    assert len({colour for colour, _ in styles[:7]}) == 7


def test_curves_of_classes_with_odd_names_and_of_a_single_class(tmp_path: Path) -> None:
    hot = np.eye(2, dtype=np.bool_)[[0, 1, 1, 0]]
    shares = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3]], np.float32)
    for truth in (hot, np.eye(2, dtype=np.bool_)[[0, 0, 0, 0]]):
        answers = Answers(truth, shares > 0.5, shares, exclusive=True)
        draw_curves(answers, 0.1, ["_no", "$yes"], tmp_path / "curves.svg")
        text = (tmp_path / "curves.svg").read_text()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert ("$yes" in text) == (truth is hot)
