"""The walls of the house: who may import what, checked on the source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dpmac_cli

PACKAGE = Path(dpmac_cli.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
#: The door of ``python -m dpmac_cli``.
DOOR = PACKAGE / "__main__.py"

TERMINAL = ("typer", "rich", "click", "dpmac_cli.cli")
PICKLES = (
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "torch.load",
    "torch.save",
    "yaml.load",
    "yaml.unsafe_load",
    "numpy.load",
    "np.load",
)


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Every name that is imported anywhere in a module, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def used(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that is mentioned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def banned(source: str, names: tuple[str, ...], package: str = "dpmac_cli") -> list[str]:
    """What a source imports or mentions of the banned names."""
    tree = ast.parse(source)
    found = [*imported(tree, package), *used(tree)]
    return [
        one for one in found if any(one == name or one.startswith(f"{name}.") for name in names)
    ]


def package_of(path: Path) -> str:
    return ".".join(("dpmac_cli", *path.relative_to(PACKAGE).parent.parts))


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 20
    assert DOOR in SOURCES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_command_line_talks_to_the_terminal(path: Path) -> None:
    if PACKAGE / "cli" not in path.parents and path != DOOR:
        assert banned(path.read_text(), TERMINAL, package_of(path)) == []


@pytest.mark.privacy
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_pickle_is_written_or_loaded(path: Path) -> None:
    assert banned(path.read_text(), PICKLES, package_of(path)) == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import rich", TERMINAL),
        ("def f():\n    from rich.text import Text", TERMINAL),
        ("from dpmac_cli import cli", TERMINAL),
        ("from dpmac_cli.cli.app import main", TERMINAL),
        ("from . import cli", TERMINAL),
        ("from .cli import app", TERMINAL),
        ("import torch\ntorch.load('x')", PICKLES),
        ("from torch import save", PICKLES),
        ("import pickle as p", PICKLES),
    ],
)
def test_the_check_sees_every_way_in(source: str, names: tuple[str, ...]) -> None:
    assert banned(source, names)


@pytest.mark.parametrize(
    "source", ["import richer", "from dpmac_cli.client import x", "import torch\ntorch.loader.x()"]
)
def test_the_check_lets_namesakes_through(source: str) -> None:
    assert not banned(source, (*TERMINAL, *PICKLES))


def test_nothing_prints_outside_the_command_line() -> None:
    for path in SOURCES:
        if PACKAGE / "cli" in path.parents:
            continue
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        assert not names & {"print", "input", "exit", "quit"}, path


@pytest.mark.privacy
def test_the_tests_that_the_privacy_page_names_exist_and_are_of_privacy() -> None:
    root = PACKAGE.parent
    named = set(re.findall(r"`(tests/[^`]+)`", (root / "docs" / "privacy.md").read_text()))
    assert len(named) > 15
    for name in named:
        assert "mark.privacy" in (root / name).read_text(), name
