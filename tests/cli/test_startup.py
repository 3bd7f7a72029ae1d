"""Help, mistakes and prices come at once: nothing loads torch before there is a run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = ("torch", "torchvision", "sklearn", "scipy.stats")


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["train", "--help"], 0),
        (["eval", "--help"], 0),
        (["train", "--sigma", "-1"], 2),
        (["train", "--config", "nowhere.yaml"], 2),
        (["eval", "nowhere", "--dataset", "mnits"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_torch_stays_unloaded(args: list[str], code: int, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from dpmac_cli.__main__ import main\n"
        f"sys.argv = ['dpmac', *{args!r}]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        f"    open('loaded', 'w').write(' '.join(m for m in {SLOW!r} if m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == code
    assert (tmp_path / "loaded").read_text() == ""


def run_with(hook: str, *args: str) -> subprocess.CompletedProcess[str]:
    """dpmac in a process of its own, in which some code runs first."""
    script = (
        f"import atexit, os, signal, sys\n{hook}\n"
        f"sys.argv = ['dpmac', *{args!r}]\n"
        "from dpmac_cli.__main__ import main\n"
        "main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["typer", "torch"])
def test_a_signal_while_starting_ends_it_quietly(module: str, number: int, tmp_path: Path) -> None:
    hook = (
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder())"
    )
    done = run_with(hook, "train", "--dataset", "mnist", "--data-dir", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted.\n")
    assert os.listdir() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_end_changes_nothing(number: int) -> None:
    hook = f"atexit.register(lambda: os.kill(os.getpid(), {int(number)}))"
    flags = ("--dataset", "digits", "--sigma", "6", "--steps", "3", "--quiet", "--out", "run")
    done = run_with(hook, "train", *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert Path("run/report.json").exists()
