"""Limits on the size of functions, constructors, modules and packages, and who imports whom."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp

import dpmac_cli

PACKAGE = Path(dpmac_cli.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
FUNCTION, ARGUMENTS, MODULE = 60, 8, 400


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


def test_functions_constructors_and_modules_are_small() -> None:
    """But for those that CONTRIBUTING.md names, which need it."""
    long = {name for file in FILES for name in too_long(file)}
    long |= {name_of(f) for f in FILES if len(f.read_text("utf-8").splitlines()) > MODULE}
    assert long == exceptions()


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph("dpmac_cli", cache_dir=None)
    below: dict[str, set[str]] = {
        m: graph.find_modules_directly_imported_by(m) for m in graph.modules
    }
    done: set[str] = set()
    while ready := {m for m in below if m not in done and below[m] <= done}:
        done |= ready
    assert below.keys() - done == set()
