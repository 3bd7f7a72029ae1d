"""Limits on the size of functions, constructors, modules and packages, and who imports whom."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

import dpmac_cli

PACKAGE = Path(dpmac_cli.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
FUNCTION, ARGUMENTS, MODULE, TOP = 60, 8, 400, 20


def exceptions() -> set[str]:
    """What CONTRIBUTING.md excuses: names in backticks of the list below the limits."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("Exceptions to these limits")
    return set(re.findall(r"^- `([^`]+)`", rest.partition("\n## ")[0], re.MULTILINE))


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)


def constructor_arguments(node: ast.ClassDef) -> int:
    """How many a class takes: those of its ``__init__``, or its fields if it is a dataclass."""
    for made in node.body:
        if isinstance(made, ast.FunctionDef) and made.name == "__init__":
            return len(made.args.posonlyargs + made.args.args + made.args.kwonlyargs) - 1
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return 0
    fields = [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)]
    return sum("init=False" not in part and ": ClassVar[" not in part for part in fields)


def too_long(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > FUNCTION:
                yield f"{name_of(file)}.{node.name}"
        if isinstance(node, ast.ClassDef) and constructor_arguments(node) > ARGUMENTS:
            yield f"{name_of(file)}.{node.name}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_functions_constructors_and_modules_are_small(file: Path) -> None:
    found = set(too_long(file))
    if len(file.read_text(encoding="utf-8").splitlines()) > MODULE:
        found.add(name_of(file))
    assert found <= exceptions()


def test_the_exceptions_are_needed() -> None:
    long = {name for file in FILES for name in too_long(file)}
    long |= {name_of(f) for f in FILES if len(f.read_text("utf-8").splitlines()) > MODULE}
    assert exceptions() <= long


def test_the_top_level_is_short() -> None:
    names = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert len(names - {"__pycache__"}) <= TOP


def test_every_module_says_in_a_line_what_it_holds() -> None:
    for file in FILES:
        line = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0]
        assert line.endswith((".", "!")), file
        assert len(line.split()) > 2, file


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph("dpmac_cli", cache_dir=None)
    below: dict[str, set[str]] = {
        m: graph.find_modules_directly_imported_by(m) for m in graph.modules
    }
    done: set[str] = set()
    while ready := {m for m in below if m not in done and below[m] <= done}:
        done |= ready
    assert below.keys() - done == set()


#: Public names that two modules may define, and why.
SHARED_NAMES = {
    "tune": "commands are named like the functions that they run",
    "train": "commands are named like the functions that they run",
    "predict": "commands are named like the functions that they run",
    "evaluate": "commands are named like the functions that they run",
    "AdaClip": "an optimizer is named like its geometry",
    **dict.fromkeys(
        (
            *("Attack", "Audit", "Count", "Dataset", "Interval"),
            *("Model", "Sampler", "Scores"),
        ),
        "sections of report.json are named like what they record",
    ),
}


def public_names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and type aliases of a module; constants belong to their module."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            if isinstance(target, ast.Name) and not target.id.isupper():
                yield target.id


def test_public_names_are_unique() -> None:
    modules: dict[str, list[str]] = {}
    for file in FILES:
        for name in public_names(ast.parse(file.read_text(encoding="utf-8"))):
            if not name.startswith("_"):
                modules.setdefault(name, []).append(name_of(file))
    shared = {name: files for name, files in modules.items() if len(set(files)) > 1}
    assert shared.keys() <= SHARED_NAMES.keys(), shared
    assert SHARED_NAMES.keys() <= shared.keys()


def test_constants_that_other_modules_import_are_unique() -> None:
    defined: dict[str, set[str]] = {}
    for file in (file for file in FILES if file.name != "__init__.py"):  # which only names them
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpmac_cli"):
                for alias in node.names:
                    if alias.name.isupper():
                        defined.setdefault(alias.name, set()).add(str(node.module))
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}
