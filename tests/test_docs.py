"""The pages: links lead somewhere, names exist, commands print what stands below them."""

import ast
import math
import os
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import dpmac_cli
from dpmac_cli import __version__
from dpmac_cli.cli.app import COMMANDS, load_command
from dpmac_cli.config.account import Question
from dpmac_cli.config.flags import Flags
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.settings import SETTINGS, Settings
from dpmac_cli.optim import OPTIMIZERS
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


def defined(file: Path, dotted: str) -> bool:
    """Whether a module has a name: a function, a class, a constant, or a class's method."""
    body = ast.parse(file.read_text()).body
    for part in dotted.split("."):
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if part == getattr(node, "name", None) or part in names:
                body = getattr(node, "body", [])
                break
        else:
            return False
    return True


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b\n## A b\n[1](#a-b) [2](#a-b-1) [3](#c) [4](gone.md) [5](page.md#x)\n")
    assert broken(page) == ["#c", "gone.md", "page.md#x"]


@by_page
def test_what_is_named_in_the_code_is_there(page: Path) -> None:
    """Links such as [`geometry.MacAdam.next`](../dpmac_cli/dp/geometry.py)."""
    for text, target in links(page):
        file, name = page.parent / target, text.strip("`")
        if file.suffix == ".py" and "/" not in name:
            module, _, dotted = name.partition(".")
            assert module == file.stem, text
            assert defined(file, dotted), text


@by_page
def test_files_that_are_named_are_there(page: Path) -> None:
    for name in FILE.findall(FENCE.sub("", read(page))):
        places = (ROOT, ROOT / "dpmac_cli", ROOT / "tests", page.parent)
        assert any((place / name).exists() for place in places), name


def test_names_that_are_not_there_would_be_found() -> None:
    file = ROOT / "dpmac_cli" / "dp" / "geometry.py"
    assert defined(file, "MacAdam.next")
    assert defined(file, "LEAST_KAPPA")
    assert not defined(file, "MacAdam.nexts")
    assert not defined(file, "Macadam")


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


def test_commands_that_dpmac_does_not_accept_would_be_found() -> None:
    page = (
        "```sh\ndpmac train --sigma 1 \\\n  --sigm 2\n```\n    dpmac train --sigma x  # a\n\n"
        "`dpmac eval RUN --audits`"
    )
    assert list(typed(page)) == ["dpmac train --sigma 1 --sigm 2", "dpmac train --sigma x  # a"]
    assert all(mistyped(command) for command in typed(page))
    assert [unknown(*pair) for pair in inline_flags(page)] == [True]


def test_extras_that_are_named_exist_and_are_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sources = [*PAGES, *ROOT.glob("dpmac_cli/**/*.py"), *ROOT.glob("dpmac_cli/**/*.toml")]
    named = {
        extra
        for source in sources
        for group in re.findall(r"(?:dpmac|['\"]\.)\[([a-z,]+)\]", source.read_text())
        for extra in group.split(",")
    }
    extras = set(project["optional-dependencies"])
    assert named <= extras
    install = (ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"`dpmac\[([a-z]+)\]`", install)) == extras


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation["version"] == __version__
    assert __version__ in changes[:2]  # the first section may be of the coming version


def test_the_optimizers_page_has_every_optimizer_and_its_settings() -> None:
    text = (ROOT / "docs" / "optimizers.md").read_text()
    headings = re.findall(r"^## `(.+)`$", text, re.MULTILINE)
    assert sorted(headings) == sorted(OPTIMIZERS)
    for name in set().union(*(kind.used() for kind in OPTIMIZERS.values())):
        assert f"`--{name.replace('_', '-')}`" in text
        assert name in SETTINGS


def test_the_page_of_commands_has_examples_and_groups_in_words() -> None:
    page = read(ROOT / "docs" / "commands.md")
    assert "```text\n\n```" not in page
    groups = re.findall(r"^\|(.+)\|value\|default\|", page, re.MULTILINE)
    assert len(groups) > len(COMMANDS)
    assert [name for name in groups if not re.fullmatch(r"[A-Z][a-z]+( [a-z]+)*", name)] == []


def test_the_generated_pages_are_up_to_date_and_complete() -> None:
    written = {name: page() for name, page in GENERATE["WRITTEN"].items()}
    for name, text in written.items():
        kept = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert kept == text, f"{name}: run python docs/generate.py"
    texts = {page.name: read(page) for page in BUILT} | written
    for name in SETTINGS:
        assert f"|`--{name.replace('_', '-')}`|" in texts["configuration.md"]
    for name in COMMANDS:
        assert f"\n## dpmac {name}\n" in texts["commands.md"]
    keys = set(re.findall(r"^\| ?`([^`]+)`", texts["report.md"], re.MULTILINE))
    assert keys >= {"privacy.epsilon", "privacy.events[].steps", "rows[].epsilon"}
    named = re.findall(r"^::: dpmac_cli\.(\w+)$", texts["api.md"], re.MULTILINE)
    assert sorted(named) == sorted({*dpmac_cli.__all__} - {"__version__"})


def test_the_defaults_for_ones_own_data_are_told(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((600, 4)), np.arange(600) % 3
    np.savez(tmp_path / "rows.npz", x=x, y=y, x_test=x, y_test=y)
    resolved = resolve(dataset=str(tmp_path / "rows.npz"), feature_range="0,1")
    one = resolved.plan
    text = (ROOT / "docs" / "configuration.md").read_text()
    (row,) = re.findall(r"^\|your own rows of numbers, 500\|\|(.+)\|$", text, re.MULTILINE)
    model, batch, *told = row.split("|")
    share = round(500 / math.ceil(500 / int(batch.removeprefix("n/"))))
    assert (one.recorded["model"], one.privacy.batch_size) == (model, math.ceil(600 / share))
    values = (one.recorded["epochs"], one.optimizer.lr, one.recipe.ema)
    assert values == tuple(map(float, told))
    said = " ".join((ROOT / "docs" / "own-data.md").read_text().split())
    assert "for epsilon 3, at delta 1e-5 or n^-1.1" in said
    assert (one.optimizer.name, resolved.settings.epsilon) == ("dp-adam", 3)
    assert one.privacy.delta == 1e-5


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
