"""Everything that one looks at is a view of the report: no number in it is from anywhere else."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.release import card as cards
from dpmac_cli.release import sentences
from dpmac_cli.release.report import read_report
from dpmac_cli.tasks.task import METRICS, number
from tests.digits_runs import metrics_of, report_of
from tests.typed import dpmac

#: A number as it is printed, with separators of thousands.
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def numbers_in(text: str) -> set[str]:
    """The numbers of a text, without separators of thousands."""
    return {found.rstrip(",").replace(",", "") for found in NUMBER.findall(text)}


def leaves(value: Any) -> Iterator[Any]:
    """Everything in JSON that is no object or list, and the keys."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def forms(value: Any) -> set[str]:
    """The numbers in a text; a number as any view writes it."""
    if isinstance(value, str):
        return numbers_in(value)
    if value is None or isinstance(value, bool):
        return set()
    texts = [str(value), format_epsilon(abs(value)), number(value)]
    texts += [format(value, form) for form in (".2%", ".0%", ".3f", ".4f", "g", ".4g", ".6g")]
    texts += [format(value, form) for form in (".10g", ",")]
    return set().union(*map(numbers_in, texts))


def of_report(run: Path) -> set[str]:
    """Every number of a run's public files, as any view writes it."""
    report = report_of(run)
    facts = [*leaves(report), *leaves(metrics_of(run))]
    facts += leaves(yaml.safe_load((run / "config.yaml").read_text()))
    facts += [str(run), (run / "config.yaml").read_text()]
    # Numbers of test records by class, and of those that are right.
    counts = report["scores"].get("confusion") or []
    facts += [*map(sum, counts), *map(sum, zip(*counts, strict=True))]
    facts.append(sum(row[place] for place, row in enumerate(counts)))
    # Shares of records by their noisy histogram, which the report has.
    facts += [value for each in cards._reliability(read_report(run)) for value in each]
    return set().union(*map(forms, facts))


def of_the_program() -> set[str]:
    """Numbers that are in what the program says of every run."""
    folder = Path(cards.__file__).parent
    texts = [(folder / name).read_text() for name in ("model_card.md.jinja", "sentences.py")]
    return set().union(*map(numbers_in, [*texts, sentences.AUDIT_RUN]))


CSV = "age,score,ill\n" + "".join(f"{20 + n % 60},{n % 7},{n % 2}\n" for n in range(120))
AGE = "columns: {age: {range: [0, 99]}, score: {range: [0, 9]}}\n"


def digits(where: Path) -> tuple[str, ...]:
    del where
    return ("--dataset", "digits", "--sigma", "6", "--epochs", "2")


def seeded(where: Path) -> tuple[str, ...]:
    return (*digits(where), "--seed", "5")


def without_privacy(where: Path) -> tuple[str, ...]:
    del where
    return ("--dataset", "digits", "--no-dp", "--epochs", "1")


def covered(where: Path) -> tuple[str, ...]:
    return (*digits(where), "--cover-scores")


def for_a_target(where: Path) -> tuple[str, ...]:
    del where
    return ("--dataset", "digits", "--epsilon", "2", "--epochs", "2", "--sampler", "poisson")


def two_classes(where: Path) -> tuple[str, ...]:
    (where / "t.csv").write_text(CSV)
    (where / "s.yaml").write_text(f"label: {{column: ill, classes: ['0', '1']}}\n{AGE}")
    table = ("--dataset", str(where / "t.csv"), "--schema", str(where / "s.yaml"))
    return (*table, "--epsilon", "3", "--steps", "20", "--batch-size", "16")


def numbers(where: Path) -> tuple[str, ...]:
    (where / "t.csv").write_text(CSV)
    (where / "s.yaml").write_text(
        "label: {column: score, range: [0, 9]}\n"
        "columns: {age: {range: [0, 99]}, ill: {categories: ['0', '1']}}\n"
    )
    table = ("--dataset", str(where / "t.csv"), "--schema", str(where / "s.yaml"))
    return (*table, "--epsilon", "3", "--steps", "20", "--batch-size", "16")


def audited(where: Path) -> tuple[str, ...]:
    return (*digits(where), "--canaries", "20")


def of_units(where: Path) -> tuple[str, ...]:
    people = "".join(f"{20 + n % 60},{n % 7},{n % 2},p{n % 40}\n" for n in range(400))
    (where / "t.csv").write_text(f"age,score,ill,person\n{people}")
    (where / "s.yaml").write_text(f"label: {{column: ill, classes: ['0', '1']}}\n{AGE}")
    table = ("--dataset", str(where / "t.csv"), "--schema", str(where / "s.yaml"))
    return (*table, "--unit", "person", "--epsilon", "3", "--steps", "10", "--batch-size", "16")


def without_ranges(where: Path) -> tuple[str, ...]:
    rows = CSV + CSV.partition("\n")[2] * 9
    (where / "t.csv").write_text(rows)
    (where / "s.yaml").write_text(
        "label: {column: ill, classes: ['0', '1']}\n"
        "columns: {age: {type: number}, score: {type: number}}\n"
    )
    table = ("--dataset", str(where / "t.csv"), "--schema", str(where / "s.yaml"))
    return (*table, "--epsilon", "8", "--steps", "10", "--batch-size", "16")


KINDS: tuple[Callable[[Path], tuple[str, ...]], ...] = (
    *(digits, seeded, without_privacy, covered, for_a_target, two_classes, numbers, audited),
    *(of_units, without_ranges),
)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A run's folder, and what its command printed."""
    run = tmp_path / "run"
    result = dpmac("train", *request.param(tmp_path), "--device", "cpu", "--out", run)
    assert result.exit_code == 0, result.output
    return run, result.stdout


@pytest.mark.promise("said")
def test_every_number_that_one_sees_is_the_report_s(trained: tuple[Path, str]) -> None:
    run, screen = trained
    known = of_report(run) | of_the_program()
    text = cards.run_page(run)
    page = re.sub(r"(?s)<svg.*?</svg>|<style.*?</style>|<pre.*?</pre>|<[^>]*>", " ", text)
    shown: Mapping[str, str] = {
        "screen": re.sub(r"(?m)^computing .*$", "", screen),
        "card": re.sub(r"(?s)```.*?```", "", (run / "model-card.md").read_text()),
        "page": unescape(page),
    }
    others = {view: sorted(numbers_in(text) - known) for view, text in shown.items()}
    assert not any(others.values()), others


def covered_in(run: Path) -> bool:
    return bool(report_of(run)["settings"]["cover_scores"])


def test_eval_and_runs_say_what_the_report_says(trained: tuple[Path, str]) -> None:
    run, _ = trained
    report = report_of(run)
    [listed] = json.loads(dpmac("runs", run.parent, "--json").stdout)["runs"]
    for name in ("epsilon", "delta"):
        assert listed[name] == report[name]
    assert listed["score"] == report["scores"][METRICS[listed["metric"]].key]["value"]
    assert listed["state"] == report["state"]
    if covered_in(run):
        return
    scored = json.loads(dpmac("eval", run, "--json").stdout)
    for metric in METRICS.values():
        if metric.key in scored:
            score = report["scores"][metric.key]
            assert scored[metric.key] == pytest.approx(score["value"])
            if "low" in score:
                ends = [score["low"], score["high"]]
                assert scored["intervals"][metric.key] == pytest.approx(ends)
            if metric.constant in scored:
                assert scored[metric.constant] == score["constant"]
    for name in ("samples", "confusion", "interval_coverage"):
        if name in scored:
            assert scored[name] == report["scores"][name]
