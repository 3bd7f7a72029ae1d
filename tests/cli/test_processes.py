"""Commands in processes of their own: a run on several, and locales of one byte."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpmac_cli.runs import checkpoint
from tests.digits_runs import report_of
from tests.typed import ENVIRONMENT, process, shell

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
    assert report_of("run")["events"][0]["steps"] == 5


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
    with process("train", "--resume", "run", *more) as alone:
        _, err = alone.communicate(timeout=300)
        assert alone.returncode == 0, err
    longer = report_of("longer")
    assert longer["state"] == "finished"
    assert len(longer["events"]) == 2  # the parent's, too


# Names with characters that a terminal or a locale cannot encode.

#: Environments with an encoding of one byte: of output only, and the default of files, too.
ASCII_OUTPUT = {"PYTHONIOENCODING": "ascii"}
ASCII_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
CLASSES = ("Br\u00f6tchen", "K\u00e4se", "\u732b")
SHORT = ("--sigma", "4", "--steps", "2", "--model", "mlp", "--device", "cpu")


def photos() -> Path:
    draws, root = np.random.default_rng(0), Path("Fotos f\u00fcr alle \u732b")
    for part, count in (("train", 6), ("test", 3)):
        for label, name in enumerate(CLASSES):
            place = root / part / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = draws.integers(0, 100 + 50 * label, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"M\u00fcller{number}.png")
    return root


def run_all(typed: list[tuple[list[str], int]], environment: dict[str, str]) -> None:
    """Run commands in one process in an environment, each with its exit code."""
    program = (
        "import sys\nfrom dpmac_cli.__main__ import main\n"
        f"for words, wanted in {typed!a}:\n"
        "    sys.argv = ['dpmac', *words]\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert (end.code or 0) == wanted, words\n"
        "print('all of them')"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONIO"))}
    command, of = [sys.executable, "-c", program], kept | environment
    done = subprocess.run(command, env=of, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b"all of them\n")
    assert b"Unicode" not in done.stderr


@pytest.mark.long
def test_every_command_prints_in_an_encoding_of_one_byte() -> None:
    root, run = photos(), "l\u00e4uft"
    table = "gr\u00f6\u00dfe,Klasse\n" + "".join(f"{i % 7},{CLASSES[i % 2]}\n" for i in range(40))
    Path("Patient\u00e4ten.csv").write_text(table, encoding="utf-8")
    commands = (
        ("train", "--dataset", root, *SHORT, "--out", run),
        ("eval", run),
        ("eval", run, "--json"),
        ("predict", run, root / "test", "--out", "f\u00fcr.csv"),
        ("card", run),
        ("runs", "."),
        ("account", run),
        ("report", run),
        ("schema", "Patient\u00e4ten.csv"),
        ("cache",),
        ("train", "--dataset", "fehlt\u00fc"),
    )
    typed = [(list(map(str, words)), 2 * ("fehlt\u00fc" in words)) for words in commands]
    run_all(typed, ASCII_OUTPUT)


@pytest.mark.long
def test_files_of_a_run_are_in_utf_8_in_every_locale() -> None:
    table = "gr\u00f6\u00dfe,Klasse\n" + "".join(f"{i % 7},{CLASSES[i % 2]}\n" for i in range(40))
    Path("table.csv").write_text(table, encoding="utf-8")
    declared = (
        f"label:\n  column: Klasse\n  classes: [{', '.join(CLASSES[:2])}]\n"
        "columns:\n  gr\u00f6\u00dfe:\n    range: [0, 6]\n"
    )
    Path("table.yaml").write_text(declared, encoding="utf-8")
    trained = ("train", "--dataset", "table.csv", "--schema", "table.yaml", *SHORT, "--out", "run")
    commands = (trained, ("card", "run"), ("predict", "run", "table.csv", "--out", "p.csv"))
    run_all([(list(words), 0) for words in commands], ASCII_LOCALE)
    assert report_of("run")["data"]["classes"] == [*CLASSES[:2]]
    for name in ("run/model-card.md", "p.csv"):
        assert CLASSES[0] in Path(name).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("words", ["--help", "--version", "runs --help", "recipes"])
def test_output_that_is_lost_is_one_line_and_no_traceback(words: str) -> None:
    done = shell(f"dpmac {words} > /dev/full")
    lost = "error: standard output: No space left on device. Free some space.\n"
    assert (done.returncode, done.stderr) == (2, lost)
