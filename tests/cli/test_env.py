"""What dpmac env prints for a bug report."""

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dpmac_cli import __version__
from dpmac_cli.cli.app import app
from dpmac_cli.dp.clipping.batch_invariance import Manner
from dpmac_cli.runs import machine


def printed(*args: str) -> str:
    done = CliRunner().invoke(app, ["env", *args])
    assert done.exit_code == 0
    return done.stdout


def test_env_has_what_a_bug_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    monkeypatch.setenv("DPMAC_DATA_DIR", "somewhere")
    found = json.loads(printed("--json"))
    assert (found["dpmac"], found["torch"]) == (__version__, torch.__version__)
    assert found["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert found["threads"] == torch.get_num_threads()
    assert found["environment variables"]["MKL_CBWR"] == "AUTO"
    assert found["data"] == "somewhere"
    assert found["processor"]
    assert "BLAS" in found["build of torch"]
    lines = printed().splitlines()
    assert [line.partition(":")[0] for line in lines if line[0] != " "] == [*found]


def test_env_tries_the_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(run: Any, base: torch.Tensor, chunk: int) -> Manner | None:
        return None if base.dtype == torch.float64 else Manner()

    monkeypatch.setattr(machine, "find_manner", found)
    *_, single, double = printed().splitlines()
    assert single == "  float32: none"
    assert double.startswith("  float64: On this machine, products of matrices round a record")
    assert "each record is multiplied with the weights by itself" in double
