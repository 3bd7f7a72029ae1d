"""Help, mistakes and prices come at once: nothing loads torch before there is a run."""

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
        "from dpmac_cli.cli.app import main\n"
        f"sys.argv = ['dpmac', *{args!r}]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        f"    open('loaded', 'w').write(' '.join(m for m in {SLOW!r} if m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == code
    assert (tmp_path / "loaded").read_text() == ""
