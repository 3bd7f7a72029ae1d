"""What the server of Flower tells silos of their nodes. Flower itself is not needed.

Flower lowers the versions of other libraries, so most environments do not have it. Of its classes,
these tests use the names alone.
"""

import dataclasses
import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dpmac_cli.silo.rounds import PROBLEMS
from dpmac_cli.silo.silo import REFUSED, SiloError
from tests.silo.hospital import ask, silo, start

NAMES = {
    "flwr.app": (
        *("ArrayRecord", "ConfigRecord", "Context", "Message", "MetricRecord"),
        "RecordDict",
    ),
    "flwr.clientapp": ("ClientApp",),
    "flwr.serverapp": ("Grid",),
    "flwr.serverapp.strategy": ("FedAvg",),
}


class FedAvg:
    """A strategy that sends the settings of a round, and averages nothing."""

    def __init__(self, **_: Any) -> None:
        """Take the settings."""

    def configure_train(self, number: int, arrays: Any, config: Any, grid: Any) -> Any:
        """Return the settings of a round."""
        return config

    def aggregate_train(self, *_: Any) -> tuple[None, None]:
        """Return no weights and no metrics."""
        return None, None


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package's side of Flower, on classes that stand in for those of Flower."""
    for name, classes in NAMES.items():
        module: Any = ModuleType(name)
        for class_ in classes:
            setattr(module, class_, FedAvg if class_ == "FedAvg" else type(class_, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flwr", ModuleType("flwr"))
    monkeypatch.delitem(sys.modules, "dpmac_cli.silo.flower", raising=False)
    yield importlib.import_module("dpmac_cli.silo.flower")
    sys.modules.pop("dpmac_cli.silo.flower")


@pytest.mark.promise("silo")
def test_a_folder_that_was_deleted_is_noticed_by_its_node(tmp_path: Path, door: Any) -> None:
    """The new one has another name, by which the server has seen nothing."""
    server = door.SiloAvg()
    claim = dataclasses.asdict(ask(tmp_path / "silo", 1).claim)
    sender = SimpleNamespace(src_node_id=5)
    reply = SimpleNamespace(has_content=lambda: True, content={"claim": claim}, metadata=sender)
    server.aggregate_train(1, [reply])
    config = server.configure_train(2, None, {"server-round": 2}, None)
    shutil.rmtree(tmp_path / "silo")
    weights = SimpleNamespace(to_torch_state_dict=start)
    message = SimpleNamespace(content={"arrays": weights, "config": config})
    node = SimpleNamespace(run_id=7, node_id=5)
    with pytest.raises(SiloError) as failure:
        door.answer(lambda _: silo(tmp_path / "silo"), message, node)
    assert str(failure.value) == REFUSED
    assert "The server has seen 3 steps" in (tmp_path / "silo" / PROBLEMS).read_text()
