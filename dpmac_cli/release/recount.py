"""Recompute the privacy cost of a run from its report. Does not import torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dpmac_cli.accounting.accountants import DEFAULT_ACCOUNTANT
from dpmac_cli.accounting.pricing import Row, price
from dpmac_cli.accounting.selection import epsilon_of
from dpmac_cli.config import account_flags
from dpmac_cli.config.settings import DELTA
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.release.report import read_report

#: Flags that may be combined with a run, which determines everything else.
BESIDE_A_RUN = ("delta", "accountant")


def recount(
    path: Path, given: Mapping[str, str], found: Sequence[str] = ()
) -> tuple[list[Row], float, float]:
    """Recompute the privacy cost of a run from its report.

    Returns rows for the requested delta and accountants, and the stored and the correct epsilon.

    Args:
        path: a run folder, or a report.
        given: see :func:`dpmac_cli.config.account_flags.ask`; only :data:`BESIDE_A_RUN` are
            allowed.
        found: faults that were found before.

    Raises:
        InputError: the file is not a dpmac report, or a flag does not apply to it.
    """
    why = f"contradicts {path}, which has all facts of the run. Leave it out."
    errors = [*found, *(f"--{name} {why}" for name in given if name not in BESIDE_A_RUN)]
    beside = {name: text for name, text in given.items() if name in BESIDE_A_RUN}
    named = account_flags.by_name(beside, errors)
    asked = account_flags.parse_account_flags(named, errors)
    raise_errors(errors)
    report = read_report(path)
    privacy, search = report.privacy, report.privacy.trials
    if search is not None and asked.accountant != DEFAULT_ACCOUNTANT:
        raise InputError(f"{path} is of a search: use --accountant {DEFAULT_ACCOUNTANT}.")
    events, own_delta = privacy.training_events(), privacy.delta or DELTA
    delta = asked.delta if "delta" in named else own_delta
    size, unit = report.dataset.train_size, privacy.unit.name
    rows = [
        replace(price(events, delta, name, unit, search), dataset_size=size)
        for name in account_flags.USED[asked.accountant]
    ]
    stored = math.inf if privacy.epsilon is None else privacy.epsilon
    return rows, stored, epsilon_of(search or events, own_delta)
