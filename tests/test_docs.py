"""The pages: links lead somewhere, names exist, commands print what stands below them."""

import os
import re
import runpy
import shlex
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import dpmac_cli
from dpmac_cli import __version__
from dpmac_cli.cli.app import COMMANDS, load_command
from dpmac_cli.config.account import Question
from dpmac_cli.config.flags import Flags
from dpmac_cli.config.settings import SETTINGS, Settings
from tests.tiers import one_in
from tests.typed import dpmac

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))
#: Pages that only the site has.
BUILT = [ROOT / "docs" / name for name in GENERATE["BUILT"]]
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


@by_page
def test_files_that_are_named_are_there(page: Path) -> None:
    for name in FILE.findall(FENCE.sub("", read(page))):
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
    printed = iter(dpmac(*args, columns=120).output.splitlines())
    assert all(line in printed for line in lines), command


def typed(text: str) -> Iterator[str]:
    """Commands in the blocks of a page, fenced or indented, as a shell reads them."""
    joined = re.sub(r" \\\n\s*", " ", text)
    blocks = "\n".join(FENCE.findall(joined))
    lines = re.findall(r"^(?:\$ )?(dpmac [a-z].*)$", blocks, re.MULTILINE)
    lines += re.findall(r"^    (dpmac [a-z].*)$", FENCE.sub("", joined), re.MULTILINE)
    yield from (line.partition(" > ")[0] for line in lines if "[OPTIONS]" not in line)


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
        kept = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert kept == text, f"{name}: run python docs/generate.py"
    for name in SETTINGS:
        assert f"|`--{name.replace('_', '-')}`|" in written["configuration.md"]
    for name in COMMANDS:
        assert f"\n## dpmac {name}\n" in read(ROOT / "docs" / "commands.md")
    named = re.findall(r"^::: dpmac_cli\.(\w+)$", read(ROOT / "docs" / "api.md"), re.MULTILINE)
    assert sorted(named) == sorted({*dpmac_cli.__all__} - {"__version__"})


def test_the_index_has_every_page() -> None:
    targets = {target for _, target in links(ROOT / "docs" / "README.md")}
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*.json")]
    assert {file.name for file in [*files, *BUILT]} - {"README.md"} <= targets
    assert "docs/README.md" in {target for _, target in links(ROOT / "README.md")}


def test_every_measurement_has_a_line() -> None:
    data = ROOT / "docs" / "data"
    listed = [target for _, target in links(data / "README.md")]
    there = {file.name for file in data.iterdir()} - {"README.md"}
    assert there == {target for target in listed if not target.startswith("../")}
