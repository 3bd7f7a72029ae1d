"""dpmac as typed: in this process, in one of its own, or by a shell."""

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from dpmac_cli.cli.app import app
from dpmac_cli.studies import local
from dpmac_cli.studies.grid import Run

#: Several processes run at once: a thread each, or they wait for one another.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def dpmac(*args: str | Path, columns: int = 400) -> Result:
    """Type a command, in this process."""
    env = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    return CliRunner().invoke(app, list(map(str, args)), env=env)


class Here:
    """Job of a run of a study, whose command has ended in this process when the job is there.

    A process of its own takes seconds to load libraries.
    """

    def __init__(self, run: Run, device: str, threads: int) -> None:
        del threads
        local.clear_the_way(run)
        self._result = dpmac(*local.arguments(run, device))

    def ended(self) -> bool:
        """Return True: it has ended."""
        return True

    def stop(self) -> None:
        """Do nothing: it has ended."""

    def failure(self) -> str | None:
        """Return why the run did not finish."""
        code = self._result.exit_code
        return None if code == 0 else local.reason(code, self._result.stderr)


def process(*args: str, **variables: str) -> subprocess.Popen[str]:
    """Type a command, in a process of its own, where some variables are set."""
    return subprocess.Popen(
        [sys.executable, "-m", "dpmac_cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **variables},
    )


def started(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python of its own."""
    return _ended(sys.executable, "-c", program)


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """What a shell makes of a line in which ``dpmac`` is ours."""
    line = line.replace("dpmac", f"{sys.executable} -m dpmac_cli")
    return _ended("bash", "-c", f"set -o pipefail; {line}")


def _ended(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
