"""Results as small tables for a notebook: the numbers that matter, instead of a repr."""

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, cast

from dpmac_cli.accounting.statements import NO_PRIVACY, format_epsilon
from dpmac_cli.storage.report_keys import PrivacyPart, ReportKeys
from dpmac_cli.tasks.known import task_in
from dpmac_cli.tasks.task import EvaluationMetric

#: A label and a value, as text.
Line = tuple[str, str]
CELL = "text-align: left; padding: 2px 12px 2px 0; vertical-align: top"


def as_html(title: str, rows: Iterable[Line], note: str = "") -> str:
    """Return a table of two columns as HTML. All text is escaped; colours are the notebook's."""
    lines = "".join(
        f'<tr><th scope="row" style="{CELL}">{escape(name)}</th>'
        f'<td style="{CELL}; overflow-wrap: anywhere">{escape(value)}</td></tr>'
        for name, value in rows
    )
    below = f"<div>{escape(note)}</div>" if note else ""
    return (
        f'<div style="max-width: 44em"><strong>{escape(title)}</strong>'
        f'<table style="border-collapse: collapse"><tbody>{lines}</tbody></table>{below}</div>'
    )


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
    """Return the same of the privacy in a report."""
    epsilon = math.inf if privacy["epsilon"] is None else privacy["epsilon"]
    return of_privacy(epsilon, privacy["delta"], privacy["unit"]["name"])


def of_report(report: Mapping[str, Any]) -> list[Line]:
    """Return the privacy, the test score and the number of records of a run."""
    found, test, headline = cast(ReportKeys, report), report["test"], task_in(report).headline
    privacy = found["privacy"]
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


def of_score(
    metric: EvaluationMetric, value: float | None, ends: Iterable[float | None] | None
) -> Line:
    """Return a test score with its 95% interval."""
    known = [end for end in ends or () if end is not None and math.isfinite(end)]
    between = f" (95%: {' to '.join(map(metric.text, known))})" if known else ""
    return f"test {metric.title}", f"{metric.text(value)}{between}"
