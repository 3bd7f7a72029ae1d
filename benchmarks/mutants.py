"""Put privacy bugs into the code, one at a time, and run the tests that must find them.

    python benchmarks/mutants.py --out docs/data/mutants.json    # all of them: half an hour
    python benchmarks/mutants.py --only chunks     # some, by name, definition or file
    python benchmarks/mutants.py --short           # by the tests that `pytest` runs, without --long
    python benchmarks/mutants.py --check           # only whether each still applies: seconds
    python benchmarks/mutants.py --places          # only name the files that they are in now

The bugs are in mutants.toml. Each names a definition and the code to replace there, compared by
syntax: formatting it or moving it to another place or file changes nothing. The tests run in a
copy of the tree, first without any bug, when they must pass. Exit code 1 if a bug goes unnoticed
or no longer applies to the code.
"""

import argparse
import ast
import difflib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias, cast

from syntax import (
    Code,
    Definition,
    as_statements,
    definitions,
    nearest,
    occurrences,
    parse,
    parse_pair,
    replaced,
    show,
)

ROOT = Path(__file__).parent.parent
PACKAGE = "dpmac_cli"
TABLE = Path(__file__).with_suffix(".toml")
#: The last verdict on each, which the site shows.
RECORD = ROOT / "docs/data/mutants.json"
#: Seconds that tests may take: a bug may have them go on for ever.
LIMIT = 1800
#: Loaded before any test is run. None starts a thread.
LIBRARIES = (
    *("pytest", "numpy", "scipy.stats", "sklearn.datasets", "torch", "torchvision"),
    *(
        "torch.func",
        "dp_accounting.pld.pld_privacy_accountant",
        "safetensors.torch",
        "typer.testing",
    ),
    *("dp_accounting.rdp.rdp_privacy_accountant", "matplotlib.pyplot", "rich.live"),
)
FORKS = multiprocessing.get_context("fork")
#: Markers of the tests to run, one after the other, until one fails.
TIERS = ("not long", "long")
KILLED, SURVIVED, BROKEN = "killed", "survived", "broken"
#: Definitions of the package by qualified name.
Known: TypeAlias = Mapping[str, list[Definition]]
PASSED, FAILED, NO_TESTS = 0, 1, 5  # exit codes of pytest
FAILED_LINE = re.compile(r"^(?:FAILED|ERROR) .*$", re.MULTILINE)
FAILURE = re.compile(r"^FAILED (\S+::.*?)(?: - (.*))?$", re.MULTILINE)

HEAD = "| bug | what it would cost | file | found by |\n|---|---|---|---|"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A bug to put into the package.

    Attributes:
        name: what is done wrong.
        cost: what it would cost.
        where: qualified name of the definition in the package that it is put into.
        old: code that occurs there exactly once; "" for the whole body of a function.
        new: what takes its place.
        tests: files or node ids of pytest, of which some must fail.
        marker: of the tests that count; "" for all.
    """

    name: str
    cost: str
    where: str
    old: str = ""
    new: str
    tests: tuple[str, ...]
    marker: str = "privacy"

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> "Mutant":
        """Return the mutant that a row of the table describes."""
        where, replace = row.pop("in"), row.pop("replace", None)
        if (replace is None) == ("old" not in row):
            sys.exit(f"{row['name']}: needs either old and new or replace.")
        row |= {"tests": tuple(row["tests"])}
        return cls(where=where, **row if replace is None else {**row, "new": replace})

    def found(self, known: Known) -> tuple[Definition, Code, Code]:
        """Return the definition that the bug goes into, the code there, and what replaces it.

        Raises:
            ValueError: there is not exactly one place for it.
        """
        named = known.get(self.where, [])
        if not self.old:
            functions = [d for d in named if isinstance(d.node, ast.FunctionDef)]
            if len(functions) != 1:
                close = difflib.get_close_matches(self.where, known, n=3)
                raise ValueError(
                    f"there are {len(functions)} functions {self.where}{_perhaps(close)}"
                )
            body = cast(ast.FunctionDef, functions[0].node).body
            return functions[0], body, as_statements(parse(self.new))
        old, new = parse_pair(self.old, self.new)
        counts = {definition: occurrences(definition, old) for definition in named}
        total = sum(counts.values())
        if total == 1:
            return next(d for d, count in counts.items() if count), old, new
        what = f"its old code occurs {total} times in {self.where}"
        if not named:
            what = f"there is no {self.where}"
        raise ValueError(what + ("" if total else self._elsewhere(known, old)))

    def _elsewhere(self, known: Known, old: Code) -> str:
        """Return where its old code may have gone, for a message."""
        everything = [definition for several in known.values() for definition in several]
        if places := [d for d in everything if occurrences(d, old)]:
            return _perhaps([max((d.name for d in places), key=len)])
        named = known.get(self.where) or [
            definition
            for name in difflib.get_close_matches(self.where, known, n=3)
            for definition in known[name]
        ]
        if near := nearest(named, old):
            return f"; nearest: {show(near[1])}, in {near[0].name} ({near[0].file.name})"
        return _perhaps([definition.name for definition in named if not known.get(self.where)])

    def applied(self, known: Known) -> tuple[Path, ast.Module]:
        """Return the file that the bug goes into, and its syntax with the bug in it.

        Raises:
            ValueError: it cannot be put into the code as it is now.
        """
        definition, old, new = self.found(known)
        return definition.file, replaced(definition, old, new)

    def place(self, known: Known) -> str:
        """Return the definition and the file that the bug goes into, or a file unknown."""
        with suppress(ValueError):
            return f"{self.where}\n{in_package(self.found(known)[0].file)}"
        return self.where

    def placed(self, known: Known, verdict: "Verdict") -> "Verdict":
        """Return a verdict with the file that the bug goes into now."""
        with suppress(ValueError):
            return replace(verdict, file=in_package(self.found(known)[0].file))
        return verdict

    def faults(self, known: Known) -> Iterator[str]:
        """Yield why it cannot be put into the code as it is now, and tests that do not exist."""
        try:
            self.applied(known)
        except ValueError as failure:
            yield str(failure)
        for test in self.tests:
            file, _, name = test.partition("[")[0].partition("::")
            if not (ROOT / file).is_file():
                yield f"there is no {file}"
            elif name and f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8"):
                yield f"there is no {test}"


def _perhaps(names: Sequence[str]) -> str:
    """Return names to look at, for a message."""
    return f"; look at {', '.join(names)}" if names else ""


@dataclass(frozen=True)
class Verdict:
    """Result of a mutant.

    Attributes:
        name, cost, file: of the mutant.
        result: "killed" by a test that failed, "survived", or "broken": neither could be told.
        by: the first test that failed. why: what it said, or what is broken.
        seconds: that it took.
    """

    name: str
    cost: str
    file: str
    result: str
    by: str
    why: str
    seconds: float


def read_table() -> list[Mutant]:
    """Every mutant, in the table's order. Ends the program if two have the same name."""
    with TABLE.open("rb") as file:
        rows = tomllib.load(file)["mutant"]
    mutants = [Mutant.of_row(row) for row in rows]
    twice = [name for name, count in Counter(m.name for m in mutants).items() if count > 1]
    if twice:
        sys.exit(f"Two mutants have one name: {', '.join(twice)}.")
    return mutants


def known_definitions(tree: Path) -> Known:
    """Return every definition of the package in a tree, by qualified name."""
    known: dict[str, list[Definition]] = {}
    for definition in definitions(tree / PACKAGE):
        known.setdefault(definition.name, []).append(definition)
    return known


def check(mutants: Sequence[Mutant], known: Known) -> None:
    """End the program, with exit code 1 if any mutant does not apply."""
    faults = [f"{mutant.name}: {fault}" for mutant in mutants for fault in mutant.faults(known)]
    print("\n".join(faults) or f"{len(mutants)} mutants apply.")
    sys.exit(bool(faults))


def copy_tree(where: Path, tree: Path = ROOT) -> Path:
    """Copy a tree without what is hidden or compiled."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
    return Path(shutil.copytree(tree, where / "tree", ignore=ignored))


def in_package(file: Path) -> str:
    """Return the path of a file of the package, in whatever tree."""
    return file.as_posix().rpartition(f"/{PACKAGE}/")[2]


def run_tests(
    tree: Path, tests: Sequence[str], marker: str, tiers: Sequence[str] = TIERS
) -> tuple[int, str]:
    """Run tests of a tree up to the first failure: pytest's exit code, and what it printed.

    Those that are long only run if none of the others fails.

    Raises:
        TimeoutError: they go on for ever.
    """
    least, said = NO_TESTS, ""
    for tier in tiers:
        code, said = _run_tier(tree, tests, f"{marker} and {tier}" if marker else tier)
        if code not in (PASSED, NO_TESTS):
            return code, said
        least = min(least, code)
    return least, said


def _run_tier(tree: Path, tests: Sequence[str], marker: str) -> tuple[int, str]:
    """Run the tests of a tier.

    In a process forked from this one, which has loaded the libraries, but nothing of the package.
    """
    arguments = ["-x", "-q", "-n0", "--long", "--tb=no", "-p", "no:cacheprovider", "-m", marker]
    arguments += [f"--rootdir={tree}", f"--basetemp={tree.parent / 'files'}", *tests]
    said = tree.parent / "said"
    process = FORKS.Process(target=_run_tests, args=(tree, arguments, said))
    process.start()
    process.join(LIMIT)
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"its tests take longer than {LIMIT} seconds")
    return process.exitcode or 0, said.read_text(encoding="utf-8")


def _run_tests(tree: Path, arguments: list[str], said: Path) -> None:
    """Run tests in the forked process."""
    with said.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    # No compiled file: one of the very same second and size would be taken for the mutant's.
    sys.dont_write_bytecode = True
    settings = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "1000"}
    settings |= {"CI": "true"}  # a test that cannot run, as without data, fails
    os.environ.update(settings)
    code = importlib.import_module("pytest").main(arguments)
    sys.stdout.flush()
    os._exit(int(code))  # at once: what else ends a process is the business of the one it is of


def load_libraries() -> None:
    """Import the libraries of all test runs once, before forking."""
    for name in LIBRARIES:
        importlib.import_module(name)


def examine(mutant: Mutant, known: Known, tree: Path, tiers: Sequence[str] = TIERS) -> Verdict:
    """Put a mutant into a tree, run its tests, and take it out again."""
    began, where = time.monotonic(), ""

    def verdict(result: str, by: str = "", why: str = "") -> Verdict:
        seconds = round(time.monotonic() - began, 1)
        return Verdict(mutant.name, mutant.cost, where, result, by, why, seconds)

    try:
        original, mutated = mutant.applied(known)
    except ValueError as failure:
        return verdict(BROKEN, why=str(failure))
    where = in_package(original)
    file = tree / PACKAGE / where
    try:
        file.write_text(ast.unparse(mutated), encoding="utf-8")
        code, said = run_tests(tree, mutant.tests, mutant.marker, tiers)
    except TimeoutError as failure:
        return verdict(BROKEN, why=str(failure))
    finally:
        shutil.copyfile(original, file)
    if code == PASSED:
        return verdict(SURVIVED)
    if code != FAILED or (found := FAILURE.search(said)) is None:
        return verdict(BROKEN, why=said[-500:])
    return verdict(KILLED, found[1], found[2] or "")


def check_baseline(mutants: Sequence[Mutant], tree: Path, tiers: Sequence[str]) -> None:
    """Run all their tests without a mutant. Ends the program if they do not pass."""
    for marker in sorted({mutant.marker for mutant in mutants}):
        wanted = {test for m in mutants if m.marker == marker for test in m.tests}
        code, said = run_tests(tree, sorted(wanted), marker, tiers)
        if code != PASSED:
            wrong = "\n".join(FAILED_LINE.findall(said)) or said[-1000:]
            sys.exit(f"Without a mutant, tests do not pass:\n{wrong}")


def examine_all(mutants: Sequence[Mutant], jobs: int, tiers: Sequence[str]) -> Iterator[Verdict]:
    """Examine mutants, some at a time, each in a tree that no other uses meanwhile.

    All of them in the code as it is at the start, however long they take.
    """
    trees: SimpleQueue[Path] = SimpleQueue()
    with ExitStack() as stack:
        whole = copy_tree(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        known = known_definitions(whole)
        for _ in range(jobs):
            trees.put(copy_tree(Path(stack.enter_context(tempfile.TemporaryDirectory())), whole))

        def work(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                return examine(mutant, known, tree, tiers)
            finally:
                trees.put(tree)

        tree = trees.get()
        check_baseline(mutants, tree, tiers)
        trees.put(tree)
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(work, mutants)


def as_row(verdict: Verdict) -> str:
    """A row of the table, as Markdown."""
    file, _, test = verdict.by.partition("[")[0].partition("::")
    words = test.removeprefix("test_").replace("_", " ")
    by = f"`{file.removeprefix('tests/')}`: {words}" if test else f"**{verdict.result}**"
    return f"| {verdict.name} | {verdict.cost} | `{verdict.file}` | {by} |"


def killed(verdicts: Iterable[Verdict]) -> int:
    """Return the number of mutants that tests have found."""
    return sum(verdict.result == KILLED for verdict in verdicts)


def write(out: Path, verdicts: Sequence[Verdict]) -> None:
    """Write the verdicts as JSON, a row each."""
    rows = [asdict(verdict) for verdict in verdicts]
    document = {"mutants": len(rows), "killed": killed(verdicts), "rows": rows}
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def earlier(out: Path | None) -> dict[str, Verdict]:
    """The verdicts that a file holds, by name."""
    if out is None or not out.exists():
        return {}
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    return {row["name"]: Verdict(**row) for row in rows}


def write_places(mutants: Sequence[Mutant], known: Known) -> None:
    """Write where the mutants of the last complete round are now, and leave the rest as it was."""
    by_name = {mutant.name: mutant for mutant in mutants}
    kept = [
        by_name[name].placed(known, verdict) if name in by_name else verdict
        for name, verdict in earlier(RECORD).items()
    ]
    write(RECORD, kept)


def main() -> None:
    """Examine the mutants, print a table and write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--check", action="store_true", help="only whether each still applies")
    parser.add_argument("--places", action="store_true", help="only write where each is now")
    parser.add_argument("--short", action="store_true", help="leave out long tests")
    parser.add_argument("--only", default="", help="part of a name, definition or file")
    parser.add_argument("--out", type=Path, help="with --only, its other rows stay as they are")
    options = parser.parse_args()
    mutants, known = read_table(), known_definitions(ROOT)
    if options.places:
        write_places(mutants, known)
        sys.exit()
    chosen = [m for m in mutants if options.only in f"{m.name}\n{m.place(known)}"]
    if options.check:
        check(chosen, known)
    verdicts = earlier(options.out) if options.only else {}
    load_libraries()
    print(HEAD, flush=True)
    for verdict in examine_all(chosen, options.jobs, TIERS[: 1 if options.short else 2]):
        print(as_row(verdict), flush=True)
        verdicts[verdict.name] = verdict
        if options.out:
            write(
                options.out,
                [m.placed(known, verdicts[m.name]) for m in mutants if m.name in verdicts],
            )
    count = killed(verdicts[m.name] for m in chosen)
    print(f"\n{count} of {len(chosen)} killed.")
    sys.exit(count < len(chosen))


if __name__ == "__main__":
    main()
