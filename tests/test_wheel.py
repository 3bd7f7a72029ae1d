"""What is released: a source distribution, and the wheel that is built from it."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from shutil import ignore_patterns

import pytest

ROOT = Path(__file__).parents[1]
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
        archive.extractall(tmp_path, filter="data")
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
