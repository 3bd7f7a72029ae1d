"""Self-contained web pages of runs and comparisons, from Markdown and figures."""

import json
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from dpmac_cli.accounting.pricing import price
from dpmac_cli.plots import as_svg, course, trade_offs
from dpmac_cli.release.card import answered_card, templates
from dpmac_cli.release.report import read_report
from dpmac_cli.runs import folder
from dpmac_cli.tasks.known import headline_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def web_page(text: str, pictures: Mapping[str, "Figure"]) -> str:
    """Convert Markdown to a self-contained web page, with titled pictures below."""
    from markdown_it import MarkdownIt  # noqa: PLC0415  (help is fast)

    drawn = {escape(title): as_svg(figure) for title, figure in pictures.items()}
    body = MarkdownIt("js-default").enable("table").render(text)
    title = escape(re.sub(r"\\(.)", r"\1", text.partition("\n")[0].removeprefix("# ")))
    template = templates().get_template("page.html.jinja")
    return template.render(title=title, body=body, pictures=drawn)


def run_page(run: Path) -> str:
    """Return a web page of a run: model card, training curves, bounds on attacks, settings.

    Raises InputError if it has no card, report or metrics.
    """
    card, privacy = answered_card(run, {}), read_report(run).privacy
    _, lines = folder.read_run_file(run, folder.METRICS, "Name a run folder of dpmac train.")
    points = [json.loads(line) for line in lines.splitlines()]
    metric = headline_in(points[0] if points else {})
    pictures = {f"Test {metric.title} and epsilon": course(points, metric.logged)}
    if privacy.delta is not None:
        unit, search = privacy.unit.name, privacy.trials
        row = price(privacy.training_events(), privacy.delta, unit=unit, search=search)
        pictures["What any membership attack can reach"] = trade_offs([row])
    settings = (run / folder.CONFIG).read_text(encoding="utf-8")
    return web_page(f"{card}\n## Settings\n\n```yaml\n{settings}```\n", pictures)
