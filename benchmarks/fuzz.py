"""Types thousands of commands, right and wrong, among whole and damaged files: what comes of it?

    PYTHONPATH=. python benchmarks/fuzz.py --cases 2000 --processes 50 --out docs/data/fuzz.json

Most are typed in one process, where data are read once, runs are asked to stop after a few steps
and comparisons train in place; some as processes of their own, with a time limit. Each must end
with an exit code that its command documents, other than 1, without a traceback, with a message
that names a flag or a file if it was refused, and without having lost, altered or left anything
where it was not asked to. See ``tests/fuzzing.py``.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import hypothesis
import torch

from tests.fuzzing import (
    ENVIRONMENT,
    TOO_LONG,
    Case,
    Outcome,
    attempt_in,
    generate,
    make_world,
    prepare,
    quickened,
    type_here,
)

#: Nothing is downloaded: nobody listens there.
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")


def type_apart(args: Sequence[str]) -> Outcome:
    """Type a command in the working folder, as a process of its own."""
    began = time.perf_counter()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "dpmac_cli", *args],
            check=False,
            capture_output=True,
            env={**os.environ, **ENVIRONMENT, **OFFLINE},
            timeout=TOO_LONG,
        )
    except subprocess.TimeoutExpired:
        return Outcome(None, "", "", time.perf_counter() - began)
    stdout, stderr = (text.decode(errors="replace") for text in (ended.stdout, ended.stderr))
    return Outcome(ended.returncode, stdout, stderr, time.perf_counter() - began)


class Tally:
    """Counts of outcomes of cases.

    Args:
        apart: whether each is a process of its own.
        root: a folder to work in, which holds the world.
        keep: where the folders of cases that fail are kept.
    """

    def __init__(self, apart: bool, root: Path, keep: Path) -> None:
        self.apart, self.root, self.keep = apart, root, keep
        self.counts: Counter[tuple[str, int | None]] = Counter()
        self.different: set[str] = set()
        self.slowest = (0.0, "")
        self.failures = 0

    def attempt(self, case: Case) -> None:
        """Try a case, count it, and print it if it fails."""
        where, world = self.root / "case", self.root / "world"
        shutil.rmtree(where, ignore_errors=True)
        outcome, wrong = attempt_in(where, world, case, type_apart if self.apart else type_here)
        self.counts[case.command, outcome.code] += 1
        self.different.add(repr(case))
        self.slowest = max(self.slowest, (round(outcome.seconds, 1), case.typed[:200]))
        if wrong:
            self.failures += 1
            kept = self.keep / f"{'process' if self.apart else 'case'}-{self.failures}"
            shutil.rmtree(kept, ignore_errors=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            prepare(case, world, kept)
            print(f"(cd {kept} && {case.typed})", *wrong, *case.damages, sep="\n    ")
            print(f"    {outcome.stderr[-400:]}", flush=True)

    def summary(self) -> dict[str, Any]:
        """As JSON values."""
        codes: dict[str, dict[str, int]] = {}
        for (command, code), count in sorted(self.counts.items(), key=str):
            codes.setdefault(command, {})[str(code)] = count
        return {
            "cases": self.counts.total(),
            "different": len(self.different),
            "failures": self.failures,
            "exit_codes": codes,
            "slowest": dict(zip(("seconds", "typed"), self.slowest, strict=True)),
        }


def main() -> None:
    """Try all cases, print counts and write them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cast(io.TextIOWrapper, sys.stdout).reconfigure(errors="surrogateescape")
    torch.set_num_threads(1)
    keep = options.keep.absolute()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        make_world(Path(name, "world"))
        for kind, count in (("in one process", options.cases), ("as processes", options.processes)):
            if not count:
                continue
            apart = kind == "as processes"
            tally = Tally(apart, Path(name), keep)
            with nullcontext() if apart else quickened():
                generate(tally.attempt, Path(name, "world"), count, options.seed)
            results[kind] = tally.summary()
            print(f"{kind}: {json.dumps(results[kind], indent=2)}", flush=True)
    if options.out:
        document = {"seed": options.seed, "hypothesis": hypothesis.__version__, **results}
        options.out.write_text(json.dumps(document, indent=2) + "\n")
    if any(result["failures"] for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
