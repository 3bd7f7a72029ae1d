"""``benchmarks/step_time.py`` runs to its end, in a tiny size."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="needs opacus"),
]
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
    plain = ["plain-adam", "plain-adam, memory kept"]
    assert [row["optimizer"] for row in rows] == [*plain, "dp-adam"]
    assert all(row["step_ms"] > 0 for row in rows)
    assert 1 in {row["ratio"] for row in rows[:2]}, "ratios are to the fastest of plain torch"


SLOWER = """
import regression
from contenders import Size
regression.STEPS, regression.SCATTER = 1, 1e6
regression.LIMITS = {{Size("mlp", 8): {{"dp-adam": {limit}}}}}
regression.main()
"""


@pytest.mark.parametrize(("limit", "code"), [(1e-6, 1), (1e6, 0)])
def test_a_step_that_became_slower_is_reported(limit: float, code: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SLOWER.format(limit=limit), "--rounds", "2", "--warm", "1"],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == code, run.stderr
