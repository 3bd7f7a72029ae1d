"""Model card of a run as Markdown, and self-contained web pages of runs and comparisons.

Both are views of the report: ``tests/test_views.py`` looks for every number of them in it. A card
has front matter that model repositories read, and answers the questions of NIST SP 800-226.
"""

import functools
import math
import re
from collections.abc import Mapping
from datetime import date
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dpmac_cli.accounting import statements
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.accounting.pricing import price
from dpmac_cli.config.networks import FEATURES, OwnFeatures
from dpmac_cli.config.settings import RECIPE_DEFAULTS
from dpmac_cli.errors import InputError, first_fault
from dpmac_cli.libraries import jinja2, markdown_it, torch
from dpmac_cli.release.plots import (
    as_svg,
    confusion,
    course,
    predicted_numbers,
    rates,
    reliability,
    residuals,
    trade_offs,
)
from dpmac_cli.release.report import Report, Score, read_report
from dpmac_cli.runs import folder
from dpmac_cli.runs.headers import MetricsLine
from dpmac_cli.tasks.metrics import number, percent_or_dash
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import headline_in

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure
    from torch import nn


def web_page(text: str, pictures: Mapping[str, "Figure"], below: str = "") -> str:
    """Convert Markdown to a web page in one file, which loads nothing else.

    Args:
        text: Markdown of the upper part, whose first line is the title. HTML in it is escaped.
        pictures: figures between both parts, by their titles.
        below: Markdown of the lower part.
    """
    drawn = {escape(title): as_svg(figure) for title, figure in pictures.items()}
    markdown = markdown_it.MarkdownIt("js-default").enable("table")
    first_line = text.partition("\n")[0].removeprefix("# ")
    without_backslashes = re.sub(r"\\(.)", r"\1", first_line)
    template = templates().get_template("page.html.jinja")
    return template.render(
        title=escape(without_backslashes),
        body=markdown.render(text),
        pictures=drawn,
        below=markdown.render(below),
    )


def run_page(run: Path) -> str:
    """Return a web page of a run: figures, pictures, the guarantee in words, and settings.

    Every number of it is in the report, the metrics or the settings of the run. Exact scores are
    shown where the report has them; the report of a run with covered scores has none.

    Args:
        run: folder of the run.

    Raises:
        InputError: it has no card, report or metrics.
    """
    card = without_front_matter(answered_card(run, {}))
    report = read_report(run)
    points = _points(run)
    metric = headline_in(points[0] if points else {})
    pictures = _pictures_of_scores(report)
    if report.scores is not None:
        pictures[f"Test {metric.title} and epsilon"] = course(points, metric.logged)
    if report.delta is not None:
        row = price(report.events, report.delta, search=report.search)
        pictures["What any membership attack can reach"] = trade_offs([row])
    settings = (run / folder.CONFIG).read_text(encoding="utf-8")
    figures, words = _figures_first(card)
    return web_page(figures, pictures, f"{words}\n\n## Settings\n\n```yaml\n{settings}```\n")


def _pictures_of_scores(report: Report) -> dict[str, "Figure"]:
    """Return pictures of how well a model predicts, by their titles; {} if nothing can be drawn.

    They are of the scores in the report, and of the noisy histogram of the training records.
    """
    pictures = dict[str, "Figure"]()
    network, classes, task = report.network, report.data.classes, report.task
    by_class = getattr(report.scores, "confusion", None)
    if by_class is not None and len(classes) <= MOST_CLASSES:
        pictures["Test records by true and predicted class"] = confusion(by_class, classes)
    by_number = getattr(report.scores, "by_bin", None)
    if by_number is not None and isinstance(task, Regression):
        coverage = getattr(report.scores, "interval_coverage_by_bin", None)
        title = "Test records by true and predicted number"
        if coverage is not None:
            title += ", and the share of the targets in their intervals"
        pictures[title] = predicted_numbers(by_number, coverage, task.bin_ends)
    calibration = network.calibration
    if calibration is not None and calibration.reliability():
        pictures["Reliability of probabilities"] = reliability(calibration.reliability())
    if calibration is not None and len(classes) == 2:
        title = "Sensitivity and specificity by the noisy histogram of the training records"
        pictures[title] = rates(calibration)
    if network.residuals is not None:
        title = "Targets minus predictions by the noisy histogram, and the interval of 90%"
        pictures[title] = residuals(network.residuals)
    return pictures


#: First line of the table of figures in a card.
FIGURES = "|  |  |\n"
#: Titles of sections of a card that have figures alone.
FIGURE_SECTIONS = ("Reliability of probabilities", "Test records by class")


def _figures_first(card: str) -> tuple[str, str]:
    """Return a card in two parts of Markdown: title and figures, and all that it says besides."""
    first, *sections = re.split(r"(?m)^## ", card)
    lead, table = first.split(FIGURES, 1)
    title, _, guarantee = lead.partition("\n")
    figures, words = f"{title}\n\n{FIGURES}{table}", f"## Guarantee\n{guarantee}"
    for section in sections:
        if section.startswith(FIGURE_SECTIONS):
            figures += f"## {section}"
        else:
            words += f"## {section}"
    return figures, words


def _points(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl as JSON values, in their order.

    Args:
        run: folder of the run.

    Raises:
        InputError: the file is missing, or has a line that dpmac does not write.
    """
    remedy = "Name a run folder of dpmac train."
    file, lines = folder.read_run_file(run, folder.METRICS, remedy)
    points = list[dict[str, Any]]()
    for place, text in enumerate(lines.splitlines(), 1):
        try:
            line = MetricsLine.model_validate_json(text, strict=True)
        except ValueError as failure:
            raise InputError(
                f"{file}, line {place}: not written by dpmac ({first_fault(failure)}). {remedy}"
            ) from failure
        points.append(line.model_dump(mode="json", exclude_unset=True))
    return points


#: Largest number of classes whose sensitivities and confusion matrix a card shows.
MOST_CLASSES = 20
#: Placeholder in a card for answers that its author must provide, and what they say, by their rows.
OPEN = "to be filled in"
QUESTIONS: Mapping[str, str] = {
    "data curator": "Person or organisation that publishes the model.",
    "intended use": "What the model is intended for, and what it is not.",
    "contact": "Contact for questions.",
    "region": "Region that the records come from.",
    "access and collection": (
        "Who can access the records, and what else is collected about the same people."
    ),
    "justification": "Justification of epsilon, delta and the unit of privacy.",
}


@functools.cache  # compiling them takes as long as a short run
def templates() -> "Environment":
    """Return the templates of cards and pages, beside this module.

    They do not escape anything: pages get escaped values, and cards use the filters ``as_code``
    and ``as_text``. A name that a template uses and does not get is an error.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dpmac_cli.release", ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "fmt": format,
        "epsilon": statements.format_epsilon,
        "as_code": _as_code,
        "as_text": _as_text,
        "as_number": "{:.4g}".format,
        "as_date": _as_date,
    }
    return environment


def _as_date(days: float) -> str:
    """Return the date of a number of days since 1970-01-01, as in 2024-12-31.

    A noisy end before the year 1 or after the year 9999, where no cell has a date, is cut to it.

    >>> _as_date(17812.5), _as_date(-1e9)
    ('2018-10-08', '0001-01-01')
    """
    day = math.floor(days) + date(1970, 1, 1).toordinal()
    possible = max(date.min.toordinal(), min(day, date.max.toordinal()))
    return date.fromordinal(possible).isoformat()


def _as_code(name: str) -> str:
    """Return a name as code in a cell of a table.

    The code is between more backticks than the name has in a row.
    """
    backticks = re.findall("`+", name)
    fence = "`" + max(backticks, key=len, default="")
    padded = f" {name} " if backticks else name
    return f"{fence}{padded}{fence}".replace("|", "\\|")


def _as_text(text: str) -> str:
    r"""Return text that Markdown shows as it is, also in a cell of a table.

    >>> _as_text("a|b *c*")
    'a\\|b \\*c\\*'
    """
    return re.sub(r"([\\`*<>|\[\]])", r"\\\1", text)


def model_card(report: Report, model: "nn.Module") -> str:
    """Return the model card of a run as Markdown, which begins with :func:`front_matter`.

    Args:
        report: report of the run, which every number of the card is from.
        model: its network. If it is a sequence of torch's layers, they become code that builds it.
    """
    template = templates().get_template("model_card.md.jinja")
    metric, score = report.score
    trained = report.training[-1]
    calibration = report.network.calibration
    recipe = dict[str, Any]()
    for name, default in RECIPE_DEFAULTS.items():
        value = getattr(report.settings, name)
        if value is not None and value != default:
            recipe[name] = value
    return front_matter(report) + template.render(
        {**report.values(), "settings": report.settings},
        private=report.private,
        metric=metric,
        task=report.task,
        continues=bool(report.task.network),
        score=score,
        largest=_largest(report),
        reliability=[] if calibration is None else calibration.reliability(),
        most_classes=MOST_CLASSES,
        percent=percent_or_dash,
        number=number,
        plain=model if _is_plain(model) else None,
        own_features=_are_own(report.settings.features),
        epochs=report.network.steps / trained.steps_per_epoch,
        sampler=trained.sampler,
        parts=_parts(report),
        recipe=recipe,
        no_privacy=statements.NO_PRIVACY,
        to_be_filled_in=OPEN,
        open_questions=QUESTIONS,
        samplers=SAMPLERS,
    )


def _are_own(features: str | None) -> bool:
    """Return whether features are those of a program, which may have registered them or not."""
    return features is not None and isinstance(FEATURES.get(features), OwnFeatures | None)


def _parts(report: Report) -> list[tuple[str, TrainingEvent]]:
    """Return the events of a run with their names in words, in the order of the card."""
    trained = list[tuple[str, TrainingEvent]]()
    counts = list[tuple[str, TrainingEvent]]()
    tested = list[tuple[str, TrainingEvent]]()
    for event in report.events:
        if event.records == "test":
            tested.append(("test scores", event))
        elif event.histogram:
            counts.append(("histogram of the training records", event))
        else:
            trained.append((f"before {len(trained) + 1}", event))
    trained[-1] = ("this model", trained[-1][1])
    return [*trained, *counts, *tested]


#: Kinds of records and of tasks as the tags of a repository page name them.
PIPELINES: Mapping[tuple[str, str], str] = {
    ("images", "classes"): "image-classification",
    ("numbers", "classes"): "tabular-classification",
    ("table", "classes"): "tabular-classification",
    ("texts", "classes"): "text-classification",
    ("numbers", "regression"): "tabular-regression",
    ("table", "regression"): "tabular-regression",
    ("texts", "language-model"): "text-generation",
}
#: What is added to the epsilon of a run with a seed.
KNOWN_SEED = ", only against those who do not know its seed"
#: First and last line of a card's front matter.
FENCE = "---\n"


def front_matter(report: Report) -> str:
    """Return the facts of a run as YAML, which model repositories such as Hugging Face's read.

    They are those of the report: its scores that are known, with epsilon. The license is left to
    the owner of the model. Format: huggingface.co/docs/hub/model-cards.
    """
    data = report.data
    measured = _measured(report)
    target = "classes" if data.target is None else data.target.kind
    pipeline = PIPELINES.get((data.records.kind, target), "other")
    result = {
        "task": {"type": pipeline},
        "dataset": {"name": data.name, "type": data.name},
        "metrics": measured,
    }
    facts: dict[str, Any] = {
        "library_name": "dpmac",
        "tags": ["differential-privacy"] if report.private else ["no-privacy"],
        "metrics": [each["type"] for each in measured if each["type"] != "epsilon"],
        "model-index": [{"name": f"{report.network.name} on {data.name}", "results": [result]}],
    }
    if pipeline != "other":
        facts["pipeline_tag"] = pipeline
    if not data.user_supplied:  # a repository has no private data
        facts["datasets"] = [data.name]
    text = yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)
    return f"{FENCE}# license: to be chosen by the owner of the model\n{text}{FENCE}"


def _measured(report: Report) -> list[dict[str, Any]]:
    """Return the scores of a report that are known, and epsilon, as metrics of a repository.

    Each has the keys type, name and value. Epsilon is named with its delta, because it means
    nothing without.
    """
    measured = list[dict[str, Any]]()
    for metric in report.task.metrics:
        score = getattr(report.scores, metric.key, None)
        if isinstance(score, Score) and score.value is not None:
            name = f"test {metric.title}"
            measured.append({"type": metric.key, "name": name, "value": score.value})
    if report.delta is not None and report.epsilon is not None:
        name = f"epsilon at delta {statements.format_epsilon(report.delta)}"
        if report.seeded:
            name += KNOWN_SEED
        measured.append({"type": "epsilon", "name": name, "value": report.epsilon})
    return measured


def without_front_matter(card: str) -> str:
    """Return a card without its front matter, the YAML between two lines ``---`` at its beginning.

    Args:
        card: Markdown of a card. Without front matter it is returned as it is.
    """
    return card.removeprefix(FENCE).partition(f"\n{FENCE}")[2] if card.startswith(FENCE) else card


def _largest(report: Report) -> str:
    """Return the class that most test records have, as code in a cell; words if it is not known.

    It is what a model would always say that has the accuracy of a constant prediction.
    """
    confusion_matrix = getattr(report.scores, "confusion", None)
    if not confusion_matrix:
        return "that class"
    counts = list(map(sum, confusion_matrix))
    return _as_code(report.data.classes[counts.index(max(counts))])


def _is_plain(model: "nn.Module") -> bool:
    """Return whether a network is a sequence of torch layers, for which a card has code."""
    if type(model) is not torch.nn.Sequential:
        return False
    for layer in model.children():
        of_torch = type(layer).__module__.startswith("torch.nn.")
        if not of_torch or list(layer.children()):
            return False
    return True


def answered_card(run: Path, answers: Mapping[str, str]) -> str:
    """Return the model card of a run as Markdown, with answers in their rows.

    Args:
        run: folder of the run.
        answers: answers that the run does not know, by the names of the card's rows.

    Raises:
        InputError: the run has no card; or there is no place for an answer, or it cannot be
            displayed.
    """
    if run.is_file():
        raise InputError(f"{run} is a file. Name the folder of the run.")
    _, text = folder.read_run_file(run, folder.CARD, "Name a run folder of dpmac train.")
    card = text.decode()
    for row, answer in answers.items():
        if not answer.isprintable():
            raise InputError(f"The answer to '{row}' has characters that cannot be displayed.")
        place = f"| {row} | {OPEN} |"
        if place not in card:
            raise InputError(f"The card of {run} has no row '{row}': it promises no privacy.")
        card = card.replace(place, f"| {row} | {_as_text(answer)} |")
    return card
