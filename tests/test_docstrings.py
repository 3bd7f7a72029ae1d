"""Examples in docstrings run, and print what stands below them."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import dpmac_cli

ROOT = Path(dpmac_cli.__file__).parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_run(name: str) -> None:
    result = doctest.testmod(import_module(name), optionflags=FLAGS)
    assert result.attempted > 0
    assert result.failed == 0


def test_an_example_that_prints_something_else_fails() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda _: None).failed == 1
