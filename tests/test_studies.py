"""The scripts of the long studies: what they keep can be gone on with, and compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dpmac_cli.release import run
from dpmac_cli.release.publish import Finished
from tests.digits_runs import digits_config

ROOT = Path(__file__).parent.parent
FLAGS = "--dataset digits --sigma 6 --steps 3 --optimizers dp-sgd,dp-adam --seeds 2 --device cpu"


def python(*args: str | Path) -> str:
    """Run Python in a process of its own, and return what it printed."""
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.long
def test_packed_runs_are_found_finished_where_they_are_unpacked(tmp_path: Path) -> None:
    first, second, file = tmp_path / "first", tmp_path / "second", tmp_path / "runs.jsonl"
    python("-m", "dpmac_cli", "compare", *FLAGS.split(), "--out", first, "--quiet")
    assert "4 runs" in python(ROOT / "benchmarks/study.py", "pack", first, file)
    assert "4 runs" in python(ROOT / "benchmarks/study.py", "unpack", file, second)
    assert not list(second.rglob("*.safetensors"))
    again = python("-m", "dpmac_cli", "compare", *FLAGS.split(), "--out", second)
    assert "4 of them found finished" in again
    one, other = (json.loads((out / "compare.json").read_text()) for out in (first, second))
    assert one == other
    assert "4 runs" in python(ROOT / "benchmarks/study.py", "pack", second, file)


def test_a_run_that_was_interrupted_is_not_packed(tmp_path: Path) -> None:
    asked = iter(range(100))
    out = str(tmp_path / "study" / "runs" / "one")
    config = digits_config(steps=8, out=out)
    *_, last = run.train(config, lambda: next(asked) >= 3)
    assert isinstance(last, Finished)
    assert last.report["state"] == "interrupted"
    file = tmp_path / "runs.jsonl"
    assert "0 runs" in python(ROOT / "benchmarks/study.py", "pack", tmp_path / "study", file)


@pytest.mark.parametrize(("mean", "std", "bold"), [(0.927, 0.001, False), (0.921, 0.001, True)])
def test_a_cell_beside_the_paper_is_bold_where_it_differs(
    tmp_path: Path, mean: float, std: float, bold: bool
) -> None:
    row = {"optimizer": "dp-adam", "sigma": 0.5, "mean": mean, "std": std, "seeds": 5}
    file = tmp_path / "compare.json"
    file.write_text(json.dumps({"dataset": "mnist", "axes": ["optimizer"], "rows": [row]}))
    table = python(ROOT / "benchmarks/beside_paper.py", file)
    cell = f"{100 * mean:.2f} ± 0.10 [92.8 ± 0.1]"
    assert f"| dp-adam | {f'**{cell}**' if bold else cell} |" in table
