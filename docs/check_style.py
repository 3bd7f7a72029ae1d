"""Check the wording of everything that a person can read, and exit with 1 if something is found.

    python docs/check_style.py

Reads comments, strings and docstrings of Python files, and the whole text of tables, templates,
configurations and pages. Add to :data:`BANNED` what reads badly wherever you find it.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Folders and files that are read; recorded results and this list are not.
READ = ("dpmac_cli", "docs", "benchmarks", "sample_configs", ".github", ".")
KINDS = {".py", ".md", ".toml", ".yaml", ".yml", ".jinja", ".cff"}
#: Patterns, without regard to case, and what to write instead.
BANNED: Mapping[str, str] = {
    r"\bbill(s|ed)?\b(?! of)": "privacy cost",
    r"\b(go|goes|gone|going) on with\b": "resume, resumed",
    r"\bthe door\b": "validation",
    r"\banew\b": "again, from scratch",
    r"\bmend(s|ed|ing)?\b": "fix, repair",
    r"\bdear(er|est)\b": "expensive, higher",
    r"\bso many\b(?! \w+ right)": "N, at most N, as many as",
    r"\ba (row|line|batch) an? (sample|step|epoch|run|class|seed|unit)\b": "one row per sample",
    r"\b(one|a) record more or less\b": "adding or removing one record",
    r"\b(treats?|keeps?) samples apart\b": "is independent across samples",
    r"\bcomes? otherwise\b": "differs",
    r"\bone's own\b": "your own",
    r"\bof a person's own\b": "your own, user-supplied",
    r"\bof your own\b": "your own X",
    r"\bbut for (a|the) probability\b": "except with probability",
    r"\bnot so\b[:,]? [a-z]": "is not supported; use X instead",
    r"\bno matter\b": "does not matter",
    r"\bat its wits\b|\bto its end\b": "completely",
    r"\bit is meant\b|\bis to be had\b|\bcan(not)? be had\b": "is available",
    r"\bwhereof\b|\bthereof\b|\bthereby\b|\bhereby\b|\btherein\b|\bwherein\b": "of it, in it",
    r"\bin the place of\b": "instead of",
    r"\bnobody else's\b": "private",
    r"\blikewise\b": "also, in the same way",
    r"\bbe it\b|\blest\b|\bere\b|\bsave for\b": "plain words",
    r"\bis (no|not) longer than so\b": "is at most",
    r"\blies about\b": "is left over",
}
#: First words that no docstring begins with.
OPENINGS = ("What ", "Whether ", "The same ", "Those ", "How ")


def files() -> Iterator[Path]:
    """Yield the files that are checked."""
    for name in READ:
        found = (ROOT / name).iterdir() if name == "." else (ROOT / name).rglob("*")
        for path in sorted(found):
            if path.suffix in KINDS and path != Path(__file__) and path.is_file():
                yield path


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers and the words there."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(source.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


def openings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers and first lines of docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text.splitlines()[0]


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers and what is wrong there."""
    for number, text in texts(path):
        for pattern, instead in BANNED.items():
            if found := re.search(pattern, text, re.IGNORECASE):
                yield number, f"'{found[0]}': write '{instead}'"
    if path.suffix == ".py":
        for number, text in openings(path):
            if text.startswith(OPENINGS):
                yield number, f"'{text}': begin with a verb ('Return ...') or a noun phrase"


def main() -> int:
    """Print what is found; return the exit code."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {fault}"
        for path in files()
        for number, fault in sorted(faults(path))
    ]
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
