"""dpmac card and dpmac report: model cards, and web pages of runs and comparisons."""

from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from dpmac_cli.cli import console
from dpmac_cli.cli.options import argument, take, with_options
from dpmac_cli.cli.written_files import ReplaceFile, faults_of_file
from dpmac_cli.config.fields import Flag, SomePath, options
from dpmac_cli.config.flags import Flags
from dpmac_cli.config.settings import OUTPUT, SETTINGS, Debug
from dpmac_cli.errors import raise_errors
from dpmac_cli.release.card import answered_card
from dpmac_cli.release.page import run_page
from dpmac_cli.storage.files import write_atomically
from dpmac_cli.studies.tables import COMPARE_JSON, study_page

DEBUG = {"debug": SETTINGS["debug"]}


Answer = Annotated[str | None, Flag(OUTPUT)]


class CardAnswers(Flags, frozen=True):
    """Answers of a model card that only its publisher knows."""

    data_curator: Answer = None
    """Person or organisation that publishes the model."""
    intended_use: Answer = None
    """What the model is intended for, and what it is not."""
    contact: Answer = None
    """Contact for questions."""
    region: Answer = None
    """Region that the records come from."""
    access_and_collection: Answer = None
    """Who can access the records, and what else is collected about the same people."""
    justification: Answer = None
    """Justification of epsilon, delta and the unit of privacy."""


class ReportFlags(Flags, frozen=True):
    """Flags of ``dpmac report``."""

    html: Annotated[SomePath, Flag(OUTPUT, metavar="FILE")] = Path("report.html")
    """File to write."""
    force: ReplaceFile = False
    debug: Debug = False


@with_options(argument("run", "A run folder."), options(CardAnswers), DEBUG)
def card(run: Path, **given: Any) -> None:
    """Print the model card of a run as Markdown.

    The card answers the questions of NIST SP 800-226. Answers that only you know are "to be
    filled in" until you provide them here. For a web page, use dpmac report.

    Example: dpmac card runs/scans-dp-adam-1 --contact "dpo@clinic.example" > card.md

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    answers = take(CardAnswers, given)
    rows = {
        name.replace("_", " "): " ".join(text.split()) for name, text in answers.explicit.items()
    }
    written = {name: text for name, text in rows.items() if text}
    console.print_result(answered_card(run, written))


@with_options(argument("path", "A run folder, or a folder of dpmac compare."), options(ReportFlags))
def report(path: Path, **given: Any) -> None:
    """Write a web page for a run or a comparison: one self-contained file with figures.

    For a run: its model card, accuracy and epsilon over time, bounds on membership attacks, and
    its settings. For a comparison: the table, with significance tests, and a figure.

    Examples:

        dpmac report runs/mnist-dp-macadam-1

        dpmac report runs/compare --html study.html

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input.
    """
    flags = take(ReportFlags, given)
    html = flags.html
    raise_errors(faults_of_file(html, (".html",), flags.force, "html"))
    with console.waiting(quiet=False, first="report"):
        is_study = (path / COMPARE_JSON).is_file()
        page = study_page(path) if is_study else run_page(path)
    write_atomically(html, page.encode())
    console.stdout().print(Text(f"{html}: web page of {path}, in one file"))
