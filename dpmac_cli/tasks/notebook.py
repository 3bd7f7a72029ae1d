"""Results as small tables for a notebook: the numbers that matter, instead of a repr."""

import math
from collections.abc import Iterable
from html import escape

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


def of_score(
    metric: EvaluationMetric, value: float | None, ends: Iterable[float | None] | None
) -> Line:
    """Return a test score with its 95% interval."""
    known = [end for end in ends or () if end is not None and math.isfinite(end)]
    between = f" (95%: {' to '.join(map(metric.text, known))})" if known else ""
    return f"test {metric.title}", f"{metric.text(value)}{between}"
