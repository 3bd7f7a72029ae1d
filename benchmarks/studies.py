"""Kill a comparison and its runs at random instants, and compare its time with that of its runs.

    python benchmarks/studies.py kills --count 20 --json docs/data/study_kills.json
    python benchmarks/studies.py times --rounds 3 --json docs/data/study_times.json

``kills``: a comparison of the digits is started, and after a random time SIGKILL strikes the
comparison itself or one of its runs, in turn. Then the same command is given again. No file of a
finished run may change, and at the end every run must be finished, once.

``times``: CPU seconds of a comparison of eight runs of one epoch, two at a time, with those of its
runs, beside the CPU seconds of the same eight commands ``dpmac train`` one after the other. CPU
time does not depend on what else the machine computes.
"""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import parser_of, write_json

DPMAC = (sys.executable, "-m", "dpmac_cli")
STUDY = ("compare", "--dataset", "digits", "--sigma", "4", "--device", "cpu", "--jobs", "2")
#: Eight runs that take little longer than to start.
SHORT = (*STUDY, "--epochs", "1", "--seeds", "4", "--optimizers", "dp-sgd,dp-adam")
#: Four runs that are killed.
LONGER = (*STUDY, "--epochs", "60", "--seeds", "2", "--optimizers", "dp-sgd,dp-adam")
#: Longest time until a kill, in seconds.
LONGEST = 20.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what was asked for, and write it as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("kills", "times"))
    parser.add_argument("--count", type=int, default=20, help="number of kills")
    parser.add_argument("--rounds", type=int, default=3, help="number of times that each is timed")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found = kills(given.count) if given.what == "kills" else times(given.rounds)
    write_json(given.json, found)


def started(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command of dpmac in a process of its own."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen([*DPMAC, *arguments], stdout=quiet, stderr=quiet)


def runs_of(out: Path) -> list[int]:
    """Return the processes that train a run of a study, by their command lines."""
    found = list[int]()
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"train" in words and any(word.startswith(bytes(out)) for word in words):
            found.append(int(entry.name))
    return found


def finished_in(out: Path) -> dict[str, int]:
    """Return when each finished run of a study was published, by the name of its folder."""
    return {sums.parent.name: sums.stat().st_mtime_ns for sums in out.glob("runs/*/SHA256SUMS")}


def kills(count: int) -> dict[str, Any]:
    """Kill studies and runs in turn until ``count`` kills have struck."""
    draw, struck = random.Random(0), list[str]()  # noqa: S311  (no secret)
    lost = repeated = studies = 0
    while len(struck) < count:
        studies += 1
        with tempfile.TemporaryDirectory() as folder:
            out, done = Path(folder) / "study", dict[str, int]()
            while True:
                command = started(*LONGER, "--out", str(out))
                time.sleep(draw.uniform(0, LONGEST))
                if command.poll() is None and len(struck) < count:
                    whom = "study" if len(struck) % 2 == 0 else "run"
                    trained = runs_of(out)
                    if whom == "study":
                        command.kill()
                    elif trained:
                        send(draw.choice(trained))
                    struck.append(whom)
                code = command.wait()
                now = finished_in(out)
                lost += len(done.keys() - now.keys())
                repeated += sum(now[name] != moment for name, moment in done.items() if name in now)
                done = now
                if code == 0:
                    break
            assert len(done) == 4, done
    return {"kills": struck, "studies": studies, "lost": lost, "repeated": repeated}


def send(process: int) -> None:
    """Kill a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def cpu_of(*arguments: str) -> float:
    """Return the CPU seconds of a command with all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert started(*arguments).wait() == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def times(rounds: int) -> dict[str, Any]:
    """Time a study, and the same runs by themselves, in turn."""
    found: dict[str, list[float]] = {"study": [], "runs": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "study")
            planned = [*DPMAC, *SHORT, "--out", out, "--dry-run", "--json"]
            text = subprocess.run(planned, capture_output=True, check=True).stdout
            lines = [line.split() for line in json.loads(text)["commands"]]
            found["runs"].append(sum(cpu_of(*words[1:]) for words in lines))
        with tempfile.TemporaryDirectory() as folder:
            found["study"].append(cpu_of(*SHORT, "--out", str(Path(folder) / "study")))
    ratio = min(found["study"]) / min(found["runs"])
    return {**found, "ratio": round(ratio, 3)}


if __name__ == "__main__":
    main()
