"""How a network is run so that no row's result depends on the other rows."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batch_invariance import (
    FEW,
    FILLS,
    FULL,
    PERIOD,
    Manner,
    find_manner,
)
from dpmac_cli.models import feature_cache
from dpmac_cli.models.features import FrozenFeatures
from tests.helpers import make_trainer
from tests.tiers import rest_long

ONE_ULP = 2.0**-20
EVENLY = [*FILLS][1]


class Odd(nn.Module):
    """A layer with rows that are rounded otherwise under a condition."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.seen = kind, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x)).view(-1, *[1] * (x.ndim - 1))
        threads, onednn = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
        self.seen.append((threads, onednn))
        off = {
            "nothing": 0 * places,
            "threads": ((places == len(x) // 2) & (len(x) % 2 == 1)) * (threads > 1),
            "onednn": (places == len(x) // 2) * onednn,
            "number": len(x) + 0 * places,
            "rest": places >= len(x) // 4 * 4,
            "place": places,
        }
        return x + ONE_ULP * off[self.kind]


def found(kind: str, *more: nn.Module, chunk: int = 50, fixed: bool = False) -> Any:
    network = nn.Sequential(nn.Linear(3, 4), Odd(kind), nn.ReLU(), *more)
    return find_manner(network, network, torch.randn(PERIOD, 3), chunk, fixed=fixed)


@pytest.fixture
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.mark.privacy
@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("nothing", Manner()),
        ("threads", Manner({"1": "on one thread"})),
        ("onednn", Manner({"1": "without oneDNN and cuDNN"})),
        ("number", Manner(fill=FULL)),
        ("rest", Manner(fill=EVENLY)),
        ("place", Manner(alone=("1",))),
    ],
)
def test_a_layer_whose_rows_depend_on_others_runs_in_another_way(kind: str, expected: Any) -> None:
    assert found(kind) == expected


@pytest.mark.privacy
def test_a_batch_of_fixed_size_is_tried_at_that_size_alone() -> None:
    assert found("number", fixed=True) == Manner(fill=FULL)
    assert found("place", fixed=True) == Manner(alone=("1",))


@pytest.mark.privacy
def test_a_small_chunk_is_filled_if_its_rows_differ() -> None:
    assert found("rest", chunk=6) == Manner(fill=EVENLY)


def test_random_numbers_are_not_taken_for_rounding() -> None:
    assert found("nothing", nn.Dropout(0.5)) == Manner()
    assert found("place", nn.Dropout(0.5)) == Manner(alone=("1",))


@pytest.mark.usefixtures("_two_threads")
def test_a_way_lasts_as_long_as_its_module_runs() -> None:
    network = nn.Sequential(Odd("nothing"), Odd("nothing"))
    with Manner({"0": "on one thread", "1": "without oneDNN and cuDNN"}).of(network):
        network(torch.zeros(1, 1))
        assert (torch.get_num_threads(), torch._C._get_mkldnn_enabled()) == (2, True)
    network(torch.zeros(1, 1))
    parts: list[Any] = list(network)
    assert [part.seen for part in parts] == [[(1, True), (2, True)], [(2, False), (2, True)]]


@pytest.mark.parametrize(
    ("fill", "chunk", "rows"),
    [
        (FEW, 2, {1: 2, 2: 2}),
        (FEW, 50, {1: 16, 17: 17}),
        (EVENLY, 2, {1: 16, 2: 16}),
        (EVENLY, 50, {1: 16, 17: 32, 50: 64}),
        (FULL, 2, {1: 2, 2: 2}),
        (FULL, 50, {1: 64, 50: 64}),
    ],
)
def test_how_many_rows_are_computed(fill: str, chunk: int, rows: dict[int, int]) -> None:
    assert {n: Manner(fill=fill).rows(n, chunk) for n in rows} == rows
    assert Manner(fill=fill).rows(1, 1) == 1


@pytest.mark.privacy
def test_a_network_that_no_way_helps_runs_on_one_record_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "dpmac_cli.training.chunks.find_manner", lambda *_, **__: Manner(alone=("1", ""))
    )
    trainer = make_trainer("dp-sgd")
    assert trainer.state.chunk == 1
    assert "in 1, the network itself. To avoid that" in trainer.notes[0]
    trainer.step()


@pytest.mark.privacy
def test_features_that_depend_on_places_are_computed_one_by_one() -> None:
    class Stub:
        gain = torch.ones(1)

        class train:  # noqa: N801
            images = torch.zeros(1, 3)

    parts = FrozenFeatures(Odd("place"), nn.Linear(3, 2), torch.float32)
    feature_cache._manner(parts, Stub())  # type: ignore[arg-type]
    assert parts.isolated


@pytest.mark.privacy
@pytest.mark.parametrize("only", rest_long(["own Linear 64 to 1", "Conv2d 1 to 16, kernel 8"]))
def test_the_scan_finds_nothing_left(only: str, tmp_path: Path) -> None:
    out = tmp_path / "scan.json"
    script = Path(__file__).parents[2] / "benchmarks" / "row_rounding.py"
    main = runpy.run_path(str(script))["main"]
    main(["--here", "--out", str(out), "--only", only, "--threads", "1", "2"])
    rows = json.loads(out.read_text())
    assert len(rows) >= 2
    assert all(row["left"] == [] for row in rows)
    if "own" in only:
        assert all(row["plain"] == [] or row["fill"] != FEW or row["ways"] for row in rows)
