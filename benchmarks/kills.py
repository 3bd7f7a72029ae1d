"""Kill runs at random instants and resume them: do they end, and does epsilon cover all of it?

    python benchmarks/kills.py --kills 50 --out docs/data/kills.json

Each optimizer trains the digits once undisturbed. Then the same command is killed by SIGKILL after
a random time, from before it has made its folder to after its report, and resumed, and killed
again; where nothing can be resumed yet, it is begun again. Once a few kills have struck, it may
end. Every process writes each release and its keys to a file beside the run. So it is known what
was released, of which epsilon must be an upper bound, and that no key is in the folder, and none
was used twice. With a checkpoint every 2 of the 480 steps, a kill loses up to 3 steps since the
last one and the 5 that are reserved ahead, which may add 1% to the epsilon of the undisturbed run.
"""

import base64
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from common import parser_of, write_json

from dpmac_cli.__main__ import main
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.randomness.keystream import STREAMS, Keys, make_keys
from dpmac_cli.runs import checkpoint, ledger, train

#: 480 steps in a few seconds, so checkpoints are due by steps: by default one is also written every
#: fiftieth of the steps, but only if that takes little of the time.
SETTINGS = ("--dataset", "digits", "--sigma", "6", "--epochs", "40")
#: Also given when a run is resumed, because it is no setting of the run.
OFTEN = ("--checkpoint-every", "2")
#: Kills of one run before it may end.
KILLS_A_RUN = 4
#: Share of the kills that strike while a command is yet to save anything, and at any time; the
#: others strike after it has.
EARLY, ANY_TIME = 0.2, 0.2
#: Largest increase of epsilon by a kill.
INCREASE = 0.01
AFTER = "after the last file"


@dataclass
class Truth:
    """Releases and keys of the processes of a run, in files beside its folder."""

    out: Path

    @property
    def keys(self) -> Path:
        """File with the keys of each session, one JSON object a line."""
        return self.out.with_suffix(".keys")

    @property
    def releases(self) -> Path:
        """File with one byte for each release of a private mean."""
        return self.out.with_suffix(".releases")

    def watch(self) -> None:
        """Write what this process does from now on."""
        release = GaussianMechanism.release

        def made(*args: Any, **options: Any) -> Keys:
            keys = make_keys(*args, **options)
            with self.keys.open("a") as file:
                file.write(json.dumps({name: getattr(keys, name).hex() for name in STREAMS}) + "\n")
            return keys

        def released(mechanism: GaussianMechanism, *args: Any) -> Any:
            private = release(mechanism, *args)
            with self.releases.open("ab", buffering=0) as file:
                file.write(b".")
            return private

        train.make_keys = made  # type: ignore[attr-defined]
        GaussianMechanism.release = released  # type: ignore[assignment,method-assign]

    def steps(self) -> int:
        """Return the number of releases, one per step of a network of one block."""
        return len(self.releases.read_bytes())

    def secrets(self) -> list[bytes]:
        """Return the keys of all sessions, without the public seed of the initial weights."""
        lines = map(json.loads, self.keys.read_text().splitlines())
        return [bytes.fromhex(keys[name]) for keys in lines for name in STREAMS if name != "init"]


def command(out: Path, *args: str) -> ForkProcess:
    """Type a command, in a process of its own; what it says goes to a file."""
    process = multiprocessing.get_context("fork").Process(target=_typed, args=(out, args))
    process.start()
    return process


def _typed(out: Path, args: Sequence[str]) -> None:
    Truth(out).watch()
    sys.argv = ["dpmac", "train", *args]
    with out.with_suffix(".said").open("w") as sys.stderr, open(os.devnull, "w") as sys.stdout:
        main()


def begun(optimizer: str, out: Path) -> tuple[str, ...]:
    """Return the command that begins a run, whatever a kill has left in its place."""
    return (*SETTINGS, *OFTEN, "--optimizer", optimizer, "--out", str(out), "--force")


def epsilon_of(out: Path) -> float:
    """Return the epsilon of a finished run's report."""
    epsilon: float = json.loads((out / "report.json").read_bytes())["epsilon"]
    return epsilon


def stage(out: Path) -> str:
    """Return the stage at which a run was killed."""
    if not out.exists():
        return "before the folder"
    if (out / "SHA256SUMS").exists() and "report.json" in (out / "SHA256SUMS").read_text():
        return AFTER
    if (out / "report.json").exists() or (out / "model.safetensors").exists():
        return "among the last files"
    if not checkpoint.path_in(out).exists():
        return "before the first checkpoint"
    return "while training" if checkpoint.read(out).step else "before the second checkpoint"


def strike(running: ForkProcess, out: Path, wait: float, any_time: bool) -> None:
    """Kill a command some time after it was typed, or after it first wrote; it may end before."""
    before = _written(out)
    while not any_time and running.is_alive():
        if _written(out) != before:
            break
        time.sleep(0.005)
    running.join(wait)
    running.kill()


def _written(out: Path) -> int | None:
    """Return when the checkpoint of a run was written; None without one."""
    path = checkpoint.path_in(out)
    return path.stat().st_mtime_ns if path.exists() else None


def faults(out: Path, kills: int, undisturbed: float) -> list[str]:
    """Return what a run that was killed promises and does not hold."""
    truth, found = Truth(out), list[str]()
    spent = ledger.read_ledger(out)
    assert spent is not None
    counted = sum(event.steps for event in spent.events)
    event = replace(spent.event, steps=truth.steps())
    epsilon, least = epsilon_of(out), total_epsilon((event,), 1e-5)
    if counted < truth.steps() or epsilon < least * (1 - 1e-9):
        found.append(f"{truth.steps()} steps were released, and {counted} counted")
    if epsilon > undisturbed * (1 + INCREASE) ** kills:
        found.append(f"{kills} kills raised epsilon from {undisturbed} to {epsilon}")
    secrets = truth.secrets()
    if len({*secrets}) < len(secrets):
        found.append("two sessions had the same key")
    for path in out.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        for key in secrets:
            if any(form in content for form in (key, key.hex().encode(), base64.b64encode(key))):
                found.append(f"a key is in {path.name}")
    return found


def disturbed(
    optimizer: str, out: Path, set_up: float, whole: float, rng: random.Random
) -> Counter[str]:
    """Kill and resume a run until it may end; at which stages it was killed."""
    stages: Counter[str] = Counter()
    trained = whole - set_up
    while True:
        saved = checkpoint.path_in(out).exists()
        running = command(
            out, *(("--resume", str(out), *OFTEN) if saved else begun(optimizer, out))
        )
        if sum(stages.values()) < KILLS_A_RUN and not stages[AFTER]:
            kind = rng.random()
            longest = set_up if kind < EARLY else whole if kind < EARLY + ANY_TIME else trained
            strike(running, out, rng.uniform(0, 1.1 * longest), kind < EARLY + ANY_TIME)
        running.join()
        code = running.exitcode or 0
        if code < 0:
            stages[stage(out)] += 1
        elif code == 0 or "is finished" in out.with_suffix(".said").read_text():
            return stages
        else:
            raise RuntimeError(f"exit code {code}: {out.with_suffix('.said').read_text()}")


def study(optimizer: str, kills: int, rng: random.Random) -> dict[str, Any]:
    """Kill runs of one optimizer ``kills`` times."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        started = time.monotonic()
        running = command(root / "whole", *begun(optimizer, root / "whole"))
        while not (root / "whole" / "checkpoint").exists() and running.is_alive():
            time.sleep(0.005)
        set_up = time.monotonic() - started
        running.join()
        whole = time.monotonic() - started
        undisturbed = epsilon_of(root / "whole")
        stages: Counter[str] = Counter()
        runs, wrong, largest = 0, list[str](), 0.0
        while sum(stages.values()) < kills:
            out = root / f"run-{runs}"
            struck = disturbed(optimizer, out, set_up, whole, rng)
            stages += struck
            runs += 1
            wrong += faults(out, sum(struck.values()), undisturbed)
            largest = max(largest, epsilon_of(out) / undisturbed - 1)
    return {
        "optimizer": optimizer,
        "kills": sum(stages.values()),
        "stages": dict(stages),
        "runs": runs,
        "largest increase": round(largest, 4),
        "faults": wrong,
    }


def study_all() -> None:
    """Run the study, print a table and write it."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(options.seed)  # noqa: S311
    each = -(-options.kills // len(OPTIMIZERS))
    rows = []
    for optimizer in OPTIMIZERS:
        rows.append(study(optimizer, each, rng))
        line = "{optimizer:14} {kills:3} kills of {runs} runs, epsilon up to +{more:.2%}  {stages}"
        print(line.format(**rows[-1], more=rows[-1]["largest increase"]), flush=True)
        print(*rows[-1]["faults"], sep="\n", end="")
    total = {key: sum(row[key] for row in rows) for key in ("kills", "runs")}
    wrong = sum(len(row["faults"]) for row in rows)
    print("{kills} kills of {runs} runs, which all ended".format(**total), f"{wrong} faults")
    found = {"torch": torch.__version__, "seed": options.seed, **total, "rows": rows}
    write_json(options.out, found)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    study_all()
