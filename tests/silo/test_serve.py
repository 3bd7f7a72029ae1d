"""Rounds of an NVFlare job, whose server is made up: it needs no extra."""

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dpmac_cli.silo.silo import REFUSED, SiloError
from tests.silo.hospital import STEPS, silo, start

ROUNDS_OF_JOB = 2


class Server:
    """Sends the same weights in each round of a job, and notes what it receives."""

    def __init__(self) -> None:
        self.job, self.rounds, self.claims = "", 0, list[Any]()

    def begin(self, job: str) -> None:
        self.job, self.rounds = job, 0

    def is_running(self) -> bool:
        return self.rounds < ROUNDS_OF_JOB

    def receive(self) -> Any:
        self.rounds += 1
        params = {name: tensor.numpy() for name, tensor in start().items()}
        return SimpleNamespace(params=params, current_round=self.rounds)

    def send(self, model: Any) -> None:
        self.claims.append(model.meta["claim"])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server in the place of NVFlare."""
    made_up = Server()
    client: Any = ModuleType("nvflare.client")
    client.init, client.is_running, client.receive = bool, made_up.is_running, made_up.receive
    client.send, client.get_job_id = made_up.send, lambda: made_up.job
    models: Any = ModuleType("nvflare.app_common.abstract.fl_model")
    models.FLModel, models.ParamsType = SimpleNamespace, SimpleNamespace(FULL="FULL")
    root: Any = ModuleType("nvflare")
    root.client = client
    for name, module in (
        ("nvflare", root),
        ("nvflare.client", client),
        ("nvflare.app_common", ModuleType("nvflare.app_common")),
        ("nvflare.app_common.abstract", ModuleType("nvflare.app_common.abstract")),
        ("nvflare.app_common.abstract.fl_model", models),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "dpmac_cli.silo.nvflare", raising=False)
    yield made_up
    sys.modules.pop("dpmac_cli.silo.nvflare", None)


@pytest.mark.promise("silo")
def test_a_folder_that_was_deleted_between_jobs_is_refused(tmp_path: Path, server: Server) -> None:
    serve: Callable[..., int] = importlib.import_module("dpmac_cli.silo.nvflare").serve
    folder = tmp_path / "silo"
    server.begin("first job")
    seen = serve(silo(folder))
    assert seen == ROUNDS_OF_JOB * STEPS
    server.begin("second job")
    assert serve(silo(folder), seen) == 2 * seen
    assert [claim["begun"] for claim in server.claims] == [STEPS * n for n in range(1, 5)]
    shutil.rmtree(folder)
    server.begin("third job")
    with pytest.raises(SiloError, match=REFUSED):
        serve(silo(folder), 2 * seen)
    assert len(server.claims) == 4
