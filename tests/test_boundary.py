"""What ruff's banned imports leave open: pickles in the command line, and the privacy page."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dpmac_cli
from tests import promises

PACKAGE = Path(dpmac_cli.__file__).parent
CONFIG = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
#: Names that the package may not use anywhere. The others are free in dpmac_cli/cli.
PICKLES = [
    name
    for name, rule in CONFIG["flake8-tidy-imports"]["banned-api"].items()
    if "pickle" in rule["msg"]
]


def banned(*arguments: str, source: str = "") -> list[str]:
    """What ruff finds of the pickles, where no file is excepted."""
    entries = ", ".join(f'"{name}" = {{msg = "x"}}' for name in PICKLES)
    rule = f"lint.flake8-tidy-imports.banned-api = {{{entries}}}"
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--output-format",
        "concise",
    ]
    done = subprocess.run(
        [*command, "--select", "TID251", "--ignore-noqa", "--config", rule, *arguments],
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if "TID251" in line]


@pytest.mark.promise("code")
def test_no_pickle_is_written_or_loaded() -> None:
    assert len(PICKLES) > 10
    (public,) = banned(str(PACKAGE))  # tensors alone: tests/test_features.py
    assert "dpmac_cli/models/weights.py" in public
    assert "torch.load" in public
    assert "weights_only=True" in (PACKAGE / "models" / "weights.py").read_text()


@pytest.mark.promise("bugs")
def test_every_promise_has_a_test_and_a_bug_that_it_finds() -> None:
    assert all(promises.tests_of_promises()[name] for name in promises.PROMISES)
    without = {name for name, count in promises.bugs_of_promises().items() if count == 0}
    assert without == {"bugs", "fuzz", "silent"}  # these judge all of the others
    assert promises.page() == promises.PAGE.read_text(encoding="utf-8")
