"""The promises that tests keep, each with a mark: ``@pytest.mark.promise("sampling")``.

``python -m tests.promises`` writes the table of tests/PROMISES.md.
"""

import ast
import functools
import re
import tomllib
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "PROMISES.md"
BUGS = HERE.parent / "benchmarks" / "mutants.toml"
MARK = re.compile(r"mark\.promise\('([a-z-]+)'\)")

PROMISES = {
    "price": "epsilon is the accountant's, for the sampler and the steps that really ran",
    "allocation": "the cost of random allocation agrees with quadrature",
    "risk": "no attack exceeds the bounds of `--risk`",
    "target": "a target epsilon is met, a budget is not exceeded",
    "sampling": "batches are sampled as accounted for",
    "one": "no record moves the sum by more than 1, in float32 too",
    "unit": (
        "a unit of several records moves the sum by at most 1, and is sampled, split and "
        "resumed as a whole"
    ),
    "views": "a record in many augmented views counts as one; schedules do not change the noise",
    "alone": "a network and its loss see one record at a time, or are refused",
    "validated": "what was validated is what runs, and is published",
    "silent": "what a program changes between steps by mistake is noticed or harmless",
    "noise": "noise has the stated deviation, is independent, and is never reused",
    "mean": "the state of an optimizer depends only on the noisy mean",
    "precision": "the arithmetic of a step does not depend on the program around it",
    "secure": "the randomness and the grid of `--secure`",
    "failed": "a step that fails is charged, and its noise is not used again",
    "again": "training a network again adds up",
    "resume": (
        "a resumed run draws with new keys, none of which is on disk, and counts every "
        "step that began"
    ),
    "ledger": "the record of the spent budget survives kills and lost files",
    "silo": (
        "what leaves a silo is noisy weights and public facts, charged before a record is read, "
        "whatever fails or is killed"
    ),
    "faults": "kills, faults, altered files and memory that runs out change no price",
    "ranks": (
        "ranks take the same steps as one process, add noise once, and receive neither "
        "noise nor its key"
    ),
    "facts": "facts of user-supplied data are those of the records that were trained on",
    "reading": (
        "no record decides how another is read, or what is published except through the noise"
    ),
    "features": (
        "frozen features depend on one record alone, and only their owner can read the cache"
    ),
    "scores": "covered scores are noisy, paid for, and depend on each test record alone",
    "histogram": (
        "one unit moves a noisy histogram by at most its sensitivity; it is of training records "
        "alone, charged before they are read, and once"
    ),
    "ranges": (
        "ranges and ranks of columns follow from noisy counts alone, each charged before it is "
        "read, and kept once they are stored"
    ),
    "search": (
        "a search draws settings and a number of trials as accounted for; only its winner is left"
    ),
    "published": (
        "published files contain no seed, key, state, batch, pre-noise value, path, user or host"
    ),
    "said": "report, header and card say what the guarantee covers and what it does not",
    "code": "no file makes dpmac run code",
    "mistakes": "what honest people do wrong is refused or said, at every door",
    "fuzz": "no typed or damaged input breaks the above",
    "audit": (
        "the guarantee withstands an attack that detects a tenth of the noise, missing clipping "
        "and repeated records"
    ),
    "attack": "the figures of an attack are in one file, which only its owner can read",
    "budget": "a budget counts every fit before it begins, and no copy of it pays again",
    "estimators": "bounds are declared, and no other step of a pipeline learns from records",
    "bugs": "a bug injected for each of these is found by its tests",
}


@functools.cache
def tests_of_promises() -> dict[str, set[str]]:
    """Return the tests that keep each promise, "tests/test_name.py::test_what", by its mark."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(HERE.rglob("test_*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        marks = [
            ast.unparse(node)
            for node in body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        ]
        tests = [n for n in body if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
        for test in tests:
            own = [ast.unparse(decorator) for decorator in test.decorator_list]
            for name in MARK.findall(" ".join([*own, *marks])):
                found[name].add(f"{path.relative_to(HERE.parent).as_posix()}::{test.name}")
    return found


@functools.cache
def bugs_of_promises() -> dict[str, int]:
    """Return how many injected bugs break each promise: those that one of its tests must find."""
    tests, found = tests_of_promises(), dict.fromkeys(PROMISES, 0)
    for bug in tomllib.loads(BUGS.read_text(encoding="utf-8"))["mutant"]:
        for name in PROMISES:
            found[name] += any(
                test.startswith(part) for part in bug["tests"] for test in tests[name]
            )
    return found


def page() -> str:
    """Return the page of promises, whose table is that of the marks."""
    tests, bugs = tests_of_promises(), bugs_of_promises()
    rows = []
    for name, said in PROMISES.items():
        files = sorted({test.partition("::")[0] for test in tests[name]})
        named = ", ".join(f"`{file}`" for file in files)
        rows.append(f"| {said} | `{name}` | {bugs[name]} | {named} |")
    return "\n".join(
        [
            "# How each promise is tested\n",
            "Tests with a mark (`pytest -m promise`) fail when a promise is broken, and so they do "
            "with each of the injected bugs that are counted\nhere (`benchmarks/mutants.toml`). "
            "This page is written by `python -m tests.promises`.\n",
            "| promise | mark | injected bugs | tests |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
