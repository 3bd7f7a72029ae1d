"""A run on several processes, from the command line."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dpmac_cli.runs import checkpoint
from tests.typed import ENVIRONMENT, process

TRAIN = ("train", "--dataset", "digits", "--sigma", "6", "--device", "cpu", "--out", "run")
Processes = list["subprocess.Popen[str]"]


@contextmanager
def started(size: int, *command: str) -> Iterator[Processes]:
    """A process a rank, with what a launcher sets; none is left behind."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    ranks = [process(*command, **common, RANK=str(rank)) for rank in range(size)]
    try:
        yield ranks
    finally:
        for one in ranks:
            one.kill()
            one.communicate()


def report(run: str = "run") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(run, "report.json").read_text())
    return found


@pytest.mark.long
def test_by_torchrun() -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "-m", "dpmac_cli", *TRAIN, "--steps", "5"],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("digits: 1,437 records") == 1  # rank 0 alone prints
    assert report()["privacy"]["steps"] == 5


def wait_for_training() -> None:
    """Until a test set was scored, which on a busy machine takes minutes."""
    limit, metrics = time.monotonic() + 300, Path("run/metrics.jsonl")
    while not metrics.exists() or not metrics.stat().st_size:  # empty while all ranks get ready
        assert time.monotonic() < limit, "training did not begin"
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.promise("ranks")
def test_a_lost_rank_is_named_and_the_run_goes_on_without_it() -> None:
    with started(2, *TRAIN, "--epochs", "2000", "--checkpoint-every", "5") as (first, second):
        wait_for_training()
        second.send_signal(signal.SIGKILL)
        out, err = first.communicate(timeout=180)
        said = " ".join(err.split())
        assert first.returncode == 4, said
        assert "One of the 2 processes of this run stopped, or does not answer (" in said
        assert ".cc:" not in said  # a place in torch's source
        assert "dpmac train --resume run" in said
        assert "Traceback" not in err + out
    saved = checkpoint.read(Path("run")).step
    more = ("--out", "longer", "--steps", str(saved + 30))
    with process("train", "--fork", "run", *more) as alone:
        _, err = alone.communicate(timeout=300)
        assert alone.returncode == 0, err
    longer = report("longer")
    assert longer["state"] == "finished"
    assert len(longer["privacy"]["events"]) == 2  # the parent's, too
