"""A silo in NVFlare's simulator. Needs the extra ``nvflare``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpmac_cli import Account, total_epsilon
from dpmac_cli.silo.rounds import read_rounds

pytest.importorskip("nvflare", reason="needs dpmac[nvflare]")

EXAMPLE = Path(__file__).parents[2] / "examples" / "nvflare"


@pytest.mark.long
@pytest.mark.promise("silo")
def test_a_simulation_of_two_silos_and_three_rounds_counts_their_steps(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "simulate.py")],
        cwd=tmp_path,
        env={**os.environ, "ACCOUNTS": str(tmp_path / "accounts")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for hospital in ("0", "1"):
        folder = tmp_path / "accounts" / hospital
        account = Account.open(folder / "account.json")
        [event] = account.own
        assert event.steps == 30
        assert account.epsilon == total_epsilon((event,), 1e-5) <= 3
        assert read_rounds(folder).answered == 3
