"""Kills runs at random instants and resumes them: do they end as if nothing had happened?

    python benchmarks/kills.py --kills 100 --out docs/data/kills.json

Each optimizer trains the digits once undisturbed. Then the same command is killed by SIGKILL after
a random time, from before it has made its folder to after its report, and resumed, and killed
again; where nothing can be resumed yet, it is begun again. Once a few kills have struck, it may
end, and weights, metrics (but for seconds) and epsilon are compared bit by bit with the
undisturbed run's.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import dpmac_cli.release.run  # noqa: F401  (once, for all processes)
from dpmac_cli.__main__ import main

OPTIMIZERS = ("dp-sgd", "adaclip", "dp-adam", "dp-adambc", "dp-macadam", "dp-macadambc")
SETTINGS = ("--dataset", "digits", "--sigma", "6", "--epochs", "40", "--seed", "7")
#: Often, so that kills strike while a file is written.
OFTEN = ("--checkpoint-every", "3")
#: Kills of one run before it may end.
KILLS_A_RUN = 4
#: Share of the kills that strike while a command is yet to save anything, and at any time; the
#: others strike after it has.
EARLY, ANY_TIME = 0.2, 0.2
AFTER = "after the last file"


def command(said: Path, *args: str) -> ForkProcess:
    """Type a command, in a process of its own; what it says goes to a file."""
    process = multiprocessing.get_context("fork").Process(target=_typed, args=(said, args))
    process.start()
    return process


def _typed(said: Path, args: Sequence[str]) -> None:
    sys.argv = ["dpmac", "train", *args, *OFTEN]
    with said.open("w") as sys.stderr, open(os.devnull, "w") as sys.stdout:
        main()


def begun(optimizer: str, out: Path) -> tuple[str, ...]:
    """The command that begins a run, whatever a kill has left in its place."""
    return (*SETTINGS, "--optimizer", optimizer, "--out", str(out), "--force")


def result(out: Path) -> dict[str, Any]:
    """Return the results of a finished run."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((out / "report.json").read_bytes())
    return {
        "weights": safetensors.torch.load_file(out / "model.safetensors"),
        "metrics": [{k: v for k, v in line.items() if k != "seconds"} for line in lines],
        "epsilon": report["privacy"]["epsilon"],
        "events": report["privacy"]["events"],
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit by bit."""
    first, second = one["weights"], other["weights"]
    return (
        first.keys() == second.keys()
        and all(torch.equal(first[name], second[name]) for name in first)
        and all(one[key] == other[key] for key in ("metrics", "epsilon", "events"))
    )


def stage(out: Path) -> str:
    """Return the stage at which a run was killed."""
    if not out.exists():
        return "before the folder"
    if (out / "SHA256SUMS").exists() and "report.json" in (out / "SHA256SUMS").read_text():
        return AFTER
    if (out / "report.json").exists() or (out / "model.safetensors").exists():
        return "among the last files"
    steps = [int(path.stem[5:]) for path in out.glob("checkpoint/step-*.safetensors")]
    if not steps:
        return "before the first checkpoint"
    return "while training" if max(steps) else "before the second checkpoint"


def strike(running: ForkProcess, out: Path, wait: float, any_time: bool) -> None:
    """Kill a command some time after it was typed, or after it first wrote; it may end before."""
    before = {path.name for path in out.glob("checkpoint/*")}
    while not any_time and running.is_alive():
        if {path.name for path in out.glob("checkpoint/*")} != before:
            break
        time.sleep(0.005)
    running.join(wait)
    running.kill()


def disturbed(
    optimizer: str, out: Path, set_up: float, whole: float, rng: random.Random
) -> Counter[str]:
    """Kill and resume a run until it may end; at which stages it was killed."""
    stages: Counter[str] = Counter()
    trained = whole - set_up
    while True:
        saved = any(out.glob("checkpoint/step-*.safetensors"))
        said = out.with_suffix(".said")
        running = command(said, *(("--resume", str(out)) if saved else begun(optimizer, out)))
        if sum(stages.values()) < KILLS_A_RUN and not stages[AFTER]:
            kind = rng.random()
            longest = set_up if kind < EARLY else whole if kind < EARLY + ANY_TIME else trained
            strike(running, out, rng.uniform(0, 1.1 * longest), kind < EARLY + ANY_TIME)
        running.join()
        code = running.exitcode or 0
        if code < 0:
            stages[stage(out)] += 1
        elif code == 0 or "is finished" in said.read_text():
            return stages
        else:
            raise RuntimeError(f"exit code {code}: {said.read_text()}")


def study(optimizer: str, kills: int, rng: random.Random) -> dict[str, Any]:
    """Kill runs of one optimizer ``kills`` times."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        started = time.monotonic()
        running = command(root / "whole.said", *begun(optimizer, root / "whole"))
        while not (root / "whole" / "checkpoint").exists() and running.is_alive():
            time.sleep(0.005)
        set_up = time.monotonic() - started
        running.join()
        whole = time.monotonic() - started
        expected = result(root / "whole")
        stages: Counter[str] = Counter()
        runs = right = 0
        while sum(stages.values()) < kills:
            out = root / f"run-{runs}"
            stages += disturbed(optimizer, out, set_up, whole, rng)
            runs += 1
            right += same(result(out), expected)
    return {
        "optimizer": optimizer,
        "kills": sum(stages.values()),
        "stages": dict(stages),
        "runs": runs,
        "identical": right,
    }


def study_all() -> None:
    """Run the study, print a table and write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(options.seed)  # noqa: S311
    each = -(-options.kills // len(OPTIMIZERS))
    rows = []
    for optimizer in OPTIMIZERS:
        rows.append(study(optimizer, each, rng))
        print(
            "{optimizer:14} {kills:3} kills  {identical}/{runs} runs identical  {stages}".format(
                **rows[-1]
            ),
            flush=True,
        )
    total = {key: sum(row[key] for row in rows) for key in ("kills", "runs", "identical")}
    print("{kills} kills, {identical} of {runs} runs identical".format(**total))
    if options.out:
        document = {"torch": torch.__version__, "seed": options.seed, **total, "rows": rows}
        options.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    study_all()
