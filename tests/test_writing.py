"""How texts are written, as inputs."""

import pytest

from dpmac_cli.data.writing import WRITTEN, how_written
from tests.test_texts import TEXTS

PROSE = "The patient came in on Monday, with a cough that had lasted for a week."


def test_ordinary_prose_is_near_zero() -> None:
    assert len(how_written(PROSE)) == WRITTEN
    assert max(map(abs, how_written(PROSE))) < 0.1


@pytest.mark.parametrize(
    ("place", "text"),
    [(0, "WIN A PRIZE"), (1, "call 0800 123"), (2, "now!!!"), (3, "£5 + $3")],
)
def test_each_number_is_of_one_property(place: int, text: str) -> None:
    assert how_written(text)[place] > how_written(PROSE)[place] + 0.3


@pytest.mark.promise("reading")
def test_numbers_are_within_bounds_and_of_one_text() -> None:
    """For every kind of text: empty, with other scripts, NUL, only spaces, 25,000 characters."""
    alone = [how_written(text) for text in TEXTS]
    assert [how_written(text) for text in reversed(TEXTS)] == alone[::-1]
    assert all(-1 <= value <= 1 for row in alone for value in row)
