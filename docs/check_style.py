"""Check the wording of everything that a person can read, and exit with 1 if something is found.

    python docs/check_style.py
    python docs/check_style.py --sample 20 --seed 0    # sentences drawn at random, to be read

Reads comments, strings and docstrings of Python files, and the whole text of tables, templates,
configurations and pages. Add to :data:`BANNED` what reads badly
wherever you find it.
"""

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Folders and files that are read; recorded results and this list are not.
READ = ("dpmac_cli", "docs", "benchmarks", "sample_configs", ".github", ".")
KINDS = {".py", ".md", ".toml", ".yaml", ".yml", ".jinja", ".cff"}
#: The list itself.
LEFT_OUT = (Path(__file__),)
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
    r"\bof your own\b(?! \w)": "your own X",
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
    r"\b(bits a pixel|labels a (record|sample)|steps an epoch|milliseconds a step)\b": "per",
    r"\bworked on at a time\b": "processed at a time",
    r"\bpriced? (again|(it )?forward)\b": "recompute the privacy cost",
    r"\bturns? the question round\b": "solves for",
    r"\bwhat is wrong with\b": "fault, why",
    r"\bjoins? ``errors``": "is added to ``errors``",
    r"\bkept nowhere\b": "not saved",
    r"\bpart way\b": "partly trained, in progress",
    r"\bwent apart\b": "diverged",
    r"\ba whole safetensors\b|\bnot a whole one\b": "valid, complete",
}
#: The same, in pages alone: the project's own history, which the changelog has.
HISTORY: Mapping[str, str] = {
    r"\buntil now\b": "what is",
    r"\b(was|were) to take\b|\b(the )?targets? (was|were)\b|\bis missed by\b": "what was measured",
    r"\bearlier (version|measurement)s?\b|\bbefore that change\b": "what is",
    r"\bwhen this was measured\b|\bhave been removed\b|\bwas removed\b": "what is",
    r"\b(in|of) dpmac 0\.\d": "what is, or the version beside a measurement",
}
#: A sentence without markup, code or table cells.
SENTENCE = re.compile(r"(?<=[.!?] )[A-Z][^.|`\"{}<>]+\.(?= )")
#: First words that no docstring begins with.
OPENINGS = ("What ", "Whether ", "The same ", "Those ", "How ")


def files() -> Iterator[Path]:
    """Yield the files that are checked."""
    for name in READ:
        found = (ROOT / name).iterdir() if name == "." else (ROOT / name).rglob("*")
        for path in sorted(found):
            if path.suffix in KINDS and path not in LEFT_OUT and path.is_file():
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


def pages() -> Iterator[str]:
    """Yield lines of pages that tell history."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            for pattern, instead in HISTORY.items():
                if found := re.search(pattern, line, re.IGNORECASE):
                    yield f"docs/{path.name}:{number}: '{found[0]}': write {instead}"


def sample(count: int, seed: int) -> Iterator[str]:
    """Yield sentences of pages, messages and docstrings, with their files."""
    found = []
    for path in files():
        prose = path.suffix == ".md" or path.parts[-3:-1] != ("docs", "data")
        if prose and path.relative_to(ROOT).parts[0] in ("dpmac_cli", "docs", "README.md"):
            text = " ".join(line for _, line in texts(path))
            found += [(path, words) for words in SENTENCE.findall(text) if len(words.split()) > 7]
    for path, words in random.Random(seed).sample(found, count):  # noqa: S311  (no secret)
        yield f"{path.relative_to(ROOT)}: {' '.join(words.split())}"


def main() -> int:
    """Print what is found; return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--sample", type=int, metavar="N", help="print N sentences instead")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.sample:
        sys.stdout.writelines(f"{line}\n" for line in sample(options.sample, options.seed))
        return 0
    found = [
        f"{path.relative_to(ROOT)}:{number}: {fault}"
        for path in files()
        for number, fault in sorted(faults(path))
    ]
    found += pages()
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
