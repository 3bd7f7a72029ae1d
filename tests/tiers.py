"""Tests in two tiers: which cases of a test are long."""

from collections.abc import Iterable
from typing import Any

import pytest


def rest_long(cases: Iterable[Any], short: int = 1) -> list[Any]:
    """Return cases for ``parametrize``, of which all but the first few are marked as long."""
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)),
            marks=[pytest.mark.long] if number >= short else [],
        )
        for number, case in enumerate(cases)
    ]
