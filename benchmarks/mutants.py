"""Put privacy bugs into the code, one at a time, and run the tests that must find them.

    python benchmarks/mutants.py --out docs/data/mutants.json    # all of them: half an hour
    python benchmarks/mutants.py --only chunks     # some, by name, definition or file
    python benchmarks/mutants.py --check           # only whether each still applies: seconds

The bugs are in mutants.toml. Each names a definition and the code to replace there; both are
compared as ``ast.unparse`` writes them, so layout, comments and the file do not matter. The tests
run in a copy of the tree, first without any bug, when they must pass. Exit code 1 if a bug goes
unnoticed or no longer applies to the code.
"""

import ast
import builtins
import difflib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

from common import parser_of

ROOT = Path(__file__).parent.parent
PACKAGE = "dpmac_cli"
TABLE = Path(__file__).with_suffix(".toml")
#: Seconds that tests may take: a bug may have them go on for ever.
LIMIT = 1800
#: Loaded before any test is run. None starts a thread.
LIBRARIES = (
    *("pytest", "numpy", "scipy.stats", "sklearn.datasets", "torch", "torchvision", "torch.func"),
    *("dp_accounting.pld.pld_privacy_accountant", "dp_accounting.rdp.rdp_privacy_accountant"),
    *("safetensors.torch", "click.testing", "matplotlib.pyplot", "rich.live"),
)
FORKS = multiprocessing.get_context("fork")
#: Markers of the tests to run, one after the other, until one fails.
TIERS = ("not long and not weekly", "long and not weekly", "weekly")
KILLED, SURVIVED, BROKEN = "killed", "survived", "broken"
PASSED, FAILED, NO_TESTS = 0, 1, 5  # exit codes of pytest
FAILED_LINE = re.compile(r"^(?:FAILED|ERROR) .*$", re.MULTILINE)
FAILURE = re.compile(r"^FAILED (\S+::.*?)(?: - (.*))?$", re.MULTILINE)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, eq=False)
class Definition:
    """A function, method, class or constant of the package, by its qualified name."""

    name: str
    file: Path
    node: Any

    @cached_property
    def text(self) -> str:
        """Its code, formatted in one way."""
        return ast.unparse(self.node)

    def within(self, text: str) -> str:
        """Return the code of its file with another text in its place."""
        lines = source(self.file).splitlines()
        decorators = getattr(self.node, "decorator_list", [])
        first = min(each.lineno for each in (self.node, *decorators))
        lines[first - 1 : self.node.end_lineno] = [
            textwrap.indent(text, self.node.col_offset * " ")
        ]
        return "\n".join(lines) + "\n"


#: Definitions of the package by qualified name.
Known: TypeAlias = Mapping[str, list[Definition]]


@cache
def source(file: Path) -> str:
    """Return the text of a file."""
    return file.read_text(encoding="utf-8")


@cache
def words(text: str) -> frozenset[str]:
    """Return the names in a text."""
    return frozenset(re.findall(r"\w+", text))


def known_definitions(tree: Path) -> Known:
    """Return every definition of the package in a tree."""
    known: dict[str, list[Definition]] = {}
    for file in sorted((tree / PACKAGE).rglob("*.py")):
        for found in definitions(ast.parse(source(file)), "", file):
            known.setdefault(found.name, []).append(found)
    return known


def definitions(scope: ast.AST, prefix: str, file: Path) -> Iterator[Definition]:
    """Yield the definitions within a module, class or function."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, SCOPES):
            yield Definition(prefix + node.name, file, node)
            yield from definitions(node, f"{prefix}{node.name}.", file)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and not isinstance(scope, ast.FunctionDef):
                    yield Definition(prefix + target.id, file, node)
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            yield from definitions(node, prefix, file)


def formatted(code: str) -> tuple[str, bool]:
    """Return code formatted in one way, and whether it is an expression.

    Raises:
        ValueError: it is not Python.
    """
    with suppress(SyntaxError):
        return ast.unparse(ast.parse(f"({code}\n)", mode="eval")), True
    try:
        return ast.unparse(ast.parse(textwrap.dedent(code).strip())), False
    except SyntaxError as failure:
        raise ValueError(f"not Python ({failure.msg}): {code.strip()}") from failure


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
    marker: str = "promise"

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> "Mutant":
        """Return the mutant that a row of the table describes."""
        where, replace = row.pop("in"), row.pop("replace", None)
        if (replace is None) == ("old" not in row):
            sys.exit(f"{row['name']}: needs either old and new or replace.")
        row |= {"tests": tuple(row["tests"])}
        return cls(where=where, **row if replace is None else {**row, "new": replace})

    def applied(self, known: Known) -> tuple[Path, str]:
        """Return the file that the bug goes into, and its code with the bug in it.

        Raises:
            ValueError: there is not exactly one place for it, or it is not Python.
        """
        named = known.get(self.where, [])
        if not named:
            close = ", ".join(difflib.get_close_matches(self.where, known, n=3))
            raise ValueError(f"there is no {self.where}; look at {close}")
        new, is_value = formatted(self.new) if self.new.strip() else ("pass", False)
        if not self.old:
            (place,) = (each for each in named if isinstance(each.node, ast.FunctionDef))
            head = ast.parse(place.text).body[0]
            head.body = ast.parse(new).body  # type: ignore[attr-defined]
            return place.file, self.checked(place, ast.unparse(head))
        old, was_value = formatted(self.old)
        if is_value and was_value:
            found = re.compile(rf"(?<![\w.]){re.escape(old)}(?!\w)")
            new = f"({new})"
        else:
            found = re.compile(rf"^( *){re.escape(old)}$".replace("\\\n", "\n\\1"), re.MULTILINE)
        counts = [(each, len(found.findall(each.text))) for each in named]
        if (total := sum(count for _, count in counts)) != 1:
            raise ValueError(f"its old code occurs {total} times in {self.where}")
        (place,) = (each for each, count in counts if count)

        def put(match: re.Match[str]) -> str:
            return textwrap.indent(new, match[1]) if match.re.groups else new

        return place.file, self.checked(place, found.sub(put, place.text))

    def checked(self, place: Definition, text: str) -> str:
        """Return the file with a definition changed.

        Raises:
            ValueError: it is not Python, or uses a name that the file does not have.
        """
        try:
            ast.parse(text)
        except SyntaxError as failure:
            raise ValueError(f"{self.where} would not compile ({failure.msg})") from failure
        names = words(source(place.file)) | {*dir(builtins)}
        new = list(ast.walk(ast.parse(formatted(self.new)[0])))
        bound = {getattr(each, kind, None) for each in new for kind in ("arg", "name", "asname")}
        bound |= {n.id for n in new if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        if lost := {each.id for each in new if isinstance(each, ast.Name)} - names - bound:
            said = ", ".join(sorted(lost))
            raise ValueError(f"its new code uses {said}, which the file does not define")
        return place.within(text)

    def place(self, known: Known) -> str:
        """Return the file that the bug goes into, or ""."""
        with suppress(ValueError):
            return in_package(self.applied(known)[0])
        return ""

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
            elif name and f"def {name}(" not in source(ROOT / file):
                yield f"there is no {test}"


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
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    mutants = [Mutant.of_row(row) for row in rows]
    twice = [name for name, count in Counter(m.name for m in mutants).items() if count > 1]
    if twice:
        sys.exit(f"Two mutants have one name: {', '.join(twice)}.")
    return mutants


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


def run_tests(tree: Path, tests: Sequence[str], marker: str) -> tuple[int, str]:
    """Run tests of a tree up to the first failure: pytest's exit code, and what it printed.

    Those that are long or weekly only run if none of the others fails. Each tier runs in a process
    forked from this one, which has loaded the libraries, but nothing of the package.

    Raises:
        TimeoutError: they go on for ever.
    """
    least, text = NO_TESTS, ""
    for tier in TIERS:
        marked = f"{marker} and {tier}" if marker else tier
        arguments = [
            "-x",
            "-q",
            "-n0",
            "--weekly",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "-m",
            marked,
        ]
        arguments += [f"--rootdir={tree}", f"--basetemp={tree.parent / 'files'}", *tests]
        said = tree.parent / "said"
        process = FORKS.Process(target=_run_tests, args=(tree, arguments, said))
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"its tests take longer than {LIMIT} seconds")
        code, text = process.exitcode or 0, said.read_text(encoding="utf-8")
        if code not in (PASSED, NO_TESTS):
            return code, text
        least = min(least, code)
    return least, text


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
    os.environ.update(settings | {"CI": "true"})  # a test that cannot run, as without data, fails
    code = importlib.import_module("pytest").main(arguments)
    sys.stdout.flush()
    os._exit(int(code))  # at once: what else ends a process is the business of the one it is of


def examine(mutant: Mutant, known: Known, tree: Path) -> Verdict:
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
        file.write_text(mutated, encoding="utf-8")
        code, said = run_tests(tree, mutant.tests, mutant.marker)
    except TimeoutError as failure:
        return verdict(BROKEN, why=str(failure))
    finally:
        shutil.copyfile(original, file)
    if code == PASSED:
        return verdict(SURVIVED)
    if code != FAILED or (found := FAILURE.search(said)) is None:
        return verdict(BROKEN, why=said[-500:])
    return verdict(KILLED, found[1], found[2] or "")


def check_baseline(mutants: Sequence[Mutant], tree: Path) -> None:
    """Run all their tests without a mutant. Ends the program if they do not pass."""
    for marker in sorted({mutant.marker for mutant in mutants}):
        wanted = {test for m in mutants if m.marker == marker for test in m.tests}
        code, said = run_tests(tree, sorted(wanted), marker)
        if code != PASSED:
            wrong = "\n".join(FAILED_LINE.findall(said)) or said[-1000:]
            sys.exit(f"Without a mutant, tests do not pass:\n{wrong}")


def examine_all(mutants: Sequence[Mutant], jobs: int) -> Iterator[Verdict]:
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
                return examine(mutant, known, tree)
            finally:
                trees.put(tree)

        tree = trees.get()
        check_baseline(mutants, tree)
        trees.put(tree)
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(work, mutants)


def write(out: Path, verdicts: Sequence[Verdict]) -> None:
    """Write the verdicts as JSON, a row each."""
    killed = sum(verdict.result == KILLED for verdict in verdicts)
    rows = [asdict(verdict) for verdict in verdicts]
    document = {"mutants": len(rows), "killed": killed, "rows": rows}
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Examine the mutants, print a line each, and write them."""
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--check", action="store_true", help="only whether each still applies")
    parser.add_argument("--only", default="", help="part of a name, definition or file")
    parser.add_argument("--out", type=Path, help="with --only, its other rows stay as they are")
    options = parser.parse_args()
    mutants, known = read_table(), known_definitions(ROOT)
    chosen = mutants
    if options.only:
        chosen = [m for m in mutants if options.only in f"{m.name}\n{m.where}\n{m.place(known)}"]
    if options.check:
        check(chosen, known)
    verdicts: dict[str, Verdict] = {}
    if options.only and options.out:
        rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
        verdicts = {row["name"]: Verdict(**row) for row in rows}
    for name in LIBRARIES:
        importlib.import_module(name)
    for verdict in examine_all(chosen, options.jobs):
        by = verdict.by or verdict.why
        print(f"{verdict.result}: {verdict.name} ({verdict.file}), by {by}", flush=True)
        verdicts[verdict.name] = verdict
        if options.out:
            write(options.out, [verdicts[m.name] for m in mutants if m.name in verdicts])
    missed = sum(verdicts[m.name].result != KILLED for m in chosen)
    print(f"\n{len(chosen) - missed} of {len(chosen)} killed.")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
