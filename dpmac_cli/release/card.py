"""Render the model card of a run as a web page, or as an entry for a public registry.

The registry is OpenDP's (github.com/opendp/deployments-registry-data, schema of commit 617ad17).
"""

import functools
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from dpmac_cli.accounting.pricing import price
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.errors import InputError
from dpmac_cli.plots import as_svg, course, trade_offs
from dpmac_cli.release.report_file import read_report
from dpmac_cli.runs import folder
from dpmac_cli.tasks.known import headline_in, task_in

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure

FORMATS = ("md", "html", "registry-yaml")
#: Placeholder in a card for answers that its author must provide.
OPEN = "to be filled in"


@functools.cache  # compiling them takes as long as a short run
def templates() -> "Environment":
    """Return the templates of cards. They do not escape: pages must get escaped values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415  (help is fast)

    environment = Environment(  # noqa: S701  (Markdown and YAML; a page gets escaped parts)
        loader=PackageLoader("dpmac_cli.release", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "fmt": format,
        "epsilon": format_epsilon,
        "as_code": _as_code,
        "as_text": _as_text,
    }
    return environment


def _as_code(name: str) -> str:
    """Return a name as code in a cell of a table."""
    fence = "`" * (1 + max(map(len, re.findall("`+", name)), default=0))
    pad = " " * ("`" in name)
    return f"{fence}{pad}{name}{pad}{fence}".replace("|", "\\|")


def _as_text(text: str) -> str:
    """Return text that Markdown shows as it is, also in a cell of a table."""
    return re.sub(r"([\\`*<>|\[\]])", r"\\\1", text)


def render_card(run: Path, kind: str, answers: Mapping[str, str]) -> str:
    """Return the model card of a run.

    Args:
        run: folder of the run.
        kind: a name in :data:`FORMATS`.
        answers: answers that the run does not know, by the names of the card's rows.

    Raises:
        InputError: the run has no card or report, or they were edited; it does not fit the
            registry; or there is no place for an answer, or it cannot be displayed.
    """
    if run.is_file():
        raise InputError(f"{run} is a file. Name the folder of the run.")
    folder.check_unchanged(run)
    for row, answer in answers.items():
        if not answer.isprintable():
            raise InputError(f"The answer to '{row}' has characters that cannot be displayed.")
    if kind == "registry-yaml":
        return _registry_entry(run, answers)
    _, text = folder.read_run_file(run, folder.CARD, "Name a run folder of dpmac train.")
    card = text.decode()
    for row, answer in answers.items():
        if (place := f"| {row} | {OPEN} |") not in card:
            raise InputError(f"The card of {run} has no row '{row}': it promises no privacy.")
        card = card.replace(place, f"| {row} | {_as_text(answer)} |")
    return card if kind == "md" else web_page(card)


def web_page(text: str, pictures: Mapping[str, "Figure"] | None = None) -> str:
    """Convert Markdown to a self-contained web page, with titled pictures below."""
    from markdown_it import MarkdownIt  # noqa: PLC0415  (help is fast)

    drawn = {escape(title): as_svg(figure) for title, figure in (pictures or {}).items()}
    body = MarkdownIt("js-default").enable("table").render(text)
    title = escape(re.sub(r"\\(.)", r"\1", text.partition("\n")[0].removeprefix("# ")))
    template = templates().get_template("card.html.jinja")
    return template.render(title=title, body=body, pictures=drawn)


def run_page(run: Path) -> str:
    """Return a web page of a run: model card, training curves, bounds on attacks, settings.

    Raises InputError if it has no card, report or metrics.
    """
    card, report = render_card(run, "md", {}), read_report(run)
    _, lines = folder.read_run_file(run, folder.METRICS, "Name a run folder of dpmac train.")
    points = [json.loads(line) for line in lines.splitlines()]
    metric = headline_in(points[0] if points else {})
    pictures = {f"Test {metric.title} and epsilon": course(points, metric.logged)}
    if report.delta is not None:
        row = price(report.training_events(), report.delta, unit=report.unit, search=report.search)
        pictures["What any membership attack can reach"] = trade_offs([row])
    settings = (run / folder.CONFIG).read_text(encoding="utf-8")
    return web_page(f"{card}\n## Settings\n\n```yaml\n{settings}```\n", pictures)


def _registry_entry(run: Path, answers: Mapping[str, str]) -> str:
    """Return an entry of the registry, as YAML. Raises InputError."""
    from jinja2 import UndefinedError  # noqa: PLC0415  (help is fast)

    if read_report(run).epsilon is None:
        raise InputError(f"{run} has no finite epsilon, so it does not fit the privacy registry.")
    file, text = folder.read_run_file(run, folder.REPORT, "Name a run folder of dpmac train.")
    report = TypeAdapter(dict).validate_json(text)
    date = datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat()
    template = templates().get_template("registry.yaml.jinja")
    try:
        answered = {name: answers.get(name, OPEN) for name in report["statement"]["open"]}
        noun = task_in(report).usage.noun
        return template.render(report, answers=answered, date=date, noun=noun)
    except (LookupError, TypeError, ValueError, UndefinedError) as missing:
        raise InputError(
            f"{file} was written by an older dpmac and lacks required facts ({missing})."
        ) from missing
