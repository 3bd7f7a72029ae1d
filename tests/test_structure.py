"""Limits on the size of functions and constructors, and the wheel that is released."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from shutil import ignore_patterns
from typing import Any

import grimp
import pytest

import dpmac_cli

PACKAGE = Path(dpmac_cli.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
FUNCTION, ARGUMENTS = 60, 8


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


def test_functions_and_constructors_are_small() -> None:
    """But for those that CONTRIBUTING.md names, which need it."""
    long = {name for file in FILES for name in too_long(file)}
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


BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_wheel_of_the_source_distribution_trains(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "dpmac_cli", tree / "dpmac_cli", ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    (tree / "tests" / "test_one.py").write_text("")
    run("-c", BUILD, "build_sdist", tmp_path, folder=tree)
    (source,) = tmp_path.glob("dpmac-*.tar.gz")
    with tarfile.open(source) as archive:
        # Python 3.11.4 has filters, and later ones warn without.
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path, **safely)
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert "CHANGELOG.md" in names
    assert not [name for name in names if name.startswith("tests")]  # without what they read
    run("-c", BUILD, "build_wheel", tmp_path, folder=tmp_path / source.name.removesuffix(".tar.gz"))
    (wheel,) = tmp_path.glob("dpmac-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("dpmac_cli/")}
        archive.extractall(tmp_path / "installed")
    ours = (ROOT / "dpmac_cli").rglob("*")
    kinds = {".py", ".pyi", ".toml", ".jinja", ".yaml"}
    wanted = {str(path.relative_to(ROOT)) for path in ours if path.suffix in kinds}
    assert packed == {*wanted, "dpmac_cli/py.typed"}
    (tmp_path / "empty").mkdir()
    where = {"PYTHONPATH": str(tmp_path / "installed"), "PYTHONSAFEPATH": "1"}
    named = run("-c", "import dpmac_cli; print(dpmac_cli.__file__)", folder=tmp_path, **where)
    assert named.startswith(str(tmp_path / "installed"))
    listed = run("-m", "dpmac_cli", "recipes", folder=tmp_path / "empty", **where)
    assert "dpmac train --recipe mnist-scatter" in listed
    given = ("--recipe", "digits", "--sigma", "6", "--steps", "3", "--out", "run")
    assert "privacy epsilon" in run("-m", "dpmac_cli", "train", *given, folder=tmp_path, **where)
