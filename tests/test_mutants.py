"""The table of bugs that the tests must find: each can still be put into the code."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def check(root: Path, *only: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "benchmarks/mutants.py"), "--check", *only]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.privacy
def test_every_mutant_applies() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) > 100


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, of what the check reads."""
    tree = tmp_path_factory.mktemp("mutants")
    for name in ("benchmarks", "dpmac_cli", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


@contextmanager
def edited(tree: Path, file: str, old: str, new: str) -> Iterator[None]:
    """Have a file of the copy say something else for a while."""
    changed = tree / file
    source = changed.read_text(encoding="utf-8")
    assert source.count(old) == 1
    changed.write_text(source.replace(old, new), encoding="utf-8")
    try:
        yield
    finally:
        changed.write_text(source, encoding="utf-8")


TOTAL = "total.add_(z.mul_(self.noise_multiplier / GRID).round_())"
OFF = "the noise off the grid: "
SHARE = "the grid's share of the sensitivity forgotten: "
HERE = "SecureMechanism.whitened"


#: File, what it says, what it would say, and the answer.
CHANGES = [
    (
        "dpmac_cli/dp/mechanism.py",
        TOTAL,
        "total.add_(z.mul_(self.noise_multiplier / (2 * GRID)).round_())",
        f"{OFF}its old code occurs 0 times in {HERE}; nearest: total.add_(z.mul_(self.noise_m",
    ),
    (
        "dpmac_cli/dp/mechanism.py",
        TOTAL,
        f"{TOTAL}\n        {TOTAL}",
        f"{OFF}its old code occurs 2 times in {HERE}",
    ),
    (
        "dpmac_cli/dp/mechanism.py",
        "def whitened(",
        "def in_whitened_space(",
        f"{OFF}there is no {HERE}; look at SecureMechanism.in_whitened_space",
    ),
    (
        "benchmarks/mutants.toml",
        'replace = "return GRID"',
        'replace = "return BIG"',
        f"{SHARE}its new code uses BIG, which the file does not define",
    ),
    (
        "benchmarks/mutants.toml",
        'replace = "return GRID"',
        'replace = "return ]"',
        f"{SHARE}not Python",
    ),
    (
        "tests/dp/test_precision.py",
        "def test_a_program_that_turns_tf32_on_does_not_turn_it_on_in_steps(",
        "def test_a_program_may_turn_tf32_on(",
        "TF32 left on: there is no tests/dp/test_precision.py::test_a_program_that_turns_tf32",
    ),
    (
        "benchmarks/mutants.toml",
        'name = "clipping to 2"',
        'name = "no clipping"',
        "Two mutants have one name: no clipping.",
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    CHANGES,
    ids=["changed", "twice", "renamed", "unbound", "not Python", "no test", "same name"],
)
def test_one_that_no_longer_applies_is_named(
    copied: Path, file: str, old: str, new: str, said: str
) -> None:
    with edited(copied, file, old, new):
        done = check(copied, "--only", said.partition(":")[0])
    assert done.returncode == 1
    assert said in done.stdout + done.stderr


@pytest.mark.privacy
def test_moved_and_reformatted_code_is_found(copied: Path) -> None:
    new = (
        "(\n            total  # of all samples\n            .add_(\n"
        "                (z.mul_(self.noise_multiplier / (GRID))).round_(),\n            ))"
    )
    here, there = copied / "dpmac_cli/dp/mechanism.py", copied / "dpmac_cli/noise_of_steps.py"
    with edited(copied, "dpmac_cli/dp/mechanism.py", TOTAL, new):
        done = check(copied, "--only", "the grid")
        assert done.returncode == 0, done.stdout
        here.rename(there)
        done = check(copied, "--only", "the grid")
        there.rename(here)
    assert done.returncode == 0, done.stdout
