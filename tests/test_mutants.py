"""The table of bugs that the tests must find: each can still be put into the code."""

import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import LONG_ALONE

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import mutants

CODE = """
class Mechanism:
    def release(self, z):
        total = z.mul(  # noise
            self.sigma / (GRID)
        )
        if total > 0:
            return total

GRID = 2.0
"""


@pytest.mark.promise("bugs")
def test_every_mutant_applies() -> None:
    known, table = mutants.known_definitions(mutants.ROOT), mutants.read_table()
    assert len(table) > 100
    assert [f"{each.name}: {fault}" for each in table for fault in each.faults(known)] == []


def applied(folder: Path, where: str, old: str, new: str) -> str:
    """Return the code with a bug in it."""
    (folder / "dpmac_cli").mkdir()
    (folder / "dpmac_cli" / "of_noise.py").write_text(CODE)
    bug = mutants.Mutant(name="", cost="", where=where, old=old, new=new, tests=())
    file, text = bug.applied(mutants.known_definitions(folder))
    assert file.name == "of_noise.py"
    return text


@pytest.mark.parametrize(
    ("where", "old", "new", "changed"),
    [
        ("Mechanism.release", "self.sigma/GRID", "GRID", "z.mul((GRID))"),
        ("Mechanism.release", "if total > 0:\n  return total", "", "GRID)\n        pass\n"),
        ("Mechanism.release", "", "return z", "self, z):\n        return z\n"),
        ("Mechanism", "total>0", "-z", "if (-z):"),
        ("GRID", "2.0", "3", "GRID = (3)"),
    ],
)
def test_code_is_found_however_it_is_formatted(
    tmp_path: Path, where: str, old: str, new: str, changed: str
) -> None:
    assert changed in applied(tmp_path, where, old, new)


@pytest.mark.parametrize(
    ("where", "old", "new", "said"),
    [
        ("Mechanism.release", "self.sigma", "self.sigma * BIG", "new code uses BIG, which"),
        ("Mechanism.release", "self.sigm", "1", "old code occurs 0 times in Mechanism.release"),
        ("Mechanism.release", "total", "1", "old code occurs 3 times in Mechanism.release"),
        ("Mechanism.released", "total", "1", "no Mechanism.released; look at Mechanism.release"),
        ("Mechanism.release", "self.sigma", "]", "not Python"),
    ],
)
def test_one_that_no_longer_applies_is_named(
    tmp_path: Path, where: str, old: str, new: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        applied(tmp_path, where, old, new)


def test_a_test_that_is_not_there_is_named() -> None:
    lost = ("tests/test_none.py", "tests/test_mutants.py::test_none")
    bug = mutants.Mutant(name="", cost="", where="GRID", new="1", tests=lost)
    assert [f"there is no {test}" for test in lost] == list(bug.faults({}))[1:]


def test_a_short_test_looks_for_every_bug_that_is_put_in(pytestconfig: pytest.Config) -> None:
    """Of those that break a privacy promise; conftest.py knows the tests that are only long."""
    rows = tomllib.loads(mutants.TABLE.read_text(encoding="utf-8"))["mutant"]
    long = pytestconfig.stash[LONG_ALONE]
    assert [
        row["name"]
        for row in rows
        if row.get("marker") is None and {test.partition("[")[0] for test in row["tests"]} <= long
    ] == []
