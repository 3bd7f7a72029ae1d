"""The model card of a run in other formats: a web page, and an entry for a public registry.

The registry is OpenDP's (github.com/opendp/deployments-registry-data, schema of commit 617ad17).
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from pydantic import TypeAdapter

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.errors import InputError
from dpmac_cli.runs import folder
from dpmac_cli.runs.report_file import read_report

FORMATS = ("md", "html", "registry-yaml")
#: What a card says where its author has to answer.
OPEN = "to be filled in"


def templates() -> Environment:
    """Return the templates of cards, which escape nothing: what a page is given is escaped."""
    environment = Environment(  # noqa: S701  (Markdown and YAML; a page gets escaped parts)
        loader=PackageLoader("dpmac_cli.runs", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"fmt": format, "epsilon": format_epsilon, "as_code": _as_code}
    return environment


def _as_code(name: str) -> str:
    """Return a name as code in a cell of a table."""
    cell = name.replace("|", "\\|")
    return f"`` {cell} ``" if "`" in name else f"`{cell}`"


def render_card(run: Path, kind: str, answers: Mapping[str, str]) -> str:
    """Return the model card of a run.

    Args:
        run: its folder.
        kind: a name of :data:`FORMATS`.
        answers: to what the run cannot know, by the names of the rows of the card.

    Raises:
        InputError: the run has no card or report, or a registry cannot take it.
    """
    if kind == "registry-yaml":
        return _registry_entry(run, answers)
    _, text = folder.read(run, folder.CARD, "Name a run folder of dpmac train.")
    card = text.decode()
    for row, answer in answers.items():
        cell = answer.replace("|", "\\|").replace("\n", " ")
        card = card.replace(f"| {row} | {OPEN} |", f"| {row} | {cell} |")
    if kind == "md":
        return card
    body = MarkdownIt("js-default").enable("table").render(card)
    title = escape(card.partition("\n")[0].removeprefix("# "))
    return templates().get_template("card.html.jinja").render(title=title, body=body)


def _registry_entry(run: Path, answers: Mapping[str, str]) -> str:
    """Return an entry of the registry, as YAML. Raises InputError."""
    if read_report(run).epsilon is None:
        raise InputError(f"{run} has no finite epsilon: a registry of privacy has no place for it.")
    file, text = folder.read(run, folder.REPORT, "Name a run folder of dpmac train.")
    report = TypeAdapter(dict).validate_json(text)
    if "statement" not in report:
        raise InputError(f"{file} was written by an older dpmac, which said too little.")
    written = datetime.fromtimestamp(file.stat().st_mtime, UTC)
    answered = {name: answers.get(name, OPEN) for name in report["statement"]["open"]}
    template = templates().get_template("registry.yaml.jinja")
    return template.render(report, answers=answered, date=written.date().isoformat())
