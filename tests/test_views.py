"""Everything that one looks at is a view of the report: no number in it is from anywhere else."""

import gc
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpmac_cli.accounting.selection import Trials
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import train
from dpmac_cli.errors import BUDGET, INTERRUPTED
from dpmac_cli.release import card as cards
from dpmac_cli.release import sentences
from dpmac_cli.release.report import read_report
from dpmac_cli.tasks.metrics import number
from dpmac_cli.tasks.task import METRICS
from tests.digits_runs import after, metrics_of, report_of
from tests.tiny_bert import notes, write_network
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
    # The epochs of the planned steps, and the distribution of the number of trials.
    steps = report["settings"].get("steps") or 0
    facts += [steps / event["steps_per_epoch"] for event in report["events"]]
    if report["search"] is not None:
        facts.append(Trials(**report["search"]["trials"]).log_weight)
    # Numbers of test records by class, and of those that are right.
    counts = report["scores"].get("confusion") or []
    facts += [*map(sum, counts), *map(sum, zip(*counts, strict=True))]
    facts.append(sum(row[place] for place, row in enumerate(counts)))
    # Shares of records by their noisy histogram, which the report has.
    known = read_report(run).network.calibration
    for each in [] if known is None else known.reliability():
        facts += each
    return set().union(*map(forms, facts))


def of_the_program() -> set[str]:
    """Numbers that are in what the program says of every run."""
    folder = Path(cards.__file__).parent
    texts = [(folder / name).read_text() for name in ("model_card.md.jinja", "sentences.py")]
    return set().union(*map(numbers_in, [*texts, sentences.AUDIT_RUN]))


CSV = "age,score,ill\n" + "".join(f"{20 + n % 60},{n % 7},{n % 2}\n" for n in range(120))
AGE = "columns: {age: {range: [0, 99]}, score: {range: [0, 9]}}\n"
ILL = f"label: {{column: ill, classes: ['0', '1']}}\n{AGE}"
SCORE = (
    "label: {column: score, range: [0, 9]}\n"
    "columns: {age: {range: [0, 99]}, ill: {categories: ['0', '1']}}\n"
)
UNDECLARED = (
    "label: {column: ill, classes: ['0', '1']}\n"
    "columns: {age: {type: number}, score: {type: number}}\n"
)
DIGITS = "train --dataset digits --device cpu"


def table(text: str, schema: str, flags: str) -> str:
    """Write a table and its schema; return the command of a run on it."""
    Path("t.csv").write_text(text)
    Path("s.yaml").write_text(schema)
    return f"train --dataset t.csv --schema s.yaml --device cpu --batch-size 16 {flags}"


def of_units() -> str:
    people = "".join(f"{20 + n % 60},{n % 7},{n % 2},p{n % 40}\n" for n in range(400))
    return table(f"age,score,ill,person\n{people}", ILL, "--unit person --epsilon 3 --steps 10")


def of_texts() -> str:
    """Write an encoder and notes; return the command of a run on them."""
    write_network(Path("bert"), "bert")
    rows = [f"{text},{label}" for text, label in notes(60)]
    Path("t.csv").write_text("\n".join(["note,ill", *rows]))
    Path("s.yaml").write_text(
        "label: {column: ill, classes: ['0', '1']}\ncolumns: {note: {text: 12}}\n"
    )
    files = "--dataset t.csv --schema s.yaml --backbone ./bert"
    return f"train {files} --epsilon 3 --steps 4 --batch-size 16 --device cpu"


def language_model() -> str:
    write_network(Path("gpt2"), "gpt2", causal=True)
    Path("t.csv").write_text("\n".join(["note", *(text for text, _ in notes(60))]))
    Path("s.yaml").write_text("columns: {note: {text: 12}}\n")
    return (
        "train --dataset t.csv --schema s.yaml --task language-model --backbone ./gpt2 "
        "--epsilon 8 --steps 4 --device cpu"
    )


#: Kinds of runs, by what is typed. Those of a table or of texts write their files first.
KINDS: Mapping[str, str | Callable[[], str]] = {
    "digits": f"{DIGITS} --sigma 6 --epochs 2",
    "seeded": f"{DIGITS} --sigma 6 --epochs 2 --seed 5",
    "without privacy": f"{DIGITS} --no-dp --epochs 1",
    "covered": f"{DIGITS} --sigma 6 --epochs 2 --cover-scores",
    "for a target": f"{DIGITS} --epsilon 2 --epochs 2 --sampler poisson",
    "audited": f"{DIGITS} --sigma 6 --epochs 2 --canaries 20",
    "two classes": lambda: table(CSV, ILL, "--epsilon 3 --steps 20"),
    "numbers": lambda: table(CSV, SCORE, "--epsilon 3 --steps 20"),
    "covered numbers": lambda: table(CSV, SCORE, "--epsilon 3 --steps 20 --cover-scores"),
    "of units": of_units,
    "without ranges": lambda: table(
        CSV + CSV.partition("\n")[2] * 9, UNDECLARED, "--epsilon 8 --steps 10"
    ),
    "texts": of_texts,
    "language model": language_model,
    "search": (
        "tune --dataset digits --model linear --steps 3 --epsilon 0.5 --lr 0.1:1 --trials 2 "
        "--device cpu"
    ),
    "budget spent": f"{DIGITS} --sigma 6 --steps 40 --max-epsilon 0.25",
    "interrupted": f"{DIGITS} --sigma 6 --steps 40",
    "resumed": f"{DIGITS} --sigma 6 --steps 40",
    "resumed elsewhere": f"{DIGITS} --sigma 6 --steps 40",
}
#: Exit codes of runs whose budget ends before their last step.
CODES = {"budget spent": BUDGET}


@pytest.fixture(params=KINDS)
def trained(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A run's folder, and what its last command printed."""
    kind, run = request.param, Path("run")
    typed = KINDS[kind]
    command = typed if isinstance(typed, str) else typed()
    if kind in ("interrupted", "resumed", "resumed elsewhere"):
        with monkeypatch.context() as patched:
            patched.setattr(train, "stop_request", lambda: nullcontext(after(15)))
            printed = printed_by(INTERRUPTED, *command.split(), "--out", run)
        if kind == "resumed":
            printed = printed_by(0, "train", "--resume", run)
        elif kind == "resumed elsewhere":
            flags = ("--out", "longer", "--steps", "50")
            printed, run = printed_by(0, "train", "--resume", run, *flags), Path("longer")
    else:
        printed = printed_by(CODES.get(kind, 0), *command.split(), "--out", run)
    return run, printed


def printed_by(code: int, *args: str | Path) -> str:
    """What a command prints, which ends with a code. The lock of its run's folder is free then."""
    result = dpmac(*args)
    assert result.exit_code == code, result.output
    printed = result.stdout
    del result  # a traceback in it keeps the lock
    gc.collect()
    return printed


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
    [listed] = json.loads(dpmac("runs", run, "--json").stdout)["runs"]
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
    for name in ("samples", "confusion", "by_bin", "interval_coverage", "interval_coverage_by_bin"):
        if name in scored:
            assert scored[name] == report["scores"][name]
