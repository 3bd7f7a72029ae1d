"""The table of bugs that the tests must find: each can still be put into the code."""

import sys
import tomllib
from pathlib import Path

import pytest

from tests import promises
from tests.conftest import LONG_ALONE

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import mutants


@pytest.mark.promise("bugs")
def test_every_mutant_applies() -> None:
    known, table = mutants.known_definitions(mutants.ROOT), mutants.read_table()
    assert len(table) > 100
    assert [f"{each.name}: {fault}" for each in table for fault in each.faults(known)] == []


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


@pytest.mark.promise("bugs")
def test_every_promise_has_a_test_and_a_bug_that_it_finds() -> None:
    assert all(promises.tests_of_promises()[name] for name in promises.PROMISES)
    without = {name for name, count in promises.bugs_of_promises().items() if count == 0}
    assert without == {"bugs", "silent"}  # these judge all of the others
    assert promises.page() == promises.PAGE.read_text(encoding="utf-8")
