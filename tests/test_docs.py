"""The pages: links, commands and figures hold, and the site builds and needs no other site."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import yaml
from PIL import Image

import dpmac_cli
from dpmac_cli import __version__
from dpmac_cli.cli.app import COMMANDS, load_command
from dpmac_cli.cli.question import Question
from dpmac_cli.config.flags import Flags
from dpmac_cli.config.settings import SETTINGS, Settings
from dpmac_cli.tasks.task import TASKS
from tests.digits_runs import SIGMA, train_digits
from tests.tiers import one_in
from tests.typed import dpmac, shell

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import beside_paper

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DATA = DOCS / "data"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GENERATE = runpy.run_path(str(DOCS / "generate.py"))
#: Pages that only the site has.
BUILT = [DOCS / name for name in GENERATE["BUILT"]]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: A file of this repository, by its path.
FILE = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|toml|md|json|jsonl|yaml))`")
#: Commands whose values are validated, too, by their settings.
VALIDATED: Mapping[str, type[Flags]] = {"train": Settings, "account": Question}

by_page = pytest.mark.parametrize(
    "page", [*PAGES, *BUILT], ids=lambda page: str(page.relative_to(ROOT))
)


@cache
def read(page: Path) -> str:
    """Return the text of a page of the tree or of the site."""
    made = GENERATE["BUILT"][page.name] if page in BUILT else partial(page.read_text, "utf-8")
    return str(made())


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links, as GitHub does it."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", read(page))):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        again = sum(1 for name in found if re.fullmatch(rf"{re.escape(words)}(-\d+)?", name))
        found.add(f"{words}-{again}" if again else words)
    return found


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Text and target of a page's links, but for those to other sites."""
    for text, target in LINK.findall(FENCE.sub("", read(page))):
        if "://" not in target:
            yield text, target


def broken(page: Path) -> list[str]:
    """Links that lead nowhere."""
    found = []
    for _, target in links(page):
        name, _, anchor = target.partition("#")
        file = Path(os.path.normpath(page.parent / name)) if name else page
        there = file.exists() or file in BUILT
        lost = there and file.suffix == ".md" and anchor and anchor not in anchors(file)
        if not there or lost:
            found.append(target)
    return found


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    """The changelog names files that were, and those of runs."""
    for name in () if page.name == "CHANGELOG.md" else FILE.findall(FENCE.sub("", read(page))):
        places = (ROOT, ROOT / "dpmac_cli", ROOT / "tests", page.parent)
        assert any((place / name).exists() for place in places), name


def commands() -> Iterator[tuple[str, str, list[str]]]:
    """Page, command and some of the lines that it prints, in their order."""
    for page in PAGES:
        for block in CONSOLE.findall(page.read_text()):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, *lines = part.splitlines()
                yield page.name, command, lines


@pytest.mark.parametrize(("page", "command", "lines"), one_in(4, commands()))
def test_commands_print_what_stands_below_them(page: str, command: str, lines: list[str]) -> None:
    name, *args = command.split()
    assert name == "dpmac", page
    assert lines
    found = shell(command).stdout if "|" in args else dpmac(*args, columns=120).output
    printed = iter(found.splitlines())
    assert all(line in printed for line in lines), command


def typed(text: str) -> Iterator[str]:
    """Commands in the blocks of a page, fenced or indented, as a shell reads them."""
    joined = re.sub(r" \\\n\s*", " ", text)
    blocks = "\n".join(FENCE.findall(joined))
    lines = re.findall(r"^(?:\$ )?(dpmac [a-z].*)$", blocks, re.MULTILINE)
    lines += re.findall(r"^    (dpmac [a-z].*)$", FENCE.sub("", joined), re.MULTILINE)
    yield from (re.split(r" [>|] ", line)[0] for line in lines if "[OPTIONS]" not in line)


@cache
def known() -> Mapping[str, Any]:
    """The commands by name."""
    return {name: load_command(name) for name in COMMANDS}


def mistyped(command: str) -> str:
    """What is wrong with a command, or ""; datasets and variables are not looked up."""
    _, name, *args = shlex.split(command, comments=True)
    try:
        given = known()[name].make_context(name, args).params
        if model := VALIDATED.get(name):
            given = {key: value for key, value in given.items() if key in model.model_fields}
            left_out = {"dataset", *(key for key, v in given.items() if str(v).startswith("$"))}
            model.model_validate({key: v for key, v in given.items() if key not in left_out})
    except Exception as error:  # noqa: BLE001  (of any kind)
        return f"{command}: {error}"
    return ""


def inline_flags(text: str) -> Iterator[tuple[str, str]]:
    """Commands and flags that stand beside each other in a line of code within the text."""
    for name, rest in re.findall(r"`dpmac ([a-z]+)( [^`]*)`", FENCE.sub("", text)):
        yield from ((name, flag) for flag in re.findall(r"(?<= )--[a-z][\w-]*", rest))


def unknown(name: str, flag: str) -> bool:
    """Whether a command does not have a flag."""
    return name not in known() or not any(flag in each.opts for each in known()[name].params)


@by_page
def test_every_command_is_one_that_dpmac_accepts(page: Path) -> None:
    """Also those that take too long to run in a test."""
    text = read(page)
    assert [found for command in typed(text) if (found := mistyped(command))] == []
    past = page.name == "CHANGELOG.md"  # it names what was removed
    assert [pair for pair in inline_flags(text) if unknown(*pair) and not past] == []


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation["version"] == __version__
    assert __version__ in changes[:2]  # the first section may be of the coming version


def test_the_generated_pages_are_up_to_date_and_complete() -> None:
    written = {name: page() for name, page in GENERATE["WRITTEN"].items()}
    for name, text in written.items():
        kept = (DOCS / name).read_text(encoding="utf-8")
        assert kept == text, f"{name}: run python docs/generate.py"
    for name in SETTINGS:
        assert f"|`--{name.replace('_', '-')}`|" in written["configuration.md"]
    for name in COMMANDS:
        assert f"\n## dpmac {name}\n" in read(DOCS / "commands.md")
    named = re.findall(r"^::: dpmac_cli\.(\w+)$", read(DOCS / "api.md"), re.MULTILINE)
    assert sorted(named) == sorted({*dpmac_cli.__all__} - {"__version__"})


def test_every_metric_is_explained() -> None:
    page, missing = read(DOCS / "own-task.md"), list[str]()
    for task in TASKS.values():
        if task.__module__.startswith("dpmac_cli."):
            missing += [each.name for each in task.metrics if f"`{each.name}`" not in page]
    assert missing == []


def test_the_index_has_every_page() -> None:
    targets = {target for _, target in links(DOCS / "README.md")}
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*.json")]
    assert {file.name for file in [*files, *BUILT]} - {"README.md"} <= targets
    assert "docs/README.md" in {target for _, target in links(ROOT / "README.md")}


def test_every_measurement_has_a_line() -> None:
    data = DOCS / "data"
    listed = [target for _, target in links(data / "README.md")]
    there = {file.name for file in data.iterdir()} - {"README.md"}
    assert there == {target for target in listed if not target.startswith("../")}


#: What a page loads when it is opened.
LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(https?:)?//[^>]*>")


@pytest.mark.long
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    pages = {page: page.read_text(encoding="utf-8") for page in tmp_path.glob("**/*.html")}
    assert len(pages) > 30
    for page, text in pages.items():
        assert not LOADED.search(text), page.name
        assert "arithmatex" not in text, page.name
    for name in dpmac_cli.__all__:
        assert name == "__version__" or f'id="dpmac_cli.{name}"' in pages[tmp_path / "api.html"]


# Figures are those of their data files.


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of measurements."""
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


def grouped(rows: Iterable[Mapping[str, Any]], *keys: str) -> Mapping[Any, Sequence[Any]]:
    """Return rows by the values of some keys."""
    found = defaultdict[Any, list[Any]](list)
    for row in rows:
        found[tuple(row[key] for key in keys)].append(row)
    return found


def tables(page: str) -> list[list[str]]:
    """Return the rows of all tables of a page, without bold."""
    text = (DOCS / page).read_text("utf-8").replace("**", "")
    shown = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in shown]


def test_accuracies_of_the_readme() -> None:
    shown = [row[2:] for row in tables("../README.md") if row[1].startswith("linear on ")]
    found = grouped(rows_of("texts.jsonl"), "set", "features", "epsilon", "epochs")
    expected = [
        [
            f"{mean(r['accuracy'] for r in found[name, 'minilm', e, 20]):.1f}"
            for e in (1.0, 3.0, None)
        ]
        for name in ("sms", "banking77")
    ]
    rows = json.loads((DATA / "backbone-lite2.json").read_text())["rows"]
    images = {round(row["epsilon"], 3): f"{100 * row['mean']:.1f}" for row in rows}
    assert shown == [*expected, [images[1.0], f"{images[2.435]} (at 2.435)", ""]]


def test_the_papers_tables() -> None:
    """Means by sigma, as of the runs, beside the paper's."""
    measured: list[list[str]] = []
    for name in ("table1", "table1-estimates", "table2"):
        by_kind = defaultdict[str, list[str]](list)
        for row in beside_paper.rows_of(DATA / f"{name}.jsonl.xz"):
            by_kind[" ".join(row["labels"])].append(f"{100 * row['mean']:.2f}")
        measured += by_kind.values()
    shown = [row[1:] for row in tables("reproduction.md") if "[" in row[1]]
    assert len(shown) == 8 + 7
    for line in shown:
        assert [re.split(" [±[]", cell)[0] for cell in line] in measured, line


def test_a_report_of_today_is_compared_with_the_papers_tables(tmp_path: Path) -> None:
    finished = train_digits(optimizer="dp-macadam", kappa="paper", out=tmp_path / "run")
    text = (finished.folder / "report.json").read_text()
    runs = tmp_path / "runs.jsonl"
    runs.write_text(json.dumps({"run": "run", "files": {"report.json": text}}))
    [row] = beside_paper.rows_of(runs)
    assert row["labels"] == ("dp-macadam", "kappa paper")
    accuracy = finished.report["scores"]["accuracy"]["value"]
    assert (row["dataset"], row["sigma"], row["mean"]) == ("digits", SIGMA, accuracy)


def test_the_best_batch_and_rate_of_each_optimizer() -> None:
    rows = [row for row in rows_of("batches.jsonl") if row["seed"] < 5 and row["epsilon"] == 0.785]
    found = grouped(rows, "optimizer", "batch_size", "lr")
    shown = {row[0].strip("`"): row[1:] for row in tables("reproduction.md") if len(row) == 4}
    for (name, batch, rate), runs in found.items():
        scores = [each["accuracy"] for each in runs]
        accuracy = f"{mean(scores):.2f} ± {stdev(scores):.2f}"
        assert shown[name] == [f"{batch:,}", f"{rate:g}", accuracy]


def test_units() -> None:
    found = grouped(rows_of("units.jsonl"), "row", "target")
    rows = {row[0]: row[1:] for row in tables("units.md")}
    for name in {name for name, _ in found}:
        scores = [[100 * r["accuracy"] for r in found[name, e]] for e in (1.0, 3.0, 8.0)]
        assert rows[name] == [f"{mean(each):.2f} ± {stdev(each):.2f}" for each in scores]


def test_processes() -> None:
    measured = json.loads((DATA / "scaling.json").read_text())["rows"]
    found = grouped(measured, "model", "batch", "optimizer")
    rows = [row for row in tables("clusters.md") if row[1].isdigit()]
    assert rows == [
        [
            *map(str, key),
            *(f"{row['step_ms']:.1f}" for row in runs[:2]),
            f"{runs[1]['speed_up']:.2f}",
        ]
        for key, runs in found.items()
    ]


def test_the_picture_of_accuracies_is_of_the_data() -> None:
    drawn = runpy.run_path(str(DOCS / "accuracy_picture.py"))
    with Image.open(drawn["PICTURE"]) as picture:
        told = picture.info["Source"]
    assert told == drawn["source"](), "run python docs/accuracy_picture.py"


def test_programs_of_the_manual_are_checked_by_mypy(tmp_path: Path) -> None:
    checked = runpy.run_path(str(DOCS / "check_programs.py"))
    names = {path.stem for path in checked["write_programs"](tmp_path)}
    assert {"programs", "hospitals", "flower_simulate", "nvflare_client"} <= names
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        if "\n```python\n" in page.read_text():
            assert (tmp_path / "programs" / f"{page.stem.replace('-', '_').lower()}.py").exists()
    assert "docs/check_programs.py" in (ROOT / ".ci" / "checks").read_text()
