"""The short tests show every privacy promise."""

import tomllib
from pathlib import Path

import pytest

from tests.conftest import LONG_ALONE

TABLE = Path(__file__).parents[1] / "benchmarks" / "mutants.toml"


def test_a_short_test_looks_for_every_bug_that_is_put_in(pytestconfig: pytest.Config) -> None:
    """Of those that break a privacy promise; conftest.py knows the tests that are only long."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    long = pytestconfig.stash[LONG_ALONE]
    assert [
        row["name"]
        for row in rows
        if row.get("marker") is None and {test.partition("[")[0] for test in row["tests"]} <= long
    ] == []
