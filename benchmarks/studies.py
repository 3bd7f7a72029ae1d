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
    options = parser.parse_args(arguments)
    result = kills(options.count) if options.what == "kills" else times(options.rounds)
    write_json(options.json, result)


def started(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command of dpmac in a process of its own."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen([*DPMAC, *arguments], stdout=quiet, stderr=quiet)


def runs_of(out: Path) -> list[int]:
    """Return the processes that train a run of a study, by their command lines."""
    processes = list[int]()
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"train" in words and any(word.startswith(bytes(out)) for word in words):
            processes.append(int(entry.name))
    return processes


def finished_in(out: Path) -> dict[str, int]:
    """Return when each finished run of a study was published, by the name of its folder."""
    return {sums.parent.name: sums.stat().st_mtime_ns for sums in out.glob("runs/*/SHA256SUMS")}


def kills(count: int) -> dict[str, Any]:
    """Kill studies and runs in turn until ``count`` kills have struck a process.

    Each kill is described by what it struck, after how many seconds of the command, and how many
    runs were finished then.
    """
    draw, struck = random.Random(0), list[dict[str, Any]]()  # noqa: S311  (no secret)
    lost = repeated = studies = 0
    while len(struck) < count:
        studies += 1
        with tempfile.TemporaryDirectory() as folder:
            out, finished = Path(folder) / "study", dict[str, int]()
            code = None
            while code != 0:
                command = started(*LONGER, "--out", str(out))
                after = draw.uniform(0, LONGEST)
                time.sleep(after)
                target = "study" if len(struck) % 2 == 0 else "run"
                if len(struck) < count and kill(target, command, out, draw):
                    kept = len(finished_in(out))
                    struck.append({"of": target, "after_s": round(after, 1), "finished": kept})
                code = command.wait()
                assert code in (0, 4, -signal.SIGKILL), code
                now = finished_in(out)
                lost += len(finished.keys() - now.keys())
                for name in finished.keys() & now.keys():
                    repeated += now[name] != finished[name]
                finished = now
            assert len(finished) == 4, finished
    return {"kills": struck, "studies": studies, "lost": lost, "repeated": repeated}


def kill(target: str, command: subprocess.Popen[bytes], out: Path, draw: random.Random) -> bool:
    """Kill a study or one of its runs; return whether there was one."""
    if command.poll() is not None:
        return False
    if target == "study":
        command.kill()
        return True
    trained = runs_of(out)
    if trained:
        send(draw.choice(trained))
    return bool(trained)


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
    seconds: dict[str, list[float]] = {"study": [], "runs": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "study")
            planned = [*DPMAC, *SHORT, "--out", out, "--dry-run", "--json"]
            text = subprocess.run(planned, capture_output=True, check=True).stdout
            lines = [line.split() for line in json.loads(text)["commands"]]
            seconds["runs"].append(sum(cpu_of(*words[1:]) for words in lines))
        with tempfile.TemporaryDirectory() as folder:
            seconds["study"].append(cpu_of(*SHORT, "--out", str(Path(folder) / "study")))
    ratio = min(seconds["study"]) / min(seconds["runs"])
    return {**seconds, "ratio": round(ratio, 3)}


if __name__ == "__main__":
    main()
