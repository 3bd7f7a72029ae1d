"""A silo in Flower: a real simulation, and what a failure says. Needs the extra ``flower``."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpmac_cli import Account, total_epsilon
from dpmac_cli.silo.silo import LOCKED, REFUSED, SiloError
from tests.silo.hospital import silo

flwr = pytest.importorskip("flwr", reason="needs dpmac[flower]")

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def fails(_: Any) -> Any:
    raise ValueError("patient 7 is 203 years old")


@pytest.mark.promise("silo")
def test_no_failure_of_a_client_leaves_the_node(tmp_path: Path) -> None:
    from dpmac_cli.silo.flower import answer  # noqa: PLC0415

    weights = SimpleNamespace(to_torch_state_dict=dict)
    content = {"arrays": weights, "config": {"server-round": 1}}
    message, context = SimpleNamespace(content=content), SimpleNamespace(run_id=7, node_id=5)
    for make_silo in (fails, lambda _: silo(tmp_path / "silo")):
        with pytest.raises(SiloError) as failure:
            answer(make_silo, message, context)
        assert str(failure.value) == REFUSED
        assert failure.value.__context__ is failure.value.__cause__ is None
    with silo(tmp_path / "silo"), pytest.raises(SiloError, match=LOCKED):
        answer(lambda _: silo(tmp_path / "silo"), message, context)


@pytest.mark.long
@pytest.mark.promise("silo")
def test_a_simulation_of_two_silos_and_three_rounds_says_the_right_epsilon(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "simulate.py")],
        cwd=tmp_path,
        env={**os.environ, **OFFLINE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 and delta 2e-05" not in done.stdout
    for hospital in (0, 1):
        account = Account.open(tmp_path / "accounts" / str(hospital) / "account.json")
        [event] = account.own
        assert event.steps == 30
        assert account.epsilon == total_epsilon((event,), 1e-5) <= 3
        assert f"| {event.noise_multiplier:.10g} | 30 (0) | 3 | 1e-05 |" in done.stdout
