"""Count what makes the package easy or hard to change, at some commits, as a Markdown table.

    python benchmarks/house.py f4b56a6 HEAD

Rows: rooms (packages and top-level modules) and arrows (imports between them), lookups of settings
by string and how many of them mypy does not check (all are misspelt to find out), long functions,
files that mention ``multilabel``, public names that two modules define, and code lines by room: of
.py, .toml and .jinja, without docstrings, comments and blank lines.
"""

import argparse
import ast
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from dpmac_cli.config.settings import SETTINGS

ROOT = Path(__file__).parent.parent
PACKAGE = "dpmac_cli"
LONG = 40
#: Names of settings, as fields and as flags.
NAMES = {text for name in SETTINGS for text in (name, name.replace("_", "-"))}
#: Tokens that are no code.
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def room_of(module: str, packages: set[str]) -> str:
    """Return the innermost package of a module, or the module itself at the top level."""
    parts = module.split(".")
    rooms = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return next((room for room in reversed(rooms) if room in packages), parts[0])


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules of the package that a module imports, as far as the text says."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def code_lines(file: Path) -> int:
    """Return the number of lines of code of a file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        lines = (line.strip() for line in text.splitlines())
        return sum(bool(line) and not line.startswith("#") for line in lines)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines_of = {
        line
        for token in tokens
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines_of - docstring_lines(ast.parse(text)))


def lookups(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings with which a setting, or something of its name, is looked up."""
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            key = node.args[0] if node.func.attr in {"get", "pop"} and node.args else None
        if isinstance(key, ast.Constant) and key.value in NAMES:
            yield key


def misspelt(text: str) -> tuple[str, list[int]]:
    """Return a module in which every such string is misspelt, each differently, and their lines."""
    lines = text.splitlines(keepends=True)
    keys = sorted(lookups(ast.parse(text)), key=lambda key: (key.lineno, key.col_offset))
    for number, key in reversed(list(enumerate(keys))):
        line = lines[key.lineno - 1].encode()
        word, start = str(key.value).encode(), key.col_offset + 1
        if line[start:].startswith(word):  # the place of a string within an f-string is not exact
            before, after = line[:start], line[start:]
        else:
            before, after = line.rsplit(word, 1)
            after = word + after
        lines[key.lineno - 1] = b"".join((before, b"misspelt%d_" % number, after)).decode()
    return "".join(lines), [key.lineno for key in keys]


def unchecked(package: Path) -> list[str]:
    """Return where mypy does not notice that such a string is misspelt, as FILE:LINE."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / PACKAGE
        shutil.copytree(package, copy)
        shutil.copy(ROOT / "pyproject.toml", folder)
        places: Counter[str] = Counter()
        for file in sorted(copy.rglob("*.py")):
            text, lines = misspelt(file.read_text("utf-8"))
            file.write_text(text, "utf-8")
            places.update(f"{file.relative_to(folder)}:{line}" for line in lines)
        command = (sys.executable, "-m", "mypy", PACKAGE)
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    errors = (
        line.split(": error: ")[0] for line in said.stdout.splitlines() if ": error: " in line
    )
    return sorted((places - Counter(errors)).elements())


def public_names(tree: ast.Module) -> Iterator[str]:
    """Public functions and classes of a module."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name


def counts(package: Path) -> dict[str, int]:
    """Return the rows of a tree."""
    files = sorted(f for kind in ("py", "toml", "jinja") for f in package.rglob(f"*.{kind}"))
    modules = {
        ".".join(f.relative_to(package).with_suffix("").parts): ast.parse(f.read_text("utf-8"))
        for f in files
        if f.suffix == ".py"
    }
    packages = {name.removesuffix(".__init__") for name in modules if name.endswith(".__init__")}
    rooms = {room_of(name, packages) for name in modules if name != "__init__"}
    arrows: set[tuple[str, str]] = set()
    names: dict[str, set[str]] = defaultdict(set)
    long = found = 0
    for name, tree in modules.items():
        for target in imported(tree):
            if target.startswith(f"{PACKAGE}."):
                there = room_of(target.removeprefix(f"{PACKAGE}."), packages)
                here = room_of(name, packages)
                if there in rooms and here in rooms and here != there:
                    arrows.add((here, there))
        found += len(list(lookups(tree)))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                long += (node.end_lineno or 0) - node.lineno + 1 > LONG
        for public in public_names(tree):
            names[public].add(name)
    by_room: Counter[str] = Counter()
    for file in files:
        by_room[file.relative_to(package).parts[0]] += code_lines(file)
    mentions = sum("multilabel" in f.read_text("utf-8") for f in files)
    return {
        "rooms": len(rooms),
        "arrows": len(arrows),
        "settings looked up by string": found,
        "of these, not checked by mypy": len(unchecked(package)),
        f"functions above {LONG} lines": long,
        "files that mention `multilabel`": mentions,
        "functions and classes with the name of another": sum(
            len(where) for where in names.values() if len(where) > 1
        ),
        "code lines": sum(by_room.values()),
        **{f"code lines of `{room}`": by_room[room] for room in sorted(by_room)},
    }


def at(commit: str) -> dict[str, int]:
    """Return the rows at a commit."""
    command = ("git", "archive", commit, PACKAGE)
    packed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        return counts(Path(folder) / PACKAGE)


def main() -> None:
    """Print a table with one column per commit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("commits", nargs="+", help="commits, the earliest first")
    commits = parser.parse_args().commits
    columns = [at(commit) for commit in commits]
    print(f"| | {' | '.join(commits)} |")
    print("|---" * (1 + len(commits)) + "|")
    for row in dict.fromkeys(name for column in columns for name in column):
        print(f"| {row} | {' | '.join(f'{column.get(row, 0):,}' for column in columns)} |")


if __name__ == "__main__":
    main()
