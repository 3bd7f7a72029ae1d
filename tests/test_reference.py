"""Names and types that the reference of docs/library.md promises."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import dpmac_cli

PAGE = (Path(__file__).parents[1] / "docs" / "library.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.split("## Reference")[1], re.MULTILINE)
#: Written as an attribute or a call in the description of a class.
MEMBER = re.compile(r"`([a-z_]+)(?:\([^`]*\))?`")

#: Attributes that only instances have.
INSTANCE = {"errors"}


def members(kind: type) -> set[str]:
    """Attributes of a class and fields of its instances."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {*dir(kind), *(field.name for field in fields), *getattr(kind, "__annotations__", ())}


def test_the_reference_has_every_public_name() -> None:
    assert {name for name, _ in ROWS} == set(dpmac_cli.__all__) - {"__version__"}


@pytest.mark.parametrize(("name", "text"), ROWS, ids=[name for name, _ in ROWS])
def test_a_row_of_the_reference_is_true(name: str, text: str) -> None:
    found: Any = getattr(dpmac_cli, name)
    for promised in re.findall(r"(?::|to) an? `(\w+)`", text):
        parts = [found, *vars(found).values()] if isinstance(found, type) else [found]
        called = [inspect.signature(part) for part in parts if inspect.isroutine(part)]
        returned = {found.__name__, *(str(each.return_annotation) for each in called)}
        assert any(promised in each for each in returned), (promised, returned)
    if isinstance(found, type):
        missing = set(MEMBER.findall(text)) - members(found) - INSTANCE - set(dpmac_cli.__all__)
        assert not missing, (name, missing)
