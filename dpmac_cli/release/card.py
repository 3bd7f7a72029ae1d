"""Model card of a run as Markdown, and self-contained web pages of runs and comparisons."""

import functools
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dpmac_cli.accounting import statements
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.accounting.pricing import price
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
from dpmac_cli.tasks.calibration import Reliability
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import headline_in, number, percent_or_dash

if TYPE_CHECKING:
    from jinja2 import Environment
    from torch import nn
if TYPE_CHECKING:
    from matplotlib.figure import Figure


def web_page(text: str, pictures: Mapping[str, "Figure"], below: str = "") -> str:
    """Convert Markdown to a self-contained web page, with titled pictures, and text below them."""
    drawn = {escape(title): as_svg(figure) for title, figure in pictures.items()}
    markdown = markdown_it.MarkdownIt("js-default").enable("table")
    title = escape(re.sub(r"\\(.)", r"\1", text.partition("\n")[0].removeprefix("# ")))
    template = templates().get_template("page.html.jinja")
    return template.render(
        title=title, body=markdown.render(text), pictures=drawn, below=markdown.render(below)
    )


def run_page(run: Path) -> str:
    """Return a web page of a run: figures, pictures, the guarantee in words, and settings.

    Raises InputError if it has no card, report or metrics.
    """
    card, report = without_front_matter(answered_card(run, {})), read_report(run)
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
    """Return pictures of how well a model predicts, by their titles.

    They are of the scores in the report, and of the noisy histogram of the training records.
    """
    pictures, network, classes = dict[str, "Figure"](), report.network, report.data.classes
    counts = getattr(report.scores, "confusion", None)
    if counts is not None and len(classes) <= MOST_CLASSES:
        pictures["Test records by true and predicted class"] = confusion(counts, classes)
    counts, task = getattr(report.scores, "by_bin", None), report.task
    if counts is not None and isinstance(task, Regression):
        coverage = getattr(report.scores, "interval_coverage_by_bin", None)
        title = "Test records by true and predicted number"
        if coverage is not None:
            title += ", and the share of the targets in their intervals"
        pictures[title] = predicted_numbers(counts, coverage, task.bin_ends)
    if bins := _reliability(report):
        pictures["Reliability of probabilities"] = reliability(bins)
    if network.calibration is not None and len(classes) == 2:
        title = "Sensitivity and specificity by the noisy histogram of the training records"
        pictures[title] = rates(network.calibration)
    if network.residuals is not None:
        title = "Targets minus predictions by the noisy histogram, and the interval of 90%"
        pictures[title] = residuals(network.residuals)
    return pictures


#: First line of the table of figures in a card, and titles of sections that have figures alone.
FIGURES, FIGURE_SECTIONS = "|  |  |\n", ("Reliability of probabilities", "Test records by class")


def _figures_first(card: str) -> tuple[str, str]:
    """Return the title and the figures of a card, and all that it says besides, as Markdown."""
    first, *sections = re.split(r"(?m)^## ", card)
    said, table = first.split(FIGURES, 1)
    title, _, guarantee = said.partition("\n")
    shown = [f"## {each}" for each in sections if each.startswith(FIGURE_SECTIONS)]
    others = [f"## {each}" for each in sections if not each.startswith(FIGURE_SECTIONS)]
    figures = "".join((f"{title}\n\n", FIGURES, table, *shown))
    return figures, "".join((f"## Guarantee\n{guarantee}", *others))


def _reliability(report: Report) -> list[Reliability]:
    """Return probabilities beside the noisy histogram of a calibration; none without one."""
    task = report.task
    if not isinstance(task, Classification) or task.calibration is None:
        return []
    return task.calibration.reliability()


def _points(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl. Raises InputError if there are none, or others."""
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
    """Return the templates of cards and pages. They do not escape: pages get escaped values."""
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


def model_card(report: Report, model: "nn.Module") -> str:
    """Return the model card of a run as Markdown; layers of plain models become code.

    It begins with :func:`front_matter`.
    """
    template, (metric, score) = templates().get_template("model_card.md.jinja"), report.score
    trained = [event for event in report.events if event.trains]
    recipe = {name: getattr(report.settings, name) for name in RECIPE_DEFAULTS}
    return front_matter(report) + template.render(
        {**report.values(), "settings": report.settings},
        private=report.private,
        metric=metric,
        task=report.task,
        continues=bool(report.task.network),
        score=score,
        largest=_largest(report),
        reliability=_reliability(report),
        most_classes=MOST_CLASSES,
        percent=percent_or_dash,
        number=number,
        plain=model if _is_plain(model) else None,
        epochs=report.network.steps / trained[-1].steps_per_epoch,
        sampler=trained[-1].sampler,
        parts=_parts(report),
        recipe={n: v for n, v in recipe.items() if v is not None and v != RECIPE_DEFAULTS[n]},
        no_privacy=statements.NO_PRIVACY,
        to_be_filled_in=OPEN,
        open_questions=QUESTIONS,
        samplers=SAMPLERS,
    )


def _parts(report: Report) -> list[tuple[str, TrainingEvent]]:
    """Return the events of a run in the order of its card, and what each is."""
    trained = [event for event in report.events if event.trains]
    counts = [event for event in report.events if event.histogram]
    tested = [event for event in report.events if event.records == "test"]
    names = [f"before {number}" for number in range(1, len(trained))]
    return [
        *zip([*names, "this model"], trained, strict=True),
        *(("histogram of the training records", event) for event in counts),
        *(("test scores", event) for event in tested),
    ]


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
    the owner of the model.
    """
    scores = {metric: getattr(report.scores, metric.key, None) for metric in report.task.metrics}
    known = {
        metric: score.value
        for metric, score in scores.items()
        if isinstance(score, Score) and score.value is not None
    }
    measured = [
        {"type": metric.key, "name": f"test {metric.title}", "value": value}
        for metric, value in known.items()
    ]
    data = report.data
    if report.delta is not None and report.epsilon is not None:
        at = f"epsilon at delta {statements.format_epsilon(report.delta)}"
        if report.seeded:
            at += KNOWN_SEED
        measured.append({"type": "epsilon", "name": at, "value": report.epsilon})
    target = "classes" if data.target is None else data.target.kind
    pipeline = PIPELINES.get((data.records.kind, target), "other")
    facts: dict[str, Any] = {
        "library_name": "dpmac",
        "tags": ["differential-privacy"] if report.private else ["no-privacy"],
        "metrics": [metric.key for metric in known],
        "model-index": [
            {
                "name": f"{report.network.name} on {data.name}",
                "results": [
                    {
                        "task": {"type": pipeline},
                        "dataset": {"name": data.name, "type": data.name},
                        "metrics": measured,
                    }
                ],
            }
        ],
    }
    if pipeline != "other":
        facts["pipeline_tag"] = pipeline
    if not data.own:  # a repository has no private data
        facts["datasets"] = [data.name]
    text = yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)
    return f"{FENCE}# license: to be chosen by the owner of the model\n{text}{FENCE}"


def without_front_matter(card: str) -> str:
    """Return a card without its front matter."""
    return card.removeprefix(FENCE).partition(f"\n{FENCE}")[2] if card.startswith(FENCE) else card


def _largest(report: Report) -> str:
    """Return the class that most test records have, as code in a cell; words if it is not known."""
    counts = [sum(row) for row in getattr(report.scores, "confusion", None) or ()]
    return _as_code(report.data.classes[counts.index(max(counts))]) if counts else "that class"


def _is_plain(model: "nn.Module") -> bool:
    """Return whether a network is a sequence of torch layers."""
    return type(model) is torch.nn.Sequential and all(
        type(layer).__module__.startswith("torch.nn.") and not list(layer.children())
        for layer in model.children()
    )


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
        if (place := f"| {row} | {OPEN} |") not in card:
            raise InputError(f"The card of {run} has no row '{row}': it promises no privacy.")
        card = card.replace(place, f"| {row} | {_as_text(answer)} |")
    return card
