"""The table of bugs that the tests must find: each can still be put into the code."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "benchmarks/mutants.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.privacy
def test_every_mutant_applies() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) > 100


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "dpmac_cli/dp/mechanism.py",
            "GRID * math.sqrt(size)",
            "math.sqrt(size) * GRID",
            "the grid's share of the sensitivity forgotten: its old text occurs 0 times in dp/mec",
        ),
        (
            "dpmac_cli/dp/mechanism.py",
            "        return GRID * math.sqrt(size)",
            "        return GRID * math.sqrt(size)\n        return GRID * math.sqrt(size)",
            "the grid's share of the sensitivity forgotten: its old text occurs 2 times in dp/mec",
        ),
        (
            "dpmac_cli/dp/mechanism.py",
            "return GRID * math.sqrt(size)",
            "return GRID * math.sqrt(size) if size else )",
            "the grid's share of the sensitivity forgotten: dp/mechanism.py would not compile",
        ),
        (
            "tests/test_engine.py",
            "def test_tf32_is_off(",
            "def test_tf32_is_on(",
            "TF32 left on: there is no tests/test_engine.py::test_tf32_is_off",
        ),
        (
            "benchmarks/mutants.toml",
            'name = "clipping to 2"',
            'name = "no clipping"',
            "Two mutants have one name: no clipping.",
        ),
    ],
    ids=["gone", "twice", "broken", "no test", "same name"],
)
def test_one_that_no_longer_applies_is_named(
    tmp_path: Path, file: str, old: str, new: str, said: str
) -> None:
    for name in ("benchmarks", "dpmac_cli", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=ignored)
    changed = tmp_path / "tree" / file
    source = changed.read_text(encoding="utf-8")
    assert source.count(old) == 1
    changed.write_text(source.replace(old, new), encoding="utf-8")
    done = check(tmp_path / "tree")
    assert done.returncode == 1
    assert said in done.stdout + done.stderr
