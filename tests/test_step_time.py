"""``benchmarks/step_time.py`` runs to its end, in a tiny size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("opacus")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
#: Times so short that a single step takes longer, as for slow contenders on a slow machine.
PROGRAM = """
import step_time
step_time.WARM = step_time.TURN = 1e-6
step_time.main()
"""


def test_a_contender_that_is_slower_than_its_warm_up_is_timed(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    tiny = ["--model", "mlp", "--batch", "4", "--only", "dp-adam", "--rounds", "2", "--no-peers"]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *tiny, "--device", "cpu", "--json", file],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["optimizer"] for row in rows] == ["plain-adam", "dp-adam"]
    assert all(row["step_ms"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1
