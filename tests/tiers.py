"""Tests in tiers: which cases of a test are long, or weekly."""

import itertools
from collections.abc import Iterable, Sequence
from operator import getitem
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.pairwise import all_pairs


def rest_long(cases: Iterable[Any], short: int = 1) -> list[ParameterSet]:
    """Return cases for ``parametrize``, of which all but the first few are marked as long."""
    return [_long(case) if number >= short else _case(case) for number, case in enumerate(cases)]


def weekly(cases: Iterable[Any]) -> list[ParameterSet]:
    """Return cases for ``parametrize``, all marked as weekly: more draws of what others show."""
    plain = map(_case, cases)
    return [
        pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.weekly])
        for case in plain
    ]


def one_in(count: int, cases: Iterable[Any], *kept: str) -> list[ParameterSet]:
    """Return cases, of which one in so many stays short, and those with some ids: the rest long."""
    found = [_case(case) for case in cases]
    return [
        case if number % count == 0 or case.id in kept else _long(case)
        for number, case in enumerate(found)
    ]


def pairs_short(*columns: Sequence[Any]) -> list[ParameterSet]:
    """Return all combinations: short where a covering array has them, and long otherwise."""
    places = [range(len(column)) for column in columns]
    short = set(all_pairs(*places))
    return [
        (_case if each in short else _long)(tuple(map(getitem, columns, each)))
        for each in itertools.product(*places)
    ]


def _case(case: Any) -> ParameterSet:
    if isinstance(case, ParameterSet):
        return case
    return pytest.param(*(case if type(case) is tuple else (case,)))


def _long(case: Any) -> ParameterSet:
    plain = _case(case)
    return pytest.param(*plain.values, id=plain.id, marks=[*plain.marks, pytest.mark.long])
