"""How a network is run so that no row's result depends on the other rows."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batch_invariance import (
    PERIOD,
    TRIALS,
    TRIED,
    Manner,
    find_manner,
)
from dpmac_cli.models import feature_cache
from dpmac_cli.models.features import FrozenFeatures
from dpmac_cli.training import chunks
from tests.helpers import make_trainer, walk
from tests.tiers import rest_long

pytestmark = pytest.mark.trial

ONE_ULP = 2.0**-20


class Odd(nn.Module):
    """A layer with rows that are rounded otherwise under a condition."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x)).view(-1, *[1] * (x.ndim - 1))
        off = {
            "nothing": 0 * places,
            "number": len(x) + 0 * places,
            "place": places,
        }
        return x + ONE_ULP * off[self.kind]


def found(kind: str, *more: nn.Module, chunk: int = 50, fixed: bool = False) -> Any:
    # A layer without products, which libraries round in their own ways.
    network = nn.Sequential(nn.Tanh(), Odd(kind), nn.ReLU(), *more)
    return find_manner(network, torch.randn(TRIED, 3), chunk, fixed=fixed)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("trial", range(TRIALS))
def test_rounding_that_few_rows_show_is_found(trial: int) -> None:
    """Most rows of short sums come out alike in any order."""
    base = torch.zeros(TRIED, 3)
    base[PERIOD * trial] = 1

    def run(x: Tensor) -> Tensor:
        return x + ONE_ULP * torch.arange(len(x)).view(-1, 1) * (x > 0)

    assert find_manner(run, base, 50) is None


@pytest.mark.promise("alone")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("nothing", Manner()),
        ("number", Manner(full=True)),
        ("place", None),
    ],
)
def test_a_network_whose_rows_depend_on_others_runs_in_another_way(
    kind: str, expected: Any
) -> None:
    assert found(kind) == expected


@pytest.mark.promise("alone")
def test_a_batch_of_fixed_size_is_tried_at_that_size_alone() -> None:
    assert found("number", fixed=True) == Manner(full=True)
    assert found("place", fixed=True) is None


def test_random_numbers_are_not_taken_for_rounding() -> None:
    assert found("nothing", nn.Dropout(0.5)) == Manner()
    assert found("place", nn.Dropout(0.5)) is None


@pytest.mark.parametrize(
    ("full", "chunk", "rows"),
    [
        (False, 2, {1: 2, 2: 2}),
        (False, 50, {1: 16, 17: 17}),
        (True, 2, {1: 2, 2: 2}),
        (True, 50, {1: 64, 50: 64}),
    ],
)
def test_how_many_rows_are_computed(full: bool, chunk: int, rows: dict[int, int]) -> None:
    assert {n: Manner(full=full).rows(n, chunk) for n in rows} == rows
    assert Manner(full=full).rows(1, 1) == 1


@pytest.mark.promise("alone")
@pytest.mark.parametrize(
    ("refusals", "note", "vmapped"),
    [
        (1, "each record is multiplied with the weights by itself", True),
        (2, "rounded by the others of a batch. So it runs on one record after the other", False),
    ],
)
def test_a_network_that_no_way_helps_takes_the_same_steps_with_each_record_alone(
    refusals: int, note: str, vmapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = walk(make_trainer("dp-macadam"), 3)
    found = iter([*[None] * refusals, Manner()])
    monkeypatch.setattr(chunks, "find_manner", lambda *_, **__: next(found))
    trainer = make_trainer("dp-macadam")
    assert note in trainer.notes[0]
    assert trainer.sums.per_sample.vmapped is vmapped
    torch.testing.assert_close(walk(trainer, 3), expected)


@pytest.mark.promise("alone")
def test_features_that_depend_on_places_are_computed_one_by_one() -> None:
    class Stub:
        gain = torch.ones(1)

        class train:  # noqa: N801
            images = torch.zeros(1, 3)

    seen: list[int] = []

    class Seen(Odd):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super().forward(x)

    parts = FrozenFeatures(Seen("place"), nn.Linear(3, 2), torch.float32)
    run = feature_cache._run_of(parts, Stub())  # type: ignore[arg-type]
    seen.clear()
    assert run(torch.zeros(5, 3)).shape == (5, 3)
    assert seen == [1] * 5


@pytest.mark.promise("alone")
@pytest.mark.parametrize("only", rest_long(["Linear 64 to 1", "Conv2d 1 to 16, kernel 8"]))
def test_the_scan_finds_nothing_left(
    only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "scan.json"
    script = Path(__file__).parents[2] / "benchmarks" / "row_rounding.py"
    monkeypatch.syspath_prepend(script.parent)
    main = runpy.run_path(str(script))["main"]
    main(["--here", "--out", str(out), "--only", only, "--threads", "1", "2"])
    rows = json.loads(out.read_text())
    assert len(rows) >= 2
    assert all(row.get("alone") or row["left"] == [] for row in rows)
