"""Recompute the privacy cost of a run from its report. Does not import torch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpmac_cli.accounting.accountants import DEFAULT_ACCOUNTANT
from dpmac_cli.accounting.pricing import Row, price
from dpmac_cli.accounting.selection import epsilon_of
from dpmac_cli.config.account import USED, Question
from dpmac_cli.config.flags import flag_name, is_given
from dpmac_cli.config.settings import DELTA
from dpmac_cli.errors import InputError
from dpmac_cli.release.report import read_report

#: Flags that may be combined with a run, which determines everything else.
BESIDE_A_RUN = ("delta", "accountant")


def excluded(path: Path, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a fault for each given flag that contradicts a run, or its report at ``path``."""
    for name, value in given.items():
        if name in Question.model_fields and name not in BESIDE_A_RUN and is_given(value):
            yield (
                f"--{flag_name(name)} contradicts {path}, which has all facts of the run. Leave "
                "it out."
            )


def recount(path: Path, asked: Question) -> tuple[list[Row], float, float]:
    """Recompute the privacy cost of a run from its report.

    Returns rows for the requested delta and accountants, and the stored and the correct epsilon.

    Args:
        path: a run folder, or a report.
        asked: flags, of which :data:`BESIDE_A_RUN` are used.

    Raises:
        InputError: the file is not a dpmac report, or a flag does not apply to it.
    """
    report = read_report(path)
    privacy, search = report.privacy, report.privacy.trials
    if search is not None and asked.accountant != DEFAULT_ACCOUNTANT:
        raise InputError(f"{path} is of a search: use --accountant {DEFAULT_ACCOUNTANT}.")
    events, own_delta = privacy.training_events(), privacy.delta or DELTA
    delta = asked.delta if "delta" in asked.explicit else own_delta
    size, unit = report.dataset.train_size, privacy.unit.name
    rows = [
        replace(price(events, delta, name, unit, search), dataset_size=size)
        for name in USED[asked.accountant]
    ]
    stored = math.inf if privacy.epsilon is None else privacy.epsilon
    return rows, stored, epsilon_of(search or events, own_delta)
