"""Privacy and scores of a run as rows of a small table for a notebook."""

import math
from collections.abc import Mapping
from typing import Any, cast

from dpmac_cli.accounting.statements import NO_PRIVACY, format_epsilon
from dpmac_cli.storage.report_keys import PrivacyPart, ReportKeys
from dpmac_cli.tasks.known import task_in
from dpmac_cli.tasks.notebook import Line, of_score


def of_privacy(epsilon: float, delta: float | None, unit: str) -> list[Line]:
    """Return epsilon, delta and the unit of privacy; delta is None without noise."""
    if delta is None:
        return [("privacy", NO_PRIVACY)]
    return [
        ("epsilon", format_epsilon(epsilon)),
        ("delta", f"{delta:g}"),
        ("protected", f"one {unit}"),
    ]


def of_claim(privacy: PrivacyPart) -> list[Line]:
    """Return epsilon, delta and the unit of privacy of a report."""
    epsilon = math.inf if privacy["epsilon"] is None else privacy["epsilon"]
    return of_privacy(epsilon, privacy["delta"], privacy["unit"]["name"])


def of_report(report: Mapping[str, Any]) -> list[Line]:
    """Return the privacy, the test score and the number of records of a run."""
    found, headline = cast(ReportKeys, report), task_in(report).headline
    privacy, test = found["privacy"], found["test"]
    several = privacy["unit"]["told_by"] is not None
    counted = "units" if several else "records"
    return [
        *of_claim(privacy),
        of_score(headline, test[headline.key], test[f"{headline.key}_interval"]),
        ("trained on", f"{found['dataset']['train_size']:,} {counted}"),
        (
            "tested on",
            f"{test['samples']:,} {counted if privacy['covered_scores'] else 'records'}",
        ),
    ]
